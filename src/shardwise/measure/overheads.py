"""Measures the seconds that Python and the engine add to a step, by technique, on reference modules.

Steps of these modules are measured, and forecast from figures of the same probe without overhead. The difference is
divided among the step, each op, each op on sharded tensors, and each unit or message (costs/overhead), by non-negative
least squares over three tiny modules: few blocks, more blocks, deeper blocks. Larger modules give a factor on each kind
of op (products with attention, convolutions, all others), since caches are in another state inside a step. Under
techniques with many collectives a large module gives the share of its work for which a rank waits for others.

A "technique" here is a name such as "zero3" or "tp", with the suffix ` draws` if random operations are followed.

*What this does not do*: compiled modules, experts; devices that run behind the host, where overhead hides.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import geometric_mean, median

import numpy as np
import torch

from shardwise.cluster import Cluster
from shardwise.cluster.cluster import Overhead as OverheadRow
from shardwise.comm import everybody, gather_rows
from shardwise.costs.kernels import KINDS
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.overhead import BASE, DRAWS, Overhead, events
from shardwise.costs.software import software
from shardwise.layout import Plan
from shardwise.layout.zero_stages import SHARDED
from shardwise.measure.pace import Beat, Budget, Pace, over_ranks, pace_beside
from shardwise.measure.reference_modules import large_tasks, reference_task
from shardwise.planner.traced_task import Traced
from shardwise.progress import Say, silent
from shardwise.task import Task

REFERENCES = ((2, 1), (6, 1), (2, 4))  # (blocks, feed-forward parts of a block) of each tiny module
WARM, MOST, BUDGET_S = 4, 320, 0.6  # warm-up steps of a module, most timed steps, seconds for these
LEAST, STEPS = 6, 24  # fewest steps for a median, and for a reliable one if there is time
PASSES, AGREE = 2, 1.08  # passes over all modules, and the factor within which two results agree
TURNS = 6  # iterations of `fit`
ALIKE = {"zero2": "zero1", "sp": "tp"}  # techniques that a quick probe assumes to cost as much as another
DRAWN = (BASE, "zero3", "tp", "sp", "pp")  # techniques that are measured again with random operations followed
OFTEN = ("zero3", "tp", "sp")  # techniques with many collectives in a step
# kind of op -> techniques under which its module runs; modules without matrix products cannot be sharded by tp
LARGE = {"products": (BASE, "zero1", "zero3", "tp", "sp"), "convolutions": (BASE, "zero1"), "rest": (BASE, "zero1")}
TIMID = 0.03  # weight of equal factors for all kinds, against the weight 1 of a step: used if no step has a kind
NOTHING = Overhead()
SHIFT = 0.01  # change of a factor by which its part of a step is found


def plans(ranks: int, quick: bool = False) -> dict[str, list[str]]:
    """Returns {technique: [plan over all `ranks` ranks for each of REFERENCES]}.

    quick   whether techniques in `ALIKE` are left out, and random operations followed only under replicas
    """
    texts = {BASE: f"dp_replicate={ranks}"}
    if ranks > 1:
        texts |= {f"zero{stage.number}": f"dp_shard={ranks},zero={stage.number}" for stage in SHARDED}
    # tp=2 and pp=2 need an even number of ranks
    if ranks % 2 == 0:
        rest = f",dp_replicate={ranks // 2}" if ranks > 2 else ""
        texts |= {"tp": f"tp=2{rest}", "sp": f"tp=2,sp=true{rest}", "pp": f"pp=2{rest}"}
    texts = {name: plan for name, plan in texts.items() if not (quick and name in ALIKE)}
    texts |= {name + DRAWS: texts[name] for name in (DRAWN[:1] if quick else DRAWN) if name in texts}
    return {name: [_busier(name, plan, at) for at in range(len(REFERENCES))] for name, plan in texts.items()}


def _busier(name: str, plan: str, reference: int) -> str:
    """Returns the plan for the module at index `reference`; a pipeline's last one gets more micro-batches.

    Otherwise all modules would have equally many messages, and their cost could not be told from the step's.
    """
    return f"{plan},microbatches=4" if name.startswith("pp") and reference == len(REFERENCES) - 1 else plan


Large = dict[tuple[str, str], float]  # (kind of op, technique) -> seconds of a step


def step_times(
    ranks: int, pace: Pace, say: Say = silent, *, budget: Budget | None = None, quick: bool = False
) -> tuple[dict[str, list[float]], Large]:
    """Times steps of all reference modules on all ranks. Collective.

    Returns ({technique: [seconds of a step of each tiny module]}, {(kind of op, technique): seconds of a large one}).

    pace    corrects times of this rank; `budget`: for all, None: unlimited
    quick   whether each module is measured once. If not, all are measured `PASSES` times, so that a slow moment of the
            machine does not affect one module alone, and again if the results disagree; the median counts

    A module takes its share of the budget left, and none begins that would not end in time.
    """
    budget = budget or Budget(math.inf)
    of = plans(ranks, quick)
    tiny = {(name, at): (reference_task(*sizes, 4 * ranks), plan, name.endswith(DRAWS)) for name, texts in of.items()
            for at, (plan, sizes) in enumerate(zip(texts, REFERENCES, strict=True))}  # fmt: skip
    large = {(kind, name): (task, of[name][0], False) for kind, task in large_tasks(ranks).items()
             for name in LARGE[kind] if name in of}  # fmt: skip
    work = [*tiny.values(), *large.values()]
    measured: list[list[float]] = [[] for _ in work]
    took = [0.0] * len(work)
    rounds = 1 if quick else PASSES + 1
    for turn in range(rounds):
        for at, ((task, plan, follows), seen) in enumerate(zip(work, measured, strict=True)):
            left = budget.left_s()
            if turn and took[at] > left:  # it would not end in time
                continue
            apart = max(seen) / min(seen) if seen else 1.0
            if turn == PASSES and over_ranks(apart) < AGREE:  # the last round is for modules whose passes disagree
                continue
            say(_progress_text(turn, rounds, at, len(work), plan, left))
            seen.append(_seconds(task, plan, pace, left / (len(work) - at), follows))
            took[at] = left - budget.left_s()
    times = [median(seen) for seen in measured]
    of_tiny = dict(zip(tiny, times, strict=False))
    steps = {name: [of_tiny[name, at] for at in range(len(REFERENCES))] for name in of}
    return steps, dict(zip(large, times[len(tiny) :], strict=True))


def _progress_text(turn: int, rounds: int, at: int, count: int, plan: str, left_s: float) -> str:
    """Returns the line of progress for module `at` of `count` in round `turn`; `left_s`: seconds left."""
    more = ", the fewest steps, since time is up" if left_s <= 0 else ""
    if left_s > 0 and math.isfinite(left_s):
        more = f", {left_s:.0f} s left at most"
    return f"probe: steps of small modules, round {turn + 1} of {rounds}, {at + 1} of {count}: {plan}{more}"


def _seconds(task: Task, plan: str, pace: Pace, share_s: float = math.inf, follows: bool = False) -> float:
    """Returns the median seconds of a module's step under a plan, at the reference pace. Collective.

    share_s   seconds that it may take, warm-up included
    follows   whether every operation is followed for random numbers, as in a run of a module that uses some
    """
    seconds = _alone(task, plan, pace, share_s, follows)
    gc.collect()  # frees the engine with the threads of its groups, which would slow down the next engine
    return seconds


def _alone(task: Task, plan: str, pace: Pace, share_s: float, follows: bool) -> float:
    """Returns what `_seconds` returns; a function of its own, so that its engine is unreachable afterwards."""
    from shardwise.engine.engine import parallelize

    assert task.batch is not None and pace.reference is not None
    own = Budget(share_s)
    engine = parallelize(task, plan, check_loss=False, randomness="global" if follows else "fast")
    make = task.batch
    beat = Beat(pace.device)
    times: list[float] = []

    def take(steps: int) -> None:
        for _ in range(steps):
            batch = make(len(times))
            beat.before(len(times))
            began = time.perf_counter()
            engine.step(batch)
            times.append(time.perf_counter() - began)

    # the number of steps must be the same on all ranks, hence the mean
    take(WARM)
    step_s = over_ranks(median(times))
    beat.spread(step_s)
    take(steps_within(own.left_s(), step_s))
    beat.end(len(times))
    seen = gather_rows(torch.tensor(beat.us, dtype=torch.float64), everybody()).tolist()
    engine.close()
    steps = list(enumerate(times))[WARM:]
    beside = pace_beside(steps, beat.at, seen, in_turn=Plan.parse(plan).pp > 1)
    return median(times[WARM:]) * pace.reference / beside


def steps_within(left_s: float, step_s: float) -> int:
    """Returns the number of steps to time; `left_s`: seconds left, `step_s`: seconds of a step.

    That is as many as fit in `BUDGET_S`, but at least `STEPS`; if time is short, those that fit, but at least `LEAST`.
    """
    wanted = min(MOST, max(STEPS, int(BUDGET_S / step_s)))
    return wanted if wanted * step_s <= left_s else max(LEAST, int(left_s / step_s))


def _traced(cluster: Cluster, plan: Plan, task: Task) -> tuple[Layout, Traced, int]:
    """Returns (layout, `Traced`, samples of a batch) of a reference task under a plan; raises as `of_plan`."""
    assert task.batch is not None
    samples = len(task.batch(0))
    layout = of_plan(plan, global_batch=samples, seq=1, uneven=True)
    micro = (layout.micro_batch, layout.micro_batch)
    return layout, Traced(task, cluster, software("shardwise"), "fp32", micro, True), samples


@dataclass(frozen=True)
class Features:
    """Linear terms of a step's forecast, from which its seconds follow for other factors and overheads.

    fixed   seconds that do not depend on factors
    kinds   seconds of each kind of op at factor 1, in the order of `KINDS`
    call    number of times that the overhead of an op counts; `cut`: of an op on sharded tensors; `event`: of a unit or
            message (a number may be fractional, since some overhead overlaps)
    work    a rank's seconds of work, a share of which it waits for others
    work_call, work_cut  number of times that the overhead of an op, or of one on sharded tensors, is in that work
    """

    fixed: float
    kinds: tuple[float, ...]
    call: float
    cut: float
    event: float
    work: float
    work_call: float
    work_cut: float

    def bare(self, factors: Sequence[float]) -> float:
        """Returns the step's seconds without overhead; `factors`: one for each of `KINDS`."""
        return self.fixed + sum(factor * part for factor, part in zip(factors, self.kinds, strict=True))

    def works(self, factors: Sequence[float], call_us: float = 0.0, cut_us: float = 0.0) -> float:
        """Returns the seconds of a rank's work in a step; `call_us`, `cut_us`: microseconds of overhead of each op."""
        ops = self.work * self.bare(factors) / self.bare([1.0] * len(KINDS))
        return ops + 1e-6 * (self.work_call * call_us + self.work_cut * cut_us)

    def added(self, row: Sequence[float]) -> float:
        """Returns the seconds of overhead in a step; `row`: microseconds (step, call, cut, event)."""
        return 1e-6 * (row[0] + self.call * row[1] + self.cut * row[2] + self.event * row[3])


