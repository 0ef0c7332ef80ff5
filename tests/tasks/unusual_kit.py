"""What the files of unusual modules share: the list of their tasks, and batches of sentences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from module_tasks import task
from torch import Tensor, nn

from shardwise import Task

WORDS, LENGTH, SAMPLES = 20, 8, 6
ALL: dict[str, Callable[[], Task]] = {}
SPACE: set[str] = set()  # those whose samples have dims of space


def listed(make: Callable[[], Task]) -> Callable[[], Task]:
    ALL[make.__name__] = make
    return make


def in_space(make: Callable[[], Task]) -> Callable[[], Task]:
    SPACE.add(make.__name__)
    return listed(make)


def draws(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step + 100)


def sentences(step: int) -> dict[str, Tensor]:
    """Words, their number in each sentence, and the word that follows each."""
    g = draws(step)
    words = torch.randint(1, WORDS, (SAMPLES, LENGTH + 1), generator=g)
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=g)
    return {"words": words[:, :-1], "next": words[:, 1:], "lengths": lengths}


def by_word(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    targets = batch["next"]
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def language(model: Any, *names: str, **changes: Any) -> Task:
    """A task that predicts the next word from the named fields."""
    inputs = names or ("words",)
    return task(
        model, sentences, loss=by_word, inputs=lambda batch: (tuple(batch[name] for name in inputs), {}), **changes
    )


def net_of(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with SiLU between."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def fields(*names: str) -> Callable[[dict[str, Tensor]], tuple[tuple, dict]]:
    """A batch's fields as a model's arguments."""
    return lambda batch: (tuple(batch[name] for name in names), {})
