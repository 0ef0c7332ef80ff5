"""Propose which dims of a batch are space, to be cut into tiles. engine/find_positions tries the proposals in order.

    x (B, C, H, W), mask (B, H, W), label (B,)     domain=2x3: x and mask are cut, label is replicated
    x (B, C, H, W), fine (B, C, 2H, 2W)            x is cut; fine is replicated, and sliced where it meets cut tensors

If the task names the dims (`Task.spatial`), these are proposed. Otherwise the proposals are, in this order,

    all dims behind batch and channel of a tensor
    fewer of its last dims, since steps of time or ensemble members may lie before the channels
    the dims between batch and last dim, since channels may come last

Every tensor whose dims at the same place have the same sizes ("extents") is tiled too. Tensors that the model is given
are considered first. A plan with fewer degrees than dims of space tiles the first dims.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.comm import Axis
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.grid import SPACE
from shardwise.part.positions import Candidate, Cuts, Positions
from shardwise.task import Domain, Task


def candidates(
    batch: Any, samples: int, tiles: tuple[Axis | None, ...], names: tuple[str, ...], spatial: Domain | None,
    model_leaves: Collection[int],
) -> Iterator[Candidate]:  # fmt: skip
    """Yields a `Candidate` for each set of extents of the model's inputs; it cuts all tensors that have these extents.

    samples       size of the batch dim
    tiles         for each dim of space, from the first on, the axis that cuts it; None: not cut
    names         name of each leaf of `batch`, for messages
    spatial       the dims that the task names, or None
    model_leaves  ids of the leaves that the model is given
    Raises `RefusedPlan` before it yields anything if `tiles` has more dims than `spatial` names.
    """
    leaves, _ = tree_flatten(batch)
    if spatial is not None and len(tiles) > len(spatial.dims):
        raise RefusedPlan(
            f"domain={'x'.join(str(axis.size if axis else 1) for axis in tiles)} tiles {len(tiles)} dims, and "
            f"Task.spatial names {len(spatial.dims)}: {spatial.as_text()}"
        )
    fields = [leaf for leaf in leaves if _is_field(leaf, samples)]
    # if the model is given none of the fields, it is given tensors computed from them, so all fields are considered
    asked = [leaf for leaf in fields if id(leaf) in model_leaves] or fields
    wanted = [extents for leaf in asked for extents in _extents(leaf, len(tiles), spatial)]
    if spatial is None:  # steps of time or members may lie in front of the channels
        wanted += [tuple(leaf.shape[d:]) for leaf in asked for d in range(3, leaf.dim() - max(len(tiles), 2) + 1)]
    for extents in dict.fromkeys(wanted):
        dims = [_dims(leaf, extents, spatial) if _is_field(leaf, samples) else () for leaf in leaves]
        cuts = tuple(_cuts(along, tiles) for along in dims)
        yield Candidate(Positions(cuts, names, "field"), f"fields of {' x '.join(map(str, extents))}")
    if spatial is None:
        for count in dict.fromkeys(leaf.dim() - 2 for leaf in asked):
            if len(tiles) <= count <= 3:  # channels may come last
                last = Domain(dims=tuple(range(1, count + 1)))
                yield from candidates(batch, samples, tiles, names, last, model_leaves)


def without_space(spatial: Domain | None, tiled: int, batch: Any, names: tuple[str, ...]) -> str:
    """Returns a sentence for the user on why no tensor of a batch has dims that can be cut.

    tiled  number of dims of space that the plan cuts;  names  name of each leaf of `batch`
    """
    if spatial is None:
        return f"no tensor has {tiled} dim(s) of space behind batch and channel (spatial=Domain(...) names them)"
    leaves = zip(names, tree_flatten(batch)[0], strict=True)
    shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in leaves if isinstance(leaf, torch.Tensor))
    return f"Task.spatial names {spatial.as_text()}, and no tensor of the batch has these behind its samples: {shapes}"


def as_read(positions: Positions, task: Task, batch: Any) -> Positions:
    """Returns `positions`, with `shapes` and `space` set if the task's source reads tiles (it has a `global_shape`).

    shapes  for each leaf of `batch` the shape of an uncut sample, None for a leaf that is no tensor
    space   names of the axes that cut space, in the order of `global_shape`, which is that of the tensors' dims
    Raises `InputError` if a cut dim of a field has another size than `global_shape` says.
    """
    # a source without `global_shape` reads whole samples
    whole = getattr(task.data, "global_shape", None)
    if whole is None:
        return positions
    leaves = tree_flatten(batch)[0]
    space = _in_order([leaf for leaf, cuts in zip(leaves, positions.cuts, strict=True) if cuts], task.spatial)
    for leaf, cuts, name in zip(leaves, positions.cuts, positions.names, strict=True):
        for dim, (axis,) in cuts:
            place = space.index(axis.name)
            # unchecked, a rank would read other cells than it computes, without any error
            if place >= len(whole) or leaf.shape[dim] != whole[place]:
                raise InputError(
                    f"Task.data has global_shape={tuple(whole)}, and {name} of a sample read whole is "
                    f"{tuple(leaf.shape[1:])}, of which dim {dim - 1} is cut over {axis.name}: a rank would read "
                    "another tile than it computes"
                )
    shapes = tuple(tuple(leaf.shape[1:]) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    return replace(positions, shapes=shapes, space=space)


def _in_order(fields: list[torch.Tensor], spatial: Domain | None) -> tuple[str, ...]:
    """Returns the names of the axes that cut space, in the order of the fields' dims; `InputError` if fields differ."""
    if spatial is None:
        return SPACE
    # dims counted from the front and from the back may change order between tensors with and without channels
    orders = {tuple(axis for _, axis in sorted(zip(_declared(leaf, spatial), SPACE, strict=False))) for leaf in fields}
    if len(orders) > 1:
        raise InputError(
            f"Task.spatial names {spatial.as_text()}, which lie in one order in some tensors of the batch and in "
            "another one in others, and a rank reads its tile of all alike: count all dims from the front or all from "
            "the back"
        )
    return next(iter(orders), SPACE)


