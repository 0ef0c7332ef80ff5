"""Settings of both sides of a proof.

A new one must also be added to parity, oracle, own_precision and cli/prove, or to verify_run if it is a run's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.random.reading_seeds import drawing
from shardwise.task import Task

LEAST_EPS = 1e-4  # below it, Adam-family updates turn rounding of near-zero gradients into sign flips


@dataclass(frozen=True)
class Settings:
    """Settings of one proof. `batch_samples` applies to tasks with a `Source`, whose batches have that many samples."""

    steps: int = 2
    seed: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float64
    batch_samples: int = 8
    own_steps: int = 10  # steps in the plan's own precision (own_precision)
    dtypes: bool = True  # whether dtypes of modules and messages are compared too
    nudge: int = 0  # above 0: the seed by which each element of weights and inputs moves up or down by one epsilon
    nudge_inside: bool = False  # whether outputs of modules without children are nudged too
    device: str = "cpu"  # or the type of the accelerator, which ranks share if there are too few
    own_backend: bool = False  # whether ranks that share an accelerator use its own backend (nccl), not gloo
    share: tuple[int, int] | None = None  # (rank, ranks): run only the samples of this data rank
    limits: tuple[float, ...] = ()  # for ranks: each step's size up to which gradient elements are zeroed (zeros)
    halves: bool = False  # whether each micro-batch is accumulated in two parts, the same sum in another order

    @property
    def of_engine(self) -> dict[str, Any]:
        """Returns the keyword arguments of `parallelize`: seed, randomness, clip_norm and device."""
        return {"seed": self.seed, "randomness": "global", "clip_norm": self.clip_norm, "device": self.device}


def global_batch(task: Task, settings: Settings, step: int) -> Any:
    """Returns the global batch of a step, counted from 0: the task's own, or the next samples of its data in order."""
    if task.batch is not None:
        return task.batch(step)
    assert task.data is not None
    length = len(task.data)
    count = min(settings.batch_samples, length)
    with drawing(settings.seed, step * count // length, step * count):
        return task.data.read([(step * count + i) % length for i in range(count)])


def raise_eps(optimizer: torch.optim.Optimizer) -> list[float]:
    """Raises each group's eps to `LEAST_EPS`; returns the values that were below it."""
    raised = []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and eps < LEAST_EPS:
            raised.append(eps)
            group["eps"] = LEAST_EPS
    return raised


def nudged(tensor: torch.Tensor, settings: Settings, place: int) -> torch.Tensor:
    """Returns the tensor; with `nudge`, each element moved by one relative epsilon up or down at random.

    `place` tells tensors apart, so that each moves by signs of its own.
    """
    if not settings.nudge or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    # a generator of its own, on the CPU: the task's generators do not advance, and nudges are the same on any device
    generator = torch.Generator().manual_seed(1000003 * settings.nudge + place)
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype) * 2 - 1
    signs = signs.to(tensor.device)
    return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)