def fit(
    cluster: Cluster, steps: dict[str, list[float]], large: Large
) -> tuple[tuple[OverheadRow, ...], tuple[tuple[str, float], ...]]:
    """Returns (`Device.overheads`, `Device.factors`) of the cluster's device, fitted to steps measured on it.

    steps   {technique: [seconds of a step of each tiny module]}, from which overheads follow
    large   {(kind of op, technique): seconds of a step of a large module}, from which factors follow

    Overheads and factors depend on each other, so they are found alternately, `TURNS` times.
    """
    ranks = cluster.world_size

    def looked_at(name: str, at: int, task: Task) -> Features:
        return _features(cluster, Plan.parse(plans(ranks)[name][at]), task)

    small = {
        name: [looked_at(name, at, reference_task(*sizes, 4 * ranks)) for at, sizes in enumerate(REFERENCES)]
        for name in steps
    }
    tasks = large_tasks(ranks)
    wholes = {(kind, name): looked_at(name, 0, tasks[kind]) for kind, name in large}
    factors = [1.0] * len(KINDS)
    waits: dict[str, float] = {}
    rows = _rows(small, steps, factors, waits)
    # six iterations are enough for both to settle
    for _ in range(TURNS if large else 0):
        added = {name: times for name, *times, _ in rows}
        left = {key: seconds - wholes[key].added(added[key[1]]) for key, seconds in large.items()}
        # steps with many collectives depend more on waiting than on factors
        factors = _factors(wholes, {key: value for key, value in left.items() if key[1] not in OFTEN}, large)
        often = {key: value for key, value in left.items() if key[1] in OFTEN}
        waits = _waits(wholes, often, factors, {name: times[1:3] for name, times in added.items()})
        rows = _rows(small, steps, factors, waits)
    fitted = {row[0]: row for row in rows}
    # techniques that a quick probe leaves out get the row of the one in ALIKE
    rows += tuple((name, *fitted[other][1:]) for name, other in ALIKE.items() if name not in fitted and other in fitted)
    return rows, tuple((kind, float(f"{factor:.4g}")) for kind, factor in zip(KINDS, factors, strict=True))


