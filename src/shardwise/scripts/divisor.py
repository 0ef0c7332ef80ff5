"""What a loss was divided by, read from its autograd graph: a mean over a rank's samples hides the weight it needs.

    cross_entropy(...)            NllLoss, reduction mean, total weight 512        a mean over 512
    (a - b).pow(2).mean()         Mean of 4096                                     a mean over 4096
    nll.sum() / mask.sum()        Div(Sum, 37)                                     a mean over 37
    ce * 0.5 + penalty.mean()     Add of both                                      both

Means over numbers in proportion to ranks' samples are averaged in that proportion; others may not be.

What this does not do: guess. A graph that ends in anything else is unknown, and the caller asks for the weight.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.errors import InputError

_MEAN, _SUM = 1, 2  # torch's numbers for `reduction`
_SHAPE_ONLY = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "Neg"}
_DEPTH = 64


@dataclass(frozen=True)
class Divisor:
    """`kind` is "mean", "sum" or "unknown"; `numbers` are what the terms were divided by, the largest first; `written`
    are those of them that stand in the script as divisions of the whole loss."""

    kind: str
    numbers: tuple[float, ...] = ()
    written: tuple[float, ...] = ()


UNKNOWN = Divisor("unknown")


def divisor_of(loss: torch.Tensor) -> Divisor:
    """What `loss`, one number, is a mean over."""
    if loss.grad_fn is None:
        return UNKNOWN
    with _disable_current_modes():  # a Python number that was saved is no tensor to them
        return _of(loss.grad_fn, _DEPTH)


def refuse_division(loss: torch.Tensor, weight: float, accumulate: int) -> None:
    """Raise `InputError` for a sum, given with its weight, that was divided by the number of micro-batches too."""
    found = divisor_of(loss) if accumulate > 1 else UNKNOWN
    own = found.numbers == found.written and weight in found.written  # a sum over its weight: the mean itself
    if accumulate in found.written and not (own and found.written.count(accumulate) == 1 and accumulate == weight):
        raise InputError(
            f"prepared.backward(loss, weight): the loss was divided by {accumulate}, the micro-batches of a step, and "
            "the weights of a step's micro-batches are added up, so it would be divided twice: leave the division "
            "out, for a mean over all of the step; or prepared.backward(loss, mean_over=n), for the mean of means as "
            "the script has it"
        )


def _of(node: Any, depth: int) -> Divisor:
    if node is None or depth == 0:
        return UNKNOWN
    name = re.sub(r"Backward\d*$", "", node.name())
    children = [child for child, _ in node.next_functions if child is not None]
    if name == "Mean" and not hasattr(node, "_saved_dim"):
        return Divisor("mean", (float(node._saved_self_sym_numel),))
    if name == "Sum" and not hasattr(node, "_saved_dim"):
        return Divisor("sum")
    if hasattr(node, "_saved_reduction"):
        return _of_loss(node)
    if name in _SHAPE_ONLY and len(children) == 1:
        return _of(children[0], depth - 1)
    if name == "Mul" and len(children) == 1:
        return _of(children[0], depth - 1)
    if name == "Div" and len(children) == 1 and node.next_functions[0][0] is children[0]:
        return _divided(_of(children[0], depth - 1), _one_number(node._saved_other))
    if name in ("Add", "Sub"):
        return _together([_of(child, depth - 1) for child in children])
    return UNKNOWN


def _of_loss(node: Any) -> Divisor:
    """A loss function of torch's: it kept its reduction, and the weight or the elements it averaged over."""
    if node._saved_reduction == _SUM:
        return Divisor("sum")
    if node._saved_reduction != _MEAN:
        return UNKNOWN
    if hasattr(node, "_saved_total_weight"):
        return Divisor("mean", (float(node._saved_total_weight),))
    return Divisor("mean", (float(node._saved_self.numel()),)) if hasattr(node, "_saved_self") else UNKNOWN


def _divided(inner: Divisor, by: float | None) -> Divisor:
    if by is None:
        return UNKNOWN
    if inner.kind not in ("sum", "mean"):
        return UNKNOWN
    return Divisor("mean", (*inner.numbers, by), (*inner.written, by))


def _together(terms: list[Divisor]) -> Divisor:
    kinds = {term.kind for term in terms}
    if len(kinds) != 1 or "unknown" in kinds:
        return UNKNOWN
    numbers = sorted({number for term in terms for number in term.numbers}, reverse=True)
    return Divisor(kinds.pop(), tuple(numbers))


def _one_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
