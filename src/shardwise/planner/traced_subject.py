"""A task as a `Subject` of the search: its layouts, and forecasts from its traces (`traced_task`)."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.costs.layout import RECOMPUTES, Layout
from shardwise.costs.software import Software
from shardwise.planner.subject import Subject
from shardwise.planner.traced_layouts import TracedLayouts
from shardwise.planner.traced_task import Traced
from shardwise.progress import Say, silent
from shardwise.random import Randomness
from shardwise.simulator.quick import Quick
from shardwise.step.batching import samples_in
from shardwise.task import Task

DEFAULT_SAMPLES = 32  # of a step, for a task with a data source and no batch of its own
# samples of the two traces that others are on a line with; one sample alone runs other operations (a dim of 1 is
# broadcast, not copied), so it is traced by itself
TRACED = (2, 4)


def default_samples(task: Task) -> int:
    """Returns the number of samples in a step where the user gives none: a batch of the task, or `DEFAULT_SAMPLES`."""
    return samples_in(task.batch(0)) if task.batch is not None else DEFAULT_SAMPLES


def traced_subject(
    task: Task,
    cluster: Cluster,
    software: Software,
    global_batch: int | None,
    precision: str,
    wanted: tuple[str, ...] = RECOMPUTES,
    samples: tuple[int, int] = TRACED,
    cuts: bool = True,
    say: Say = silent,
    remarks: tuple[str, ...] = (),
    randomness: Randomness = "global",
) -> Subject:
    """Returns the `Subject` of a task: replicas, ZeRO 1 to 3, hybrid sharding, micro-batches, tp, pp, recompute.

    cuts     whether a search looks at tp and pp
    samples  the two sizes of micro-batch that are traced, or the only one, twice; larger ones are on the line through
             the two, where both ran the same operations
    say      is told what is being traced
    remarks  to be told beside its own
    randomness  as in `parallelize`
    """
    batch = default_samples(task) if global_batch is None else global_batch
    traced = Traced(task, cluster, software, precision, samples, cuts, say, remarks, randomness)
    return subject_of(traced, batch, wanted)


def subject_of(traced: Traced, batch: int, wanted: tuple[str, ...]) -> Subject:
    """Returns the `Subject` of a traced task for one global batch (samples).

    wanted  recompute policies to try beside "none"
    """
    units = len(traced.first.units)
    _remark_on(traced)
    # recompute applies to repeated blocks, and this module has none
    recomputes = [*dict.fromkeys(("none", *wanted))] if units else ["none"]

    layouts = TracedLayouts(traced, batch, recomputes)

    def estimate(layout: Layout) -> Quick:
        forecast = traced.simulate(layout, batch)
        return Quick(forecast.step_s, forecast.worst)

    return Subject(
        traced.task.name, units, batch, 1, layouts.candidates, estimate, lambda layout: traced.memory(layout, batch),
        lambda layout: traced.simulate(layout, batch), traced.remarks, own=True,
        with_batch=lambda count: subject_of(traced, count, wanted), reading=lambda: traced.reading,
        exact=lambda layout: traced.of_micro_batch(layout.micro_batch).simulate(layout, batch),
        when_long=lambda call: setattr(traced, "before_long", call), draws=lambda layout: traced.draws(layout, batch),
    )  # fmt: skip


def _remark_on(traced: Traced) -> None:
    """Say what of the module the samples do not reach, and what a random number decides."""
    first = traced.first
    if first.idle:
        traced.remark(f"no gradient reaches {first.idle:,} of {first.parameters:,} parameters on such samples")
    if first.drawn:
        traced.remark("a single random number is taken as 0.5: what it decides (layerdrop) goes the likelier way")