def _waits(
    wholes: dict[tuple[str, str], Features], left: Large, factors: Sequence[float], calls: dict[str, list[float]]
) -> dict[str, float]:
    """Returns {technique: share of its work for which a rank waits for others}.

    left    seconds of large steps without overhead; what exceeds the forecast of their ops is waiting
    calls   {technique: (call, cut) overheads in microseconds}
    """
    return {
        key[1]: max(0.0, (seconds - wholes[key].bare(factors)) / wholes[key].works(factors, *calls[key[1]]))
        for key, seconds in left.items()
    }


def _factors(wholes: dict[tuple[str, str], Features], left: Large, large: Large) -> list[float]:
    """Returns a factor for each of `KINDS`, by least squares of relative errors, slightly pulled to equal factors.

    left   seconds of each large step without overhead; `large`: with it
    """
    alike = geometric_mean(
        max(SHIFT, seconds / wholes[key].bare([1.0] * len(KINDS))) for key, seconds in left.items()
    )  # fmt: skip
    table = [np.array(wholes[key].kinds) / large[key] for key in left]
    wanted = [(seconds - wholes[key].fixed) / large[key] for key, seconds in left.items()]
    for at in range(len(KINDS)):
        table.append(TIMID * np.eye(len(KINDS))[at] / alike)
        wanted.append(TIMID)
    return [max(SHIFT, factor) for factor in non_negative(np.array(table), np.array(wanted))]


