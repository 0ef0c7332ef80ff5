"""Measure what Python and the engine add to a step, by technique, on reference modules (used by costs/overhead).

Their steps are measured, and forecast from the figures of the same probe without any overhead. What is missing is dealt
to the step, to each op, to each on cut tensors, and to each unit or message (costs/overhead), by non-negative least
squares over three modules: few blocks, more blocks, deeper blocks. Larger modules give a factor on each kind of op:
products (attention too), convolutions, and all others, since inside a step caches hold what other ops left there. One
of them says under techniques whose ranks meet many times in a step what share of its work a rank waits for others.

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

REFERENCES = ((2, 1), (6, 1), (2, 4))  # blocks, feed-forward parts of a block
WARM, MOST, BUDGET_S = 4, 320, 0.6  # steps of one module: as many as fit the budget, at most MOST
LEAST, STEPS = 6, 24  # of which a median can be told; of which one is sure, where there is time
PASSES, AGREE = 2, 1.08  # over all of them; within this factor two of them agree
TURNS = 6
ALIKE = {"zero2": "zero1", "sp": "tp"}  # techniques that a quick probe takes to add what another one does
DRAWN = (BASE, "zero3", "tp", "sp", "pp")  # techniques that are measured once more with draws followed
OFTEN = ("zero3", "tp", "sp")  # techniques whose ranks meet many times in a step
# kind of op -> techniques under which its module runs; nothing of what has no product can be cut
LARGE = {"products": (BASE, "zero1", "zero3", "tp", "sp"), "convolutions": (BASE, "zero1"), "rest": (BASE, "zero1")}
TIMID = 0.03  # weight of a factor common to all kinds, beside a step's own: where steps say nothing of a kind
NOTHING = Overhead()
SHIFT = 0.01  # of a factor, to see how much of a step it is in


def plans(ranks: int, quick: bool = False) -> dict[str, list[str]]:
    """Returns, by technique, the plan over all ranks for each reference module that shows its overhead.

    quick   without those of `ALIKE`, and draws followed under replicas alone
    """
    texts = {BASE: f"dp_replicate={ranks}"}
    if ranks > 1:
        texts |= {f"zero{stage.number}": f"dp_shard={ranks},zero={stage.number}" for stage in SHARDED}
    # an odd number of ranks has no halves to cut weights or stages over
    if ranks % 2 == 0:
        rest = f",dp_replicate={ranks // 2}" if ranks > 2 else ""
        texts |= {"tp": f"tp=2{rest}", "sp": f"tp=2,sp=true{rest}", "pp": f"pp=2{rest}"}
    # quick: techniques that cost as another does are left out and take its row
    texts = {name: plan for name, plan in texts.items() if not (quick and name in ALIKE)}
    # and once more with draws followed, for those that have a row at all
    texts |= {name + DRAWS: texts[name] for name in (DRAWN[:1] if quick else DRAWN) if name in texts}
    return {name: [_busier(name, plan, at) for at in range(len(REFERENCES))] for name, plan in texts.items()}


def _busier(name: str, plan: str, reference: int) -> str:
    """Returns the plan's text, with more micro-batches for a pipeline's last reference, so that messages differ."""
    return f"{plan},microbatches=4" if name.startswith("pp") and reference == len(REFERENCES) - 1 else plan


Large = dict[tuple[str, str], float]  # (kind of op, technique) -> seconds of a step


def step_times(
    ranks: int, pace: Pace, say: Say = silent, *, budget: Budget | None = None, quick: bool = False
) -> tuple[dict[str, list[float]], Large]:
    """Returns ({technique: seconds of a step of each tiny module}, those of larger modules by (kind, technique)).

    Collective. All are measured `PASSES` times, so that a slow moment of the machine does not fall on one of them;
    where these disagree, once more, and the median counts. `quick`: once, so that the machine's pace alone shows a slow
    moment. A module takes its share of the budget that is left, and none is begun that would not end in time: a slow
    machine takes fewer steps, not longer.
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
            if turn == PASSES and over_ranks(apart) < AGREE:  # the last round is for those whose passes disagree
                continue
            say(_progress_text(turn, rounds, at, len(work), plan, left))
            seen.append(_seconds(task, plan, pace, left / (len(work) - at), follows))
            took[at] = left - budget.left_s()
    times = [median(seen) for seen in measured]
    of_tiny = dict(zip(tiny, times, strict=False))
    steps = {name: [of_tiny[name, at] for at in range(len(REFERENCES))] for name in of}
    return steps, dict(zip(large, times[len(tiny) :], strict=True))


