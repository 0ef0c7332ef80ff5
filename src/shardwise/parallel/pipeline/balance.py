"""Choose the cut points of a recorded forward (`Flow`) that balance stages, first by cost, then by parameters."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from torch import nn

from shardwise.trace.flow import Flow

Used = Callable[[Flow], list[tuple[int, int]]]  # -> [(time, id of a parameter)], as `uses` and `uses_led`
SLACK = 1.05  # stages may cost this many times the best possible, in exchange for balanced parameters


def uses(flow: Flow) -> list[tuple[int, int]]:
    """Returns (time, id of the parameter) for each read of a parameter by an operation."""
    return [(op.time, flow.parameters[n]) for op in flow.ops if not op.inner for n in op.reads if n in flow.parameters]


def uses_led(flow: Flow) -> list[tuple[int, int]]:
    """Returns the entries of `uses` whose operation passes on a gradient of the output to the parameter."""
    # `led` does not follow gradients that the forward itself computes, which reach the output too
    led = {op.time for op in flow.ops if flow.taken or (op.leads and not flow.led.isdisjoint(op.makes))}
    return [(time, param) for time, param in uses(flow) if time in led]


def costs_of(flow: Flow) -> Prefix:
    """Returns prefix sums of the costs (`FlowOp.cost`) of the forward's operations, by their times."""
    # not `inner` ones, of a backward that the forward runs, since that runs on the stage that computed its forward
    forward = [op for op in flow.ops if not op.inner]
    return Prefix([op.time for op in forward], [op.cost for op in forward])


class Prefix:
    """Prefix sums of `values` at ascending `times`, for sums over any span."""

    def __init__(self, times: list[int], values: list[float]):
        self.times = times
        self.sums = [0.0]
        for value in values:
            self.sums.append(self.sums[-1] + value)

    def between(self, start: int, stop: int) -> float:
        """Returns the sum of the values at start <= time < stop."""
        return self.sums[bisect.bisect_left(self.times, stop)] - self.sums[bisect.bisect_left(self.times, start)]


def balanced(
    flow: Flow, module: nn.Module, moments: Sequence[int], count: int, used: Used
) -> tuple[float, list[int]]:  # fmt: skip
    """Returns (lowest possible cost of the slowest stage, indices of the `count` - 1 moments at which stages begin).

    moments  times at which a stage can begin;  count  number of stages
    used     when parameters are used; each stage must use a trainable one

    Among splits whose slowest stage costs at most SLACK times the lowest cost, the one whose largest stage has fewest
    parameters is chosen. Returns (inf, []) if some stage would always be without a trainable parameter.
    """
    edges = [0, *moments, flow.end]
    costs = costs_of(flow)
    trained = {id(p): p.numel() for p in module.parameters() if p.requires_grad}
    weighed = [(time, float(trained[param])) for time, param in used(flow) if param in trained]
    sizes = Prefix([t for t, _ in weighed], [v for _, v in weighed])

    def time_of(i: int, j: int) -> float:
        """Returns the cost of a stage from edge i to edge j; inf if it has nothing to train."""
        return costs.between(edges[i], edges[j]) if sizes.between(edges[i], edges[j]) > 0 else float("inf")

    def size_of(i: int, j: int) -> float:
        """Returns the trainable elements of a stage from edge i to edge j; inf if it costs more than `bound`."""
        return sizes.between(edges[i], edges[j]) if time_of(i, j) <= bound else float("inf")

    best, _ = _minimax(len(edges), count, time_of)
    if best == float("inf"):
        return best, []
    bound = best * SLACK
    _, cuts = _minimax(len(edges), count, size_of)
    return best, [cut - 1 for cut in cuts]


def _minimax(edges: int, count: int, value) -> tuple[float, list[int]]:
    """Splits the range from edge 0 to the last of `edges` into `count` pieces such that the largest value is least.

    value   (i, j) -> cost of the piece from edge i to edge j
    Returns (the largest piece's value, the `count` - 1 inner edges).
    """
    best = [0.0, *[float("inf")] * (edges - 1)]  # for each edge, the largest value of the best split up to it
    choice: list[list[int]] = []  # [number of pieces - 1][edge] -> edge at which the last piece begins
    for _ in range(count):
        new, come = [float("inf")] * edges, [0] * edges
        for j in range(1, edges):
            for i in range(j - 1, -1, -1):
                if best[i] == float("inf"):  # no split up to i with so few pieces
                    continue
                worst = max(best[i], value(i, j))
                if worst < new[j]:  # among equal ones the latest edge
                    new[j], come[j] = worst, i
        best = new
        choice.append(come)
    cuts, at = [], edges - 1
    for come in reversed(choice):
        at = come[at]
        cuts.append(at)
    return best[-1], list(reversed(cuts[:-1]))
