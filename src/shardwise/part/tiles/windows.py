"""Convert tiles to plain tensors and back, above autograd, over axes of positions; `answers` registers functions.

    x (B, C, H, W) cut along H over d0, along W over d1
    fetched over d0      the rows that this rank's outputs read             Part[d1, W] of (B, C, h + halo, W)
    fetched over d1      the columns, corners with them                     plain (B, C, h + halo, w + halo)
    the local operation  as torch has it, with plain weights                plain (B, O, h', w')
    placed over d1, d0   this rank's tile of the result                     Part[d0, H'] of Part[d1, W']

In between, tensors differ from rank to rank and are plain (or distributed over axes further in, such as tp). Backward
of a fetch sends each gradient to its owner, which adds them; the gradient of a weight is a summand of a sum over ranks.
All are linear, and the backward of each is another one of them, so that second derivatives need nothing else:

    fetched  <-> given back        placed  <-> taken        opened -> placed        used  <-> summed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch

from shardwise.comm import Axis
from shardwise.layout.grid import SPACE
from shardwise.part.cuts import Uncut
from shardwise.part.exchanges import Wanted, fetch, give_back, wants_own
from shardwise.part.levels import Distributed
from shardwise.part.moves import from_axis, replaced_from_axis, share_of
from shardwise.part.sums import Sum, linear, whole_over, whole_over_axis
from shardwise.part.tensor import FUNCTIONS, Part
from shardwise.part.tiles.maps import Map, reads
from shardwise.part.tiles.saved_halos import CutDim, kept_apart
from shardwise.trace.leaves import replaced, tensors_in


def cuts(tensor: Any, dims: Iterable[int]) -> list[CutDim]:
    """Returns a tensor's cuts over axes of positions along any of `dims` (may be negative), the outermost first.

    [] for a plain tensor, or any other object. Collective if it is a sum that has not been reduced yet.
    """
    cut_dims, along = [], {d % tensor.dim() for d in dims} if isinstance(tensor, Distributed) else set()
    # from the outermost axis inwards: a part's local tensor may be cut again
    while isinstance(tensor, Distributed):
        # a summand has no cut of its own: it is added up first
        if isinstance(tensor, Sum):
            tensor = tensor.settled()
            continue
        assert isinstance(tensor, Part)
        # a cut over tp, or along channels, is no tile
        if tensor.axis.positions and tensor.dim_cut in along:
            cut_dims.append(CutDim(tensor.axis, tensor.dim_cut, tensor.owners))
        tensor = tensor.local
    return cut_dims


def alone(input: torch.Tensor, cut_dims: list[CutDim]) -> bool:
    """Whether `cut_dims` (outermost first) are all cuts of the tile, so that it holds a plain tensor inside them."""
    for cut in cut_dims:
        if not isinstance(input, Part) or input.axis is not cut.axis:
            return False
        input = input.local
    return not isinstance(input, Distributed)


def _fetched(tensor: torch.Tensor, cut: CutDim, wanted: Wanted, fill: float) -> torch.Tensor:
    return replaced_from_axis(tensor, cut.axis, fetch(from_axis(tensor, cut.axis), wanted, fill))


def fetched(tensor: torch.Tensor, cut: CutDim, wanted: Wanted, fill: float = 0.0) -> torch.Tensor:
    """Returns the indices along the dim of `cut` that this rank wants, not cut over that axis any more.

    Differentiable. Collective.

    wanted  for each rank the ranges of indices that it fetches;  fill  the value of indices outside the dim
    """
    there = partial(_fetched, cut=cut, wanted=wanted, fill=fill)
    return linear(tensor, there, partial(given_back, cut=cut, wanted=wanted))


def given_back(gradient: torch.Tensor, cut: CutDim, wanted: Wanted) -> torch.Tensor:
    """Returns the gradient of the input of `fetched`, a part that has the sums at their owners. Differentiable.

    Collective.
    """

    def there(given: torch.Tensor) -> torch.Tensor:
        back = give_back(from_axis(given, cut.axis), cut.dim, cut.owners, cut.axis, wanted)
        return replaced_from_axis(given, cut.axis, back)

    # a gradient of a gradient may be whole, or dealt otherwise; a fetch reads what is dealt as the tensor was
    return linear(gradient, there, lambda second: fetched(_placed(_taken(second, cut), cut), cut, wanted))


def _open(tensor: torch.Tensor, cut: CutDim) -> torch.Tensor:
    return replaced_from_axis(tensor, cut.axis, from_axis(tensor, cut.axis).local.detach())


def opened(tensor: torch.Tensor, cut_dims: list[CutDim]) -> torch.Tensor:
    """Returns this rank's own tile, as a tensor that is not cut over these axes. Differentiable; nothing is sent."""
    for cut in cut_dims:
        tensor = linear(tensor, partial(_open, cut=cut), partial(_placed, cut=cut))
    return tensor