def _progress_text(turn: int, rounds: int, at: int, count: int, plan: str, left_s: float) -> str:
    """Returns the line of progress: what is measured now, and for how long at most."""
    more = ", the fewest steps, since time is up" if left_s <= 0 else ""
    if left_s > 0 and math.isfinite(left_s):
        more = f", {left_s:.0f} s left at most"
    return f"probe: steps of small modules, round {turn + 1} of {rounds}, {at + 1} of {count}: {plan}{more}"


def _seconds(task: Task, plan: str, pace: Pace, share_s: float = math.inf, follows: bool = False) -> float:
    """Returns the median seconds of a module's step, at the reference pace.

    share_s   what it may take, warming up included
    follows   each operation is looked at for random numbers, as in a run of a module that draws some; the references
              draw none, so a run of them would not
    """
    seconds = _alone(task, plan, pace, share_s, follows)
    gc.collect()  # with the engine go the threads of its groups, which would slow down the next one's steps
    return seconds


def _alone(task: Task, plan: str, pace: Pace, share_s: float, follows: bool) -> float:
    """Returns the median seconds of a step of one reference under one plan, at the reference pace. Collective."""
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
    """Returns how many steps to time where one takes `step_s`: what fits `BUDGET_S`, at least `STEPS` in time."""
    wanted = min(MOST, max(STEPS, int(BUDGET_S / step_s)))
    return wanted if wanted * step_s <= left_s else max(LEAST, int(left_s / step_s))


def _traced(cluster: Cluster, plan: Plan, task: Task) -> tuple[Layout, Traced, int]:
    """Returns (layout, trace, samples of a batch) of a reference task under a plan; raises as `of_plan` does."""
    assert task.batch is not None
    samples = len(task.batch(0))
    layout = of_plan(plan, global_batch=samples, seq=1, uneven=True)
    micro = (layout.micro_batch, layout.micro_batch)
    return layout, Traced(task, cluster, software("shardwise"), "fp32", micro, True), samples


@dataclass(frozen=True)
class Features:
    """Terms of a step's forecast, from which it is computed for other factors and overheads.

    fixed   seconds that no factor is on
    kinds   seconds of each kind of op, in the order of `KINDS`
    call    how often an op's overhead lies in it, `cut` how often that of an op on cut tensors, `event` how often a
            unit's or message's
    work    seconds of which ranks may wait for a share; `work_call` and `work_cut`: how often those lie in them
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
        """Returns the step's seconds without overhead."""
        return self.fixed + sum(factor * part for factor, part in zip(factors, self.kinds, strict=True))

    def works(self, factors: Sequence[float], call_us: float = 0.0, cut_us: float = 0.0) -> float:
        """Returns the seconds of a rank's work in a step, of which others wait for a share."""
        ops = self.work * self.bare(factors) / self.bare([1.0] * len(KINDS))
        return ops + 1e-6 * (self.work_call * call_us + self.work_cut * cut_us)

    def added(self, row: Sequence[float]) -> float:
        """Returns the seconds of overhead under a row (step, call, cut, event; microseconds)."""
        return 1e-6 * (row[0] + self.call * row[1] + self.cut * row[2] + self.event * row[3])


