"""Bounds that prune sharded layouts of a traced module in a search: the least compute time, and slower degrees.

Over t ranks of one axis a step takes about C + K (t - 1) + D / t: the compute, what the axis adds (sums of activations,
waiting stages), and collectives of data ranks, of which there are t times fewer. That is convex in t, so if two ranks
take longer than one, then four take longer than two, and so does a second axis in addition.
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
    """Returns a lower bound of a step's compute in seconds for `batch` samples on `world` devices; 0.0 if unknown.

    It holds for sharded modules too. A shard makes matrix products narrower by the factor by which it gives a rank more
    samples, and starts as many ops, so the same work computes no faster.
    """
    # traces of different operations cannot be interpolated; a bound of 0 prunes nothing
    if not same_ops(model.small, model.large):
        return 0.0
    kernels, _ = kernels_of(cluster, Layout(), software, PRECISIONS[precision].products)
    own = max(model.small.samples, -(-batch // world))  # samples of a rank
    # a layout may use any of these micro-batches, so the bound is that of the fastest
    sizes = {own, *(2**place for place in range(own.bit_length()))}
    small, large = model.small, model.large
    seconds_per_sample = [between(small, large, n, kernels, software) / n for n in sizes if n >= small.samples]
    correction = cluster.device.correction.value if cluster.device.correction is not None else 1.0
    return min(seconds_per_sample) * batch / world * correction * (1.0 if cluster.device.kind == "cpu" else GAPS)


SLOWER = 1.05  # an axis is slower if its step takes longer than the fastest without it by this factor
EVEN = 1.02  # if a smaller micro-batch is as fast within this factor, a larger one would not be faster


@dataclass
class _Alone:
    """Step times of one degree of tp or pp with data ranks (without recompute, and with zero 0 or 1).

    fits   {samples of a micro-batch: seconds of the fastest step}, of layouts that fit
    whole  whether all layouts fit so far
    hopes  seconds of the fastest step if its compute took only the lower bound
    """

    fits: dict[int, float] = field(default_factory=dict)
    whole: bool = True
    hopes: float = float("inf")

    @property
    def seconds(self) -> float:
        return min(self.fits.values(), default=0.0)

    @property
    def free(self) -> bool:
        """Whether memory does not limit the best time, because a larger micro-batch would be no faster."""
        if self.whole or not self.fits:
            return self.whole
        largest = max(self.fits)
        smaller = [seconds for size, seconds in self.fits.items() if size < largest]
        return self.fits[largest] > self.seconds or min(smaller, default=float("inf")) <= EVEN * self.seconds


class Slower:
    """Prunes larger degrees of tp and pp once a smaller degree was slower than the fastest plan without it.

    fastest  seconds of the fastest step without tp and pp
    least    lower bound of a step's compute in seconds
    """

    def __init__(self, fastest: float, least: float):
        self.fastest, self.least = fastest, least
        self.alone: dict[tuple[str, int], _Alone] = {}
        self.remarks: dict[str, str] = {}  # axis -> remark on the degrees that were skipped

    def note(self, layout: Layout, forecast: Forecast | None) -> None:
        """Records the forecast of a layout that uses tp or pp alone; None: the layout does not fit.

        Other layouts, and those with recompute or zero 2 or 3, are ignored.
        """
        key = _axis(layout)
        # recompute and zero 2 and 3 cost time of their own, which would hide what the axis costs
        if key is None or layout.recompute != "none" or layout.sharded.gradients:
            return
        seen = self.alone.setdefault(key, _Alone())
        # a micro-batch that does not fit may have been faster
        if forecast is None:
            seen.whole = False
            return
        size, seconds = layout.micro_batch, forecast.step_s
        seen.fits[size] = min(seconds, seen.fits.get(size, seconds))
        # compute reduced to its bound leaves the axis's messages and bubbles
        seen.hopes = min(seen.hopes, seconds - max(0.0, forecast.parts["compute"] - self.least))

    def beyond(self, layout: Layout) -> bool:
        """Whether to skip a layout, because a degree of tp or pp no larger than its own was slower; adds a remark.

        A degree that memory limited does not count.
        """
        for (axis, degree), seen in self.alone.items():
            same = _axis(layout) == (axis, degree)
            # if memory limited the smaller degree, a larger one may still be faster
            # (test_an_axis_that_memory_holds_back_is_looked_at_further)
            if getattr(layout, axis) < degree or not seen.fits or not seen.free:
                continue
            behind = seen.hopes > self.fastest if same else seen.seconds > SLOWER * self.fastest
            # of the same degree only sp is skipped, which saves compute that tp repeats but sends as much
            if behind and (not same or layout.sp):
                self.remarks.setdefault(axis, self._why(axis, degree, seen))
                return True
        return False

    def _why(self, axis: str, degree: int, seen: _Alone) -> str:
        """Returns the remark on why larger degrees of `axis` are skipped."""
        return (
            f"{axis} beyond {degree} is not looked at: {axis}={degree} takes {seconds_text(seen.seconds)}, the fastest "
            f"step without {seconds_text(self.fastest)}, and more ranks of it, or another axis beside it, only add to "
            f"that (--fix {axis}={2 * degree} looks all the same)"
        )


def _axis(layout: Layout) -> tuple[str, int] | None:
    """Returns ("tp" or "pp", degree) if that axis alone shards the module, else None."""
    if layout.ep * layout.cut_positions > 1 or (layout.tp > 1) == (layout.pp > 1):
        return None
    return ("tp", layout.tp) if layout.tp > 1 else ("pp", layout.pp)
