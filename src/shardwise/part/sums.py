"""`Sum`: a whole tensor of which each rank holds a summand; the sum over ranks is taken when it is needed.

    y = Sum(x_r @ W_r)        views and additions of sums stay sums: dx_q + dx_k + dx_v is one collective, not three
    y + residual              anything else takes the sum first, once for all who read it

With sequence parallelism the sum of a (B, S, H) tensor leaves every rank its share of S (a reduce-scatter in place of
an all-reduce).
With `early` on the axis a sum is begun when its summand is there, so that what does not need it (the gradient of the
weight, beside that of the input) is computed meanwhile; sums that would have been added are then taken one by one. A
product gives (B * S, H), so a reduce-scatter begins early where the product's input still knows its (B, S).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import Axis, Pending, all_reduce
from shardwise.part.cuts import Owners, Uncut
from shardwise.part.gathered_views import GatheredView, opened_anew
from shardwise.part.gathering import Scatter, all_sum, gathered, scatter_sum
from shardwise.part.levels import Distributed, ViewOf, here, written_back
from shardwise.part.tensor import Part, answer, facts, forget, reshaped_in_place, same_memory, strides_of
from shardwise.trace.leaves import replaced

_REARRANGE = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "unsqueeze", "squeeze", "detach",
    "alias", "neg",
})  # fmt: skip
_ROWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "detach", "alias"})  # may keep the last dim


class Sum(Distributed):
    """The sum over `axis` of every rank's `local`, and `added` (a bias of the last dim); `total` once taken."""

    __module__ = "torch"  # where opt_einsum and others look for the library whose functions an array takes

    origin: str
    added: torch.Tensor | None
    read_only_copy: bool  # `total` is a copy: writing into it would be lost
    spread: bool  # the sum of a (B, S, H) tensor may be left in shares of S, where the axis asks for that
    total: torch.Tensor | None
    pending: Pending | None  # the reduction of `local`, in place, that is under way
    coming: Scatter | None  # the reduction of `local`, seen as (B, S, H), to shares of S that is under way
    base: ViewOf | None  # of a view: it is taken with what it is a view of, whose memory it shares then as before
    views: list[weakref.ref[Sum]] | None  # of one summand, this among them, where each is dealt to ranks by itself
    stale: bool  # another one of them was written into
    seen: GatheredView | None  # of a copy: the part whose gathered view it is

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
        """Returns the sum over ranks of what a product gave; where the axis says so, it begins at once, in place.

        Of tiles that another axis cuts it is taken at once: functions on tiles are asked of parts, not of sums.

        rows  (B, S), where `local` is (B * S, H)
        """
        if axis.positions and isinstance(local, Part) and local.axis.positions:
            return cls(local, axis, origin, spread=spread).value()
        if not axis.early:
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
        """Returns a copy as a `Sum` already taken that refuses writes (of tiles: as a part that does)."""
        if axis.positions and isinstance(copy, Part) and copy.axis.positions:  # of which functions on tiles are asked
            copy.copied = True
            return copy
        made = cls(copy, axis)
        made.total, made.read_only_copy, made.seen = copy, True, seen
        return made

    @classmethod
    def taken(cls, total: torch.Tensor, axis: Axis, source: ViewOf) -> Sum:
        """Returns a sum already taken, of memory that others hold too: writes into it are written back there."""
        made = cls(total, axis)
        made.total, made.source = total, source
        return made

    def tolist(self) -> Any:
        """Returns the total over ranks as Python numbers. Collective, the first time."""
        return plain(self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the total over ranks as a NumPy array. Collective, the first time."""
        return plain(self).numpy(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Sum(shape={tuple(self.shape)}, over {self.axis.name}, dtype={self.dtype})"

    summed = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return answer(func, args, kwargs or {})

    @property
    def stored(self) -> torch.Tensor:
        """Returns the total, once this or what it is a view of was taken; before that the summand."""
        return self.local if self.untaken else self.value()

    def settled(self) -> torch.Tensor:
        """Returns the total over ranks. Collective."""
        return self.value()

    def settled_local(self) -> torch.Tensor:
        """Returns this rank's summand; the total where the sum was taken or begun, or has a bias. Collective."""
        return self.local if self.waits and self.added is None else self.value()

    @property
    def untaken(self) -> bool:
        """Whether neither the sum nor what it is a view of was taken."""
        base = self.base.of if self.base is not None else None
        return self.total is None and not (isinstance(base, Sum) and not base.untaken)

    @property
    def waits(self) -> bool:
        """Whether nothing of the sum has begun."""
        return self.untaken and self.pending is None and self.coming is None

    def like(self, local: torch.Tensor) -> Sum:
        """Returns a sum over the same axis with this `local`; if this one is reduced, `local` is taken as the total."""
        made = Sum(local, self.axis, self.origin, spread=self.spread)
        if self.total is not None:
            made.total, made.read_only_copy = local, self.read_only_copy
        return made

    def value(self) -> torch.Tensor:
        """Returns the total over ranks: plain, or a share of it along the sequence. Collective, the first time."""
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
            if self.pending is not None:
                self.pending.wait()
                self.total = self.local
            elif self.coming is not None:
                self.total = self._arrived(self.coming)
            elif self.spread and self.axis.sequence and self.dim() == 3 and self.shape[1] >= self.axis.size:
                owners = Owners.blocks(self.shape[1], self.axis.size)
                self.total = Part(scatter_sum(self.local, 1, owners, self.axis), 1, owners, self.axis, may_gather=True)
            else:
                self.total = _laid_as(all_sum(self.local, self.axis), self.local)
            if self.added is not None:
                self.total = self.total + self.added
            # masks are drawn in the order that memory has in one process, which a share of one index does not show
            if isinstance(self.total, Part):
                self.total.whole_strides = self.stride()
            del self.local, self.added
        return self.total

    def _arrived(self, coming: Scatter) -> torch.Tensor:
        """Returns the share along S, where this is (B, S, H); else the whole total."""
        part = Part(coming.wait(), 1, coming.owners, self.axis, may_gather=True)
        if self.dim() == 3 and self.shape[1] == part.shape[1] and self.shape[2] == part.shape[2]:
            return part
        return gathered(part).view(self.shape)


def _laid_as(total: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns the total with the summand's strides, so that views of the summand can be taken of the total later."""
    if isinstance(total, Distributed) or isinstance(local, Distributed) or total.stride() == local.stride():
        return total
    return torch.empty_like(local, dtype=total.dtype).copy_(total)


def is_sum(tensor: Any) -> bool:
    """Whether a tensor is a sum over the axis for which a rule is being applied."""
    return isinstance(tensor, Sum) and here(tensor)


def with_sums(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed]) -> Any:
    """Returns what an operation gives of which some inputs are sums: a sum where it is linear, else of their totals."""
    op = facts(func)
    for tensor in inputs:
        if isinstance(tensor, Sum) and here(tensor) and (tensor.stale or not tensor.untaken):
            tensor.value()  # what was written into what it is a view of is in it
    first = args[0] if args and is_sum(args[0]) else None
    if first is None:  # nothing is viewed or written that is a sum
        args, kwargs = _totals(args, kwargs)
        return func(*args, **kwargs)
    if _gives_shape(op.name, args) and (first.source is not None or first.read_only_copy):
        return _reshaped(first, args[1])
    if first.total is None and op.name in _LINEAR:
        untaken = _LINEAR[op.name](func, first, args, kwargs)
        if untaken is not None:
            return _noted(first, untaken, func, args, kwargs)
    if op.reshapes:
        return _reshaped_in_place(first, func, args, kwargs)
    if op.writes:
        return _written_into(first, func, args, kwargs)
    args, kwargs = _totals(args, kwargs)
    output = func(*args, **kwargs)
    return _view_of_total(first, func, args, kwargs, output) if op.is_view else output


def _totals(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the arguments with the total in place of each sum over the axis of the rule. Collective."""
    return replaced(Sum, lambda tensor: tensor.value() if is_sum(tensor) else tensor, (args, kwargs))


def _gives_shape(name: str, args: tuple) -> bool:
    """Whether an operation is a view or reshape by a shape: not `view(dtype)`, and not `detach`."""
    return name in _ROWS and len(args) > 1 and isinstance(args[1], list | tuple)


def _noted(first: Sum, untaken: Sum, func: Any, args: tuple, kwargs: dict) -> Sum:
    """Returns the untaken result of a linear operation; a view among them is tied to the sum that it is a view of."""
    op = facts(func)
    untaken.read_only_copy = op.is_view and first.read_only_copy
    if op.is_view:
        if op.name == "_reshape_alias":  # by strides of the summand, where its total is contiguous
            func, args = torch.ops.aten.view.default, args[:2]
        _note_view(first, untaken, func, args[1:], kwargs)
    return untaken


def _reshaped_in_place(first: Sum, func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns `transpose_(x, a, b)` and the like: the total and the object around it take the shape. Collective."""
    if first.source is not None:
        raise Uncut(f"{func} changes the shape of one index of a cut dim")
    first.value()
    first.seen = None  # what is gathered anew has the shape of before
    first.total = getattr(first.total, facts(func).name[:-1])(*args[1:], **kwargs)
    return reshaped_in_place(first, func, args, kwargs)


def _written_into(first: Sum, func: Any, args: tuple, kwargs: dict) -> Sum:
    """Returns `x.add_(y)` and the like: the total is written, and what the sum is a view of. Collective."""
    if first.read_only_copy and not opened_anew(first, args):
        raise Uncut(
            f"{func} writes, with gradients, into a view of a tensor of which ranks of {first.axis.name} have "
            "shares; masked_fill, torch.where and scatter give a new one"
        )
    if first.source is not None:
        _anchored(first)
    args, kwargs = _totals(args, kwargs)
    func(*args, **kwargs)
    written_back(first)
    for view in first.views or ():  # each dealt to ranks by itself, so no memory carries the values to the others
        if (beside := view()) is not None:
            beside.stale = beside is not first
    forget()  # what was gathered last may be what was written into
    return first


def _view_of_total(first: Sum, func: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    """Returns a view of a total as a sum, where what is written into the total has to reach something else."""
    if first.read_only_copy:
        seen = first.seen.through(lambda copy: func(copy, *args[1:], **kwargs)) if first.seen is not None else None
        return replaced(torch.Tensor, lambda copy: Sum.read_only(copy, first.axis, seen), output)
    if first.source is not None:
        return replaced(torch.Tensor, lambda view: Sum.taken(view, first.axis, ViewOf(first)), output)
    return output


def _note_view(first: Sum, view: Sum, func: Callable[..., torch.Tensor], args: tuple, kwargs: dict) -> None:
    """Ties an untaken view to its sum: taking either takes both, and what is written into one is in the other."""
    shape = first.shape

    def again(total: torch.Tensor) -> torch.Tensor:
        if total.shape != shape:
            raise Uncut("the shape of a sum was changed in place, of which there is a view")
        return func(total, *args, **kwargs)

    # a sum that stands for an index of a part: both are views of that part
    if first.source is not None:
        view.source = ViewOf(first, again=again)
    elif not first.axis.sequence:
        view.base = ViewOf(first, again=again)
    else:  # a (B, S, H) sum is left in shares, others whole: no memory is shared
        if first.views is None:
            first.views = [weakref.ref(first)]
        view.views = first.views
        view.views.append(weakref.ref(view))


def _reshaped(first: Sum, shape: list[int]) -> torch.Tensor:
    """`first.view(shape)` of one index of a cut dim, or of a copy, to read: neither lies in memory as it does in one
    process, and whether that would have copied it is not known."""
    if first.total is not None:
        return Sum.read_only(first.total.reshape(shape), first.axis)
    made = Sum(first.local.reshape(shape), first.axis, first.origin, spread=first.spread)
    made.read_only_copy = True
    return made


def _anchored(view: Sum) -> None:
    """Makes a view's total a view of its sum's total again, before it is written into."""
    assert view.source is not None
    if view.source.again is not None:
        assert isinstance(view.source.of, Sum)
        _anchored(view.source.of)
        view.total = view.source.again(view.source.of.value())


def _rearranged(func: Any, first: Sum, args: tuple, kwargs: dict) -> Sum | None:
    """Returns the view, transpose or negative of an untaken sum as one; None where it needs the total."""
    name = facts(func).name
    if name not in _ROWS and (first.added is not None or first.coming is not None):
        return None  # a bias lies along the last dim, and what is coming is viewed as (B, S, H): not of other dims
    if name == "neg" and first.pending is not None:
        return None  # the reduction under way writes into the summand, which a negative would read
    # a summand may lie in memory otherwise than the sum does: one index of what a rank has, or of nothing
    local = first.local.reshape(args[1]) if _gives_shape(name, args) else func(first.local, *args[1:], **kwargs)
    begun = first.pending is not None or first.coming is not None
    if begun and not same_memory(local, first.local):
        return None  # the total arrives in the summand's memory, and this is a copy of it
    if first.added is not None and local.shape[-1:] != first.local.shape[-1:]:
        return None
    return _like(first, local, first.added)


def _scaled(func: Any, first: Sum, args: tuple, kwargs: dict) -> Sum | None:
    """Returns an untaken sum over chunks of positions times a number; None for other sums, whose total is scaled."""
    if not first.axis.turns or first.added is not None or len(args) != 2 or kwargs or not _is_number(args[1]):
        return None
    return Sum(func(first.local, args[1]), first.axis, first.origin, spread=False)


def _added(func: Any, first: Sum, args: tuple, kwargs: dict) -> Sum | None:
    """Returns an untaken sum plus another one or a bias (H,), again untaken; None of anything else."""
    if kwargs or len(args) != 2:  # with `alpha`
        return None
    name, second = facts(func).name, args[1]
    if is_sum(second):
        both = first.added is not None and second.added is not None
        if both or not (first.waits and second.waits) or first.shape != second.shape:
            return None  # of two that have begun, each arrives by itself
        added = first.added if second.added is None else -second.added if name == "sub" else second.added
        return Sum(func(first.local, second.local), first.axis, first.origin, added, first.spread)
    bias = isinstance(second, torch.Tensor) and not isinstance(second, Distributed) and second.dim() == 1
    if bias and name == "add" and first.added is None and second.shape == first.shape[-1:]:
        # a copy: zero=3 frees the bias when its module has run, and the sum may be taken later
        return _like(first, first.local, second.clone())
    return None


# ATen name -> what the operation makes of an untaken sum, again untaken; None where it needs the total
_LINEAR: dict[str, Callable[[Any, Sum, tuple, dict], Sum | None]] = {
    **dict.fromkeys(_REARRANGE, _rearranged), **dict.fromkeys(("mul", "div"), _scaled),
    **dict.fromkeys(("add", "sub"), _added),
}  # fmt: skip


def _is_number(value: Any) -> bool:
    """Whether a factor is one number, the same in every summand."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, Distributed) and not value.dim()
    return plain or isinstance(value, int | float)


def _like(first: Sum, local: torch.Tensor, added: torch.Tensor | None) -> Sum:
    made = Sum(local, first.axis, first.origin, added, first.spread)
    made.pending, made.coming = first.pending, first.coming
    return made


def plain(tensor: Any) -> Any:
    """Returns a tensor whole, as every rank holds it. Collective where it is a part or a sum."""
    while isinstance(tensor, Distributed):
        tensor = tensor.settled()
        tensor = gathered(tensor) if isinstance(tensor, Part) else tensor
    return tensor


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return plain(tensor.detach())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient


def whole(tensor: Any) -> Any:
    """Returns, differentiably, a tensor whole on every rank. Collective where it is a part or a sum."""
    return _Whole.apply(tensor) if isinstance(tensor, Distributed) else tensor


def whole_over(tensor: Any, axis: Axis) -> Any:
    """Returns a tensor whole over `axis` and axes further in; over those further out it stays as it is. Collective."""
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(whole_over(tensor.settled_local(), axis))
    return plain(tensor)


class _Uncut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        return _uncut(tensor.detach(), axis)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


def _uncut(tensor: Any, axis: Axis) -> Any:
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(_uncut(tensor.settled_local(), axis))
    # whole over the axis already
    if not isinstance(tensor, Distributed) or tensor.axis is not axis:
        return tensor
    tensor = tensor.settled()
    return gathered(tensor) if isinstance(tensor, Part) and tensor.axis is axis else tensor


def whole_over_axis(tensor: Any, axis: Axis) -> Any:
    """Returns, differentiably, a tensor whole over one axis; over others it stays as it is. Collective."""
    return _Uncut.apply(tensor, axis) if isinstance(tensor, Distributed) else tensor


class _Redealt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return how(tensor.detach())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


def redealt(tensor: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns, differentiably, `how(tensor)`, which must be the same tensor over all ranks, dealt otherwise.

    A backward that deals its gradient anew says so by this, that a second derivative is not lost where shares are read.
    """
    return _Redealt.apply(tensor, how)


class _WholeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, axis: Axis | None) -> torch.Tensor:
        ctx.axis = axis
        return tensor.detach()  # no view, whose base nobody could write into afterwards (a table with `max_norm`)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        if not isinstance(gradient, Distributed):
            return gradient, None
        axis = ctx.axis
        return redealt(gradient, plain if axis is None else lambda given: whole_over(given, axis)), None


def whole_gradient(tensor: torch.Tensor, axis: Axis | None = None) -> torch.Tensor:
    """Returns the tensor, whose gradient is made whole over `axis` (None: over every axis) in backward."""
    return _WholeGradient.apply(tensor, axis) if tensor.requires_grad and torch.is_grad_enabled() else tensor


__all__ = ["Sum", "plain", "whole", "whole_gradient", "whole_over", "whole_over_axis", "with_sums"]
