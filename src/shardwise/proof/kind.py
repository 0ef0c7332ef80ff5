"""Say in words how two tensors differ, if it can be told: a factor, a sign, an order, one rank's share."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

NEAR = 1e-6  # tolerance, relative to the largest value


def kind_of(actual: torch.Tensor, expected: torch.Tensor, shares: Sequence[torch.Tensor] = ()) -> str:
    """Returns in words how `actual` differs from `expected`, "" if nothing fits. `shares`: summands by data rank."""
    if actual.shape != expected.shape:
        return f"of shape {tuple(actual.shape)} where one process has {tuple(expected.shape)}"
    if not bool(torch.isfinite(actual).all()):
        return "not finite"
    a, b = actual.flatten(), expected.flatten()
    if not bool(a.any()):
        return "zero"
    # tried before a factor, since one missing summand of two equal ones is a factor of 1/2 too
    for rank, share in enumerate(shares):
        for sign, words in ((-1, "lacks the share of"), (1, "counts twice the share of")):
            if _near(a, b + sign * share.flatten()):
                return f"it {words} data rank {rank}"
    if a.is_complex() or b.is_complex():
        if _near(a, b.conj()):
            return "conjugated"
        a, b = torch.view_as_real(a.resolve_conj()).flatten(), torch.view_as_real(b.resolve_conj()).flatten()
    norm = float((b * b).sum())
    # the least-squares factor, named only if it explains every element
    factor = float((a * b).sum()) / norm if norm else 0.0
    if factor and abs(factor - 1) > NEAR and _near(a, factor * b):
        return "the sign is turned" if abs(factor + 1) < NEAR else f"a factor of {_number(factor)}"
    if not _near(a, b) and _near(a.sort().values, b.sort().values):  # if near already, order explains nothing
        return "the same values in another order"
    wrong = ((a - b).abs() > NEAR * b.abs().max()).nonzero().flatten()
    if 0 < len(wrong) < len(a):
        first, last = int(wrong[0]), int(wrong[-1])
        place = f"from element {first} to {last}" if len(wrong) == last - first + 1 else f"the first at {first}"
        return f"{len(wrong)} of {len(a)} {'elements' if len(a) == actual.numel() else 'parts of numbers'}, {place}"
    return ""


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) <= NEAR * max(float(b.abs().max()), 1e-300)


def _number(factor: float) -> str:
    nice = Fraction(factor).limit_denominator(64)
    return str(nice) if abs(float(nice) - factor) < NEAR * abs(factor) else f"{factor:.6g}"
