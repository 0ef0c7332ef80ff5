"""Rules of sums that are not reduced yet: linear operations run on summands, others on the totals."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.levels import Distributed, ViewOf, here, written_back
from shardwise.part.moves import share_of
from shardwise.part.sums import Sum, is_sum
from shardwise.part.tensor import facts, forget, reshaped_in_place, same_memory
from shardwise.trace.leaves import replaced, tensors_in

_REARRANGE = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "unsqueeze", "squeeze", "detach",
    "alias", "neg",
})  # fmt: skip
_ROWS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "detach", "alias"})  # may keep the last dim


def with_sums(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed]) -> Any:
    """Returns the result of an operation on sums: an unreduced `Sum` if `_LINEAR` has it, else that of their totals.

    inputs  the distributed tensors among `args` and `kwargs`
    """
    op = facts(func)
    for tensor in inputs:
        # raises where a view beside it was written into; where a view's base is reduced, it is taken of that
        if isinstance(tensor, Sum) and here(tensor) and (tensor.stale or not tensor.untaken):
            tensor.value()
    first = args[0] if args and is_sum(args[0]) else None
    if first is None:  # nothing is viewed or written that is a sum
        args, kwargs = _totals(args, kwargs)
        return func(*args, **kwargs)
    # a copy lies in memory otherwise than in one process, so strides do not tell whether `view` may be had
    if _gives_shape(op.name, args) and (first.source is not None or first.read_only_copy):
        return _reshaped(first, args[1])
    # not reduced yet: a linear operation is done on summands, and one reduction later serves its result
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
    """Returns (args, kwargs) with the total in place of each sum over the axis of the running rule. Collective."""
    return replaced(Sum, lambda tensor: tensor.value() if is_sum(tensor) else tensor, (args, kwargs))


def _gives_shape(name: str, args: tuple) -> bool:
    """Whether an operation is a view or reshape to a given shape, unlike `view(dtype)` or `detach`."""
    return name in _ROWS and len(args) > 1 and isinstance(args[1], list | tuple)


def _noted(first: Sum, untaken: Sum, func: Any, args: tuple, kwargs: dict) -> Sum:
    """Returns `untaken`, the unreduced result of a linear `func` on `first`; ties it to `first` if it is a view."""
    op = facts(func)
    untaken.read_only_copy = op.is_view and first.read_only_copy
    if op.is_view:
        if op.name == "_reshape_alias":  # by strides of the summand, where its total is contiguous
            func, args = torch.ops.aten.view.default, args[:2]
        _note_view(first, untaken, func, args[1:], kwargs)
    return untaken


def _reshaped_in_place(first: Sum, func: Any, args: tuple, kwargs: dict) -> Any:
    """Applies `transpose_` or the like to the total and to the sum object around it; returns that. Collective."""
    if first.source is not None:
        raise Uncut(f"{func} changes the shape of one index of a cut dim")
    first.value()
    first.seen = None  # what is gathered anew has the shape of before
    first.total = getattr(first.total, facts(func).name[:-1])(*args[1:], **kwargs)
    return reshaped_in_place(first, func, args, kwargs)


def _written_into(first: Sum, func: Any, args: tuple, kwargs: dict) -> Sum:
    """Applies a write (`x.add_(y)`) to the total of `first`, and to what it is a view of; returns it. Collective."""
    if first.read_only_copy and not opened_anew(first, args):
        raise Uncut(
            f"{func} writes, with gradients, into a view of a tensor of which ranks of {first.axis.name} have "
            "shares; masked_fill, torch.where and scatter give a new one"
        )
    # it stands for an index of a cut dim, and is written back to the owner from the memory of its sum's total
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
    """Returns `output`, a view of a total, as a `Sum` if writes into it are refused or have to be copied back."""
    if first.read_only_copy:
        seen = first.seen.through(lambda copy: func(copy, *args[1:], **kwargs)) if first.seen is not None else None
        return replaced(torch.Tensor, lambda copy: Sum.read_only(copy, first.axis, seen), output)
    if first.source is not None:
        return replaced(torch.Tensor, lambda view: Sum.taken(view, first.axis, ViewOf(first)), output)
    return output


def _note_view(first: Sum, view: Sum, func: Callable[..., torch.Tensor], args: tuple, kwargs: dict) -> None:
    """Ties an unreduced view to its sum, so that reducing either reduces both and writes into one reach the other.

    func, args, kwargs  the operation that takes the view, and its arguments but for the tensor
    """
    shape = first.shape

    def again(total: torch.Tensor) -> torch.Tensor:
        if total.shape != shape:
            raise Uncut("the shape of a sum was changed in place, of which there is a view")
        return func(total, *args, **kwargs)

    # a sum that stands for an index of a part: both are views of that part
    if first.source is not None:
        view.source = ViewOf(first, again=again)
    # both totals will lie in one memory, as in one process: the view is taken with its base
    elif not first.axis.sequence:
        view.base = ViewOf(first, again=again)
    else:  # a (B, S, H) sum is left in shares, others whole: no memory is shared
        if first.views is None:
            first.views = [weakref.ref(first)]
        view.views = first.views
        view.views.append(weakref.ref(view))


def _reshaped(first: Sum, shape: list[int]) -> torch.Tensor:
    """Returns `first.view(shape)` as a sum that refuses writes, if `first` is one index of a cut dim or a copy.

    Neither lies in memory as in one process, so it is not known whether one process would have copied it."""
    if first.total is not None:
        return Sum.read_only(first.total.reshape(shape), first.axis)
    made = Sum(first.local.reshape(shape), first.axis, first.origin, spread=first.spread)
    made.read_only_copy = True
    return made


def _anchored(view: Sum) -> None:
    """Takes the total of `view` anew as a view of its base's total, so that a write into it reaches the base."""
    assert view.source is not None
    if view.source.again is not None:
        assert isinstance(view.source.of, Sum)
        _anchored(view.source.of)
        view.total = view.source.again(view.source.of.value())


