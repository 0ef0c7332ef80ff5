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
_ADD = frozenset({"add", "sub"})
_SCALE = frozenset({"mul", "div"})


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
            if rows is not None and rows[1] >= axis.size:
                owners = Owners.blocks(rows[1], axis.size)
                made.coming = Scatter(local.view(*rows, -1), 1, owners, axis)
            return made
        made = cls(local.contiguous(), axis, origin, spread=spread)
        made.pending = all_reduce(made.local, axis, "activations", wait=False)
        return made

    @classmethod
    def read_only(cls, copy: torch.Tensor, axis: Axis, seen: GatheredView | None = None) -> torch.Tensor:
        """A view of something gathered over an axis, into which nothing is written as it is; of tiles, a part of it."""
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
        """The total, once this or what it is a view of was taken."""
        return self.local if self.untaken else self.value()

    def settled(self) -> torch.Tensor:
        """Returns the total over ranks. Collective."""
        return self.value()

    def settled_local(self) -> torch.Tensor:
        """This rank's summand; the total where the sum was taken, or has begun, or has something added. Collective."""
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
        if self.seen is not None and self.seen.moved:
            self.total = self.seen.view(self.seen.whole())
        if self.total is None and self.axis.turns:
            raise Uncut("chunks of positions are computed one after the other, and this needs the sum over all of them")
        if self.stale:
            raise Uncut(
                "a sum is read after a view of it was written into, and each is dealt along the sequence by itself"
            )
        if self.total is None:
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
                self.total = Part(scatter_sum(self.local, 1, owners, self.axis), 1, owners, self.axis, soft=True)
            else:
                self.total = _laid_as(all_sum(self.local, self.axis), self.local)
            if self.added is not None:
                self.total = self.total + self.added
            if isinstance(self.total, Part):
                self.total.whole_strides = self.stride()
            del self.local, self.added
        return self.total

    def _arrived(self, coming: Scatter) -> torch.Tensor:
        """The share, where this is (B, S, H); else all of it."""
        part = Part(coming.wait(), 1, coming.owners, self.axis, soft=True)
        if self.dim() == 3 and self.shape[1] == part.shape[1] and self.shape[2] == part.shape[2]:
            return part
        return gathered(part).view(self.shape)


def _laid_as(total: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The total with the summand's strides: views that can be taken of the one are taken of the other later."""
    if isinstance(total, Distributed) or isinstance(local, Distributed) or total.stride() == local.stride():
        return total
    return torch.empty_like(local, dtype=total.dtype).copy_(total)


def is_sum(tensor: Any) -> bool:
    """Whether a tensor is a sum over the axis for which a rule is being applied."""
    return isinstance(tensor, Sum) and here(tensor)


def with_sums(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed]) -> Any:
    """Returns what an operation gives of which some inputs are sums: a sum where it is linear, else of their totals."""
    known = facts(func)
    for each in inputs:
        if isinstance(each, Sum) and here(each) and (each.stale or not each.untaken):
            each.value()  # what was written into what it is a view of is in it
    first = args[0] if args else None
    first = first if is_sum(first) else None
    resized = first is not None and known.name in _ROWS and len(args) > 1 and isinstance(args[1], list | tuple)
    if first is not None and resized and (first.source is not None or first.read_only_copy):
        return _reshaped(first, args[1])
    if first is not None and first.total is None:
        kept = _kept(known.name, func, first, args, kwargs)
        if kept is not None:
            kept.read_only_copy = known.is_view and first.read_only_copy
            if known.is_view:
                if known.name == "_reshape_alias":  # by strides of the summand, where its total is contiguous
                    func, args = torch.ops.aten.view.default, args[:2]
                _note_view(first, kept, func, args[1:], kwargs)
            return kept
    if first is not None and known.reshapes:
        if first.source is not None:
            raise Uncut(f"{func} changes the shape of one index of a cut dim")
        first.value()
        first.seen = None  # what is gathered anew has the shape of before
        first.total = getattr(first.total, known.name[:-1])(*args[1:], **kwargs)
        return reshaped_in_place(first, func, args, kwargs)
    changed = first if known.writes else None
    copied = first is not None and first.read_only_copy
    if changed is not None and copied and not opened_anew(changed, args):
        raise Uncut(
            f"{func} writes, with gradients, into a view of a tensor of which ranks of {changed.axis.name} have "
            "shares; masked_fill, torch.where and scatter give a new one"
        )
    if changed is not None and changed.source is not None:
        _anchored(changed)
    args, kwargs = replaced(Sum, lambda each: each.value() if is_sum(each) else each, (args, kwargs))
    output = func(*args, **kwargs)
    if first is not None and copied and known.is_view:
        seen = first.seen.through(lambda copy: func(copy, *args[1:], **kwargs)) if first.seen is not None else None
        return replaced(torch.Tensor, lambda copy: Sum.read_only(copy, first.axis, seen), output)
    if first is not None and first.source is not None and known.is_view:
        return replaced(torch.Tensor, lambda view: Sum.taken(view, first.axis, ViewOf(first)), output)
    if changed is not None:
        written_back(changed)
        for view in changed.views or ():
            if (beside := view()) is not None:
                beside.stale = beside is not changed
        forget()
    return output if changed is None else changed


