"""Add up the sums and weights of `Task.metrics`; they are divided once, over all ranks, like the loss.

    Task.metrics(output, batch) -> {"accuracy": (right, count), "rmse": (squares (V,), count, "sqrt")}

accuracy = sum over ranks and micro-batches of right / the same of count. A third item is applied after the division:
"sqrt", "exp", or a function of one number. A vector is reported by place, as rmse/0, rmse/1, ...

What this does not do: metrics that are no quotient of sums (a median, an area under a curve).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import Axis, gather_rows
from shardwise.errors import InputError
from shardwise.host import read
from shardwise.part import plain
from shardwise.step.loss import Extra

METRICS = "metrics/"  # prefix of a metric's name among a loss's extra terms, which only the look has (`as_extras`)
_FINISH: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "exp": math.exp}
_SHAPE = "Task.metrics must return {name: (sum, weight)} or {name: (sum, weight, 'sqrt' | 'exp' | function)}"


class MetricTally:
    """Adds metrics up over micro-batches; `collect` returns their quotients over all ranks and resets the sums.

    metrics  `Task.metrics`;  sums  name -> (sum, weight), float64, both () or (V,)
    """

    def __init__(self, metrics: Callable[[Any, Any], dict], device: torch.device) -> None:
        self.metrics = metrics
        self.device = device
        self.sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._finish: dict[str, Callable[[float], float] | None] = {}

    @torch.no_grad()
    def add(self, output: Any, batch: Any, count: int) -> None:
        """Adds one micro-batch of this rank, of `count` samples.

        A stand-in (`count` 0) adds zeros, so that all ranks have the same names.
        """
        for name, total, weight, finish in self._read(self.metrics(output, batch)):
            self._finish[name] = finish
            total, weight = (total, weight) if count else (torch.zeros_like(total), torch.zeros_like(weight))
            before = self.sums.get(name)
            self.sums[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)

    def _read(self, returned: Any) -> list[tuple[str, torch.Tensor, torch.Tensor, Callable[[float], float] | None]]:
        """Returns (name, sum, weight, function to apply after the division or None) of each metric, in float64.

        Sum and weight are both () or (V,). Raises `InputError` for another return value of `Task.metrics`.
        """
        if not isinstance(returned, dict):
            raise InputError(f"{_SHAPE}, got {type(returned).__name__}")
        metrics = []
        for name, value in returned.items():
            # a third item is applied after the division ("sqrt")
            if not isinstance(value, tuple | list) or len(value) not in (2, 3):
                raise InputError(f"{_SHAPE}: '{name}' is not a sum and a weight; a mean has no weight to share")
            total, weight = (torch.as_tensor(plain(v), device=self.device).detach().double() for v in value[:2])
            # a weight may be one number for a vector of sums, not the other way round
            if total.dim() > 1 or weight.dim() > total.dim():
                raise InputError(
                    f"{_SHAPE}: '{name}' has a sum of shape {tuple(total.shape)}: give numbers or a vector"
                )
            metrics.append((str(name), total, weight.expand(total.shape), _finish(name, value[2:])))
        return metrics

    def as_extras(self, output: Any, batch: Any) -> dict[str, Extra]:
        """Returns {METRICS + name: extra term} of the metrics; the look then finds one that does not add up."""
        extras = {}
        with torch.no_grad():
            for name, total, weight, _ in self._read(self.metrics(output, batch)):
                for place, (s, w) in enumerate(zip(total.view(-1), weight.reshape(-1), strict=True)):
                    extras[f"{METRICS}{name}/{place}" if total.dim() else f"{METRICS}{name}"] = Extra(s, w)
        return extras

    def collect(self, axis: Axis) -> dict[str, float]:
        """Returns {metric: value} over all ranks since the last call, and resets the sums. Collective.

        A vector's elements are "name/0", "name/1", ... The value is NaN if its weight is 0. Returns {} if nothing was
        added.
        """
        names = sorted(self.sums)  # one order on all ranks
        if not names:
            return {}
        # for each name its sums, then its weights, end to end
        row = torch.cat([part.reshape(-1) for name in names for part in self.sums[name]])
        table = read(gather_rows(row, axis).sum(dim=0), "metrics")
        values, at = {}, 0
        for name in names:
            size = self.sums[name][0].numel()
            totals, weights = table[at : at + size], table[at + size : at + 2 * size]
            at += 2 * size
            for place, (total, weight) in enumerate(zip(totals, weights, strict=True)):
                key = f"{name}/{place}" if self.sums[name][0].dim() else name
                values[key] = self._value(name, total, weight)
        self.sums.clear()
        return values

    def _value(self, name: str, total: float, weight: float) -> float:
        """Returns total / weight after the metric's function; NaN if the weight is 0 or the function fails."""
        if not weight:
            return math.nan
        finish = self._finish[name]
        try:
            return total / weight if finish is None else finish(total / weight)
        except (ValueError, OverflowError):  # the root of a negative number, the exponential of a large one
            return math.nan


def added_extras(first: dict[str, Extra], second: dict[str, Extra]) -> dict[str, Extra]:
    """Returns the extra terms (`as_extras`) of two batches added up by name."""
    both = dict(first)
    for name, extra in second.items():
        before = both.get(name, Extra(torch.zeros_like(extra.total), 0.0))
        assert before.weight is not None and extra.weight is not None
        both[name] = Extra(before.total + extra.total, before.weight + extra.weight)
    return both


def _finish(name: str, third: Any) -> Callable[[float], float] | None:
    """Returns the function to apply to a metric after the division, None without one; `InputError` if unknown.

    third  [] or [the metric's third item: "sqrt", "exp" or a function]
    """
    if not third:
        return None
    if callable(third[0]):
        return third[0]
    if third[0] not in _FINISH:
        raise InputError(f"{_SHAPE}: '{name}' ends with {third[0]!r}")
    return _FINISH[third[0]]
