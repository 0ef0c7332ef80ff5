"""Bounds by which cuts of a traced module are left out of a search: the least time, degrees already slower.

Over t ranks of one axis a step takes about C + K (t - 1) + D / t: the work, what the axis adds (sums of activations,
turns in which stages wait), and what data ranks, t times fewer, send each other. That is convex in t: where two ranks
take longer than one, four take longer than two, and so does a second axis beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.software import Software
from shardwise.costs.units import seconds_text
from shardwise.layout.precisions import PRECISIONS
from shardwise.simulator.counted import Model
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.parts import GAPS
from shardwise.simulator.traced import between, kernels_of, same_ops


def least_seconds(
    model: Model, batch: int, world: int, cluster: Cluster, software: Software, precision: str
) -> float:  # fmt: skip
    """Returns the least seconds that computing one step takes without cutting the module; 0.0 where traces do not tell.

    A cut makes products narrower by as much as it gives a rank more samples, starts as many ops, and in a pipeline
    deals them over more micro-batches: it computes no faster for the same work.
    """
    # traces of different operations cannot be interpolated; a bound of 0 prunes nothing
    if not same_ops(model.small, model.large):
        return 0.0
    kernels, _ = kernels_of(cluster, Layout(), software, PRECISIONS[precision].products)
    own = max(model.small.samples, -(-batch // world))  # samples of a rank
    # a layout may take any of these micro-batches, so the bound is the best of them
    sizes = {own, *(2**place for place in range(own.bit_length()))}
    small, large = model.small, model.large
    seconds_per_sample = [between(small, large, n, kernels, software) / n for n in sizes if n >= small.samples]
    correction = cluster.device.correction.value if cluster.device.correction is not None else 1.0
    return min(seconds_per_sample) * batch / world * correction * (1.0 if cluster.device.kind == "cpu" else GAPS)


SLOWER = 1.05  # times as long as the fastest without it, from which an axis is behind
EVEN = 1.02  # micro-batches of half the size take as long within this: a larger one would not be faster


@dataclass
class _Alone:
    """Step times seen for one degree of tp or pp beside data ranks (without recompute, and with zero 0 or 1).

    fits   the fastest step by samples of a micro-batch
    whole  whether all sizes of micro-batch fit
    hopes  the fastest step if its computing took no longer than the least
    """

    fits: dict[int, float] = field(default_factory=dict)
    whole: bool = True
    hopes: float = float("inf")

    @property
    def seconds(self) -> float:
        return min(self.fits.values(), default=0.0)

    @property
    def free(self) -> bool:
        """Whether the best time here is not limited by memory: a larger micro-batch would not be faster."""
        if self.whole or not self.fits:
            return self.whole
        largest = max(self.fits)
        smaller = [seconds for size, seconds in self.fits.items() if size < largest]
        return self.fits[largest] > self.seconds or min(smaller, default=float("inf")) <= EVEN * self.seconds


class Slower:
    """Prunes larger degrees of tp and pp, once a smaller one alone was slower than the plan without it.

    fastest  seconds of the fastest step without either
    least    seconds that computing takes at least
    """

    def __init__(self, fastest: float, least: float):
        self.fastest, self.least = fastest, least
        self.alone: dict[tuple[str, int], _Alone] = {}
        self.remarks: dict[str, str] = {}  # by axis, a remark on what was not looked at

    def note(self, layout: Layout, forecast: Forecast | None) -> None:
        """Record the forecast of a layout that uses tp or pp alone; `forecast` is None where it does not fit.

        Other layouts, and those with recompute or zero 2 or 3, are ignored.
        """
        key = _axis(layout)
        # recompute and zero 2 and 3 cost time of their own, which would hide what the axis costs
        if key is None or layout.recompute != "none" or layout.sharded.gradients:
            return
        seen = self.alone.setdefault(key, _Alone())
        # some micro-batch does not fit: memory may hold this degree back
        if forecast is None:
            seen.whole = False
            return
        size, seconds = layout.micro_batch, forecast.step_s
        seen.fits[size] = min(seconds, seen.fits.get(size, seconds))
        # its time if computing were as fast as the bound: messages and bubbles of the axis remain
        seen.hopes = min(seen.hopes, seconds - max(0.0, forecast.parts["compute"] - self.least))

    def beyond(self, layout: Layout) -> bool:
        """Whether to skip a layout, with a remark: a smaller degree of its tp or pp was slower, not short of memory."""
        for (axis, degree), seen in self.alone.items():
            same = _axis(layout) == (axis, degree)
            # where memory limited the smaller degree, a larger one may still be faster:
            # test_an_axis_that_memory_holds_back_is_looked_at_further
            if getattr(layout, axis) < degree or not seen.fits or not seen.free:
                continue
            behind = seen.hopes > self.fastest if same else seen.seconds > SLOWER * self.fastest
            # beside the same degree only sp is skipped: it spares computing that tp repeats, and sends as much
            if behind and (not same or layout.sp):
                self.remarks.setdefault(axis, self._why(axis, degree, seen))
                return True
        return False

    def _why(self, axis: str, degree: int, seen: _Alone) -> str:
        """Returns why degrees of an axis beyond this one are not looked at."""
        return (
            f"{axis} beyond {degree} is not looked at: {axis}={degree} takes {seconds_text(seen.seconds)}, the fastest "
            f"step without {seconds_text(self.fastest)}, and more ranks of it, or another axis beside it, only add to "
            f"that (--fix {axis}={2 * degree} looks all the same)"
        )


def _axis(layout: Layout) -> tuple[str, int] | None:
    """Returns ("tp" or "pp", degree) of a layout whose module is cut by that axis alone; None for others."""
    if layout.ep * layout.cut_positions > 1 or (layout.tp > 1) == (layout.pp > 1):
        return None
    return ("tp", layout.tp) if layout.tp > 1 else ("pp", layout.pp)
