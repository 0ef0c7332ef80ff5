"""Which dims of a batch are positions, and each rank's share of them.

    batch   input_ids (B, S), labels (B, S)     S=10 over cp=2 × cp_ulysses=2
    rank    cp 0: 0..4   of which cp_ulysses 0: 0 1 2, 1: 3 4
            cp 1: 5..9                       0: 5 6 7, 1: 8 9

Shares are parts: they keep the global shape, so that positions, shifted labels and masks that a module makes from
shapes come out as in one process. The positions found are the dims of one size that a batch can lose half of and
still be a batch for the module: names and kinds of modules play no part.

What this does not do: cut tensors that have the positions along several dims (masks (B, 1, S, S)); they stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.part import Owners, Part
from shardwise.part.crossing import Along


@dataclass(frozen=True)
class Positions:
    """The dim of positions of each leaf of a batch (None: whole on every rank), over the axes that cut it.

    dims   by leaf of the flattened batch: every dim of the positions' size
    axes   outermost first
    names  of the leaves, for people
    results  how the axes cut each leaf of what a call of a submodule (path, place) gives, where they cut any
    """

    dims: tuple[tuple[int, ...], ...]
    axes: tuple[Axis, ...]
    names: tuple[str, ...] = ()
    results: Mapping[tuple[str, int], tuple[Along, ...]] = field(default_factory=dict)  # of calls, as rehearsed
    least: int = 1  # positions that every rank must have: as many as axes further in cut them over

    def cut(self, batch: Any) -> Any:
        """The batch with this rank's share of the positions, as parts of the whole."""
        leaves, spec = tree_flatten(batch)
        if len(leaves) != len(self.dims):
            return batch  # another kind of batch than the one that was looked at
        cut = [self._cut(leaf, dims) if len(dims) == 1 else leaf for leaf, dims in zip(leaves, self.dims, strict=True)]
        return tree_unflatten(cut, spec)

    def _cut(self, leaf: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        smallest = leaf.shape[dims[0]]
        for axis in self.axes:
            smallest //= axis.size
        if smallest < self.least:
            axes = " x ".join(f"{axis.name}={axis.size}" for axis in self.axes)
            raise InputError(
                f"a sequence of {leaf.shape[dims[0]]} positions leaves a rank of {axes} {smallest}, and every rank "
                f"needs at least {self.least}: use fewer ranks or longer sequences (pad, or pack several into one)"
            )
        return _share(leaf, dims[0], self.axes)

    def told(self) -> str:
        """One line for the user."""
        cut = [
            f"{name} along dim {dims[0]}" for name, dims in zip(self.names, self.dims, strict=True) if len(dims) == 1
        ]
        axes = " x ".join(f"{axis.name}={axis.size}" for axis in self.axes)
        return f"{axes} cuts the sequence of {', '.join(cut)}"


def _share(leaf: torch.Tensor, dim: int, axes: tuple[Axis, ...]) -> torch.Tensor:
    if not axes:
        return leaf.contiguous()
    axis, *rest = axes
    owners = Owners.blocks(leaf.shape[dim], axis.size)
    local = _share(owners.take(leaf, dim, axis.index), dim, tuple(rest))
    soft = not leaf.is_floating_point()  # small, and asked for whole by much that a module does before it computes
    return Part(local, dim, owners, axis, soft=soft)


def candidates(batch: Any, samples: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """For each size that dims behind the first one have: those dims, by leaf. Sizes of integer tensors come first."""
    leaves, _ = tree_flatten(batch)
    tensors = [leaf if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == samples else None
               for leaf in leaves]  # fmt: skip
    integers = [n for t in tensors if t is not None and not t.is_floating_point() for n in t.shape[1:]]
    sizes = [*integers, *(n for t in tensors if t is not None for n in t.shape[1:])]
    for size in dict.fromkeys(n for n in sizes if n > 1):
        dims = [() if t is None else tuple(d for d in range(1, t.dim()) if t.shape[d] == size) for t in tensors]
        if any(len(each) == 1 for each in dims):
            yield tuple(dims)


def shortened(batch: Any, dims: tuple[tuple[int, ...], ...]) -> Any:
    """The batch with the first half of its positions."""
    leaves, spec = tree_flatten(batch)
    kept = []
    for leaf, along in zip(leaves, dims, strict=True):
        for dim in along:
            leaf = leaf.narrow(dim, 0, (leaf.shape[dim] + 1) // 2).contiguous()
        kept.append(leaf)
    return tree_unflatten(kept, spec)