def _note_view(first: Sum, view: Sum, func: Callable[..., torch.Tensor], args: tuple, kwargs: dict) -> None:
    """Let a view of a sum share with it what either is when it is taken, and what is written then."""
    shape = first.shape

    def again(total: torch.Tensor) -> torch.Tensor:
        if total.shape != shape:
            raise Uncut("the shape of a sum was changed in place, of which there is a view")
        return func(total, *args, **kwargs)

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
    """Let a view of a sum share its memory with what the sum has become, before it is written into."""
    assert view.source is not None
    if view.source.again is not None:
        assert isinstance(view.source.of, Sum)
        _anchored(view.source.of)
        view.total = view.source.again(view.source.of.value())


def _kept(name: str, func: Any, first: Sum, args: tuple, kwargs: dict) -> Sum | None:
    """The result where it is a sum again."""
    keeps_rows = (first.added is None and first.coming is None) or name in _ROWS
    if name in _REARRANGE and keeps_rows and (first.pending is None or name != "neg"):
        resized = name in _ROWS and len(args) > 1 and isinstance(args[1], list | tuple)
        # a summand may lie in memory otherwise than the sum does: one index of what a rank has, or of nothing
        local = first.local.reshape(args[1]) if resized else func(first.local, *args[1:], **kwargs)
        begun = first.pending is not None or first.coming is not None
        if (not begun or same_memory(local, first.local)) and (
            first.added is None or local.shape[-1:] == first.local.shape[-1:]
        ):
            return _like(first, local, first.added)
    if name in _SCALE and first.axis.turns and len(args) == 2 and not kwargs and _is_number(args[1]):
        return Sum(func(first.local, args[1]), first.axis, first.origin, spread=False) if first.added is None else None
    if name not in _ADD or kwargs or len(args) != 2:
        return None
    second = args[1]
    if is_sum(second) and first.waits and second.waits and first.shape == second.shape:
        added = first.added if second.added is None else second.added
        if first.added is None or second.added is None:
            if name == "sub" and second.added is not None:
                added = -second.added
            return Sum(func(first.local, second.local), first.axis, first.origin, added, first.spread)
    bias = isinstance(second, torch.Tensor) and not isinstance(second, Distributed) and second.dim() == 1
    if bias and name == "add" and first.added is None and second.shape == first.shape[-1:]:
        # a copy: zero=3 frees the bias when its module has run, and the sum may be taken later
        return _like(first, first.local, second.clone())
    return None


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
    """Differentiable: returns a tensor whole on every rank. Collective where it is a part or a sum."""
    return _Whole.apply(tensor) if isinstance(tensor, Distributed) else tensor


def whole_over(tensor: Any, axis: Axis) -> Any:
    """A tensor that is whole over `axis` and further in; over axes further out it stays as it is. Collective."""
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
    if not isinstance(tensor, Distributed) or tensor.axis is not axis:
        return tensor
    tensor = tensor.settled()
    return gathered(tensor) if isinstance(tensor, Part) and tensor.axis is axis else tensor


def whole_over_axis(tensor: Any, axis: Axis) -> Any:
    """Differentiable: a tensor that is whole over one axis; over others it stays as it is. Collective."""
    return _Uncut.apply(tensor, axis) if isinstance(tensor, Distributed) else tensor


class _Redealt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return how(tensor.detach())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


def redealt(tensor: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Differentiable: returns `how(tensor)`, which must be the same tensor over all ranks, dealt otherwise.

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
    """The tensor itself, whose gradient arrives whole over `axis` (None: over every axis) however it was dealt."""
    return _WholeGradient.apply(tensor, axis) if tensor.requires_grad and torch.is_grad_enabled() else tensor


__all__ = [
    "Sum",
    "plain",
    "whole",
    "whole_gradient",
    "whole_over",
    "whole_over_axis",
    "with_sums",
]
