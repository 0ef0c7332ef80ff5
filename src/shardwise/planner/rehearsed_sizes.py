"""Which micro-batches of a data rank are rehearsed: sizes as a run deals them, and those of the ep group beside."""

from __future__ import annotations

import math

from shardwise.costs.layout import Layout
from shardwise.layout.dealing import deal
from shardwise.rehearsal.cut_module import ALIKE, Beside, Cuts

Sizes = tuple[tuple[int, ...], ...]  # of the micro-batches of each rehearsal


def dealt(layout: Layout, batch: int, data_rank: int) -> tuple[int, ...]:
    """Returns how many samples each micro-batch of a data rank has; at least 1, since a stand-in is run for none."""
    parts = deal(batch, layout.n_micro * layout.rounds, layout.dp, data_rank)
    return tuple(max(1, last - first) for first, last, _, _ in parts)


def played(key: Cuts, layout: Layout, batch: int, data_rank: int) -> tuple[Sizes, Beside]:
    """Returns (sizes of the micro-batches to rehearse on a data rank, sizes beside it in each of them).

    Beside it are the data ranks that fill whole groups of ep, each with all ranks that cut its positions.
    """
    count = layout.ep // math.gcd(layout.ep, layout.cut_positions)
    place = data_rank % count
    group = [dealt(layout, batch, data_rank - place + other) for other in range(count)]
    chosen = _chosen(key, layout, place, group)
    sizes = (tuple(group[place][index] for index in chosen),)
    # without ep a rank receives no rows of other ranks' micro-batches
    if layout.ep == 1:
        return sizes, ALIKE
    return sizes, (place, tuple(tuple(other[index] for other in group) for index in chosen))


def _chosen(key: Cuts, layout: Layout, place: int, group: list[tuple[int, ...]]) -> list[int]:
    """Returns indices of the micro-batches of a step that a rehearsal plays.

    pipeline, played in full      those of its first rounds (`key.rounds` - 1 of them) and of the last
    pipeline, played in part      the fullest, which stands for each
    gradients that are sharded    the first, which leaves gradients behind, and the fullest of the others
    else                          the fullest

    The fullest has the most samples of this rank; of such the one with the most of the ranks beside, whose rows ep
    sends here.

    group  samples of each micro-batch on each of the data ranks beside; this rank is the one at `place`
    """
    everything = range(len(group[place]))

    def load(index: int) -> tuple[int, int]:
        return group[place][index], sum(other[index] for other in group)

    fullest = max(everything, key=load)
    if layout.pp > 1:
        if key.microbatches != layout.n_micro:
            return [fullest]
        return [*everything[: layout.n_micro * (key.rounds - 1)], *everything[-layout.n_micro :]]
    return [0, max(everything[1:], key=load)] if key.microbatches > 1 else [fullest]
