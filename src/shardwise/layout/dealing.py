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

    batch  pytree, batch dim first; where `count` is 0 it holds one stand-in sample whose loss counts nothing
    count  samples that count
    start  index of the first of them within the micro-batch
    total  samples of the micro-batch over all ranks
    """

    batch: Any
    count: int
    start: int
    total: int


def cut(length: int, pieces: int, index: int) -> tuple[int, int]:
    """Returns [start, stop) of piece `index` of `length` items cut into `pieces` whose sizes differ by at most one."""
    return length * index // pieces, length * (index + 1) // pieces


def enough_samples(samples: int, plan: Plan) -> None:
    """Raises `InputError` where there are fewer samples than ranks that they are dealt over."""
    if samples < plan.data_ranks:
        raise InputError(
            f"more ranks than samples: plan {plan} deals each micro-batch over {plan.data_ranks} ranks, but there are "
            f"{samples} samples: use fewer data ranks or larger batches"
        )


def micro_batches(samples: int, accumulate: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of each micro-batch in a global batch; `InputError` where there are too few samples."""
    if samples < accumulate:
        raise InputError(
            f"a batch of {samples} samples cannot be split into accumulate={accumulate} micro-batches (with pp, "
            f"accumulate times microbatches): give at least {accumulate} samples or lower accumulate or microbatches"
        )
    return [cut(samples, accumulate, i) for i in range(accumulate)]


def deal(samples: int, accumulate: int, ranks: int, rank: int) -> list[tuple[int, int, int, int]]:
    """Returns for each micro-batch (first, last, start, total), [first, last) being this rank's samples in the batch.

    `start` is first's place within the micro-batch and `total` the micro-batch's size. first == last means none.
    Raises `InputError` where there are fewer samples than micro-batches.
    """
    dealt = []
    for low, high in micro_batches(samples, accumulate):
        start, stop = cut(high - low, ranks, rank)
        dealt.append((low + start, low + stop, start, high - low))
    return dealt
