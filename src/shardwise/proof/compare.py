"""Two records side by side: the error of each tensor, the largest over the steps."""

from __future__ import annotations

import torch

from shardwise.proof.parity import (
    BUFFER_BAR,
    GRADIENT_BAR,
    GRADIENT_FLOOR,
    LOSS_BAR,
    PARAMETER_BAR,
    Parity,
)
from shardwise.proof.record import Record


def tensor_error(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    """max|a - b| / max(max|b|, floor); infinite where shapes or finiteness differ."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    error = float((a - b).abs().max()) / max(float(b.abs().max()), floor)
    return error if error == error else float("inf")


def compare(parity: Parity, one: Record, many: Record) -> None:
    """Write the errors of `many` ranks against `one` process into `parity`."""
    parity.notes += one.notices + many.notices
    float64 = {"loss": LOSS_BAR, "gradient": GRADIENT_BAR, "parameter": PARAMETER_BAR, "buffer": BUFFER_BAR}
    parity.bars = parity.bars or float64
    _compare_named(parity, "initial value", one.initial, many.initial, {}, one.lr)
    losses = zip(many.losses, one.losses, strict=True)
    parity.loss_error = max(abs(a - b) / max(abs(b), 1e-12) for a, b in losses)
    for step, expected in enumerate(one.gradients):
        largest = max((float(g.abs().max()) for g in expected.values() if g is not None and g.numel()), default=0.0)
        floor = GRADIENT_FLOOR * largest
        _compare_named(parity, "gradient", expected, many.gradients[step], parity.gradient_error, floor)
        _compare_named(parity, "parameter", one.parameters[step], many.parameters[step], parity.parameter_error, one.lr)
        _compare_named(parity, "buffer", one.buffers[step], many.buffers[step], parity.buffer_error, 1.0)


def _compare_named(
    parity: Parity,
    kind: str,
    expected: dict[str, torch.Tensor | None],
    found: dict[str, torch.Tensor | None],
    errors: dict[str, float],
    floor: float,
) -> None:
    for name in sorted(expected.keys() | found.keys()):
        a, b = found.get(name), expected.get(name)
        if (a is None) != (b is None):
            side = "one process" if a is None else "the plan"
            message = f"{kind} of '{name}' exists only in {side}"
            if message not in parity.differences:
                parity.differences.append(message)
        elif a is not None and b is not None:
            error = tensor_error(a, b, max(floor, 1e-300))
            if kind == "initial value" and error > parity.bars["parameter"]:
                parity.differences.append(f"{kind} of '{name}' differs by {error:.1e}")
            errors[name] = max(errors.get(name, 0.0), error)
