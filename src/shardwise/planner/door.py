"""The verbs `plan`, `simulate` and `probe` from Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.software import software
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.planner import decoders, units
from shardwise.planner.progress import Say, silent
from shardwise.planner.propose import Constraints, Search, Subject, decoder, search
from shardwise.simulator.forecast import Forecast

if TYPE_CHECKING:
    from shardwise.task import Task


def is_shape(task: str) -> bool:
    """Whether a word names a decoder by its numbers: a catalogue name or a transformers configuration."""
    return task.endswith(".json") or Path(task).is_dir() or ":" not in task


def subject_of(
    task: str | Task,
    cluster: Cluster,
    *,
    global_batch: int | str | None = None,
    seq: int | str | None = None,
    precision: str = "bf16",
    software_name: str = "shardwise",
    plan: Plan | None = None,
    say: Say = silent,
) -> Subject:
    """What a search needs to know about a task: a catalogue name, a `config.json`, or a `Task`, which is traced.

    plan  the only one that will be asked about: a task is traced with its micro-batch then
    say   is told what is being traced
    """
    soft, precision = software(software_name), Plan(precision=precision).precision
    if isinstance(task, str):
        from_file = task.endswith(".json") or Path(task).is_dir()
        shape = decoders.decoder_from_config(task) if from_file else decoders.decoder_by_name(task)
        if seq is None or global_batch is None:
            raise InputError(f"{task} is a decoder by its numbers: give --seq and --global-batch")
        length = units.count(str(seq), "--seq")
        return decoder(shape, cluster, soft, units.batch(str(global_batch), length), length, precision)
    from shardwise.planner.traced import default_samples, traced_subject

    if seq is not None:
        raise InputError("--seq is for decoders by name; a task of your own brings its own batch")
    samples = None if global_batch is None else units.batch(str(global_batch), None)
    if plan is None:
        return traced_subject(task, cluster, soft, samples, precision, say=say)
    layout = of_plan(plan, global_batch=samples or default_samples(task), seq=1, uneven=True)
    micro = (layout.micro_batch, layout.micro_batch)
    return traced_subject(task, cluster, soft, samples, precision, (plan.remat,), micro, say=say)


def check_devices(plan: Plan, cluster: Cluster) -> None:
    """Raise `InputError` for a plan of more ranks than the cluster has devices."""
    if plan.world_size > cluster.world_size:
        raise InputError(f"plan {plan} needs {plan.world_size} devices; {cluster} has {cluster.world_size}")


def layout_of(plan: Plan, subject: Subject) -> Layout:
    """The plan with the subject's batch dealt; a task's own batch may be dealt unevenly, as a run deals it."""
    return of_plan(plan, global_batch=subject.global_batch, seq=subject.seq, uneven=subject.own)


def plan(
    task: str | Task,
    cluster: str | Cluster,
    *,
    global_batch: int | str | None = None,
    seq: int | str | None = None,
    precision: str = "bf16",
    software: str = "shardwise",
    constraints: Constraints | None = None,
) -> Search:
    """Every plan that fits, fastest first, and why the other families lost; nothing is run.

    task          a catalogue name ("llama3-8b"), the path of a transformers `config.json`, or a `Task`
    cluster       "16x8 h100-sxm-80gb, ib-400", a .toml file, or a `Cluster`
    global_batch  samples of a step, or text such as "16M-tokens"
    seq           tokens of a sample, for decoders by name

    Raises `InputError` where no plan fits, with the nearest.
    """
    where = Cluster.parse(cluster)
    subject = subject_of(task, where, global_batch=global_batch, seq=seq, precision=precision, software_name=software)
    return search(subject, where, constraints, precision=precision)


def simulate(
    task: str | Task,
    plan: str | Plan,
    cluster: str | Cluster,
    *,
    global_batch: int | str | None = None,
    seq: int | str | None = None,
    software: str = "shardwise",
) -> Forecast:
    """One step of one plan: time by part, memory by stage, timeline, and what each figure rests on."""
    where, parsed = Cluster.parse(cluster), Plan.parse(plan)
    check_devices(parsed, where)
    subject = subject_of(
        task, where, global_batch=global_batch, seq=seq, precision=parsed.precision, software_name=software, plan=parsed
    )
    return subject.simulate(layout_of(parsed, subject))


def probe(ranks: int | None = None, say: Say = silent) -> Cluster:
    """Measure this machine, with `ranks` ranks at once: products, memory, collectives, disk.

    Ranks that a launcher started are joined, and those of several hosts measure the links between them too. Collective
    then, with the same `Cluster` on every rank; process groups that were made before are gone afterwards. Raises
    `InputError` where hosts have unequal numbers of ranks, or ranks of a host do not follow each other.

    `say` is told what is being measured, by rank 0 too: it has to be a function that can be pickled.
    """
    from shardwise.planner.measure import probe as measure

    return measure(ranks, say)
