"""`Sum`: a whole tensor of which each rank holds a summand; it is reduced ("taken") when its total is needed.

    y = Sum(x_r @ W_r)        views and additions of sums stay sums: dx_q + dx_k + dx_v is one collective, not three
    y + residual              anything else takes the sum first, once for all who read it

With sequence parallelism the sum of a (B, S, H) tensor leaves every rank its share of S (a reduce-scatter in place of
an all-reduce).
With `Axis.early` a reduction begins as soon as its summand exists, so that what does not need the total (the gradient
of the weight, beside that of the input) is computed meanwhile; sums that would have been added are then reduced one by
one. A product gives (B * S, H), so a reduce-scatter begins early only if the product's input knows its (B, S) (`rows`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardwise.comm import Axis, Pending, all_reduce
from shardwise.host import to_device
from shardwise.part.cuts import Owners, Uncut
from shardwise.part.gathering import GatheredView, Scatter, gathered, scatter_sum
from shardwise.part.levels import Distributed, ViewOf, answered, here
from shardwise.part.tensor import UNSENT, Part, strides_of

TensorMap = Callable[[torch.Tensor], torch.Tensor]


class Sum(Distributed):
    """The sum over `axis` of every rank's `local`, plus `added` (a bias (H,), or None); `total` once it is reduced."""

    __module__ = "torch"  # where opt_einsum and others look for the library whose functions an array takes

    origin: str  # name of the weight whose cut led to it, "" if none
    added: torch.Tensor | None
    read_only_copy: bool  # whether `total` is a copy, so that a write into it would be lost
    spread: bool  # whether the sum of a (B, S, H) tensor may be left in shares of S, if `Axis.sequence` asks for that
    total: torch.Tensor | None
    pending: Pending | None  # the reduction of `local`, in place, that is under way
    coming: Scatter | None  # the reduction of `local`, seen as (B, S, H), to shares of S that is under way
    base: ViewOf | None  # of a view of an unreduced sum: its base, reduced together so that both totals share memory
    views: list[weakref.ref[Sum]] | None  # all views of one summand, this included, if each is scattered by itself
    stale: bool  # whether another one of `views` was written
    seen: GatheredView | None  # of a copy: the gathered view that it is a copy of

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, axis: Axis, origin: str = "", added: torch.Tensor | None = None, spread: bool = True
    ) -> Sum:  # fmt: skip
        made = torch.Tensor._make_wrapper_subclass(
            cls, local.shape, strides=strides_of(local, list(local.shape)), dtype=local.dtype, device=local.device
        )
        made.local, made.axis, made.origin, made.added, made.total = local, axis, origin, added, None
        made.spread, made.read_only_copy, made.pending, made.coming = spread, False, None, None
        made.base, made.views, made.stale, made.seen = None, None, False, None
        return made

    @classmethod
    def of(
        cls, local: torch.Tensor, axis: Axis, origin: str = "", *, spread: bool = True,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the sum over ranks of `local`, a summand that is not used elsewhere; begun now if `axis.early`.

        Over an axis of positions, if `local` is a tile of another one, it is reduced before it is returned, because
        functions on tiles are registered for parts.

        spread  Whether a (B, S, H) sum may be left in shares of S
        rows    (B, S) if `local` is (B * S, H) and these are known, else None
        """
        if axis.positions and isinstance(local, Part) and local.axis.positions:
            return cls(local, axis, origin, spread=spread).value()
        if not axis.early:  # the plan does not begin sums ahead: this one is reduced when it is read
            return cls(local, axis, origin, spread=spread)
        if axis.sequence and spread:
            made = cls(local, axis, origin)
            # a product gives (B * S, H), in which each rank's positions are no block; with fewer positions than ranks
            # the sum is taken whole
            if rows is not None and rows[1] >= axis.size:
                owners = Owners.blocks(rows[1], axis.size)
                made.coming = Scatter(local.view(*rows, -1), 1, owners, axis)
            return made
        # reduced in place, in memory without gaps
        made = cls(local.contiguous(), axis, origin, spread=spread)
        made.pending = all_reduce(made.local, axis, "activations", wait=False)
        return made

    @classmethod
    def read_only(cls, copy: torch.Tensor, axis: Axis, seen: GatheredView | None = None) -> torch.Tensor:
        """Returns `copy` as a reduced `Sum` that refuses writes; if it is a tile, as a `Part` that refuses them.

        seen  the gathered view that it is a copy of, by which a write may reach the part after all; None: not known
        """
        if axis.positions and isinstance(copy, Part) and copy.axis.positions:  # of which functions on tiles are asked
            copy.copied = True
            return copy
        made = cls(copy, axis)
        made.total, made.read_only_copy, made.seen = copy, True, seen
        return made

    @classmethod
    def taken(cls, total: torch.Tensor, axis: Axis, source: ViewOf) -> Sum:
        """Returns `total` as a reduced sum; what is written into it is written back to `source`."""
        made = cls(total, axis)
        made.total, made.source = total, source
        return made

    def tolist(self) -> Any:
        """Returns the total over ranks as Python numbers. Collective, the first time."""
        return plain(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the total over ranks as a NumPy array. Collective, the first time."""
        return plain(self).numpy(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the total over ranks as a plain tensor. Collective, the first time."""
        return plain(self).detach().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Sum(shape={tuple(self.shape)}, over {self.axis.name}, dtype={self.dtype})"

    summed = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return answered(func, args, kwargs or {})

    @property
    def stored(self) -> torch.Tensor:
        """Returns the total if this sum, or the one that it is a view of, is reduced; else the summand."""
        return self.local if self.untaken else self.value()

    def settled(self) -> torch.Tensor:
        """Returns the total over ranks. Collective."""
        return self.value()

    def settled_local(self) -> torch.Tensor:
        """Returns this rank's summand; the total if a reduction was begun or done, or a bias added. Collective then."""
        return self.local if self.waits and self.added is None else self.value()

    @property
    def untaken(self) -> bool:
        """Whether neither this sum nor the one that it is a view of is reduced."""
        base = self.base.of if self.base is not None else None
        return self.total is None and not (isinstance(base, Sum) and not base.untaken)

    @property
    def waits(self) -> bool:
        """Whether the sum is unreduced and its reduction has not begun."""
        return self.untaken and self.pending is None and self.coming is None

    def like(self, local: torch.Tensor) -> Sum:
        """Returns a sum over the same axis with this `local`; if this one is reduced, `local` is taken as the total."""
        made = Sum(local, self.axis, self.origin, spread=self.spread)
        if self.total is not None:
            made.total, made.read_only_copy = local, self.read_only_copy
        return made

    def value(self) -> torch.Tensor:
        """Returns the total over ranks, plain or (sequence parallelism) a part along S. Collective, the first time.

        Raises `Uncut` over chunks of positions, since later ones are not computed yet, and if the sum is `stale`.
        """
        # a copy of a gathered view is as old as its last gathering
        if self.seen is not None and self.seen.moved:
            self.total = self.seen.view(self.seen.whole())
        if self.total is None and self.axis.turns:
            raise Uncut("chunks of positions are computed one after the other, and this needs the sum over all of them")
        if self.stale:
            raise Uncut(
                "a sum is read after a view of it was written into, and each is dealt along the sequence by itself"
            )
        if self.total is None:
            # taken with what it is a view of: so both lie in one memory, as in one process
            if self.base is not None:
                assert isinstance(self.base.of, Sum) and self.base.again is not None
                self.total = self.base.again(self.base.of.value())
                del self.local, self.added
                return self.total
            # begun early (`of`): all-reduced in place, or scattered over positions
            if self.pending is not None:
                self.pending.wait()
                self.total = self.local
            elif self.coming is not None:
                self.total = self._arrived(self.coming)
            # sequence parallelism keeps each rank's positions of (B, S, H) alone; with fewer positions than ranks, all
            elif self.spread and self.axis.sequence and self.dim() == 3 and self.shape[1] >= self.axis.size:
                owners = Owners.blocks(self.shape[1], self.axis.size)
                self.total = Part(scatter_sum(self.local, 1, owners, self.axis), 1, owners, self.axis, may_gather=True)
            else:
                self.total = _laid_as(all_sum(self.local, self.axis), self.local)
            if self.added is not None:  # a bias, added once and not by each rank
                self.total = self.total + self.added
            # masks are drawn in the order that memory has in one process, which a share of one index does not show
            if isinstance(self.total, Part):
                self.total.whole_strides = self.stride()
            del self.local, self.added
        return self.total

    def _arrived(self, coming: Scatter) -> torch.Tensor:
        """Waits; returns the scattered total as a part along S if this sum is (B, S, H), else gathered."""
        part = Part(coming.wait(), 1, coming.owners, self.axis, may_gather=True)
        if self.dim() == 3 and self.shape[1] == part.shape[1] and self.shape[2] == part.shape[2]:
            return part
        return gathered(part).view(self.shape)


def _laid_as(total: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns the total with the summand's strides, so that views of the summand can be taken of the total later."""
    if isinstance(total, Distributed) or isinstance(local, Distributed) or total.stride() == local.stride():
        return total
    return torch.empty_like(local, dtype=total.dtype).copy_(total)


def reduced(local: torch.Tensor, part: Part, op: str = "sum") -> torch.Tensor:
    """Returns the sum (max, min) of `local` over the ranks of the part's axis. Collective."""
    return all_sum(local, part.axis, op)


def all_sum(local: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Returns the sum (or "max", "min") over ranks, still cut over inner axes where it was. Collective.

    Over chunks that one rank computes in turn (`axis.turns`) it returns a `Sum`, reduced after the last chunk.
    """
    if op == "sum" and axis.turns:
        return Sum(local, axis, spread=False)
    # chunks further in are not all computed yet: theirs stays a sum, of what is summed over this axis
    if isinstance(local, Distributed) and local.axis.turns and not isinstance(local, Part) and op == "sum":
        return local.like(all_sum(local.local, axis))
    if local.dtype in UNSENT:
        return all_sum(local.to(UNSENT[local.dtype]), axis, op).to(local.dtype)
    if isinstance(local, Distributed):
        inner = local.settled()
        # each rank further in sums its own indices, and the cut stays
        if isinstance(inner, Part):
            return inner.with_local(all_sum(inner.local, axis, op))
        return all_sum(inner, axis, op)
    total = local.clone(memory_format=torch.contiguous_format)
    all_reduce(total, axis, "activations", op=op)
    return total


def is_sum(tensor: Any) -> bool:
    """Whether a tensor is a sum over the axis for which a rule is being applied."""
    return isinstance(tensor, Sum) and here(tensor)


def plain(tensor: Any) -> Any:
    """Returns a plain tensor, reduced and gathered over all axes; other values unchanged. Collective if distributed."""
    while isinstance(tensor, Distributed):
        tensor = tensor.settled()
        tensor = gathered(tensor) if isinstance(tensor, Part) else tensor
    return tensor


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, there: TensorMap, back: TensorMap) -> torch.Tensor:
        ctx.back = back
        return there(tensor.detach())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return ctx.back(gradient), None, None


class _LinearOnce(_Linear):
    backward = staticmethod(once_differentiable(_Linear.backward))


def linear(tensor: torch.Tensor, there: TensorMap, back: TensorMap, *, once: bool = False) -> torch.Tensor:
    """Returns `there(tensor)`, a linear map; its backward applies `back`, the adjoint, to the gradient.

    once  Whether `back` is not differentiable, so that torch raises in a backward of the backward
    """
    return (_LinearOnce if once else _Linear).apply(tensor, there, back)


def _as_it_is(gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def redealt(tensor: torch.Tensor, how: TensorMap) -> torch.Tensor:
    """Returns `how(tensor)`, the same global tensor distributed otherwise; its gradient passes unchanged.

    For a backward that redistributes its gradient, because reading detached shares would lose second derivatives.
    """
    return linear(tensor, how, _as_it_is)


def whole(tensor: Any) -> Any:
    """Returns, differentiably, a tensor reduced and gathered over all axes. Collective if it is distributed."""
    return redealt(tensor, plain) if isinstance(tensor, Distributed) else tensor


def whole_over(tensor: Any, axis: Axis) -> Any:
    """Returns a tensor gathered over `axis` and axes further in, still cut over those further out. Collective."""
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(whole_over(tensor.settled_local(), axis))
    return plain(tensor)


def _uncut(tensor: Any, axis: Axis) -> Any:
    """Returns a tensor gathered or reduced over `axis` alone, still distributed over others. Collective."""
    # an axis further out keeps its cut: this one is undone inside it
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(_uncut(tensor.settled_local(), axis))
    # whole over the axis already
    if not isinstance(tensor, Distributed) or tensor.axis is not axis:
        return tensor
    tensor = tensor.settled()
    return gathered(tensor) if isinstance(tensor, Part) and tensor.axis is axis else tensor


def whole_over_axis(tensor: Any, axis: Axis) -> Any:
    """Returns, differentiably, a tensor gathered over `axis` alone, still cut over others. Collective."""
    if not isinstance(tensor, Distributed):
        return tensor
    return redealt(tensor, lambda given: _uncut(given, axis))


def whole_gradient(tensor: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
    """Returns the tensor, whose gradient is gathered over `axis` and inner axes (None: over every axis) in backward."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor

    def back(gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(gradient, Distributed):
            return gradient
        return redealt(gradient, plain if axis is None else lambda given: whole_over(given, axis))

    # of no view, whose base nobody could write into afterwards (a table with `max_norm`)
    return linear(tensor, _as_it_is, back)


class _Summand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
        ctx.axes = axes
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        return summand(gradient, ctx.axes), None


def with_summed_gradient(tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Returns the tensor, whose gradient arrives as this rank's summand of a sum over `axes` that is reduced later.

    Gradients of weights are summed over these ranks once for a step, with those of the other samples.
    """
    if not axes or not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return _Summand.apply(tensor, axes)


def summand(gradient: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Returns this rank's summand over `axes` (outermost first) of a gradient, whether a sum, cut, or whole on them.

    Of a whole gradient rank 0 of the axis has it and the others zeros; of a cut one a rank has zeros but in its share.
    """
    for axis in axes:
        over = isinstance(gradient, Distributed) and gradient.axis is axis
        if over and isinstance(gradient, Sum) and gradient.untaken and gradient.added is None:
            # this rank's summand as it is: the sum over ranks is taken once for the step
            gradient = gradient.local
            continue
        if over:
            gradient = gradient.settled()  # of a sum that was taken, what is left may be cut over axes further in
        if isinstance(gradient, Part) and gradient.axis is axis:
            gradient = _in_place(gradient)
        elif axis.index:
            # whole, and equal on all ranks: rank 0's counts, the others add zeros
            gradient = _nothing_of(gradient)
    return gradient


def _nothing_of(gradient: torch.Tensor) -> torch.Tensor:
    """Returns zeros distributed as the gradient, so that ranks that add nothing take part in the same collectives."""
    if isinstance(gradient, Sum) and gradient.waits and gradient.added is None:
        return gradient.like(_nothing_of(gradient.local))
    return torch.zeros_like(gradient)


def _in_place(part: Part) -> torch.Tensor:
    """Returns a plain tensor of the whole shape with this rank's share in its place and zeros elsewhere."""
    places = to_device(part.owners.indices(part.axis.index), part.device)
    shape = list(part.local.shape)
    shape[part.dim_cut] = part.owners.size
    return part.local.new_zeros(shape).index_copy(part.dim_cut, places, plain(part.local))
