"""Leave gradients of whole weights as summands: each rank adds to a sum that is taken once for a step."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from shardwise.comm import Axis
from shardwise.host import to_device
from shardwise.part.levels import Distributed
from shardwise.part.sums import Sum, plain
from shardwise.part.tensor import Part


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
    """Returns the tensor, whose gradient arrives as this rank's summand of a sum over `axes` still to be taken.

    Gradients of weights are summed over these ranks once for a step, with those of the other samples.
    """
    if not axes or not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return _Summand.apply(tensor, axes)


def summand(gradient: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Returns this rank's summand over `axes` (outermost first) of a gradient that is a sum, cut, or whole on them."""
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
    """Returns zeros distributed as the gradient: ranks that add nothing come to the collectives of the others."""
    if isinstance(gradient, Sum) and gradient.waits and gradient.added is None:
        return gradient.like(_nothing_of(gradient.local))
    return torch.zeros_like(gradient)


def _in_place(part: Part) -> torch.Tensor:
    """Returns a tensor of the whole shape with this rank's share in its place, and zeros elsewhere."""
    places = to_device(part.owners.indices(part.axis.index), part.device)
    shape = list(part.local.shape)
    shape[part.dim_cut] = part.owners.size
    return part.local.new_zeros(shape).index_copy(part.dim_cut, places, plain(part.local))


__all__ = ["summand", "with_summed_gradient"]