def fit(
    cluster: Cluster, steps: dict[str, list[float]], large: Large
) -> tuple[tuple[OverheadRow, ...], tuple[tuple[str, float], ...]]:
    """Returns (a device's overheads by technique, its (kind of op, factor)), fitted to steps measured on it.

    steps   technique -> seconds of the tiny modules; their forecasts come out as measured
    large   steps of the larger ones, from which the factors are

    Each depends on the other, so they are found in turns.
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
    # factors follow from what overheads leave, and overheads from the factors: six turns settle both
    for _ in range(TURNS if large else 0):
        added = {name: times for name, *times, _ in rows}
        left = {key: seconds - wholes[key].added(added[key[1]]) for key, seconds in large.items()}
        # techniques with many meetings say more of waits than of factors
        factors = _factors(wholes, {key: value for key, value in left.items() if key[1] not in OFTEN}, large)
        often = {key: value for key, value in left.items() if key[1] in OFTEN}
        waits = _waits(wholes, often, factors, {name: times[1:3] for name, times in added.items()})
        rows = _rows(small, steps, factors, waits)
    fitted = {row[0]: row for row in rows}
    # a technique that was not measured takes the row of the one that it resembles
    rows += tuple((name, *fitted[other][1:]) for name, other in ALIKE.items() if name not in fitted and other in fitted)
    return rows, tuple((kind, float(f"{factor:.4g}")) for kind, factor in zip(KINDS, factors, strict=True))


def _waits(
    wholes: dict[tuple[str, str], Features], left: Large, factors: Sequence[float], calls: dict[str, list[float]]
) -> dict[str, float]:
    """Returns, by technique, the share of its work that a rank waits for others: what large steps take beyond ops."""
    return {
        key[1]: max(0.0, (seconds - wholes[key].bare(factors)) / wholes[key].works(factors, *calls[key[1]]))
        for key, seconds in left.items()
    }


def _factors(wholes: dict[tuple[str, str], Features], left: Large, large: Large) -> list[float]:
    """Returns a factor for each kind of op: least relative errors of all steps, with a small pull to equal factors.

    left   what of each step is not overhead
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

    An op costs the host the same under every technique, and one on cut tensors what its rule in Python takes; both
    cost more with draws followed. So all techniques are solved together, which steadies what each of them adds.
    """
    rows: list[OverheadRow] = []
    for follows in (False, True):
        names = [name for name in steps if name.endswith(DRAWS) == follows]
        cut_us = next((cut for _, _, _, cut, *_ in rows), 0.0)  # where no cut tensors were followed
        rows += _solve(features, steps, names, factors, waits, cut_us) if names else []
    return tuple(sorted(rows, key=lambda row: list(steps).index(row[0])))


def _solve(
    features: dict[str, list[Features]], steps: dict[str, list[float]], names: list[str], factors: Sequence[float],
    waits: dict[str, float], cut_us: float,
) -> list[OverheadRow]:  # fmt: skip
    """Returns (technique, step, call, cut, event in us, share of waiting); call and cut are the same in all rows.

    By least squares of relative errors. `cut_us`: of a call on cut tensors, where no step has such calls.
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
    """Returns the terms of a step's forecast (a call's, a step's, an event's), by changing one at a time."""
    layout, traced, samples = _traced(cluster, plan, task)

    def seconds(added: Overhead = NOTHING, factors: tuple[tuple[str, float], ...] = ()) -> float:
        row = (BASE, 1e6 * added.step, 1e6 * added.call, 1e6 * added.cut, 1e6 * added.event, added.wait)
        traced.cluster = replace(cluster, device=replace(cluster.device, overheads=(row,), factors=factors))
        return traced.simulate(layout, samples).step_s

    bare = seconds()
    unit = 1e-5  # large against a kernel, so that what hides behind communication is seen
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
    """Returns least-squares weights that are not negative: the best of all subsets of the few columns."""
    columns = range(features.shape[1])
    best, least = np.zeros(features.shape[1]), float(np.square(wanted).sum())
    for size in range(1, features.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = features[:, chosen]
            weights, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=None)
            if rank < size or (weights < 0).any():  # columns that say the same; a cost below nothing
                continue
            left = float(np.square(part @ weights - wanted).sum())
            if left < least * (1 - 1e-9):  # fewer columns first: more must explain more than rounding does
                best, least = np.zeros(features.shape[1]), left
                best[list(chosen)] = weights
    return best.tolist()
