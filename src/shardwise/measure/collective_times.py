"""Times collectives inside a node by op, size and number of ranks, in the situation in which a step runs them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Axis, all_gather, all_reduce, all_to_all, reduce_scatter
from shardwise.device import synchronize
from shardwise.measure.pace import Budget, Pace, ends_first, within
from shardwise.planner.candidates import divisors

BYTES = tuple(2**i for i in range(10, 27, 2))
WORK = 256  # rows and columns of the matrix product before each collective: half a millisecond of a CPU
OFTEN, SELDOM, LARGE = 64, 5, 2**20  # calls of a collective of at most LARGE bytes, and of a larger one
LEAST = 5  # sizes that are measured even on a slow machine
BUDGET_S = 0.2  # seconds for one collective of one size

Message = tuple[str, int, int, float]


def collective_times(device: torch.device, ranks: int, pace: Pace, budget: Budget) -> list[Message]:
    """Returns rows (op, ranks, bytes of the full tensor, microseconds), sizes ascending. Collective.

    For op "halo", an all-to-all between neighbours alone, bytes are those that a rank with two neighbours receives.

    Groups of neighbouring ranks, of every size that divides `ranks`, run at the same time as in a run. The smallest and
    the largest tensor and three others are measured in any case, since latency plus bytes is no line on a logarithmic
    scale; further sizes follow until time is up.
    """
    rows: list[Message] = []
    groups = divisors(ranks)[1:]
    for at, size in enumerate(groups):
        group, every = dist.new_subgroups(size)
        axis = Axis("probe", size, dist.get_rank(group), group, tuple(dist.get_process_group_ranks(group)))
        # for two ranks a halo is an all-to-all
        figures = [partial(of_size, pace, axis, count, halo=size > 2) for count in ends_first(BYTES)]
        rows += sorted(chain(*within(budget.part(1 / (len(groups) - at), device), figures, LEAST, device)))
        for each in every:
            if dist.get_rank(each) >= 0:
                dist.destroy_process_group(each)
    return rows


def of_size(
    pace: Pace, axis: Axis, size_bytes: int, may_s: float = math.inf, *, halo: bool = False
) -> list[Message]:  # fmt: skip
    """Returns a row of each collective over `axis` with a tensor of `size_bytes`, in about `may_s` seconds.

    halo  whether an exchange between neighbours is measured too
    """
    device, ranks = pace.device, axis.size
    chunk = max(1, size_bytes // 4 // ranks)
    full, other = (torch.zeros(chunk * ranks, device=device) for _ in range(2))
    part = torch.zeros(chunk, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": partial(all_reduce, full, axis, "probe"),
        "all_gather": partial(all_gather, full, part, axis, "probe"),
        "reduce_scatter": partial(reduce_scatter, part, full, axis, "probe"),
        "all_to_all": partial(all_to_all, other, full, [chunk] * ranks, [chunk] * ranks, axis, "probe"),
    }
    if halo:
        beside = [full.numel() // 2 if abs(rank - axis.index) == 1 else 0 for rank in range(ranks)]
        calls["halo"] = partial(all_to_all, other[: sum(beside)], full[: sum(beside)], beside, beside, axis, "probe")
    most = OFTEN if size_bytes <= LARGE else SELDOM

    def took(call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        after_work(call, device, 1)
        # `after_work` makes one call more than asked, so two here
        once = torch.tensor([(time.perf_counter() - began) / 2], device=device)
        all_reduce(once, axis, "probe")  # so that all ranks make equally many calls
        within_s = min(BUDGET_S, may_s / len(calls))
        times = min(most, max(SELDOM if within_s > 0 else 1, int(within_s * ranks / float(once))))
        return 1e6 * pace.seconds(partial(after_work, call, device, times))

    return [(op, ranks, full.nbytes, took(call)) for op, call in calls.items()]


def after_work(call: Callable[[], Any], device: torch.device, times: int) -> float:
    """Returns the mean seconds of `times` calls, each after a matrix product, so that late ranks are waited for.

    The mean is used because a step makes many calls, whose sum counts. The slowest tenth is left out.
    """
    a, taken = torch.ones(WORK, WORK, device=device), []
    for _ in range(times + 1):  # the same number on every rank
        torch.mm(a, a)
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    kept = sorted(taken[1:])[: times - times // 10]
    return sum(kept) / len(kept)