def _rearranged(func: Any, first: Sum, args: tuple, kwargs: dict) -> Sum | None:
    """Returns the view, transpose or negative of an unreduced sum, unreduced too; None if it needs the total."""
    name = facts(func).name
    if name not in _ROWS and (first.added is not None or first.coming is not None):
        return None  # a bias lies along the last dim, and what is coming is viewed as (B, S, H): not of other dims
    if len(args) > 1 and isinstance(args[1], torch.dtype):
        return None  # the bits of a sum are not the sum of the summands' bits
    if name == "neg" and first.pending is not None:
        return None  # the reduction under way writes into the summand, which a negative would read
    # a summand may lie in memory otherwise than the sum does: one index of what a rank has, or of nothing
    local = first.local.reshape(args[1]) if _gives_shape(name, args) else func(first.local, *args[1:], **kwargs)
    begun = first.pending is not None or first.coming is not None
    if begun and not same_memory(local, first.local):
        return None  # the total arrives in the summand's memory, and this is a copy of it
    # the bias lies along the last dim, which this view would change
    if first.added is not None and local.shape[-1:] != first.local.shape[-1:]:
        return None
    return _like(first, local, first.added)


def _scaled(func: Any, first: Sum, args: tuple, kwargs: dict) -> Sum | None:
    """Returns an unreduced sum over chunks of positions times a number; None for others, which need the total."""
    if not first.axis.turns or first.added is not None or len(args) != 2 or kwargs or not _is_number(args[1]):
        return None
    return Sum(func(first.local, args[1]), first.axis, first.origin, spread=False)


def _added(func: Any, first: Sum, args: tuple, kwargs: dict) -> Sum | None:
    """Returns an unreduced sum plus another one or a bias (H,), unreduced too; None for anything else."""
    if kwargs or len(args) != 2:  # with `alpha`
        return None
    name, second = facts(func).name, args[1]
    if is_sum(second):
        both = first.added is not None and second.added is not None
        if both or not (first.waits and second.waits) or first.shape != second.shape:
            return None  # a sum keeps one bias; of two that have begun, each arrives by itself
        added = first.added if second.added is None else -second.added if name == "sub" else second.added
        return Sum(func(first.local, second.local), first.axis, first.origin, added, first.spread)
    bias = isinstance(second, torch.Tensor) and not isinstance(second, Distributed) and second.dim() == 1
    # a wider bias makes the result wider than the summands
    bias = bias and torch.promote_types(first.dtype, second.dtype) == first.dtype
    if bias and name == "add" and first.added is None and second.shape == first.shape[-1:]:
        # a copy: zero=3 frees the bias when its module has run, and the sum may be taken later
        return _like(first, first.local, second.clone())
    return None


# ATen name -> what the operation makes of an unreduced sum, unreduced too; None where it needs the total
_LINEAR: dict[str, Callable[[Any, Sum, tuple, dict], Sum | None]] = {
    **dict.fromkeys(_REARRANGE, _rearranged), **dict.fromkeys(("mul", "div"), _scaled),
    **dict.fromkeys(("add", "sub"), _added),
}  # fmt: skip


def _is_number(value: Any) -> bool:
    """Whether `value` is a number or a plain tensor (), and so the same factor on every rank."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, Distributed) and not value.dim()
    return plain or isinstance(value, int | float)


def _like(first: Sum, local: torch.Tensor, added: torch.Tensor | None) -> Sum:
    made = Sum(local, first.axis, first.origin, added, first.spread)
    made.pending, made.coming = first.pending, first.coming
    return made


def opened_anew(copy: Sum, args: tuple) -> bool:
    """Whether a gathered copy may be written; if so, gathers it anew and has writes go back to its part. Collective.

    It may not if a gradient is needed, since autograd then goes by the strides of the whole tensor.

    args  arguments of the operation that writes
    """
    seen = copy.seen
    if seen is None or seen.part.requires_grad or any(tensor.requires_grad for tensor in tensors_in(args)):
        return False
    part, whole = seen.part, seen.whole()
    copy.total = seen.view(whole)
    # the copy's memory is that of `whole`: after a write into it each rank takes its share of all of it
    copy.source = ViewOf(part, lambda _: part.local.copy_(share_of(whole, part.dim_cut, part.owners, part.axis)))
    return True
