"""Compare a loss's numbers on a batch with the sums over its parts, within the rounding of their dtypes."""

from __future__ import annotations

import math

import torch

from shardwise.device import autocast_states
from shardwise.step.loss import Loss


def bar_of(dtype: torch.dtype) -> float:
    """Returns the relative error that rounding may cause in this dtype; for float32 under autocast that of 16 bits."""
    # under autocast products of float32 weights are in 16 bits
    narrow = dtype == torch.float32 and any(autocast_states())
    return 5e-2 if narrow else _ROUNDS.get(dtype, 5e-2)


_ROUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}


def close(a: float, b: float, dtype: torch.dtype, least: float = 0.0, terms: float = 0.0) -> bool:
    """Whether two sums are equal within rounding.

    dtype   in which they were computed
    least   relative error that is allowed in any dtype
    terms   sum of the absolute values of the terms: in 16 bits sums of terms that cancel may differ by a fraction of it
    """
    bar = max(bar_of(dtype), least)
    return abs(a - b) <= bar * max(abs(a), abs(b), 1e-6, terms if bar > 1e-3 else 0.0)


def added_up(name: str, whole: Loss, value: float, dtype: torch.dtype, least: float = 0.0) -> bool:
    """Whether the loss's number `name` on the whole batch equals `value`, the sum over the parts, within rounding.

    dtype  in which the module computes; that of the number itself counts too
    least  as in `close`
    """
    least = max(least, _ROUNDS.get(whole.dtypes().get(name, torch.float64), 5e-2))
    return close(whole.numbers()[name], value, dtype, least, whole.terms if name == "sum" else 0.0)


def against(value: float, other: float) -> str:
    """Returns "a against b" for two numbers, with enough digits to show that they differ."""
    digits = next((digits for digits in range(6, 17) if f"{value:.{digits}g}" != f"{other:.{digits}g}"), 17)
    return f"{value:.{digits}g} against {other:.{digits}g}"


def number_apart(
    whole: Loss, first: Loss, second: Loss, dtype: torch.dtype, least: float = 0.0
) -> tuple[str, float, float] | None:
    """Returns (name, value on the whole, sum over the two parts) of the first number that does not add up, or None.

    `least`: as in `close`.
    """
    for name, value in whole.numbers().items():
        parts = first.numbers().get(name, 0.0) + second.numbers().get(name, 0.0)
        if not added_up(name, whole, parts, dtype, least):
            return name, value, parts
    return None


def finite(*losses: Loss) -> bool:
    """Whether all sums and weights of these losses are finite; if not, the first step names those that are not."""
    return all(math.isfinite(value) for loss in losses for value in loss.numbers().values())
