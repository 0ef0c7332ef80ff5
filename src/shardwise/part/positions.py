"""`Positions`: which dims of a batch are cut, over which axes, and this rank's shares. Found by engine/find_positions.

    sequence  input_ids (B, S), labels (B, S)   S=10 over cp=2 × cp_ulysses=2
              cp 0: 0..4   of which cp_ulysses 0: 0 1 2, 1: 3 4
              cp 1: 5..9                       0: 5 6 7, 1: 8 9
    field     x (B, C, H, W), y (B, H, W)       H over domain0, W over domain1: rank (i, j) has tile (i, j)

Shares are parts: they keep the global shape, so that positions, shifted labels, masks and sizes that a module makes
from shapes come out as in one process. What may be cut is proposed by the axis's own room (`Candidate`), and tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import MappingKey, keystr, tree_flatten, tree_unflatten

from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.layout.grid import SPACE
from shardwise.part.crossing import Along, put_together
from shardwise.part.crossing import Cuts as Dealt
from shardwise.part.cuts import Owners
from shardwise.part.known import note_known
from shardwise.part.tensor import Part

Cuts = tuple[tuple[int, tuple[Axis, ...]], ...]  # of one tensor: a dim and the axes that cut it, outermost first


class CutsInside(Protocol):
    """Protocol of what cuts tensors that arise inside the module, if no tensor of the batch has the positions.

    over     returns a copy over `swap(axis)` in place of each axis
    install  makes the module's forwards cut them; returns the undo function
    summary  returns a line for the user; `stopped`: why the batch itself cannot be cut, "" if not said
    """

    @property
    def axes(self) -> tuple[Axis, ...]: ...
    def over(self, swap: Callable[[Axis], Axis]) -> CutsInside: ...
    def install(self, module: nn.Module) -> Callable[[], None]: ...
    def summary(self, stopped: str = "") -> str: ...


@dataclass(frozen=True)
class Positions:
    """How the tensors of a batch are cut along a sequence or along dims of space.

    cuts     for each leaf of the flattened batch: (dim, its axes, outermost first) of each cut; () if it is whole
    names    for each leaf its name in messages
    what     what is cut, "sequence" or "field"
    inside   cuts tensors inside the module, if the batch itself stays whole
    stopped  why positions of the batch itself cannot be cut, a text for the user
    tables   Whether ranges inside the module are cut like the batch (`part/position_tables`)
    past     Whether the module's code takes parameters past their attributes (`part/parameters`)
    results  (path of a submodule, index of its call in a forward) -> for each leaf of its result, (axis name, dim) of
             each cut; calls without a cut result are missing
    """

    cuts: tuple[Cuts, ...]
    names: tuple[str, ...] = ()
    what: str = "sequence"
    least: int = 1  # indices that every rank must have
    routes: tuple[str, ...] = ()  # how attention is computed, lines for the user
    mask: tuple[tuple[int, ...], int] = ((), 0)  # (shape, bytes) of the largest mask of all pairs that attention gets
    zigzag: bool = False  # cp deals each rank a block from either end, for attention that looks back
    tables: bool = False
    inside: CutsInside | None = None
    stopped: str = ""
    past: bool = False
    results: Mapping[tuple[str, int], tuple[Along, ...]] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...] | None, ...] = ()  # of each leaf without the sample dim, if a rank may read its tile
    space: tuple[str, ...] = SPACE  # the axis of each dim of space, in the order in which tensors have these

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Returns the axes that cut any tensor, outermost first."""
        by_name = {axis.name: axis for cuts in self.cuts for _, axes in cuts for axis in axes}
        by_name |= {axis.name: axis for axis in (self.inside.axes if self.inside is not None else ())}
        return tuple(sorted(by_name.values(), key=lambda axis: axis.depth))

    def region(self, global_shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Returns (start, stop) of this rank's tile along each dim of space, whose whole sizes are `global_shape`."""
        axes = {axis.name: axis for axis in self.axes}
        ranges = []
        for name, n in zip(self.space, global_shape, strict=False):
            axis = axes.get(name)
            start, count = (Owners.blocks(n, axis.size).span(axis.index) or (0, 0)) if axis is not None else (0, n)
            ranges.append((start, start + count))
        return tuple(ranges)

    def over(self, swap: Callable[[Axis], Axis]) -> Positions:
        """Returns a copy whose cuts are over `swap(axis)` in place of each axis."""
        cuts = tuple(tuple((dim, tuple(map(swap, axes))) for dim, axes in leaf) for leaf in self.cuts)
        return replace(self, cuts=cuts, inside=self.inside.over(swap) if self.inside is not None else None)

    def cut(self, batch: Any, place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous) -> Any:
        """Returns the batch with its cut tensors as parts.

        place  moves a plain tensor, this rank's share or a whole leaf, to its device
        A batch with another number of leaves than `cuts` stays whole. Raises `InputError` if there are too few
        positions, or a tile has another shape than this rank's.
        """
        leaves, spec = tree_flatten(batch)
        tensors = [place if isinstance(leaf, torch.Tensor) else lambda leaf: leaf for leaf in leaves]
        if len(leaves) != len(self.cuts):  # another kind of batch than the one that was looked at
            return tree_unflatten([put(leaf) for put, leaf in zip(tensors, leaves, strict=True)], spec)
        cut: list[Any] = []
        for number, (leaf, cuts, put) in enumerate(zip(leaves, self.cuts, tensors, strict=True)):
            # another shape than the look's: the source read this rank's tile by itself
            if self.shapes and isinstance(leaf, torch.Tensor) and tuple(leaf.shape[1:]) != self.shapes[number]:
                cut.append(self._tile(number, leaf, place))
            else:
                cut.append(self._cut(leaf, cuts, place) if cuts else put(leaf))
        return tree_unflatten(cut, spec)

    def _tile(self, number: int, leaf: torch.Tensor, place: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns leaf `number`, the tile that this rank's source read, as a part; `InputError` on another shape."""
        shape = [leaf.shape[0], *(self.shapes[number] or ())]
        whole, dealt = tuple(shape), []
        for dim, axis in ((dim, axis) for dim, axes in self.cuts[number] for axis in axes):
            owners = Owners.blocks(shape[dim], axis.size)
            shape[dim] = owners.counts[axis.index]
            dealt.append((dim, owners, axis))
        # a tensor whose rank dims are whole must come whole
        if tuple(leaf.shape) != tuple(shape):
            asked = f"this rank's tile of {whole} is {tuple(shape)}" if dealt else f"it is whole on every rank: {whole}"
            raise InputError(
                f"the source gave {tuple(leaf.shape)} as {self.names[number] or 'a tensor'}, and {asked}: "
                "read(indices, region) returns what lies in the region of every tensor that has space, else all of it"
            )
        tile = place(leaf.contiguous())
        # from the innermost axis outwards: what an outer one holds is a part over those inside
        for dim, owners, axis in reversed(dealt):
            tile = Part(tile, dim, owners, axis, may_gather=not leaf.is_floating_point())
        return tile

    def _cut(self, leaf: torch.Tensor, cuts: Cuts, place: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns this rank's share of a tensor of the batch as a part; `InputError` if it has too few positions."""
        for dim, axes in cuts:
            # a rank without positions would come to other operations than the rest
            if leaf.shape[dim] < self.fewest(axes):
                raise InputError(
                    f"{leaf.shape[dim]} positions of a {self.what} over {_sizes_of(axes)} leave some rank with "
                    f"{leaf.shape[dim] // math.prod(axis.size for axis in axes)}, "
                    f"and every rank needs at least {self.least}: use fewer ranks or a longer {self.what}"
                )
        dealt, over = self.dealt(leaf.shape, cuts), [axis for _, each in cuts for axis in each]
        share = leaf
        for (_, dim, owners), axis in zip(dealt, over, strict=True):
            # each share is cut out of what the axis around it holds
            share = owners.take(share, dim, axis.index)
        made = cast(Part, put_together(place(share.contiguous()), dealt, over))
        note_known(made, leaf)
        made.deals = self.tables
        return made

    def fewest(self, axes: tuple[Axis, ...]) -> int:
        """Returns the smallest length that a dim cut over these axes may have."""
        return self.least * math.prod(axis.size for axis in axes)

    def dealt(self, shape: Sequence[int], cuts: Cuts) -> Dealt:
        """Returns (axis name, dim, owners) of each cut of a tensor of this whole shape, in the order of `cuts`."""
        left, dealt = list(shape), []
        for dim, axis in ((dim, axis) for dim, axes in cuts for axis in axes):
            # cp deals a block from either end for causal attention; other axes deal blocks of what is left
            owners = (Owners.zigzag if self.zigzag and axis.name == "cp" else Owners.blocks)(left[dim], axis.size)
            dealt.append((axis.name, dim, owners))
            left[dim] = owners.counts[axis.index]
        return tuple(dealt)

    def summary(self) -> str:
        """Returns one line for the user: what is cut, over which axes."""
        # cut inside the forward (lengths that are born there): there are no arguments to list
        if self.inside is not None:
            return "; ".join([self.inside.summary(self.stopped), *self.routes])
        names: dict[tuple[int, ...], list[str]] = {}
        # arguments that are cut along the same dims share one phrase
        for name, cuts in zip(self.names, self.cuts, strict=True):
            if cuts:
                names.setdefault(tuple(dim for dim, _ in cuts), []).append(name)
        cut = [
            f"{' and '.join(alike)} along dim{'s' * (len(dims) > 1)} {', '.join(map(str, dims))}"
            for dims, alike in names.items()
        ]
        dealt = ", a block from either end for each rank of cp (attention is causal)" if self.zigzag else ""
        return "; ".join([f"{_sizes_of(self.axes)} cuts the {self.what} of {'; '.join(cut)}{dealt}", *self.routes])


@dataclass(frozen=True)
class Candidate:
    """A proposal of what a batch may be cut along, which the engine tries.

    positions  the proposed cuts;  said  their description for the user ("dims of 10")
    shorter    the batch with fewer positions, on which the module must run too; None: not tried
    """

    positions: Positions
    said: str
    shorter: Any = None


def name_of(path: tuple) -> str:
    """Returns a leaf's name for messages: `x` of a dict, `batch[0]` of a tuple."""
    return str(path[0].key) if len(path) == 1 and isinstance(path[0], MappingKey) else f"batch{keystr(path)}"


def _sizes_of(axes: tuple[Axis, ...]) -> str:
    return " x ".join(f"{axis.name}={axis.size}" for axis in axes)
