"""How many tokens each rank of an ep group sends in a rehearsal: its samples times its share of their positions.

dp_shard=2,cp=2,ep=4    ranks 0 to 3 of ep: data ranks 0, 0, 1, 1; ranks of cp 0, 1, 0, 1
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
    """The rehearsed rank's ep group, and what its ranks hold of a sample.

    index      the rehearsed rank's index in the group
    data       for each rank of the group, the index of its data rank among the data ranks of whole ep groups
    positions  for each rank of the group, the number of positions of a sample that it has
    """

    index: int
    data: tuple[int, ...]
    positions: tuple[int, ...]

    @classmethod
    def of(cls, cuts: Cuts, data_place: int, place: Place, positions: Positions | None, batch: Any) -> RoutedRows:
        """Returns the `RoutedRows` of one rank.

        data_place  its data rank's index among the data ranks of whole ep groups
        place       its index on each axis that cuts positions; () for the first
        positions   how the batch is cut over these axes; None if it is not
        batch       a batch, which says how many positions a sample has
        """
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
        """Returns numbers in proportion to the tokens of each rank of the group; () if all ranks have as many.

        samples  samples of the micro-batch on each data rank of whole ep groups; () if all data ranks have as many
        """
        each = [samples[rank] if samples else 1 for rank in self.data]
        rows = tuple(count * share for count, share in zip(each, self.positions, strict=True))
        return rows if len({*rows}) > 1 else ()


def _positions_at(cuts: Cuts, place: Place, positions: Positions | None, batch: Any) -> int:
    """Returns the positions per sample of the rank at `place`, in the first tensor of `batch` that is cut; else 1."""
    # positions are not cut, so samples alone tell how many tokens a rank has
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
            # every cut tensor has the same share of positions, so the first one is enough
            return math.prod(left.values())
    return 1
