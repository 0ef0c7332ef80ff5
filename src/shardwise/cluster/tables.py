"""Tables of measured matrix products, other ops and collectives, interpolated in the logarithm of sizes.

Beyond the measured sizes a larger matrix product keeps the rate of the edge, and a larger message the bandwidth of the
largest one; smaller ones keep the time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from shardwise.cluster.catalogue import read


@dataclass(frozen=True, eq=False)
class GemmTable:
    """Measured products (m, k) x (k, n) of one dtype or kind.

    m, n, k  the sizes of the grid, ascending
    rate     {(m, n, k): TFLOP/s}, which may lack points of the grid
    """

    name: str
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    rate: dict[tuple[int, int, int], float]

    @property
    def best(self) -> float:
        """Returns the largest measured rate, TFLOP/s."""
        return max(self.rate.values())

    @lru_cache(maxsize=100_000)  # noqa: B019 - a table lives as long as the process
    def tflops(self, m: float, n: float, k: float) -> float:
        """Returns TFLOP/s of a product of any shape, interpolated."""
        if m > self.m[-1] and n < m:  # the transposed product costs the same and may lie inside the grid
            m, n = n, m
        total = weight = 0.0
        for mi, wm in _around(self.m, m):
            for ni, wn in _around(self.n, n):
                for ki, wk in _around(self.k, k):
                    value = self.rate.get((mi, ni, ki))
                    if value is not None and wm * wn * wk > 0:
                        total += wm * wn * wk * math.log(value)
                        weight += wm * wn * wk
        if weight == 0:  # no point around was measured, so the nearest one is used
            at = min(
                self.rate, key=lambda p: abs(math.log(p[0] / m)) + abs(math.log(p[1] / n)) + abs(math.log(p[2] / k))
            )
            return self.rate[at]
        rate = math.exp(total / weight)
        small = min(1.0, m / self.m[0]) * min(1.0, n / self.n[0]) * min(1.0, k / self.k[0])
        return rate * small  # below the grid the time stays the same, since latency dominates

    def seconds(self, m: float, n: float, k: float) -> float:
        """Returns the seconds of one product (m, k) x (k, n)."""
        return 2.0 * m * n * k / (self.tflops(m, n, k) * 1e12)


def _around(grid: tuple[int, ...], value: float) -> list[tuple[int, float]]:
    """Returns [(grid point, weight)] of the one or two points next to `value`, linear in the logarithm."""
    if value <= grid[0]:
        return [(grid[0], 1.0)]
    if value >= grid[-1]:
        return [(grid[-1], 1.0)]
    at = bisect_right(grid, value)
    low, high = grid[at - 1], grid[at]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


@dataclass(frozen=True, eq=False)
class CollectiveTable:
    """Measured collectives inside one domain."""

    name: str  # of the device
    nccl: str  # version of NCCL
    times: dict[str, dict[int, tuple[tuple[int, float], ...]]]  # op -> ranks -> ((bytes of full tensor, us), ...)

    def seconds(self, op: str, ranks: int, size_bytes: float) -> float:
        """Returns seconds of an `op` that is in `times`; unmeasured `ranks` get the nearest one's bus bandwidth."""
        by_ranks = self.times[op]
        near = min(by_ranks, key=lambda p: (abs(math.log(p / ranks)), -p))
        scale = bus_factor(op, ranks) / bus_factor(op, near)
        return _read(by_ranks[near], size_bytes) * scale * 1e-6


def bus_factor(op: str, ranks: int) -> float:
    """Returns the bytes on a rank's link for each byte of the full tensor (nccl-tests, PERFORMANCE.md).

    op  a collective, or "halo", whose size is the bytes received
    """
    if op == "halo":
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if op == "all_reduce" else share


@dataclass(frozen=True, eq=False)
class BetweenTable:
    """Measured collectives and messages ("send") between nodes.

    times  {op: {ranks of each node: {nodes: ((bytes of the full tensor, microseconds), ...)}}}
    """

    times: dict[str, dict[int, dict[int, tuple[tuple[int, float], ...]]]]

    def seconds(self, op: str, nodes: int, per_node: int, size_bytes: float) -> float:
        """Returns seconds of an `op` that is in `times` over `per_node` ranks of each of `nodes` nodes.

        Interpolated in the logarithm of bytes, nodes and ranks. Beyond the measured numbers the nearest is scaled: the
        time of the smallest message by the hops of a tree (all-reduce) or a ring, the rest by the bytes on a link.
        """
        total, by_per_node = 0.0, self.times[op]
        for e, share in _around(tuple(sorted(by_per_node)), per_node):
            for n, part in _around(tuple(sorted(by_per_node[e])), nodes):
                points = by_per_node[e][n]
                wanted = (_outside(by_per_node[e], nodes, n), _outside(by_per_node, per_node, e))
                us = _over(op, _read(points, size_bytes), points[0][1], (n, e), wanted)
                total += share * part * math.log(us)
        return math.exp(total) * 1e-6

    def near(self, op: str, nodes: int, per_node: int) -> str:
        """Returns text on the measurements from which a figure is interpolated; "" if this group was measured."""
        remarks = []
        grid_per_node = tuple(sorted(self.times[op]))
        beside = [near for near, share in _around(grid_per_node, per_node) if share > 0]
        grid_nodes = tuple(sorted(self.times[op][beside[0]]))
        for wanted, grid, unit in ((nodes, grid_nodes, "nodes"), (per_node, grid_per_node, "rank(s) a node")):
            measured = [near for near, share in _around(grid, wanted) if share > 0]
            if len(measured) == 2:
                remarks.append(f"read between {measured[0]} and {measured[1]} {unit}")
            elif measured[0] != wanted:
                remarks.append(f"scaled from {measured[0]} {unit}")
        return ", ".join(remarks)


