"""Deal samples: a global batch is cut into micro-batches, each micro-batch dealt over the data ranks.

Every cut is contiguous and sizes differ by at most one, so the same global sample is in the same micro-batch on any
number of ranks. A micro-batch smaller than the ranks leaves some with none; they run a stand-in sample that counts 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.errors import InputError
from shardwise.layout.plan import Plan


@dataclass(frozen=True)
class Share:
    """The part of one micro-batch that this rank computes.

    batch  pytree of tensors, batch dim first; if `count` is 0, one stand-in sample whose loss does not count
    count  number of samples that count
    start  index of the first of them within the micro-batch
    total  number of samples of the micro-batch on all ranks
    """

    batch: Any
    count: int
    start: int
    total: int


def cut(length: int, pieces: int, index: int) -> tuple[int, int]:
    """Returns [start, stop) of piece `index` of `length` items cut into `pieces` whose sizes differ by at most one."""
    return length * index // pieces, length * (index + 1) // pieces


def enough_samples(samples: int, plan: Plan) -> None:
    """Raises `InputError` if there are fewer samples in a micro-batch than `plan.data_ranks`."""
    if samples < plan.data_ranks:
        raise InputError(
            f"more ranks than samples: plan {plan} deals each micro-batch over {plan.data_ranks} ranks, but there are "
            f"{samples} samples: use fewer data ranks or larger batches"
        )


def micro_batches(samples: int, accumulate: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of samples of each of `accumulate` micro-batches; `InputError` if samples are fewer."""
    if samples < accumulate:
        raise InputError(
            f"a batch of {samples} samples cannot be split into accumulate={accumulate} micro-batches (with pp, "
            f"accumulate times microbatches): give at least {accumulate} samples or lower accumulate or microbatches"
        )
    return [cut(samples, accumulate, i) for i in range(accumulate)]


def deal(samples: int, accumulate: int, ranks: int, rank: int) -> list[tuple[int, int, int, int]]:
    """Returns (first, last, start, total) for each micro-batch: this rank has samples [first, last) of the batch.

    `start` is the index of `first` within the micro-batch, `total` the micro-batch's size; first == last means none.
    Raises `InputError` if there are fewer samples than micro-batches.
    """
    dealt = []
    for low, high in micro_batches(samples, accumulate):
        start, stop = cut(high - low, ranks, rank)
        dealt.append((low + start, low + stop, start, high - low))
    return dealt
