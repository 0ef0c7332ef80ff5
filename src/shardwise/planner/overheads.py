"""What Python and the engine add to a step, technique by technique: small reference modules run as a job would.

Their steps are measured, and forecast from the figures of the same probe without any overhead. What is missing is
dealt to the step, to each op, and to each unit or message (costs/overhead), by non-negative least squares over three
modules: few blocks, more blocks, deeper blocks.

*What this does not do*: compiled modules, experts; devices that run behind the host, where overhead hides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import geometric_mean, median

import numpy as np
import torch
from torch import nn

from shardwise.cluster import Cluster
from shardwise.cluster.cluster import Overhead as OverheadRow
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.overhead import BASE, Overhead, events
from shardwise.costs.software import software
from shardwise.layout import Plan
from shardwise.planner.traced import Traced
from shardwise.task import Task

WIDTH, POSITIONS = 16, 8
REFERENCES = ((2, 1), (6, 1), (2, 4))  # blocks, feed-forward parts of a block
WARM, STEPS = 4, 40
TURNS = 6
OWN_CALLS = ("tp", "sp")
WHOLE = (BASE, "zero1", "tp")  # techniques under which the larger module runs


class Reference(nn.Module):
    """Blocks with the ops that models have, so small that ops cost what it takes to start them."""

    def __init__(self, blocks: int = 4, deep: int = 1, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(deep, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Block(nn.Module):
    def __init__(self, deep: int, width: int) -> None:
        super().__init__()
        self.norm, self.heads, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.parts = nn.ModuleList(_Part(width) for _ in range(deep))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x)).view(*x.shape[:2], 3, 2, x.shape[2] // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        for part in self.parts:
            x = part(x)
        return x


class _Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(batch)


def _batch(step: int, samples: int, positions: int, width: int) -> torch.Tensor:
    return torch.ones(samples, positions, width)


def reference_task(
    blocks: int = 4, deep: int = 1, samples: int = 2, width: int = WIDTH, positions: int = POSITIONS
) -> Task:
    """A reference module and its batch."""
    return Task(
        model=partial(Reference, blocks, deep, width), loss=_loss, name="reference",
        batch=partial(_batch, samples=samples, positions=positions, width=width),
    )  # fmt: skip


def whole_task(ranks: int) -> Task:
    """A module whose ops count, not what it takes to start them."""
    return reference_task(4, 1, 4 * ranks, width=192, positions=64)


def plans(ranks: int) -> dict[str, list[str]]:
    """Technique -> the plans over all ranks under which the references show it."""
    if ranks == 1:
        return {BASE: ["dp_replicate=1"] * len(REFERENCES)}
    found = {BASE: f"dp_replicate={ranks}"} | {f"zero{stage}": f"dp_shard={ranks},zero={stage}" for stage in (1, 2, 3)}
    if ranks % 2 == 0:
        rest = f",dp_replicate={ranks // 2}" if ranks > 2 else ""
        found |= {"tp": f"tp=2{rest}", "sp": f"tp=2,sp=true{rest}", "pp": f"pp=2{rest}"}
    return {name: [_busier(name, plan, at) for at in range(len(REFERENCES))] for name, plan in found.items()}


def _busier(name: str, plan: str, reference: int) -> str:
    """More messages for the last reference of a pipeline, which would pass on as many in all three."""
    return f"{plan},microbatches=4" if name == "pp" and reference == len(REFERENCES) - 1 else plan


def step_times(ranks: int) -> dict[str, list[float]]:
    """Median seconds of a step of each reference under each technique. Collective."""
    return {
        name: [
            _seconds(reference_task(blocks, deep, 4 * ranks), plan)
            for plan, (blocks, deep) in zip(each, REFERENCES, strict=True)
        ]
        for name, each in plans(ranks).items()
    }


def whole_times(ranks: int) -> dict[str, float]:
    """Median seconds of a step of the larger module under a few techniques. Collective."""
    return {name: _seconds(whole_task(ranks), plans(ranks)[name][0]) for name in WHOLE if name in plans(ranks)}


def _seconds(task: Task, plan: str) -> float:
    from shardwise.engine.engine import parallelize

    assert task.batch is not None
    engine, times = parallelize(task, plan, check_loss=False), []
    for step in range(WARM + STEPS):
        batch = task.batch(step)
        began = time.perf_counter()
        engine.step(batch)
        times.append(time.perf_counter() - began)
    engine.close()
    return median(times[WARM:])


def _traced(cluster: Cluster, plan: Plan, task: Task) -> tuple[Layout, Traced, int]:
    assert task.batch is not None
    samples = len(task.batch(0))
    layout = of_plan(plan, global_batch=samples, seq=1, uneven=True)
    micro = (layout.micro_batch, layout.micro_batch)
    return layout, Traced(task, cluster, software("shardwise"), "fp32", micro, True), samples


Features = tuple[float, float, float]  # see _features


def fit(
    cluster: Cluster, steps: dict[str, list[float]], whole: dict[str, float]
) -> tuple[tuple[OverheadRow, ...], float]:
    """A device's overheads, and the factor on all of a forecast, from the steps that were measured on it.

    steps   technique -> seconds of the references; their forecasts come out as measured
    whole   technique -> seconds of the larger module, of which the factor is the geometric mean over techniques:
            inside a step caches hold what other ops left there, and ranks wait for each other

    Each depends on the other, so they are found in turns.
    """
    ranks = cluster.world_size

    def looked_at(name: str, at: int, task: Task) -> Features:
        return _features(cluster, Plan.parse(plans(ranks)[name][at]), task)

    small = {
        name: [looked_at(name, at, reference_task(*sizes, 4 * ranks)) for at, sizes in enumerate(REFERENCES)]
        for name in steps
    }
    large = {name: looked_at(name, 0, whole_task(ranks)) for name in whole}
    rows, factor = _rows(small, steps), 1.0
    for _ in range(TURNS):
        added = {name: row for name, *row in rows}
        ratios = [
            whole[name] / (bare + 1e-6 * (step + each * events_ + of_call * call))
            for name, (bare, call, events_) in large.items()
            for step, of_call, each in [added[name]]
        ]
        factor = geometric_mean(ratios) if ratios else 1.0
        rows = _rows(small, {name: [seconds / factor for seconds in own] for name, own in steps.items()})
    return rows, factor


def _rows(features: dict[str, list[Features]], steps: dict[str, list[float]]) -> tuple[OverheadRow, ...]:
    """An op costs the host the same under every technique but tensor parallelism, whose tensors answer in Python.

    So all others are solved together, which steadies what each of them adds.
    """
    together = [name for name in steps if name not in OWN_CALLS]
    apart = [[name] for name in steps if name in OWN_CALLS]
    rows = [row for names in (together, *apart) if names for row in _solve(features, steps, names)]
    return tuple(sorted(rows, key=lambda row: list(steps).index(row[0])))


def _solve(features: dict[str, list[Features]], steps: dict[str, list[float]], names: list[str]) -> list[OverheadRow]:
    """One cost of a call for all `names`; a step and an event of each. Relative errors count."""
    places = len(names)
    table, missing = [], []
    for at, name in enumerate(names):
        for (bare, call, event), seconds in zip(features[name], steps[name], strict=True):
            row = np.zeros(1 + 2 * places)
            row[0], row[1 + at], row[1 + places + at] = call, 1.0, event
            table.append(row / seconds)
            missing.append((seconds - bare) / seconds)
    matrix = np.array(table)
    live = matrix.any(axis=0)
    found = np.zeros(1 + 2 * places)
    found[live] = non_negative(matrix[:, live], np.array(missing))
    call, each_step, each = found[0], found[1 : 1 + places], found[1 + places :]
    return [(name, _micro(each_step[at]), _micro(call), _micro(each[at])) for at, name in enumerate(names)]


def _micro(seconds: float) -> float:
    return float(f"{1e6 * seconds:.4g}")


def _features(cluster: Cluster, plan: Plan, task: Task) -> Features:
    """Seconds of the step without overhead, how often an op's overhead lies in it, and how many events."""
    layout, traced, samples = _traced(cluster, plan, task)

    def seconds(added: Overhead) -> float:
        row = (BASE, 1e6 * added.step, 1e6 * added.call, 1e6 * added.event)
        traced.cluster = replace(cluster, device=replace(cluster.device, overheads=(row,)))
        return traced.simulate(layout, samples).step_s

    bare = seconds(Overhead())
    unit = 1e-5  # large against a kernel, so that what hides behind communication is seen
    return bare, (seconds(Overhead(call=unit)) - bare) / unit, float(events(layout, task_units(task)))


def task_units(task: Task) -> int:
    """Repeated blocks of the task's module."""
    from shardwise.trace.blocks import find_blocks

    return len(find_blocks(task.model()).paths)


def non_negative(features: np.ndarray, wanted: np.ndarray) -> Sequence[float]:
    """Least squares without negative weights: the best of all subsets of the few columns."""
    columns = range(features.shape[1])
    best, least = np.zeros(features.shape[1]), float(np.square(wanted).sum())
    for size in range(1, features.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = features[:, chosen]
            weights, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=None)
            if rank < size or (weights < 0).any():
                continue
            left = float(np.square(part @ weights - wanted).sum())
            if left < least * (1 - 1e-9):
                best, least = np.zeros(features.shape[1]), left
                best[list(chosen)] = weights
    return best.tolist()
