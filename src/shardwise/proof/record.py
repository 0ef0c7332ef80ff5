"""`Record`: losses and every gradient, parameter, buffer and optimizer state of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """One tensor of a rank that differs in a bit from rank 0's."""

    rank: int
    step: int  # -1: before the first
    kind: str  # one of `KINDS` (outcome)
    name: str
    tensor: torch.Tensor | None  # None: the rank has none of this name


@dataclass
class Record:
    """One side's tensors, unsharded, in float64 on the CPU; the lists have one entry for each optimizer step."""

    batches: list[float] = field(default_factory=list)  # a checksum of each step's global batch
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of the global gradient, before clipping
    gradients: list[Tensors] = field(default_factory=list)  # name -> gradient, clipped
    parameters: list[Tensors] = field(default_factory=list)  # after the step
    buffers: list[Tensors] = field(default_factory=list)
    states: list[Tensors] = field(default_factory=list)  # of the optimizer: "exp_avg of blocks.0.weight"
    initial: Tensors = field(default_factory=dict)  # parameters before the first step
    late: set[str] = field(default_factory=set)  # names in `initial` that appear only after steps of other models
    lr: float = 0.0  # the largest learning rate of any group or step
    limits: list[float] = field(default_factory=list)  # each step's size up to which gradient elements are zeroed
    trained: set[str] = field(default_factory=set)  # names of parameters that get a gradient
    notices: list[str] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)  # of this rank's tensors from rank 0's
    differences: list[str] = field(default_factory=list)  # sentences, for what is no error of a tensor
    buckets: int = 0  # least number of gradient buckets of a technique; 0: none
    dtypes: Any = None  # `SeenDtypes` of a step of this rank in the plan's own precision; None: there was none
    states_known: bool = True  # False: the unsharded optimizer state cannot be put together from its shards

    def of(self, kind: str, step: int) -> Tensors:
        """Returns name -> tensor of one kind ("gradient", "parameter", ...) after a step; -1: initial parameters."""
        if step < 0:
            return self.initial
        lists = {"gradient": self.gradients, "parameter": self.parameters, "buffer": self.buffers}
        return (lists | {"optimizer": self.states})[kind][step]


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense copy on the CPU in float64 or complex128 (integers as they are)."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        return tensor.to(torch.complex128, copy=True)
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def kept_state(name: str, state: Any) -> dict[str, torch.Tensor]:
    """Returns "key of name" -> copy of every tensor and number in the optimizer's state of parameter `name`."""
    values: dict[str, torch.Tensor] = {}

    def walk(path: str, value: Any) -> None:
        # state may be nested (LBFGS keeps lists of tensors), so each leaf is named by its path
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{path}.{key}" if path else str(key), item)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                walk(f"{path}.{place}", item)
        elif isinstance(value, torch.Tensor):
            values[f"{path} of {name}"] = kept(value)
        # other values (texts, None) are settings, not results
        elif isinstance(value, bool | int | float):
            values[f"{path} of {name}"] = torch.tensor(float(value), dtype=torch.float64)

    walk("", state)
    return values
