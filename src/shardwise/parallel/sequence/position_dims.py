"""Propose which dims of a batch are positions of a sequence. engine/find_positions tries the proposals in order.

A proposal is all dims of one size, over all tensors. It can be right only if the module also runs on half the size;
names and classes are not used. If a tensor has several dims of that size, all of them are proposed (a mask (S, S)), and
in tensors of three dims (with as many features as positions) then the first of each tensor, then the last. If the task
names the dims (`Task.sequence`), these alone are proposed, whatever their sizes.

What this does not do: cut tensors that have positions along several dims (masks (B, 1, S, S)), which stay uncut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.part.positions import Candidate, Positions

Dims = tuple[tuple[int, ...], ...]  # for each leaf of a batch, its dims of positions


def candidates(
    batch: Any, samples: int, axes: tuple[Axis, ...], names: tuple[str, ...], least: int,
    named: Mapping[str, int] | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    """Yields a `Candidate` for each size of dims behind the batch dim, sizes in integer tensors first.

    samples  size of the batch dim;  axes  that cut positions, outermost first
    names    name of each leaf of `batch`;  least  number of positions that every rank must have
    named    name of a tensor -> its dim of positions, which are then the only proposal, or {} for none; None: not named
    Raises `InputError`, before it yields anything, for a name or a dim that the batch lacks.
    """
    proposals = _alike(batch, samples) if named is None else [_declared(batch, names, named)] if named else []
    for dims, said in proposals:
        # a tensor with several such dims is not cut, as it is not known which of them holds positions
        cuts = tuple(((along[0], axes),) if len(along) == 1 else () for along in dims)
        # named dims need no trial on half a batch
        half = _shortened(batch, dims) if named is None else None
        yield Candidate(Positions(cuts, names, "sequence", least), said, half)


def _declared(batch: Any, names: tuple[str, ...], named: Mapping[str, int]) -> tuple[Dims, str]:
    """Returns (each leaf's dims that the task names, a phrase for the user); `InputError` if one does not exist."""
    leaves, _ = tree_flatten(batch)
    if unknown := [name for name in named if name not in names]:
        raise InputError(f"Task.sequence: a batch has no tensor {unknown[0]!r} (it has {', '.join(names)})")
    dims: list[tuple[int, ...]] = []
    for leaf, name in zip(leaves, names, strict=True):
        dim = named.get(name)
        rank = leaf.dim() if isinstance(leaf, torch.Tensor) else 0
        if dim is not None and not (-rank < dim < rank and dim):  # 0 and -rank are the samples
            raise InputError(
                f"Task.sequence: {name} has no dim {dim} behind its samples (it is {tuple(getattr(leaf, 'shape', ()))})"
            )
        dims.append(() if dim is None else (dim % rank,))
    return tuple(dims), "what Task.sequence names"


def _alike(batch: Any, samples: int) -> Iterator[tuple[Dims, str]]:
    """Yields (each leaf's dims of one size, a phrase for the user) for each proposal."""
    leaves, of_size = tree_flatten(batch)[0], _by_size(batch, samples)
    for size, dims in of_size.items():
        if any(len(along) == 1 for along in dims):  # else nothing is cut, as tensors with several such dims are not
            yield dims, f"dims of {size}"
    for size, dims in of_size.items():  # (B, S, E) with S == E, of which one dim is proposed; pictures have four dims
        several = {leaf.dim() for leaf, along in zip(leaves, dims, strict=True) if len(along) > 1}
        for place, said in (0, "first"), (-1, "last"):
            if several == {3}:
                yield tuple(along[place : place + 1 or None] for along in dims), f"the {said} dims of {size}"


def of_several(batch: Any, samples: int, names: tuple[str, ...]) -> dict[str, int]:
    """Returns tensor's name -> first of its several dims of a size, for the first size that `candidates` cannot cut.

    {} if there is no such size. For a message that suggests to name the dim.
    """
    for dims in _by_size(batch, samples).values():
        if not any(len(along) == 1 for along in dims):
            return {name: along[0] for name, along in zip(names, dims, strict=True) if along}
    return {}


def _by_size(batch: Any, samples: int) -> dict[int, Dims]:
    """Returns size -> each leaf's dims of that size, for sizes of dims behind the batch dim; integer tensors' first."""
    leaves, _ = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples]
    # integer tensors first, since tokens have a dim of positions and none of features
    integers = [n for t in tensors if not t.is_floating_point() for n in t.shape[1:]]
    sizes = dict.fromkeys(n for n in [*integers, *(n for t in tensors for n in t.shape[1:])] if n > 1)
    return {size: tuple(_along(leaf, samples, size) for leaf in leaves) for size in sizes}


def _along(leaf: Any, samples: int, size: int) -> tuple[int, ...]:
    """Returns the dims of a leaf that have this size, without its batch dim if it has one (a mask (S, S) has none)."""
    if not isinstance(leaf, torch.Tensor):
        return ()
    first = int(leaf.dim() > 0 and leaf.shape[0] == samples)
    return tuple(d for d in range(first, leaf.dim()) if leaf.shape[d] == size)


def _shortened(batch: Any, dims: Dims) -> Any:
    """Returns the batch with the first half of each leaf's dims in `dims`."""
    leaves, spec = tree_flatten(batch)
    kept = []
    for leaf, along in zip(leaves, dims, strict=True):
        for dim in along:
            leaf = leaf.narrow(dim, 0, (leaf.shape[dim] + 1) // 2).contiguous()
        kept.append(leaf)
    return tree_unflatten(kept, spec)
