"""How many rows each rank of ep has to send in a rehearsal: by its samples, and by its share of their positions.

dp_shard=2,cp=2,ep=4    ranks of ep: (sample shares 0, 0, 1, 1) x (position shares 0, 1, 0, 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.part.positions import Positions
from shardwise.rehearsal.cut_module import Cuts, Place, axes_at


@dataclass(frozen=True)
class RoutedRows:
    """The rank of a rehearsal among those of ep, and how many rows each of these has.

    index      of the rank in its group of ep
    data       of each rank of the group, its place among data ranks that fill whole groups
    positions  of each rank of the group, how many positions of a sample it has
    """

    index: int
    data: tuple[int, ...]
    positions: tuple[int, ...]

    @classmethod
    def of(cls, cuts: Cuts, data_place: int, place: Place, positions: Positions | None, batch: Any) -> RoutedRows:
        """Returns the rows of the rank at `place` along the axes that cut positions, on data rank `data_place`."""
        # without ep every rank has all experts
        if cuts.ep == 1:
            return cls(0, (0,), (1,))
        places = [*product(*(range(size) for _, size in cuts.inner))]
        # ranks of ep are dealt over data ranks first, then over shares of positions
        here = data_place * len(places) + (places.index(place) if place else 0)
        index = here % cuts.ep
        group = range(here - index, here - index + cuts.ep)
        counts = [_positions_at(cuts, other, positions, batch) for other in places]
        return cls(
            index, tuple(rank // len(places) for rank in group), tuple(counts[rank % len(places)] for rank in group)
        )

    def loads(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows of each rank of the group, in proportion; () where all have as many.

        samples  of the micro-batch, on each of the data ranks that fill whole groups; () where all have as many
        """
        each = [samples[rank] if samples else 1 for rank in self.data]
        rows = tuple(count * share for count, share in zip(each, self.positions, strict=True))
        return rows if len({*rows}) > 1 else ()


def _positions_at(cuts: Cuts, place: Place, positions: Positions | None, batch: Any) -> int:
    """Returns how many positions the rank at a place has, of the first tensor of a batch that is cut; 1 if none is."""
    # positions are not cut: rows are counted by samples
    if positions is None:
        return 1
    axes = {axis.name: axis for axis in axes_at(cuts.plan, place)}
    there = positions.over(lambda axis: axes[axis.name])
    for leaf, leaf_cuts in zip(tree_leaves(batch), there.cuts, strict=False):
        if leaf_cuts and isinstance(leaf, torch.Tensor):
            over = [axis for _, cut_axes in leaf_cuts for axis in cut_axes]
            left: dict[int, int] = {}
            for (_, dim, owners), axis in zip(there.dealt(leaf.shape, leaf_cuts), over, strict=True):
                left[dim] = owners.counts[axis.index]
            # tensors that are cut have the same share of positions: the first one tells
            return math.prod(left.values())
    return 1
