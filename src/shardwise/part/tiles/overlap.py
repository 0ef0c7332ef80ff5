"""Convolve a tile while its halo is exchanged, and in backward send the halo's gradient while others are computed.

    forward     post the halo | convolve the tile, zeros around it | wait | the border's outputs again, with the halo
    backward    gradient of the halo, from the border's | send it back | the tile's and the weight's | wait | add

A convolution is linear in the rows that it reads. So the gradient of the tile is that of a tile with zeros around it,
and the gradient of the weight is the sum of the tile's and the halo's. No window of tile and halo is made; computed
twice are the border's outputs, about kernel - 1 rows for each neighbour. A backward that may be differentiated again
waits for its halo and convolves the window.

If a grid cuts several dims, the exchange of the last one overlaps; the others bring its corners and are waited for. A
convolution must be large enough (`Axis.overlap_from`), which is decided by sizes that are the same on all ranks, so
that these issue the same collectives in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.part.cuts import REMEMBERED, Owners
from shardwise.part.exchanges import Halo, HaloBack, Wanted, has_halos
from shardwise.part.levels import Distributed
from shardwise.part.tensor import Part
from shardwise.part.tiles.maps import Sliding, reads
from shardwise.part.tiles.saved_halos import CutDim, kept_apart, nothing_hooked
from shardwise.part.tiles.windows import alone, fetched, given_back, opened, placed, used

LEAST = 1.0  # multiply-adds of a convolution on a tile, in units of `Axis.overlap_from`, from which it overlaps
BORDER = 1 / 4  # the largest share of a tile's outputs that may be computed twice, unless `overlap_from` is 0
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Sides:
    """Numbers of rows along one dim that a rank reads and computes.

    first, own         of the rank's own rows, the first that it reads, and how many it reads
    front, behind      rows in front of and behind these that it reads, of other ranks or outside the field
    outputs            output rows that it owns
    leading, trailing  of its outputs, those that read other ranks' rows in front, and those that read them behind
    """

    first: int
    own: int
    front: int
    behind: int
    outputs: int
    leading: int
    trailing: int


@lru_cache(REMEMBERED)
def sides(owners: Owners, along: Sliding) -> tuple[Sides, ...] | None:
    """Returns each rank's `Sides`; None if a rank has no outputs, or one that reads beyond both ends of its tile."""
    plan, by_rank = reads(owners, along), []
    if not has_halos(owners, plan.wanted) or not all(plan.owners.counts):
        return None
    for rank, outputs in enumerate(plan.owners.counts):
        (low, high), (start, count) = plan.wanted[rank][0], owners.span(rank) or (0, 0)
        first, last = max(low, start), min(high, start + count)
        leading = trailing = 0
        # rows outside the field are zeros, which the first pass pads already: only those of other ranks are a border
        if first > max(low, 0):
            leading = -(-(first - low) // along.stride)
        if min(high, owners.size) > last:
            trailing = outputs - max(0, (last - low - along.extent) // along.stride + 1)
        # an output that reads the halo in front and beyond the tile's end: neither border alone could compute it again
        crossing = leading and (leading - 1) * along.stride + along.extent > last - low
        crossing = crossing or (trailing and (outputs - trailing) * along.stride < first - low)
        if leading + trailing > outputs or crossing:
            return None
        by_rank.append(Sides(first - start, last - first, first - low, high - last, outputs, leading, trailing))
    return tuple(by_rank)


@dataclass(frozen=True)
class Convolution:
    """The arguments of a convolution of tiles, for each dim of space; `padding` is 0 for dims that are cut."""

    stride: tuple[int, ...]  # for each dim of space
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class _Call:
    """A convolution as this rank computes it along its last cut dim, which is dim of space `place`."""

    how: Convolution
    cut: CutDim
    wanted: Wanted  # for each rank, the range of rows that its outputs read
    here: Sides  # those of this rank
    place: int
    kernel: int  # rows from the first to the last that an output reads

    @property
    def dim(self) -> int:
        return self.cut.dim

    @property
    def stride(self) -> int:
        return self.how.stride[self.place]

    @property
    def padding(self) -> int | None:
        """Returns the padding that the kernel can do along the dim; None if the two sides need different ones."""
        side = self.here
        fits = (side.own + 2 * side.front - self.kernel) // self.stride + 1 == side.outputs
        return side.front if fits and side.own + 2 * side.front >= self.kernel else None

    def own(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this rank's tile that it reads, with zeros around them if `padding` is None."""
        side = self.here
        tile = local.narrow(self.dim, side.first, side.own) if side.own != local.shape[self.dim] else local
        return tile if self.padding is not None else _padded(tile, self.dim, side.front, side.behind)

    def pads(self, along: int = 0) -> list[int]:
        """Returns the padding of all dims, with `along` for the dim that is cut."""
        return [along if d == self.place else n for d, n in enumerate(self.how.padding)]

    @property
    def borders(self) -> tuple[_Border | None, _Border | None]:
        """Returns the `_Border`s (in front, behind); None for a side on which no other rank's rows are read."""
        side, front, behind = self.here, None, None
        if side.leading:
            end = (side.leading - 1) * self.stride + self.kernel
            # rows up to the end of the last of these outputs: those of the halo, and the rest of the tile
            front = _Border(0, side.leading, 0, min(end, side.front), 0, max(0, end - side.front))
        if side.trailing:
            first = side.outputs - side.trailing
            start = first * self.stride - side.front  # among the rows of the tile
            skip = max(0, start - side.own)  # rows of the halo in front of what they read
            behind = _Border(first, side.trailing, skip, side.behind - skip, min(start, side.own),
                             max(0, side.own - start))  # fmt: skip
        return front, behind


@dataclass(frozen=True)
class _Border:
    """The outputs of one side that read a halo, and the rows of halo and tile that they read."""

    output: int  # place of the first of them
    outputs: int  # how many
    halo: int  # place of the first row of the halo that they read
    of_halo: int  # rows of it
    tile: int  # place of the first row of this rank's own
    of_tile: int  # rows of it


def _padded(tensor: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """Returns the tensor with `before` rows of zeros in front of it along a dim, and `after` behind."""
    return torch.constant_pad_nd(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [before, after])


class _Overlapped(torch.autograd.Function):
    """The convolution of this rank's tile, with a plain weight and bias, to its own outputs. Collective, both ways.

    call  the `_Call`;  make  local tensor -> a part with the tile's cut
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: _Call, make: Callable
    ) -> torch.Tensor:  # fmt: skip
        how, dim, side = call.how, call.dim, call.here

        def convolved(rows: torch.Tensor, padding: list[int]) -> torch.Tensor:
            return _ATEN.convolution(rows, weight, bias, how.stride, padding, how.dilation, False,
                                     [0] * len(padding), how.groups)  # fmt: skip

        halo = Halo(make(local), call.wanted)  # posted; it is waited for when the tile is convolved
        output = convolved(call.own(local), call.pads(call.padding or 0))
        strips = halo.wait()
        tile = local.narrow(dim, side.first, side.own)
        # recompute that keeps products keeps this very tensor, before the borders are written into it
        if any(call.borders) and not nothing_hooked():
            output = output.clone()
        for border, strip, ahead in zip(call.borders, strips, (True, False), strict=True):
            if border is not None and strip is not None:
                read = [strip.narrow(dim, border.halo, border.of_halo), tile.narrow(dim, border.tile, border.of_tile)]
                border_outputs = convolved(torch.cat(read if ahead else read[::-1], dim), call.pads())
                output.narrow(dim, border.output, border.outputs).copy_(border_outputs)
        ctx.call, ctx.make, ctx.biased = call, make, bias is not None
        ctx.save_for_backward(local, weight, *strips)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        """Returns the gradients of the tile, weight and bias, and sends the halo's to the neighbours meanwhile."""
        if torch.is_grad_enabled():  # `create_graph=True`: by operations that autograd can differentiate again
            return _of_window(ctx, gradient)
        call, dim, (local, weight, *strips) = ctx.call, ctx.call.dim, ctx.saved_tensors
        how, side, (wants_tile, wants_weight, wants_bias) = call.how, call.here, _goals(ctx)

        def differentiated(rows: torch.Tensor, outputs: torch.Tensor, padding: list[int], biased: bool) -> tuple:
            return _ATEN.convolution_backward(
                outputs, rows, weight, [weight.shape[0]] if ctx.biased else None, how.stride, padding, how.dilation,
                False, [0] * len(padding), how.groups, [wants_tile, wants_weight, biased],
            )  # fmt: skip

        # the halo's gradient comes first, so that it is on its way while those of tile and weight are computed
        of_halo: list[torch.Tensor | None] = [None, None]
        of_weights = []
        for at, (border, strip) in enumerate(zip(call.borders, strips, strict=True)):
            if border is None or strip is None:
                continue
            # zeros for the tile's rows: what these give both gradients, and the bias's, is in the pass over the tile
            zeros = (0, border.of_tile) if at == 0 else (border.of_tile, 0)
            rows = _padded(strip.narrow(dim, border.halo, border.of_halo), dim, *zeros)
            of_rows, of_weight, _ = differentiated(
                rows, gradient.narrow(dim, border.output, border.outputs), call.pads(), False
            )
            of_weights.append(of_weight)
            if wants_tile:
                whole = strip.shape[dim]
                of_rows = of_rows.narrow(dim, zeros[0], border.of_halo)
                of_halo[at] = _padded(of_rows, dim, border.halo, whole - border.halo - border.of_halo)
        back = HaloBack(of_halo[0], of_halo[1], ctx.make(local), call.wanted) if wants_tile else None
        padding = call.pads(call.padding or 0)
        of_rows, of_weight, of_bias = differentiated(call.own(local), gradient, padding, wants_bias)
        # the border's share of the weight's gradient is what its halo gives: zeros stood for the tile
        for of_border in of_weights if wants_weight else ():
            of_weight.add_(of_border)
        if back is not None:
            if call.padding is None:  # `own` put zeros around the rows: these are of nobody
                of_rows = of_rows.narrow(dim, side.front, side.own)
            if side.own != local.shape[dim]:  # rows that no output reads have no gradient
                of_rows = _padded(of_rows, dim, side.first, local.shape[dim] - side.first - side.own)
            back.add_into(of_rows)
        return of_rows if wants_tile else None, of_weight, of_bias, None, None


def _of_window(ctx: Any, gradient: torch.Tensor) -> tuple:
    """Returns the gradients of tile, weight and bias from the window, by differentiable operations. Collective."""
    call, (local, weight, *_), (wants_tile, wants_weight, wants_bias) = ctx.call, ctx.saved_tensors, _goals(ctx)
    how = call.how
    window = fetched(placed(local, [call.cut]), call.cut, call.wanted)
    of_window, of_weight, of_bias = _ATEN.convolution_backward(
        gradient, window, weight, [weight.shape[0]] if ctx.biased else None, how.stride, call.pads(), how.dilation,
        False, [0] * len(how.stride), how.groups, [wants_tile, wants_weight, wants_bias and ctx.biased],
    )  # fmt: skip
    of_tile = opened(given_back(of_window, call.cut, call.wanted), [call.cut]) if wants_tile else None
    return of_tile, of_weight, of_bias, None, None


def _goals(ctx: Any) -> list[bool]:
    """Returns, for [tile, weight, bias], whether the running backward needs its gradient.

    A backward that is split in two (for inputs, then for weights) needs some of them each time.
    """
    wanted = [
        needed and (node.name().endswith("AccumulateGrad") or torch._C._will_engine_execute_node(node))
        for needed, (node, _) in zip(ctx.needs_input_grad, ctx.next_functions, strict=False)
    ]
    return wanted if ctx.biased else [*wanted, False]


def overlapped(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Convolution,
    along: Mapping[int, Sliding], cut_dims: list[CutDim],
) -> torch.Tensor | None:  # fmt: skip
    """Returns a convolution that overlaps with the exchange along its last cut dim; None if it cannot or should not.

    Collective.

    cut_dims  the input's cuts, the outermost first
    along     cut dim -> its `Sliding`; a cut dim is missing if each output reads its own input there
    """
    cut, first = cut_dims[-1], input.dim() - len(how.stride)
    # of a dim of which each rank reads its own rows alone there is no exchange; unbatched fields wait for theirs
    eligible = first == 2 and input.is_floating_point() and cut.dim in along
    sides_by_rank = sides(cut.owners, along[cut.dim]) if eligible else None
    filled = all(all(reads(c.owners, along[c.dim]).owners.counts) for c in cut_dims if c.dim in along)
    if sides_by_rank is None or not filled:  # a rank without outputs computes what its kernel reads for nobody
        return None
    # `_Overlapped` takes plain tensors
    if isinstance(weight, Distributed) or isinstance(bias, Distributed) or not alone(input, cut_dims):
        return None
    if not _worth(input, weight, how, sides_by_rank, cut_dims):
        return None
    plan, tensor, outer, after = reads(cut.owners, along[cut.dim]), input, [], []
    for outer_cut in cut_dims[:-1]:  # waited for: strips of the last dim are taken of what these bring, with corners
        if outer_cut.dim in along:
            read = reads(outer_cut.owners, along[outer_cut.dim])
            tensor = fetched(tensor, outer_cut, read.wanted)
            outer.append((outer_cut, read.wanted))
            after.append(CutDim(outer_cut.axis, outer_cut.dim, read.owners))
        else:
            tensor = opened(tensor, [outer_cut])
            after.append(outer_cut)
    here, place = sides_by_rank[cut.axis.index], cut.dim - first
    call = _Call(how, cut, plan.wanted, here, place, along[cut.dim].extent)
    assert isinstance(tensor, Part)
    with kept_apart(tensor.local, input, outer) if outer else nullcontext():
        tile = opened(tensor, [cut])
        output = _Overlapped.apply(tile, used(weight, cut_dims), used(bias, cut_dims), call, tensor.shell().with_local)
    return placed(output, [*after, CutDim(cut.axis, cut.dim, plan.owners)])


def _worth(
    input: torch.Tensor, weight: torch.Tensor, how: Convolution, by_rank: Sequence[Sides], cut_dims: Sequence[CutDim]
) -> bool:  # fmt: skip
    """Whether the convolution is large enough to overlap with the exchange, by sizes that are the same on all ranks."""
    # of the largest border and the mean tile: a rank's own would send ranks to different collectives
    axis, tiles = cut_dims[-1].axis, math.prod(cut.axis.size for cut in cut_dims)
    most = max((side.leading + side.trailing) / side.outputs for side in by_rank)
    products = input.numel() / input.shape[1] / math.prod(how.stride) * weight.numel() / tiles
    return most > 0 and products >= LEAST * axis.overlap_from and (most <= BORDER or axis.overlap_from == 0)
