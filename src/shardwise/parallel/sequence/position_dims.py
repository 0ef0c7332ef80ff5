"""Propose which dims of a batch are positions of a sequence (tried by engine/find_positions).

Those of one size, over all tensors, of which a batch can lose half and still be a batch for the module: names and
kinds of modules play no part. Where a tensor has several of that size, all of them are tried (a mask (S, S)), then the
first of each tensor, then the last (as many features as positions, in tensors of three dims). Where the task names the
dims (`Task.sequence`), those, whatever their sizes.

What this does not do: cut tensors that have the positions along several dims (masks (B, 1, S, S)); they stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.part.positions import Candidate, Positions

Dims = tuple[tuple[int, ...], ...]  # of each leaf


def candidates(
    batch: Any, samples: int, axes: tuple[Axis, ...], names: tuple[str, ...], least: int,
    named: Mapping[str, int] | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    """Yields a `Candidate` for each size that dims behind the samples have; integer tensors' sizes first.

    least  positions that every rank must have
    named  by name of a tensor, its dim of positions: those alone; none where it is empty
    Raises `InputError`, before the first, for a name or a dim that the batch lacks.
    """
    proposals = _alike(batch, samples) if named is None else [_declared(batch, names, named)] if named else []
    for dims, said in proposals:
        # which of several dims of the size holds positions is not known: such a tensor stays whole
        cuts = tuple(((along[0], axes),) if len(along) == 1 else () for along in dims)
        # dims that the task names are not tried on a shorter batch
        half = _shortened(batch, dims) if named is None else None
        yield Candidate(Positions(cuts, names, "sequence", least), said, half)


def _declared(batch: Any, names: tuple[str, ...], named: Mapping[str, int]) -> tuple[Dims, str]:
    """Returns (each leaf's dims that the task names, a phrase for the user); `InputError` for what is not there."""
    leaves, _ = tree_flatten(batch)
    # a name that the batch lacks is a mistake; a dim that it lacks, below
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
    """Yields (each leaf's dims of one size, a phrase for the user) for each size that a batch has."""
    leaves, of_size = tree_flatten(batch)[0], _by_size(batch, samples)
    for size, dims in of_size.items():
        if any(len(along) == 1 for along in dims):  # else nothing is cut: tensors with it several times stay whole
            yield dims, f"dims of {size}"
    for size, dims in of_size.items():  # as many positions as features: one dim of each tensor (pictures have more)
        several = {leaf.dim() for leaf, along in zip(leaves, dims, strict=True) if len(along) > 1}
        for place, said in (0, "first"), (-1, "last"):
            if several == {3}:
                yield tuple(along[place : place + 1 or None] for along in dims), f"the {said} dims of {size}"


def of_several(batch: Any, samples: int, names: tuple[str, ...]) -> dict[str, int]:
    """Returns tensor's name -> the first of its dims, several of one size, that nobody proposes to cut; {} if none."""
    for dims in _by_size(batch, samples).values():
        if not any(len(along) == 1 for along in dims):
            return {name: along[0] for name, along in zip(names, dims, strict=True) if along}
    return {}


def _by_size(batch: Any, samples: int) -> dict[int, Dims]:
    """Returns size -> each leaf's dims of that size, for sizes behind the samples; those of integer tensors first."""
    leaves, _ = tree_flatten(batch)
    # tensors whose first dim counts something else have no dims behind samples
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples]
    # integers first, as tokens are: the size that they have is the sequence, and features come later
    integers = [n for t in tensors if not t.is_floating_point() for n in t.shape[1:]]
    sizes = dict.fromkeys(n for n in [*integers, *(n for t in tensors for n in t.shape[1:])] if n > 1)
    return {size: tuple(_along(leaf, samples, size) for leaf in leaves) for size in sizes}


def _along(leaf: Any, samples: int, size: int) -> tuple[int, ...]:
    """Returns the dims of a leaf that have this size, behind the samples where it has any (a mask (S, S) has none)."""
    if not isinstance(leaf, torch.Tensor):
        return ()
    first = int(leaf.dim() > 0 and leaf.shape[0] == samples)
    return tuple(d for d in range(first, leaf.dim()) if leaf.shape[d] == size)


def _shortened(batch: Any, dims: Dims) -> Any:
    """Returns the batch with the first half of its positions, of all dims that have them."""
    leaves, spec = tree_flatten(batch)
    kept = []
    for leaf, along in zip(leaves, dims, strict=True):
        for dim in along:
            leaf = leaf.narrow(dim, 0, (leaf.shape[dim] + 1) // 2).contiguous()
        kept.append(leaf)
    return tree_unflatten(kept, spec)