def _outside(grid: Iterable[int], value: int, near: int) -> int:
    """Returns the size to which `_over` scales a figure: `value` if it is beyond the grid, else the point `near`."""
    return near if min(grid) <= value <= max(grid) else value


def _over(op: str, us: float, least: float, measured: tuple[int, int], wanted: tuple[int, int]) -> float:
    """Returns the microseconds over `wanted` (nodes, ranks of each), scaled from `us` over `measured`.

    least  microseconds of the smallest message over `measured`
    """
    if wanted == measured:
        return us
    wait = min(least, us)
    hops = [math.log2(nodes) if op == "all_reduce" else nodes - 1.0 for nodes, _ in (wanted, measured)]
    factors = [bus_factor(op, nodes * per_node) for nodes, per_node in (wanted, measured)]
    return wait * hops[0] / hops[1] + (us - wait) * factors[0] / factors[1]


def _read(points: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the microseconds at `size`, interpolated between `points` (size, microseconds) in logarithms.

    Below the first point its time is returned, beyond the last the time is proportional to the size.
    """
    first, last = points[0], points[-1]
    if size <= first[0]:
        return first[1]
    if size >= last[0]:
        return last[1] * size / last[0]
    at = bisect_right(points, (size, math.inf))
    (low, slow), (high, fast) = points[at - 1], points[at]
    share = math.log(size / low) / math.log(high / low)
    return slow ** (1 - share) * fast**share


@cache
def measured_products(rows: tuple[tuple[str, int, int, int, float], ...], dtype: str) -> GemmTable | None:
    """Returns the table of `dtype` (or "conv", "conv_backward") from a probe's `Product` rows; None if none has it."""
    rate = {(m, n, k): 2e-6 * m * n * k / us for kind, m, n, k, us in rows if kind == dtype}
    if not rate:
        return None
    axes = [tuple(sorted({point[i] for point in rate})) for i in range(3)]
    return GemmTable(f"this machine, {dtype}", axes[0], axes[1], axes[2], rate)


@dataclass(frozen=True, eq=False)
class OpTable:
    """Measured ops other than products."""

    times: dict[str, tuple[tuple[float, float], ...]]  # name -> ((bytes, or FLOPs of attention, microseconds), ...)

    def seconds(self, name: str, amount: float) -> float:
        """Returns seconds of the op `name` of `amount` bytes (FLOPs of attention); an unmeasured one as an addition."""
        return _read(self.times.get(name) or self.times["add"], amount) * 1e-6


@cache
def measured_ops(rows: tuple[tuple[str, float, float], ...]) -> OpTable | None:
    """Returns the table of a probe's `OpTime` rows, or None if "add" was not measured."""
    times: dict[str, list[tuple[float, float]]] = {}
    for name, amount, us in rows:
        times.setdefault(name, []).append((amount, us))
    return OpTable({name: tuple(sorted(points)) for name, points in times.items()}) if "add" in times else None


@cache
def measured_collectives(rows: tuple[tuple[str, int, int, float], ...]) -> CollectiveTable | None:
    """Returns the table of a probe's `Message` rows, or None if there are none."""
    times: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for op, ranks, size, us in rows:
        times.setdefault(op, {}).setdefault(ranks, []).append((size, us))
    plain = {op: {p: tuple(sorted(points)) for p, points in by.items()} for op, by in times.items()}
    return CollectiveTable("this machine", "measured here", plain) if plain else None


@cache
def measured_between(rows: tuple[tuple[str, int, int, int, float], ...]) -> BetweenTable | None:
    """Returns the table of a probe's `Between` rows, or None if there are none."""
    points: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for op, nodes, per_node, size, us in rows:
        points.setdefault((op, per_node, nodes), []).append((size, us))
    times: dict[str, dict[int, dict[int, tuple[tuple[int, float], ...]]]] = {}
    for (op, per_node, nodes), sizes in points.items():
        times.setdefault(op, {}).setdefault(per_node, {})[nodes] = tuple(sorted(sizes))
    return BetweenTable(times) if times else None


@cache
def gemm_table(name: str) -> GemmTable | None:
    """Returns the products of a device in gemm.csv (bf16), or None if it is not there."""
    inner: list[int] = []
    rate: dict[tuple[int, int, int], float] = {}
    for row in read("gemm.csv"):
        if row["gpu"] != name:
            continue
        cells = row["microseconds"].split()
        # a row of "m" is a header with the values of k for the rows below it
        if row["m"] == "m":
            inner = [int(cell) for cell in cells]
            continue
        m, n = int(row["m"]), int(row["n"])
        for k, cell in zip(inner, cells, strict=True):
            # "-" means not measured
            if cell != "-":
                rate[m, n, k] = 2e-6 * m * n * k / float(cell)
    if not rate:
        return None
    axes = [tuple(sorted({point[i] for point in rate})) for i in range(3)]
    return GemmTable(name, axes[0], axes[1], axes[2], rate)


@cache
def collective_table(name: str) -> CollectiveTable | None:
    """Returns the collectives of a device in collectives.csv, or None if it is not there."""
    sizes: list[int] = []
    times: dict[str, dict[int, tuple[tuple[int, float], ...]]] = {}
    nccl = ""
    for row in read("collectives.csv"):
        cells = row["microseconds"].split()
        # a row without a GPU is a header with the message sizes of the rows below it
        if not row["gpu"]:
            sizes = [int(cell) for cell in cells]
        elif row["gpu"] == name:
            nccl = row["nccl"]
            points = tuple((s, float(c)) for s, c in zip(sizes, cells, strict=True) if c != "-")
            times.setdefault(row["op"], {})[int(row["ranks"])] = points
    return CollectiveTable(name, nccl, times) if times else None
