"""Compare a loss's numbers on a batch with the sums of its parts' numbers, within the rounding of their dtypes."""

from __future__ import annotations

import math

import torch

from shardwise.device import autocast_states
from shardwise.step.loss import Loss


def bar_of(dtype: torch.dtype) -> float:
    """Returns the relative error that rounding may cause in this dtype (of float32 under autocast that of 16 bits)."""
    # under autocast float32 weights compute in 16 bits
    narrow = dtype == torch.float32 and any(autocast_states())
    return 5e-2 if narrow else _ROUNDS.get(dtype, 5e-2)


_ROUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}


def close(a: float, b: float, dtype: torch.dtype, least: float = 0.0, terms: float = 0.0) -> bool:
    """Whether two sums are equal within rounding.

    least   relative error that is allowed in any dtype
    terms   added up without their signs: where a dtype rounds much, sums of terms that cancel differ by a part of these
    """
    bar = max(bar_of(dtype), least)
    return abs(a - b) <= bar * max(abs(a), abs(b), 1e-6, terms if bar > 1e-3 else 0.0)


def added_up(name: str, whole: Loss, value: float, dtype: torch.dtype, least: float = 0.0) -> bool:
    """Whether a loss's number equals `value`, the parts' sum, within rounding, of its own dtype too.

    dtype  in which the module computes;  least  as of `close`
    """
    least = max(least, _ROUNDS.get(whole.dtypes().get(name, torch.float64), 5e-2))
    return close(whole.numbers()[name], value, dtype, least, whole.terms if name == "sum" else 0.0)


def against(value: float, other: float) -> str:
    """Returns two numbers that differ as text, with as many digits as show it."""
    digits = next((digits for digits in range(6, 17) if f"{value:.{digits}g}" != f"{other:.{digits}g}"), 17)
    return f"{value:.{digits}g} against {other:.{digits}g}"


def number_apart(
    whole: Loss, first: Loss, second: Loss, dtype: torch.dtype, least: float = 0.0
) -> tuple[str, float, float] | None:
    """Returns (name, the whole's value, the parts' sum) of the first number that does not add up, or None."""
    for name, value in whole.numbers().items():
        parts = first.numbers().get(name, 0.0) + second.numbers().get(name, 0.0)
        if not added_up(name, whole, parts, dtype, least):
            return name, value, parts
    return None


def finite(*losses: Loss) -> bool:
    """Whether all sums and weights of a loss are finite; the first step names those that are not."""
    return all(math.isfinite(value) for loss in losses for value in loss.numbers().values())
