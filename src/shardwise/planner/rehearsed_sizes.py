"""Chooses the micro-batches of a data rank that are rehearsed, with the sizes that its ep groups have in them."""

from __future__ import annotations

import math

from shardwise.costs.layout import Layout
from shardwise.layout.dealing import deal
from shardwise.rehearsal.cut_module import ALIKE, Beside, Cuts

Sizes = tuple[tuple[int, ...], ...]  # for each rehearsal, the samples of its micro-batches


def dealt(layout: Layout, batch: int, data_rank: int) -> tuple[int, ...]:
    """Returns the samples of each micro-batch of a data rank; at least 1, since a stand-in runs in place of none.

    batch  samples of the global batch
    """
    parts = deal(batch, layout.n_micro * layout.rounds, layout.dp, data_rank)
    return tuple(max(1, last - first) for first, last, _, _ in parts)


def played(key: Cuts, layout: Layout, batch: int, data_rank: int) -> tuple[Sizes, Beside]:
    """Returns (sizes of the micro-batches to rehearse on a data rank, `Beside` of the same micro-batches).

    The data ranks of `Beside` are those of complete ep groups, each with all ranks that cut its positions.

    key    cuts of the rehearsal; `batch`: samples of the global batch
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
    """Returns the indices of the micro-batches of a step that are rehearsed.

    pipeline, all micro-batches    those of its first rounds (`key.rounds` - 1 of them) and of the last
    pipeline, fewer of them        the fullest, which stands for each
    gradients that are sharded     the first, which leaves gradients behind, and the fullest of the others
    else                           the fullest

    The fullest has the most samples on this rank, and among such the most on the other ranks, whose tokens ep sends.

    group  for each data rank of the ep groups, the samples of each micro-batch; this rank is at index `place`
    """
    everything = range(len(group[place]))

    def load(index: int) -> tuple[int, int]:
        return group[place][index], sum(other[index] for other in group)

    fullest = max(everything, key=load)
    if layout.pp > 1:
        # a rehearsal with fewer micro-batches than the step repeats one size
        if key.microbatches != layout.n_micro:
            return [fullest]
        return [*everything[: layout.n_micro * (key.rounds - 1)], *everything[-layout.n_micro :]]
    return [0, max(everything[1:], key=load)] if key.microbatches > 1 else [fullest]