def _rows(
    features: dict[str, list[Features]],
    steps: dict[str, list[float]],
    factors: Sequence[float],
    waits: dict[str, float],
) -> tuple[OverheadRow, ...]:
    """Returns the overhead row of each technique, in the order of `steps`.

    The overheads of an op, and of an op on sharded tensors, are the same under every technique, but larger if random
    operations are followed. So all techniques are solved together, which makes each one's own terms more certain.
    """
    rows: list[OverheadRow] = []
    for follows in (False, True):
        names = [name for name in steps if name.endswith(DRAWS) == follows]
        cut_us = next((cut for _, _, _, cut, *_ in rows), 0.0)  # if no measured step with draws has sharded tensors
        rows += _solve(features, steps, names, factors, waits, cut_us) if names else []
    return tuple(sorted(rows, key=lambda row: list(steps).index(row[0])))


def _solve(
    features: dict[str, list[Features]], steps: dict[str, list[float]], names: list[str], factors: Sequence[float],
    waits: dict[str, float], cut_us: float,
) -> list[OverheadRow]:  # fmt: skip
    """Returns (technique, step, call, cut, event in microseconds, share of waiting) for each of `names`.

    Call and cut are the same in all rows. Solved by least squares of relative errors.

    waits   {technique: share of waiting}; `cut_us`: cut overhead if no step has ops on sharded tensors
    """
    places = len(names)
    waiting = [waits.get(name.removesuffix(DRAWS), 0.0) for name in names]
    table, missing = [], []
    for at, (name, wait) in enumerate(zip(names, waiting, strict=True)):
        for own, seconds in zip(features[name], steps[name], strict=True):
            row = np.zeros(2 + 2 * places)
            row[:2] = own.call + wait * own.work_call, own.cut + wait * own.work_cut
            row[2 + at], row[2 + places + at] = 1.0, own.event
            table.append(row / seconds)
            missing.append((seconds - own.bare(factors) - wait * own.works(factors)) / seconds)
    # columns: call, cut, then each technique's step, then each technique's event; empty ones are left out
    matrix = np.array(table)
    live = np.asarray(matrix.any(axis=0))
    found = np.zeros(matrix.shape[1])
    found[live] = non_negative(matrix[:, live], np.array(missing))
    call, cut = _micro(found[0]), _micro(found[1]) if live[1] else cut_us
    each_step, each = map(_micro, found[2 : 2 + places]), map(_micro, found[2 + places :])
    return [
        (name, step, call, cut, event, _four(wait))
        for name, step, event, wait in zip(names, each_step, each, waiting, strict=True)
    ]


