"""`x[index] = value` with tiles: a whole x becomes a tile if nothing else holds its memory, else tiles are gathered.

    kept = torch.zeros(B, C, H, W // 2 + 1, dtype=torch.cfloat)     whole, on every rank
    kept[:, :, :m, :m] = spectrum[:, :, :m, :m] * weight            a tile from here on: dealt in blocks, and written to

The object that the module holds stays the same, as a `Written` that stands for a part, which torch's functions get. If
its memory has other readers (a view, an array), or a module keeps it, it stays whole and the tile is gathered.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from shardwise.layout.grid import SPACE
from shardwise.part.assigned import Written, now_of, stand_for
from shardwise.part.cuts import Owners
from shardwise.part.levels import Distributed
from shardwise.part.rules.masks import mask_cut_like
from shardwise.part.sums import whole_over_axis
from shardwise.part.tiles.gathers import noted
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, opened, placed

Slices = tuple[slice, ...]
OWN = 2  # use count of a storage that one tensor alone holds, read by `_is_free`: the tensor's, and the reader's
_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@answers(torch.Tensor.__setitem__, cut_once=False)
def write(target: torch.Tensor, index: Any, value: Any) -> None:
    """Writes `target[index] = value`, either of them cut; a whole target becomes a tile if it is free (`_is_free`).

    Else the value is gathered over its cuts. May be collective.
    """
    cut_dims = cuts(value, range(value.dim())) if isinstance(value, torch.Tensor) else []
    if isinstance(target, Distributed) or not cut_dims:
        # the target is cut itself, or the index alone is: a rule for parts does it
        target[mask_cut_like(target, index)] = value
        return
    # each cut dim of the value is written along one dim of the target, which is cut as the value is from then on
    where = _whole_slices(index, tuple(target.shape)) if all(cut.axis.name in SPACE for cut in cut_dims) else None
    along = None if where is None else _dims_of(where[0], where[1], value)
    if along is not None and len(set(along)) == len(along) and _is_free(target):
        _become(target, [CutDim(cut.axis, along[cut.dim], _blocks(target, along[cut.dim], cut)) for cut in cut_dims])
        _write(target, index, value)
        return
    for cut in cut_dims:
        noted("a field that is written into a whole tensor", value, cut)
        value = whole_over_axis(value, cut.axis)
    target[index] = value


def _write(written: Written, index: Any, value: Any) -> None:
    """Writes `written[index] = value` into this rank's tile; gathers it first if the index is more than slices."""
    now = now_of(written)
    cut_dims = cuts(now, range(now.dim()))
    where = _whole_slices(index, tuple(now.shape))
    # by slices, of a cut field: this rank's own part of the region
    if where is not None and cut_dims:
        region = now.detach()[where[0]]
        beside = _beside(value, where[1], region)
        # the value has another cut than the region: it is brought to the region's, or gathered below
        if beside is not None:
            tile = opened(now, cut_dims).clone()  # what was read of the old one keeps its values
            tile[_local(where[0], cut_dims)] = opened(beside, cuts(beside, range(beside.dim())))
            stand_for(written, placed(tile, cut_dims))
            return
    # else everything is gathered, and the write is made whole
    for cut in cut_dims:
        noted("a field that tiles were written into", now, cut)
        now = whole_over_axis(now, cut.axis)
    for cut in cuts(value, range(value.dim())) if isinstance(value, torch.Tensor) else ():
        value = whole_over_axis(value, cut.axis)
    now = now.clone()
    now[index] = value
    stand_for(written, now)


def _whole_slices(index: Any, shape: tuple[int, ...]) -> tuple[Slices, list[int]] | None:
    """Returns (a slice for each dim, the dims indexed by an int); None if the index has more than slices, ints, `...`.

    The slice of a dim that is indexed by an int has length one. None too if an int is out of range.
    """
    indices = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, bool) or not (isinstance(item, slice | int) or item is Ellipsis) for item in indices):
        return None
    # `...`, or the end of a short index, stands for whole dims
    places = [place for place, item in enumerate(indices) if item is Ellipsis] or [len(indices)]
    indices[places[0] : places[0] + 1] = [slice(None)] * (len(shape) - len(indices) + (places[0] < len(indices)))
    if len(places) > 1 or len(indices) != len(shape):
        return None
    single = [dim for dim, item in enumerate(indices) if isinstance(item, int)]
    # torch's own write raises the error
    if any(not -shape[dim] <= indices[dim] < shape[dim] for dim in single):
        return None
    whole = [slice(item % n, item % n + 1) if isinstance(item, int) else slice(*item.indices(n))
             for item, n in zip(indices, shape, strict=True)]  # fmt: skip
    return tuple(whole), single


