"""Propose which dims of a batch are space, and so cut into tiles (tried by engine/positions).

    x (B, C, H, W), mask (B, H, W), label (B,)     domain=2x3: x and mask are cut, label is whole
    x (B, C, H, W), fine (B, C, 2H, 2W)            x is cut; fine is whole and read where it meets what is cut

Where the task names the dims (`Task.spatial`), those; else the dims behind batch and channel of a tensor, or the last
ones of their number; where those cannot be cut, fewer (steps of time lie before channels). Every tensor that ends in
the same extents is tiled with it. The tensors that the model is given come first. A plan of fewer degrees than dims
tiles the first ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan
from shardwise.part.positions import Candidate, Cuts, Positions
from shardwise.task import Domain


def candidates(
    batch: Any, samples: int, tiles: tuple[Axis | None, ...], names: tuple[str, ...], spatial: Domain | None,
    given: Collection[int],
) -> Iterator[Candidate]:  # fmt: skip
    """Each set of extents that the model's inputs have, with all tensors of the batch that have it too.

    tiles  for each dim of space from the first one on: the axis that cuts it, None where it stays whole
    given  ids of the leaves that the model is given
    """
    leaves, _ = tree_flatten(batch)
    if spatial is not None and len(tiles) > len(spatial.dims):
        raise RefusedPlan(
            f"domain={'x'.join(str(axis.size if axis else 1) for axis in tiles)} tiles {len(tiles)} dims, and "
            f"Task.spatial names {len(spatial.dims)}: {spatial.told()}"
        )
    fields = [leaf for leaf in leaves if _is_field(leaf, samples)]
    asked = [leaf for leaf in fields if id(leaf) in given] or fields  # else the model is given what is made of them
    wanted = [extents for leaf in asked for extents in _extents(leaf, len(tiles), spatial)]
    if spatial is None:  # steps or members lie in front of the channels
        wanted += [tuple(leaf.shape[d:]) for leaf in asked for d in range(3, leaf.dim() - max(len(tiles), 2) + 1)]
    for extents in dict.fromkeys(wanted):
        dims = [_dims(leaf, extents, spatial) if _is_field(leaf, samples) else () for leaf in leaves]
        cuts = tuple(_cuts(along, tiles) for along in dims)
        yield Candidate(Positions(cuts, names, "field"), f"fields of {' x '.join(map(str, extents))}")


def _is_field(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == samples


def _extents(leaf: torch.Tensor, tiled: int, spatial: Domain | None) -> Iterator[tuple[int, ...]]:
    """Sizes that may be those of space."""
    if spatial is not None:
        along = _declared(leaf, spatial)
        if along:
            yield tuple(leaf.shape[d] for d in along)
        return
    if tiled <= leaf.dim() - 2 <= 3:
        yield tuple(leaf.shape[2:])


def _declared(leaf: torch.Tensor, spatial: Domain) -> tuple[int, ...]:
    """The dims that the task names, counted from the front; () where this tensor has not all of them."""
    n = leaf.dim()
    if not all(-n <= d < n for d in spatial.dims):
        return ()
    along = tuple(d % n for d in spatial.dims)
    return along if 0 not in along and len(set(along)) == len(along) else ()


def _dims(leaf: torch.Tensor, extents: tuple[int, ...], spatial: Domain | None) -> tuple[int, ...]:
    """The dims of a tensor that have these extents."""
    if spatial is not None:
        along = _declared(leaf, spatial)
    else:
        along = tuple(range(leaf.dim() - len(extents), leaf.dim())) if leaf.dim() > len(extents) else ()
    return along if along and tuple(leaf.shape[d] for d in along) == extents else ()


def _cuts(along: tuple[int, ...], tiles: tuple[Axis | None, ...]) -> Cuts:
    return tuple((dim, (axis,)) for dim, axis in zip(along, tiles, strict=False) if axis is not None)
