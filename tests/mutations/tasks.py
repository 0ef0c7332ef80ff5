"""Tasks whose inputs cannot be right by luck, for bugs that kind ones would hide."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from module_tasks import several_buckets
from torch import Tensor, nn

from shardwise import Task
from shardwise.models import tasks
from shardwise.models.tasks import decoder, mlp, token_batch, unet_batchnorm

IGNORED = 3  # a class like any other
__all__ = ["several_buckets"]


def uneven_tokens(step: int, samples: int = 7, length: int = 10) -> dict[str, Tensor]:
    """Every sample counts another number of tokens; the ignored index is a valid class."""
    batch = dict(token_batch(step, samples, length))
    labels = batch["tokens"].roll(-1, 1)
    for sample in range(samples):
        labels[sample, : 1 + (3 * sample + step) % (length - 2)] = IGNORED
    return {**batch, "labels": labels}


def ignoring_loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def ignored_class() -> Task:
    return decoder().with_(batch=uneven_tokens, loss=ignoring_loss)


def few_images() -> Task:
    """Fewer samples than ranks and micro-batches: batch norm meets stand-ins."""
    return unet_batchnorm().with_(batch=partial(tasks.field_batch, samples=5))


class Gated(nn.Module):
    """A parameter without dims, one of a single element, and shapes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gate = nn.Parameter(torch.tensor([0.7]))
        self.last = nn.Linear(7, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale + self.gate)


def gated() -> Task:
    return mlp().with_(model=Gated)


def adagrad_with_decay(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=0.05, weight_decay=0.3)


def adagrad() -> Task:
    return mlp().with_(model=Gated, optimizer=adagrad_with_decay)


def adafactor_of(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=0.01)


def adafactor() -> Task:
    return mlp().with_(model=Gated, optimizer=adafactor_of)


def momentum_of(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def momentum() -> Task:
    return mlp().with_(optimizer=momentum_of)


def one_key_head() -> Task:
    return tasks._decoder("one_key_head", 5, replace(tasks.TINY_DECODER, layers=1, heads=4, kv_heads=1))


class Scaled(nn.Module):
    """A map whose result is multiplied by what a keyword says; without it, by 1."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 3)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return self.map(x) * factor


def _numbers(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(step))}


def scaled_by_keyword() -> Task:
    return Task(
        model=Scaled,
        batch=_numbers,
        inputs=lambda batch: ((batch["x"],), {"factor": 3.0}),
        loss=lambda output, batch: (output.square().sum(), len(output)),
    )
