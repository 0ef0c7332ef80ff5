"""Which dims of a batch may be positions of a sequence.

Those of one size, over all tensors, of which a batch can lose half and still be a batch for the module: names and
kinds of modules play no part.

What this does not do: cut tensors that have the positions along several dims (masks (B, 1, S, S)); they stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm import Axis
from shardwise.part.positions import Candidate, Positions

Dims = tuple[tuple[int, ...], ...]  # of each leaf


def candidates(
    batch: Any, samples: int, axes: tuple[Axis, ...], names: tuple[str, ...], least: int
) -> Iterator[Candidate]:
    """For each size that dims behind the first one have, those dims. Sizes of integer tensors come first."""
    for dims, size in _alike(batch, samples):
        cuts = tuple(((along[0], axes),) if len(along) == 1 else () for along in dims)
        yield Candidate(Positions(cuts, names, "sequence", least), f"dims of {size}", _shortened(batch, dims))


def _alike(batch: Any, samples: int) -> Iterator[tuple[Dims, int]]:
    leaves, _ = tree_flatten(batch)
    tensors = [leaf if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == samples else None
               for leaf in leaves]  # fmt: skip
    integers = [n for t in tensors if t is not None and not t.is_floating_point() for n in t.shape[1:]]
    sizes = [*integers, *(n for t in tensors if t is not None for n in t.shape[1:])]
    for size in dict.fromkeys(n for n in sizes if n > 1):
        dims = [() if t is None else tuple(d for d in range(1, t.dim()) if t.shape[d] == size) for t in tensors]
        if any(len(each) == 1 for each in dims):
            yield tuple(dims), size


def _shortened(batch: Any, dims: Dims) -> Any:
    """The batch with the first half of its positions."""
    leaves, spec = tree_flatten(batch)
    kept = []
    for leaf, along in zip(leaves, dims, strict=True):
        for dim in along:
            leaf = leaf.narrow(dim, 0, (leaf.shape[dim] + 1) // 2).contiguous()
        kept.append(leaf)
    return tree_unflatten(kept, spec)