def _outer_along(tensor: torch.Tensor, cut: CutDim) -> list[Axis]:
    """Returns the axes further out that cut the dim of `cut` too, the outermost first."""
    axes = []
    while isinstance(tensor, Distributed) and tensor.axis.depth < cut.axis.depth:
        if isinstance(tensor, Part) and tensor.dim_cut == cut.dim:
            axes.append(tensor.axis)
        tensor = tensor.settled_local()
    return axes


def _placed(local: torch.Tensor, cut: CutDim) -> torch.Tensor:
    """Returns, differentiably, the part whose share over `cut.axis` on this rank is `local`; the adjoint: `_taken`."""
    make, beside = partial(Part, dim=cut.dim, owners=cut.owners, axis=cut.axis), _outer_along(local, cut)
    return linear(local, partial(_inserted, axis=cut.axis, make=make), partial(_taken, cut=cut, beside=beside))


def _taken(gradient: torch.Tensor, cut: CutDim, beside: Sequence[Axis] = ()) -> torch.Tensor:
    """Returns, differentiably, this rank's share under `cut` of a gradient, however that is distributed.

    beside  axes further out that cut the same dim of the tensor; over others the gradient is gathered
    """
    return linear(gradient, partial(_share, cut=cut, beside=beside), partial(_placed, cut=cut))


def _share(gradient: torch.Tensor, cut: CutDim, beside: Sequence[Axis]) -> torch.Tensor:
    """Returns `_taken` without autograd. Collective if the gradient is a sum or cut otherwise."""
    for axis in _outer_along(gradient, cut):
        # that axis cuts the gradient but not the tensor, so `cut.owners` count the indices of the gathered dim
        if axis not in beside:
            gradient = whole_over_axis(gradient, axis)
    return share_of(gradient, cut.dim, cut.owners, cut.axis)


def placed(local: torch.Tensor, cut_dims: list[CutDim]) -> torch.Tensor:
    """Returns the part with these cuts (the outermost first) whose share on this rank is `local`. Differentiable."""
    for cut in reversed(cut_dims):
        local = _placed(local, cut)
    return local


def taken(tensor: torch.Tensor | None, cut_dims: list[CutDim]) -> torch.Tensor | None:
    """Returns, differentiably, this rank's share of a weight that has an element for each index of the cut dims.

    None for None.
    """
    for cut in cut_dims if tensor is not None else []:
        tensor = _taken(tensor, cut)
    return tensor


