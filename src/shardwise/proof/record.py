"""`Record`: losses and every gradient, parameter, buffer and optimizer state of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """One tensor of a rank that differs in a bit from rank 0's; `tensor` is None where the rank has none."""

    rank: int
    step: int  # -1: before the first
    kind: str
    name: str
    tensor: torch.Tensor | None  # None: the rank has none of this name


@dataclass
class Record:
    """A run's tensors, whole, in float64 on the CPU; the lists have one entry for each optimizer step."""

    batches: list[float] = field(default_factory=list)  # a checksum of each step's
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of the whole gradient, before clipping
    gradients: list[Tensors] = field(default_factory=list)  # by name, whole
    parameters: list[Tensors] = field(default_factory=list)  # after the step
    buffers: list[Tensors] = field(default_factory=list)
    states: list[Tensors] = field(default_factory=list)  # of the optimizer: "exp_avg of blocks.0.weight"
    initial: Tensors = field(default_factory=dict)  # parameters before the first step
    late: set[str] = field(default_factory=set)  # of these, names that are there after steps of other models alone
    lr: float = 0.0  # the largest rate of any step
    limits: list[float] = field(default_factory=list)  # by step, up to which elements of gradients are zero (zeros)
    trained: set[str] = field(default_factory=set)  # names of parameters that get a gradient
    notices: list[str] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)  # of this rank's tensors from rank 0's
    differences: list[str] = field(default_factory=list)  # what no number expresses, in words
    buckets: int = 0  # in which gradients travel, at least; 0: they do not
    dtypes: Any = None  # `SeenDtypes` of a step of this rank in the plan's own precision; None: there was none
    states_known: bool = True  # False: nothing tells how the whole state is made of pieces

    def of(self, kind: str, step: int) -> Tensors:
        """Returns what was recorded of a kind after a step; -1: initial parameters."""
        if step < 0:
            return self.initial
        lists = {"gradient": self.gradients, "parameter": self.parameters, "buffer": self.buffers}
        return (lists | {"optimizer": self.states})[kind][step]


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in float64 or complex128 (integers as they are) on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def kept_state(name: str, state: Any) -> dict[str, torch.Tensor]:
    """Returns every tensor and number in the optimizer's state of a parameter, by "key of name", as copies."""
    values: dict[str, torch.Tensor] = {}

    def walk(path: str, value: Any) -> None:
        # state nests as an optimizer likes (LBFGS keeps lists of tensors): each leaf is named by the way to it
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{path}.{key}" if path else str(key), item)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                walk(f"{path}.{place}", item)
        elif isinstance(value, torch.Tensor):
            values[f"{path} of {name}"] = kept(value)
        # other values (texts, None) are settings, and no numbers that could differ by rounding
        elif isinstance(value, bool | int | float):
            values[f"{path} of {name}"] = torch.tensor(float(value), dtype=torch.float64)

    walk("", state)
    return values