def _micro(seconds: float) -> float:
    return _four(1e6 * seconds)


def _four(value: float) -> float:
    return float(f"{value:.4g}")  # digits


def _features(cluster: Cluster, plan: Plan, task: Task) -> Features:
    """Returns the `Features` of a reference task's step under a plan, by changing one overhead or factor at a time."""
    layout, traced, samples = _traced(cluster, plan, task)

    def seconds(added: Overhead = NOTHING, factors: tuple[tuple[str, float], ...] = ()) -> float:
        row = (BASE, 1e6 * added.step, 1e6 * added.call, 1e6 * added.cut, 1e6 * added.event, added.wait)
        traced.cluster = replace(cluster, device=replace(cluster.device, overheads=(row,), factors=factors))
        return traced.simulate(layout, samples).step_s

    bare = seconds()
    unit = 1e-5  # seconds; large against a kernel, so that overhead which overlaps with communication shows
    kinds = tuple((seconds(factors=((kind, 1 + SHIFT),)) - bare) / SHIFT for kind in KINDS)
    waiting = (seconds(Overhead(wait=SHIFT)) - bare) / SHIFT

    def often(each: Overhead) -> tuple[float, float]:
        added = seconds(each)
        return (added - bare) / unit, ((seconds(replace(each, wait=SHIFT)) - added) / SHIFT - waiting) / unit

    (call, work_call), (cut, work_cut) = often(Overhead(call=unit)), often(Overhead(cut=unit))
    event = float(events(layout, task_units(task)))
    return Features(bare - sum(kinds), kinds, call, cut, event, waiting, work_call, work_cut)


def task_units(task: Task) -> int:
    """Returns the number of repeated blocks of the task's module."""
    from shardwise.trace.blocks import find_blocks

    return len(find_blocks(task.model()).paths)


def non_negative(features: np.ndarray, wanted: np.ndarray) -> Sequence[float]:
    """Returns the non-negative least-squares weights w of features @ w = wanted, by trying all subsets of columns."""
    columns = range(features.shape[1])
    best, least = np.zeros(features.shape[1]), float(np.square(wanted).sum())
    for size in range(1, features.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = features[:, chosen]
            weights, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=None)
            if rank < size or (weights < 0).any():  # dependent columns, or a negative cost
                continue
            left = float(np.square(part @ weights - wanted).sum())
            if left < least * (1 - 1e-9):  # more columns must improve by more than rounding
                best, least = np.zeros(features.shape[1]), left
                best[list(chosen)] = weights
    return best.tolist()
