"""Cut a sequence that arises inside the module (patches of pictures), between its first repeated block and the last.

    pictures -> patches (B, S, E), uncut  |  blocks on shares (B, S/p, E)  |  (B, S, E), all-gathered -> loss
    backward              all-gathered   <|                                |<  each rank takes its share

Before and after the blocks every rank computes everything, and the loss counts once. Elements received by a rank:
B S E (p-1)/p at the blocks' end in forward, and as many at their beginning in backward.

What this does not do: cut if the first tensor that blocks are given is not (B, S, E).
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
    """Cuts the sequence (B, S, E) that the first block of a list is given, and gathers what its last block returns.

    first, last  paths of the blocks
    axes         the axes that cut positions, outermost first
    least        number of positions that every rank must have
    The first block's call raises `RefusedPlan` for another first tensor, `InputError` for fewer positions.
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
        """Returns a line for the user. `stopped`: why positions in the batch cannot be cut; "": the batch has none."""
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
            # also in a run, since a batch may give the block other arguments than the rehearsal did
            raise RefusedPlan(f"'{self.first}' is not given (B, S, E) first, so its positions cannot be cut")
        # recompute runs the block again on the shares that it was given
        if not (isinstance(leaves[place], Part) and leaves[place].axis.positions):
            leaves[place] = entering(whole(leaves[place]), self._cuts(leaves[place].shape[DIM]), self.axes)
        return tree_unflatten(leaves, spec)

    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        """Returns the last block's output with all tensors gathered. Collective."""
        return tree_map_only(torch.Tensor, self._joined, output)

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an output of the last block, gathered on every rank. Collective."""
        if isinstance(tensor, Part) and tensor.axis is self.axes[0] and tensor.dim_cut == DIM:
            return leaving(tensor, self._cuts(tensor.shape[DIM]), self.axes)
        return whole(tensor)  # cut in another way; behind the blocks nothing may be

    def _cuts(self, size: int) -> Cuts:
        """Returns the cuts of `size` positions into blocks over the axes; `InputError` if a rank has too few."""
        cuts, smallest = [], size
        for axis in self.axes:
            owners = Owners.blocks(size, axis.size)
            cuts.append((axis.name, DIM, owners))
            # `smallest` is of any rank, so that all ranks raise or none does
            size, smallest = owners.counts[axis.index], smallest // axis.size
        if smallest < self.least:
            raise InputError(f"'{self.first}' is given too few positions for {' x '.join(a.name for a in self.axes)}")
        return tuple(cuts)


def insides(blocks: Sequence[str], axes: tuple[Axis, ...], least: int) -> Iterator[CutBlocks]:
    """Yields a `CutBlocks` for each list of two or more blocks that are children of one module.

    blocks  paths of all blocks, in order;  axes, least  as of `CutBlocks`
    """
    beside: dict[str, list[str]] = {}
    for path in blocks:
        beside.setdefault(path.rpartition(".")[0], []).append(path)
    for paths in beside.values():
        if len(paths) > 1:
            yield CutBlocks(paths[0], paths[-1], axes, least)
