"""Whole weights in graphs: what a script computes of one, whose gradient comes to the ranks' pieces."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class OfPieces(torch.autograd.Function):
    """A whole weight; each rank takes its piece of what comes back."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, values: torch.Tensor, weights: Any) -> torch.Tensor:
        ctx.piece, ctx.weights = piece, weakref.ref(weights)  # a script keeps its last loss, and not its run
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return ctx.weights().cut(ctx.piece, gradient), None, None


class BesideForward(torch.autograd.Function):
    """A whole weight, in graphs that come to the gathered weight as the forward's do."""

    @staticmethod
    def forward(ctx: Any, gathered: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return gradient, None
