"""Choose, of places to cut a forward, those that balance stages: by cost, then parameters. For traced modules."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from torch import nn

from shardwise.trace.flow import Flow

Used = Callable[[Flow], list[tuple[int, int]]]
SLACK = 1.05  # of the best time, within which stages are balanced by their parameters


def uses(flow: Flow) -> list[tuple[int, int]]:
    """Returns (time, id of the parameter) for each read of a parameter by an operation."""
    return [(op.time, flow.parameters[n]) for op in flow.ops if not op.inner for n in op.reads if n in flow.parameters]


def uses_led(flow: Flow) -> list[tuple[int, int]]:
    """Returns the entries of `uses` whose operation passes on a gradient of the output."""
    # a forward that takes gradients itself: its output is reached by these too, which `led` does not follow
    led = {op.time for op in flow.ops if flow.taken or (op.leads and not flow.led.isdisjoint(op.makes))}
    return [(time, param) for time, param in uses(flow) if time in led]


def costs_of(flow: Flow) -> Prefix:
    """Returns sums, over spans of time, of the costs (`FlowOp.cost`) of the operations that a stage is charged for."""
    # `inner`: of a gradient that the forward takes; its backward is computed on the stage that computed its forward
    forward = [op for op in flow.ops if not op.inner]
    return Prefix([op.time for op in forward], [op.cost for op in forward])


class Prefix:
    """Values at times, whose sum over any span is read off two running sums."""

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
    """Returns (the slowest stage's cost, indices of the `count` - 1 moments at which stages begin).

    moments  at which a stage can begin
    used     when parameters are used, of which each stage is to have some

    The slowest stage is as fast as can be; within SLACK of that, the largest one as small. (inf, []) where a stage
    would have nothing to train.
    """
    edges = [0, *moments, flow.end]
    costs = costs_of(flow)
    trained = {id(p): p.numel() for p in module.parameters() if p.requires_grad}
    weighed = [(time, float(trained[param])) for time, param in used(flow) if param in trained]
    sizes = Prefix([t for t, _ in weighed], [v for _, v in weighed])

    # a stage without a parameter to train has nothing for an optimizer: never the best
    def time_of(i: int, j: int) -> float:
        return costs.between(edges[i], edges[j]) if sizes.between(edges[i], edges[j]) > 0 else float("inf")

    def size_of(i: int, j: int) -> float:
        return sizes.between(edges[i], edges[j]) if time_of(i, j) <= bound else float("inf")

    best, _ = _minimax(len(edges), count, time_of)
    if best == float("inf"):
        return best, []
    bound = best * SLACK
    _, cuts = _minimax(len(edges), count, size_of)
    return best, [cut - 1 for cut in cuts]


def _minimax(edges: int, count: int, value) -> tuple[float, list[int]]:
    """Returns (the largest piece's value(i, j), the `count` - 1 edges) of the cut of [0, edges) that makes it least."""
    best = [0.0, *[float("inf")] * (edges - 1)]  # by edge: the largest piece of the best way there in so many pieces
    choice: list[list[int]] = []  # by number of pieces, then by edge: where the last of them begins
    for _ in range(count):
        new, come = [float("inf")] * edges, [0] * edges
        for j in range(1, edges):
            for i in range(j - 1, -1, -1):
                if best[i] == float("inf"):  # no way there in so few pieces
                    continue
                worst = max(best[i], value(i, j))
                if worst < new[j]:  # of equal ones the latest cut
                    new[j], come[j] = worst, i
        best = new
        choice.append(come)
    cuts, at = [], edges - 1
    for come in reversed(choice):
        at = come[at]
        cuts.append(at)
    return best[-1], list(reversed(cuts[:-1]))
