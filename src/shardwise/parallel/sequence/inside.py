"""`CutBlocks`: cut a sequence that is made inside the module (patches), from its first repeated block to the last.

    pictures -> patches (B, S, E), whole  |  blocks on shares (B, S/p, E)  |  (B, S, E), whole -> loss
    backward                   gathered  <|                                |<  shares taken

Before and behind the blocks every rank computes all, and the loss counts once. Elements received by a rank: where the
blocks end B S E (p-1)/p in a forward, and where they begin as many in a backward.

What this does not do: cut where blocks are given something else than (B, S, E) as their first tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwise.comm import Axis
from shardwise.errors import InputError, RefusedPlan
from shardwise.part import Owners, Part, whole
from shardwise.part.crossing import Cuts, entering, leaving

DIM = 1  # of (B, S, E)


@dataclass(frozen=True)
class CutBlocks:
    """Cuts the sequence (B, S, E) that a list's first block is given, and gathers what its last block returns.

    first, last  paths of the blocks
    axes         over which positions are cut, outermost first
    least        indices that every rank must have
    The first block raises `RefusedPlan` for another first tensor, `InputError` for fewer positions.
    """

    first: str
    last: str
    axes: tuple[Axis, ...]
    least: int = 1

    def install(self, module: nn.Module) -> Callable[[], None]:
        """Makes the module's blocks run on shares from now on; returns the undo function."""
        entry = module.get_submodule(self.first).register_forward_pre_hook(self._enter, with_kwargs=True)
        end = module.get_submodule(self.last).register_forward_hook(self._leave)

        def undo() -> None:
            entry.remove()
            end.remove()

        return undo

    def over(self, swap: Callable[[Axis], Axis]) -> CutBlocks:
        """Returns a copy that cuts over `swap(axis)` in place of each axis."""
        return replace(self, axes=tuple(map(swap, self.axes)))

    def summary(self, stopped: str = "") -> str:
        """Returns one line for the user; `stopped`: why what the batch has of positions could not be cut."""
        axes, ranks = " x ".join(f"{a.name}={a.size}" for a in self.axes), math.prod(a.size for a in self.axes)
        return (
            f"{axes} cuts the sequence that '{self.first}' is given along dim {DIM}, until '{self.last}' has run: "
            f"{stopped or 'its length is born inside the module'}. Before and behind, every rank computes all; a rank "
            f"receives {ranks - 1}/{ranks} of (B, S, E) once in a forward and once in a backward"
        )

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns the first block's arguments, its first tensor cut along S; `RefusedPlan` if that is not (B, S, E)."""
        leaves, spec = tree_flatten((args, kwargs))
        place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), None)
        if place is None or leaves[place].dim() != 3 or not leaves[place].is_floating_point():
            # in a run too, whose batches may bring the block something else than the rehearsal did
            raise RefusedPlan(f"'{self.first}' is not given (B, S, E) first, so its positions cannot be cut")
        # recompute runs the block again on what it was given then: shares
        if not (isinstance(leaves[place], Part) and leaves[place].axis.positions):
            leaves[place] = entering(whole(leaves[place]), self._cuts(leaves[place].shape[DIM]), self.axes)
        return tree_unflatten(leaves, spec)

    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        return tree_map_only(torch.Tensor, self._joined, output)

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an output of the last block, gathered on every rank. Collective."""
        if isinstance(tensor, Part) and tensor.axis is self.axes[0] and tensor.dim_cut == DIM:
            return leaving(tensor, self._cuts(tensor.shape[DIM]), self.axes)
        return whole(tensor)  # behind the blocks nothing is cut, in whatever way it was

    def _cuts(self, size: int) -> Cuts:
        """Returns how `size` positions are dealt over the axes, in blocks; `InputError` where a rank has too few."""
        cuts, smallest = [], size
        for axis in self.axes:
            owners = Owners.blocks(size, axis.size)
            cuts.append((axis.name, DIM, owners))
            # the smallest share of any rank: all ranks refuse alike, or none does
            size, smallest = owners.counts[axis.index], smallest // axis.size
        if smallest < self.least:
            raise InputError(f"'{self.first}' is given too few positions for {' x '.join(a.name for a in self.axes)}")
        return tuple(cuts)


def insides(blocks: Sequence[str], axes: tuple[Axis, ...], least: int) -> Iterator[CutBlocks]:
    """Yields a cut from the first to the last of each list of blocks that are children of one module.

    blocks  their paths
    """
    beside: dict[str, list[str]] = {}
    for path in blocks:
        beside.setdefault(path.rpartition(".")[0], []).append(path)
    for paths in beside.values():
        if len(paths) > 1:
            yield CutBlocks(paths[0], paths[-1], axes, least)