class _Used(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
        ctx.axes = axes
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return linear(gradient, partial(_summed, axes=ctx.axes), partial(_of_a_sum, axes=ctx.axes)), None


def _summed(gradient: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Returns this rank's gradient of a whole weight as a `Sum` over `axes`, the outermost first."""
    for axis in reversed(axes):
        gradient = _inserted(gradient, axis, partial(Sum, axis=axis, spread=False))
    return gradient


def _of_a_sum(gradient: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    for axis in axes:
        gradient = whole_over_axis(gradient, axis)
    return _Used.apply(gradient, axes)


def used(tensor: torch.Tensor | None, cut_dims: list[CutDim]) -> torch.Tensor | None:
    """Returns a whole weight (or None) for use beside this rank's tile; its gradient is a `Sum` over the cuts' axes.

    Differentiable. Raises `Uncut` if positions cut the weight itself.
    """
    if tensor is None:
        return None
    if cuts(tensor, range(tensor.dim())):
        raise Uncut(f"a weight that is cut itself, {tensor!r}, beside a tile")
    return used_over(tensor, tuple(cut.axis for cut in cut_dims))


def used_over(tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Returns a tensor that is whole on all ranks of `axes`; its gradient is a `Sum` over them. Differentiable."""
    return _Used.apply(tensor, axes)


def _inserted(tensor: torch.Tensor, axis: Axis, make: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Returns `tensor` with `make` (local tensor -> part or sum over `axis`) applied inside its axes further out."""
    if isinstance(tensor, Distributed) and tensor.axis.depth < axis.depth:
        return tensor.like(_inserted(tensor.settled_local(), axis, make))
    return make(tensor)


def windowed(
    tensor: torch.Tensor,
    along: Mapping[int, Map],
    cut_dims: list[CutDim],
    operation: Callable[[torch.Tensor], Any],
    fill: float = 0.0,
    *,
    views: bool = False,
) -> Any:
    """Runs `operation` on the inputs that this rank's outputs read, and returns its result as a part. Collective.

    along      cut dim (not negative) -> `Map` of its outputs to inputs; along other dims the cut stays as it is
    cut_dims   the tensor's cuts, the outermost first
    operation  window -> a tensor or a tuple of tensors of one shape, with the dims of `tensor` in their place; it pads
               nothing along cut dims, and what it returns beyond this rank's outputs is dropped
    fill       value of inputs outside the tensor
    views      Whether the operation returns views of the window, which then has to be a copy, as they may be written
    """
    plans = [reads(cut.owners, along[cut.dim]) if cut.dim in along else None for cut in cut_dims]
    whole, afar = tensor, []
    for cut, plan in zip(cut_dims, plans, strict=True):
        # where every rank reads its own indices alone, nothing is sent, copied or kept beside the tile
        if plan is None or (wants_own(cut.owners, plan.wanted) and not views):
            tensor = opened(tensor, [cut])
        else:
            tensor = fetched(tensor, cut, plan.wanted, fill)
            afar.append((cut, plan.wanted))
    with kept_apart(tensor, whole, afar) if afar else nullcontext():
        output = operation(tensor)
    del tensor, whole  # autograd keeps of the window what `kept_apart` says; nobody else needs it
    both = list(zip(cut_dims, plans, strict=True))
    after = [cut if plan is None else CutDim(cut.axis, cut.dim, plan.owners) for cut, plan in both]

    def own(output: torch.Tensor) -> torch.Tensor:
        for cut, plan in both:
            me = cut.axis.index
            # a transposed window adds to outputs of others, and a rank without outputs computes one of zeros
            if plan is not None and output.shape[cut.dim] != plan.owners.counts[me]:
                output = output.narrow(cut.dim, plan.skip[me], plan.owners.counts[me])
        return placed(output, after)

    return own(output) if isinstance(output, torch.Tensor) else tuple(map(own, output))


def answers(*functions: Callable, cut_once: bool = True) -> Callable:
    """Returns a decorator that registers a function to run in place of `functions` if an argument is distributed.

    cut_once  Whether its arguments are first gathered until no dim is cut over two axes
    """

    def register(answer: Callable) -> Callable:
        @wraps(answer)
        def run(*args: Any, **kwargs: Any) -> Any:
            return once(answer, args, kwargs) if cut_once else answer(*args, **kwargs)

        for function in functions:
            FUNCTIONS[function] = run
        return answer

    return register


def _cut_once(part: torch.Tensor) -> tuple[torch.Tensor, list[Axis]]:
    """Returns (the tensor gathered over inner axes that cut a dim for a second time, those axes). Collective."""
    dims_seen: set[int] = set()
    inner_axes = []
    for cut in cuts(part, range(part.dim())):
        if cut.dim in dims_seen:
            part = whole_over_axis(part, cut.axis)
            inner_axes.append(cut.axis)
        dims_seen.add(cut.dim)
    return part, inner_axes


def once(answer: Callable, args: tuple, kwargs: dict) -> Any:
    """Returns `answer(*args, **kwargs)` of parts gathered until no dim is cut over two axes (cp and cp_ulysses).

    Collective. The inner axis is gathered. All of its ranks then compute the same, until the result meets a tensor that
    it cuts; the result's gradient is gathered over it.
    """
    gathered_over: dict[str, Axis] = {}

    def whole_inside(part: Part) -> torch.Tensor:
        part, axes = _cut_once(part)
        gathered_over.update({axis.name: axis for axis in axes})
        return part

    args, kwargs = replaced(Part, whole_inside, (args, kwargs))
    output = answer(*args, **kwargs)
    for tensor in tensors_in(output):
        if not tensor.requires_grad:  # no function of its own: what it gives could not be written into
            continue
        for axis in sorted(gathered_over.values(), key=lambda axis: axis.depth):
            tensor.register_hook(partial(whole_over, axis=axis))
        # the tensor is not cut over inner axes: a gradient that arrives cut by both is gathered over these
        if not gathered_over and isinstance(tensor, Part) and tensor.axis.name not in SPACE:
            tensor.register_hook(lambda gradient: _cut_once(gradient)[0])
    return output
