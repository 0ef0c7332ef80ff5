"""Settings of both sides of a proof. A new one: parity, oracle, own_precision, cli/prove; a run's: verify_run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.random.reading_seeds import drawing
from shardwise.task import Task

LEAST_EPS = 1e-4  # below it, Adam-family updates turn rounding of near-zero gradients into sign flips


@dataclass(frozen=True)
class Settings:
    """Settings of one proof. `batch_samples` applies to tasks with a `Source`."""

    steps: int = 2
    seed: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float64
    batch_samples: int = 8
    own_steps: int = 10  # in the plan's own precision (own_precision)
    dtypes: bool = True  # of modules and messages are proven too
    nudge: int = 0  # above 0: weights and inputs move by one epsilon of the dtype, each up or down, as this seed has it
    nudge_inside: bool = False  # beside them, what each module without children returns
    device: str = "cpu"  # or the type of the accelerator, which ranks share where there are fewer
    own_backend: bool = False  # of the accelerator's, where ranks share it too
    share: tuple[int, int] | None = None  # (rank, ranks): the samples of one data rank alone
    limits: tuple[float, ...] = ()  # of the ranks: by step, up to which elements of gradients are zero (zeros)
    halves: bool = False  # accumulate each micro-batch in two parts: the same sum in another order

    @property
    def of_engine(self) -> dict[str, Any]:
        """Returns the keyword arguments of `parallelize`: seed, randomness, clip_norm and device."""
        return {"seed": self.seed, "randomness": "global", "clip_norm": self.clip_norm, "device": self.device}


def global_batch(task: Task, settings: Settings, step: int) -> Any:
    """Returns the global batch of a step, the same on both sides."""
    if task.batch is not None:
        return task.batch(step)
    assert task.data is not None
    length = len(task.data)
    count = min(settings.batch_samples, length)
    with drawing(settings.seed, step * count // length, step * count):
        return task.data.read([(step * count + i) % length for i in range(count)])


def raise_eps(optimizer: torch.optim.Optimizer) -> list[float]:
    """Raise each group's eps to `LEAST_EPS`; returns the values that were below it."""
    raised = []
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and eps < LEAST_EPS:
            raised.append(eps)
            group["eps"] = LEAST_EPS
    return raised


def nudged(tensor: torch.Tensor, settings: Settings, place: int) -> torch.Tensor:
    """Returns the tensor; with `nudge`, each element moved by an epsilon up or down. `place` tells tensors apart."""
    if not settings.nudge or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    # of its own, on the CPU: the nudges draw nothing from the task's generators, and are alike on any device
    generator = torch.Generator().manual_seed(1000003 * settings.nudge + place)
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype) * 2 - 1
    signs = signs.to(tensor.device)
    return tensor * (1 + signs * torch.finfo(tensor.dtype).eps)
