"""What datasets, collate functions and sources draw: one process's numbers, whoever reads."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data import ArraySource, Loader, as_source


class Augmented:
    """A dataset that draws while it reads."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(2)


def masked(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins samples and draws for all of them, as a collator that masks words does."""
    shift = float(np.random.rand()) + random.random()
    return torch.tensor([i for i, _ in samples]), torch.stack([x for _, x in samples]) + torch.rand(
        len(samples), 2
    ) + shift


class Drawing:
    """A source whose read draws."""

    def __len__(self) -> int:
        return 23

    def read(self, indices: list[int], region: Any = None) -> Any:
        return torch.tensor(indices), torch.rand(len(indices), 2)


DRAWING = {
    "samples": lambda: as_source(Augmented()),
    "collate": lambda: as_source(Augmented(), masked),
    "read": Drawing,
}


def drawn(kind: str, ranks: int, workers: int, accumulate: int = 1, prefetch: int = 2) -> list[float]:
    options = {"accumulate": accumulate, "data_ranks": ranks, "workers": workers, "prefetch": prefetch}
    loaders = [Loader(DRAWING[kind](), 3, 6, data_rank=rank, **options) for rank in range(ranks)]
    try:
        steps = [[next(loader) for loader in loaders] for _ in range(5)]
        return [x for of_ranks in steps for micro in zip(*of_ranks, strict=True) for part in micro
                for x in part.batch[1][: part.count].flatten().tolist()]  # fmt: skip
    finally:
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("kind", DRAWING)
def test_what_reading_draws_does_not_depend_on_who_reads(kind: str) -> None:
    first = drawn(kind, 1, 0)
    assert len(set(first)) == len(first)  # the second epoch draws anew
    for ranks, accumulate, prefetch in ((2, 1, 2), (3, 2, 0), (1, 2, 2)):
        assert drawn(kind, ranks, 0, accumulate, prefetch) == first


@pytest.mark.parametrize(("kind", "ranks"), [("samples", 1), pytest.param("collate", 2, marks=pytest.mark.long)])
def test_nor_on_whether_a_worker_does(kind: str, ranks: int) -> None:
    assert drawn(kind, ranks, 2) == drawn(kind, 1, 0)


def test_reading_leaves_the_generators_where_they_stood() -> None:
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(4), np.random.seed(4), random.seed(4)
    drawn("collate", 2, 0)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_a_source_that_draws_nothing_is_read_ahead_by_its_parts() -> None:
    with Loader(ArraySource({"x": np.arange(24.0)}), 0, 8, data_ranks=2) as loader:
        next(loader), next(loader)
        assert loader._ahead is not None and not loader._steps.whole


class Lengths:
    """Sample i is i numbers, at least one."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index,), float(index))


def padded(samples: list) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_samples_are_padded_as_in_one_process(workers: int) -> None:
    """Ranks have the padding of the whole batch: masks are counted in it; a collate that needs none says so."""

    def batches(ranks: int, rank: int, pads: bool = True) -> list[torch.Tensor]:
        source = as_source(Lengths(), padded, pads=pads)
        with Loader(source, 3, 6, data_rank=rank, data_ranks=ranks, workers=workers) as loader:
            return [next(loader)[0].batch for _ in range(6)]

    for one, first, second in zip(batches(1, 0), batches(2, 0), batches(2, 1), strict=True):
        assert torch.equal(torch.cat([first, second]), one)
    alone = batches(2, 0, pads=False)
    assert any(part.shape[1] < whole.shape[1] for part, whole in zip(alone, batches(1, 0), strict=True))
