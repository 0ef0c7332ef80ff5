"""Convert distributed tensors to this rank's plain shares and back, around a program that computes on shares.

    Part (B, S, H) cut along H  --unwrapped-->  share (B, S, H/p)  -- program -->  share  --wrapped-->  Part

Both ways are differentiable: the gradient of a share is a part of the gradient. A sum is taken on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Axis
from shardwise.part.cuts import Owners
from shardwise.part.gathering import gather
from shardwise.part.sums import Sum, whole_gradient
from shardwise.part.tensor import Part


@dataclass(frozen=True)
class PartLayout:
    """How a part is cut."""

    dim: int
    owners: Owners
    axis: Axis
    soft: bool
    origin: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PartLayout | None:
        """That of a part, or of a sum's value (which is taken: collective the first time); None for a plain tensor."""
        value = tensor.value() if isinstance(tensor, Sum) else tensor
        if not isinstance(value, Part):
            return None
        return cls(value.dim_cut, value.owners, value.axis, value.soft, value.origin)

    @property
    def key(self) -> tuple:
        """Equal where layouts are."""
        return self.dim, self.owners, id(self.axis), self.soft

    def part(self, local: torch.Tensor) -> Part:
        """A share as a part."""
        return Part(local, self.dim, self.owners, self.axis, self.soft, self.origin)

    def share(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's share of a gradient, however it was dealt. Collective where it is a sum or cut otherwise."""
        if isinstance(gradient, Sum):
            gradient = gradient.value()
        if isinstance(gradient, Part):
            if gradient.dim_cut == self.dim and gradient.owners == self.owners:
                return gradient.local
            gradient = gather(gradient)
        return self.owners.take(gradient, self.dim, self.axis.index)


class _Unwrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: PartLayout | None) -> torch.Tensor:
        ctx.layout = layout
        value = tensor.value() if isinstance(tensor, Sum) else tensor
        return value.local.detach() if isinstance(value, Part) else value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return gradient if ctx.layout is None else ctx.layout.part(gradient), None


class _Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: PartLayout) -> Part:
        ctx.layout = layout
        return layout.part(local.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return ctx.layout.share(gradient).contiguous(), None


def unwrapped(tensor: torch.Tensor) -> tuple[torch.Tensor, PartLayout | None]:
    """This rank's share of a part (of a sum: of its value), or the plain tensor itself; and how it was cut."""
    layout = PartLayout.of(tensor)
    if layout is None and not isinstance(tensor, Sum):
        return tensor, None
    return _Unwrapped.apply(tensor, layout), layout


def wrapped(local: torch.Tensor, layout: PartLayout | None) -> torch.Tensor:
    """The part of which this is a share; a plain tensor as it is, whose gradient arrives whole."""
    if layout is None:
        return whole_gradient(local)
    if not local.requires_grad or not torch.is_grad_enabled():
        return layout.part(local.detach())
    return _Wrapped.apply(local, layout)