def _dims_of(slices: Slices, single: list[int], value: torch.Tensor) -> list[int] | None:
    """Returns, for each dim of a value, the target's dim that it is written along; None if the value is broadcast."""
    kept = [dim for dim in range(len(slices)) if dim not in single][-value.dim() :] if value.dim() else []
    sizes = [len(range(slices[dim].start, slices[dim].stop, slices[dim].step or 1)) for dim in kept]
    return kept if sizes == list(value.shape) else None


def _blocks(target: torch.Tensor, dim: int, cut: CutDim) -> Owners:
    return Owners.blocks(target.shape[dim], cut.axis.size)


def _is_free(target: torch.Tensor) -> bool:
    """Whether nothing but this object refers to its memory, and no watched module keeps it. The same on all ranks."""
    if type(target) not in (torch.Tensor, FakeTensor) or target.requires_grad or target._base is not None:
        return False
    # buffers and attributes of modules outlive the forward (running fields), so they stay whole tensors
    kept = (value for module in _WATCHED for child in module.modules()
            for table in (child._buffers, vars(child)) for value in table.values())  # fmt: skip
    if any(value is target for value in kept):
        return False
    storage = target.untyped_storage()
    return storage.resizable() and torch._C._storage_Use_Count(storage._cdata) <= OWN


def _become(target: torch.Tensor, cut_dims: list[CutDim]) -> None:
    """Turns the whole `target`, which stays the same object, into a `Written` that stands for its tiles."""
    tile = target
    for cut in cut_dims:
        tile = cut.owners.take(tile, cut.dim, cut.axis.index)
    stand_for(target, placed(tile.clone(), cut_dims))


def _beside(value: Any, single: list[int], region: torch.Tensor) -> torch.Tensor | None:
    """Returns `value` with the shape and cuts of the `region` that it is written to; None if it does not get these.

    single  the region's dims that are indexed by an int, which the value lacks
    """
    # a number fits everywhere
    if isinstance(value, torch.Tensor):
        for _ in range(region.dim() - len(single) - value.dim()):
            value = value.unsqueeze(0)
        for dim in single:
            value = value.unsqueeze(dim)
        if value.dim() > region.dim():
            return None
    along = range(region.dim())
    # the value is broadcast to the region, and cut as it is, by an operation of parts
    if not isinstance(value, torch.Tensor) or value.shape != region.shape or cuts(value, along) != cuts(region, along):
        value = torch.zeros_like(region) + value  # an operation of parts, by which the value is broadcast, and cut
    return value if cuts(value, along) == cuts(region, along) and value.shape == region.shape else None


def _local(slices: Slices, cut_dims: list[CutDim]) -> Slices:
    """Returns the global `slices` converted to positions in this rank's share."""
    own_slices = list(slices)
    for cut in cut_dims:
        start, stop, step = slices[cut.dim].start, slices[cut.dim].stop, slices[cut.dim].step or 1
        places = cut.owners.local_slice(cut.axis.index, start, stop, step)
        own_slices[cut.dim] = slice(int(places[0]), int(places[-1]) + 1, step) if len(places) else slice(0, 0)
    return tuple(own_slices)


def watch(module: nn.Module) -> None:
    """Makes `module` return the part in place of a `Written`, and has its own tensors stay whole (`_is_free`)."""
    if module not in _WATCHED:
        _WATCHED.add(module)
        module.register_forward_hook(_give_parts)


def _give_parts(module: nn.Module, args: tuple, output: Any) -> Any:
    return tree_map_only(Written, now_of, output)


Written.assign = staticmethod(_write)