def _is_field(leaf: Any, samples: int) -> bool:
    """Whether a leaf of a batch is a tensor (samples, ...) of two or more dims."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == samples


def _extents(leaf: torch.Tensor, tiled: int, spatial: Domain | None) -> Iterator[tuple[int, ...]]:
    """Yields the sizes of a tensor's dims of space, the named ones or else all behind dim 1; nothing if it has none.

    tiled  number of dims that the plan cuts
    """
    if spatial is not None:
        along = _declared(leaf, spatial)
        if along:
            yield tuple(leaf.shape[d] for d in along)
        return
    if tiled <= leaf.dim() - 2 <= 3:  # behind samples and channels; space has three axes at most
        yield tuple(leaf.shape[2:])


def _declared(leaf: torch.Tensor, spatial: Domain) -> tuple[int, ...]:
    """Returns the dims that the task names, counted from the front; () if this tensor lacks one of them."""
    n = leaf.dim()
    if not all(-n <= d < n for d in spatial.dims):
        return ()
    along = tuple(d % n for d in spatial.dims)
    # dim 0 is the batch; in a tensor of two dims, -1 and 1 are the same dim
    return along if 0 not in along and len(set(along)) == len(along) else ()


def _dims(leaf: torch.Tensor, extents: tuple[int, ...], spatial: Domain | None) -> tuple[int, ...]:
    """Returns the tensor's dims of space (the named ones, else its last dims) if their sizes are `extents`, else ()."""
    if spatial is not None:
        along = _declared(leaf, spatial)
    else:
        along = tuple(range(leaf.dim() - len(extents), leaf.dim())) if leaf.dim() > len(extents) else ()
    return along if along and tuple(leaf.shape[d] for d in along) == extents else ()


def _cuts(along: tuple[int, ...], tiles: tuple[Axis | None, ...]) -> Cuts:
    """Returns (dim, (axis,)) for each of the dims `along` that an axis cuts."""
    return tuple((dim, (axis,)) for dim, axis in zip(along, tiles, strict=False) if axis is not None)
