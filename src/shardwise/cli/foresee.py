"""The commands plan, simulate, compare and probe. Each only reads its words and calls a room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.answer import Answer, speaks
from shardwise.cli.options import WholeNumber, common, output_file
from shardwise.cli.waiting import begin
from shardwise.errors import InputError
from shardwise.progress import silent, telling, timing

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.layout import Plan
    from shardwise.planner.subject import Subject
    from shardwise.simulator.forecast import Forecast

TASK = "TASK"
TASK_HELP = """
    TASK is a catalogue name such as llama3-405b, the config.json of a transformers model (decoders by their numbers,
    any other is built without weights and traced), module:name or file.py:name of a task of your own (its model is
    traced without being run), or a built-in task.
"""


def where(function: Callable) -> Callable:
    """Options that say on what and with which batch."""
    options = (
        click.option(
            "--cluster", required=True,
            help='Devices and links: "16x8 h100-sxm-80gb, ib-400" (nodes x devices, device, links), or a .toml file.',
        ),
        click.option("--global-batch", help="Samples of a step: 512, or 16M-tokens (k and M are 1024 and 1024^2)."),
        click.option("--seq", help="Tokens of a sample, for names and configurations of models of text: 8192 or 8k."),
        click.option(
            "--software", default="shardwise", show_default=True,
            help="Whose kernels and overlap to assume: shardwise, megatron-core, nemo, llm-foundry ...",
        ),
    )  # fmt: skip
    for option in options:
        function = option(function)
    return function


def failures(command: Any) -> Any:
    """The options that tell of failures and what they cost."""
    options = (
        click.option("--mtbf-hours", type=click.FloatRange(min=1), help="Mean hours between failures of one device."),
        click.option(
            "--restart-s", type=click.FloatRange(min=0), default=300.0, show_default=True, help="Seconds to restart."
        ),
        click.option(
            "--checkpoint-s",
            type=click.FloatRange(min=0),
            help="Seconds that a checkpoint stops a step; by default the copy of what a rank writes.",
        ),
        click.option("--saves-of", metavar="RUN", help="The same, as this run's folder says it was measured."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _goodput(words: dict[str, Any], forecast: Any, subject: Any, plan: Any) -> tuple[dict[str, Any], list[str]]:
    """How much of the time is progress when devices fail, and the same as lines."""
    from shardwise.planner.door import layout_of
    from shardwise.simulator import goodput

    saved = goodput.saved_bytes(forecast.memory, layout_of(plan, subject))
    if words["checkpoint_s"] is not None and words["saves_of"] is not None:
        raise InputError("--checkpoint-s and --saves-of both tell what a checkpoint costs: give one of them")
    stall, basis = saved / goodput.COPY_BYTES_PER_S, f"a copy at {goodput.COPY_BYTES_PER_S / 1e9:g} GB/s, measured"
    if words["checkpoint_s"] is not None:
        stall, basis = words["checkpoint_s"], "as given"
    elif words["saves_of"] is not None:
        stall, basis = goodput.stall_of(words["saves_of"]), f"measured in {words['saves_of']}"
    found = goodput.goodput(forecast.step_s, plan.world_size, words["mtbf_hours"] * 3600, words["restart_s"], stall)
    found |= {"saved_bytes": saved, "basis": basis}
    told = f"  a rank writes {saved / 1e9:.3g} GB and its buffer in host memory is as large; the stall: {basis}"
    return found, [*goodput.lines(found), told]


@click.command()
@click.argument("task", metavar=TASK)
@where
@click.option("--precision", default="bf16", show_default=True, help="precision of the plans.")
@click.option("--max-tp", type=WholeNumber(min=1), help="Largest tensor-parallel degree.")
@click.option("--max-pp", type=WholeNumber(min=1), help="Largest pipeline degree.")
@click.option("--max-cp", type=WholeNumber(min=1), help="Largest context-parallel degree.")
@click.option("--fix", multiple=True, metavar="KEY=VALUE", help="A field that every plan has: --fix tp=8; repeatable.")
@click.option("--runnable", is_flag=True, help="Only plans that this version can train.")
@click.option(
    "--min-memory-headroom",
    type=click.FloatRange(0, 0.9),
    default=0.08,
    show_default=True,
    help="Share of memory kept free.",
)
@click.option(
    "--job", metavar="TIME", help="A job that takes as long on all devices (20m, 3h): its cost, and on fewer."
)
@click.option("--tokens", metavar="COUNT", help="A job of so many tokens (300B, 15T): hours and cost, and on fewer.")
@click.option("--price", type=click.FloatRange(min=0), default=0.0, help="Price of one device for an hour, for a job.")
@click.option("--top", type=WholeNumber(min=1), default=8, show_default=True, help="Rows of the table.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    callback=output_file,
    help="Write the best plan into this .toml file.",
)
@failures
@common
@click.pass_obj
def plan(answer: Answer, task: str, **words: Any) -> None:
    """Which plans fit a cluster, which is fastest, and why the others are not. Nothing is run.

    \b
    shardwise plan llama3-405b --cluster "2048x8 h100-sxm-80gb, ib-400" --global-batch 16M-tokens --seq 8192
    """
    from shardwise.cluster import Cluster
    from shardwise.layout import check

    cluster, fixed = Cluster.parse(words["cluster"]), _fixed(words["fix"])
    begin(answer, "plan: loading PyTorch and the figures of the catalogue")
    from shardwise.planner import Constraints
    from shardwise.planner import search as search_plans
    from shardwise.planner.text import proposal_dict, search_text
    from shardwise.planner.worth import Asked, job_lines, jobs

    asked = Asked.of(words["job"], words["tokens"], words["price"])
    constraints = Constraints(
        words["max_tp"], words["max_pp"], words["max_cp"], fixed, words["min_memory_headroom"],
        check if words["runnable"] else None,
    )  # fmt: skip
    with timing(not answer.as_json) as say:
        subject, batch = _subject(task, cluster, words, words["precision"], say=say)
        found = search_plans(subject, cluster, constraints, precision=words["precision"], say=say)
        job = jobs(subject, cluster, found, constraints, words["precision"], asked)
    best = found.best
    named = task if subject.own and not subject.head else "MODULE:TASK"  # a shape or a configuration has no data
    written = str(best.plan)
    if words["output"]:
        _write(words["output"], best.plan.to_toml())
        written = words["output"]
    command = f"shardwise train {named} --plan '{written}'"
    lines: list[str] = []
    if words["mtbf_hours"]:
        goodput, lines = _goodput(words, best.forecast, subject, best.plan)
        answer.fields["goodput"] = goodput
        command += f" --checkpoint-every {goodput['checkpoint_every_steps']} --restarts 100"
    answer.fields.update(
        plan=str(best.plan),
        world_size=best.plan.world_size,
        cluster=cluster.as_dict(),
        proposals=[proposal_dict(p) for p in found.proposals],
        later=[proposal_dict(p) for p in found.later],
        stopped=found.stopped,
        lost=found.lost,
        notes=found.notes,
        considered=found.considered,
        fitted=found.fitted,
        command=command,
    )
    if subject.head:
        command += f"\n{_how_to_train(task, subject.head)}"
    answer.fields["job"] = [each.as_dict() for each in job]
    table = search_text(found, cluster, subject.name, batch, command, words["top"])
    answer.text = "\n".join([table, *job_lines(job), *lines])


@click.command()
@click.argument("task", metavar=TASK)
@click.option(
    "--plan", "plan_text", required=True, help="The plan to simulate: tp=8,pp=16,dp_shard=128,zero=1 or a .toml file."
)
@where
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    callback=output_file,
    help="Write the timeline as a Chrome/Perfetto trace (.json).",
)
@click.option(
    "--html", type=click.Path(dir_okay=False), callback=output_file, help="Write the timeline as one HTML page."
)
@click.option("--scale", is_flag=True, help="Also over numbers of devices and batches.")
@failures
@click.option("--measure-rank", type=WholeNumber(min=0), help="Run this rank here: true compute and peak bytes.")
@click.option(
    "--price", type=click.FloatRange(min=0), help="Price of one device for an hour; gives the cost of tokens."
)
@common
@click.pass_obj
def simulate(answer: Answer, task: str, plan_text: str, **words: Any) -> None:
    """One step of one plan at any scale: time, MFU, exposed communication, bubble, memory by stage. Nothing is run.

    \b
    shardwise simulate llama3-8b --plan dp_shard=8 --cluster "1x8 h100-sxm-80gb" --global-batch 8 --seq 8k

    Exit code 0 when the plan fits its devices, 3 when it does not.
    """
    from shardwise.cluster import Cluster
    from shardwise.layout import Plan

    Plan.parse(plan_text), Cluster.parse(words["cluster"])
    begin(answer, "simulate: loading PyTorch and the figures of the catalogue")
    from shardwise.planner.door import check_devices, layout_of, plan_for, possible
    from shardwise.planner.text import forecast_lines, rank_map
    from shardwise.simulator import page, timeline

    cluster, parsed = Cluster.parse(words["cluster"]), plan_for(task, plan_text)
    answer.fields.update(plan=str(parsed), world_size=parsed.world_size)
    check_devices(parsed, cluster)
    with timing(not answer.as_json) as say:
        subject, batch = _subject(task, cluster, words, parsed.precision, parsed, say)
        layout = layout_of(parsed, subject)
        say(f"{subject.name}: simulating a step of {parsed}")
        forecast = possible(subject.simulate(layout))
    answer.fields.update(forecast.as_dict(), cluster=cluster.as_dict(), fits=forecast.fits(cluster.device.memory_bytes))
    lines = [
        f"{subject.name} under {parsed} on {cluster}, {batch}",
        *subject.remarks,
        *forecast_lines(forecast),
        *rank_map(layout, cluster),
    ]
    if not answer.fields["fits"]:
        answer.code = 3
        lines.append(
            f"DOES NOT FIT: {forecast.needed_bytes / 1e9:.1f} GB of {cluster.device.memory_bytes / 1e9:.1f} GB"
        )
    if words["measure_rank"] is not None:
        lines += _measured(answer, task, parsed, words["measure_rank"], forecast)
    if words["scale"]:
        rows = timeline.scaling(subject.simulate, layout)
        answer.fields["scaling"] = rows
        lines += timeline.scaling_lines(rows)
    if words["mtbf_hours"]:
        answer.fields["goodput"], told = _goodput(words, forecast, subject, parsed)
        lines += told
    if words["price"] is not None:
        cost, what = forecast.cost_per_million(words["price"])
        answer.fields[f"cost_per_million_{what}"] = cost
        lines.append(f"cost of a million {what}: {cost:.4g} (at {words['price']:g} for a device and hour)")
    title, memory = f"{subject.name}, {parsed}", cluster.device.memory_bytes
    for option, write in (("trace", timeline.chrome), ("html", partial(page.page, capacity=memory))):
        if words[option]:
            _write(words[option], write(forecast, title))
            lines.append(f"timeline written to {words[option]}")
    answer.text = "\n".join(lines)


@click.command()
@click.argument("task", metavar=TASK)
@click.option("--plans", required=True, help='Plans side by side, with ";" between them.')
@where
@click.option("--measure", is_flag=True, help="Also run each plan on this machine's ranks for a few steps.")
@common
@click.pass_obj
def compare(answer: Answer, task: str, plans: str, **words: Any) -> None:
    """Forecasts of several plans side by side: step, rate, MFU, memory, exposed communication.

    \b
    shardwise compare llama3-8b --plans "dp_shard=8;tp=8" --cluster "1x8 h100-sxm-80gb" --global-batch 8 --seq 8k

    With --measure also what a few steps take on the ranks at hand: step time, peak of live tensor bytes, bytes that a
    rank receives in a step, and the loss after the last one.
    """
    from shardwise.cluster import Cluster

    cluster = Cluster.parse(words["cluster"])
    begin(answer, "compare: loading PyTorch and the figures of the catalogue")
    from shardwise.planner.door import plan_for
    from shardwise.planner.text import table

    if words["measure"]:
        _can_be_measured(task, words)
    rows: list[list[str]] = []
    found: list[dict[str, Any]] = []
    texts = [text for part in plans.split(";") if (text := part.strip())]
    with timing(not answer.as_json) as say:
        for number, text in enumerate(texts, 1):
            say(f"compare: forecasting {text} ({number} of {len(texts)})")
            parsed = plan_for(task, text)
            cells, fields = _forecast_row(task, cluster, parsed, words)
            if words["measure"]:
                say(f"compare: running {text} on this machine ({number} of {len(texts)})")
                more, measured = _measured_row(task, parsed, fields)
                cells, fields = [*cells, *more], {**fields, "measured": measured}
            rows.append([text, *cells])
            found.append({"plan": str(parsed), **fields})
    if not rows:
        raise InputError('--plans: no plan given; write them as "dp_replicate=8;dp_shard=8,zero=3"')
    if all("error" in fields for fields in found):
        raise InputError(f"compare: none of the plans can be forecast: {found[0]['error']}")
    head = ["plan", "step", "MFU", "memory", "fits", "largest beside compute"]
    if words["measure"]:
        head += ["measured step", "live bytes, forecast", "measured", "received a step", "loss"]
    answer.fields.update(plans=found)
    answer.text = "\n".join(table(head, rows))


def _forecast_row(task: str, cluster: Cluster, plan: Plan, words: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Cells and fields of one plan's forecast, or why there is none."""
    from shardwise.errors import ShardwiseError
    from shardwise.planner.door import check_devices, layout_of, possible
    from shardwise.planner.units import bytes_text, seconds_text

    try:
        check_devices(plan, cluster)
        subject, _ = _subject(task, cluster, words, plan.precision, plan)
        forecast = possible(subject.simulate(layout_of(plan, subject)))
    except ShardwiseError as error:
        return ["-", "-", "-", "-", str(error)], {"error": str(error)}
    fits = forecast.fits(cluster.device.memory_bytes)
    most = max(forecast.parts, key=lambda name: forecast.parts[name] if name != "compute" else 0.0)
    cells = [
        seconds_text(forecast.step_s), f"{forecast.mfu:.1%}", bytes_text(forecast.needed_bytes),
        "yes" if fits else "NO", f"{most} {forecast.parts[most] / forecast.step_s:.0%}",
    ]  # fmt: skip
    return cells, {"fits": fits, **forecast.as_dict()}


def _can_be_measured(task: str, words: dict[str, Any]) -> None:
    from shardwise.planner.door import is_shape

    if is_shape(task):
        raise InputError(f"--measure: {task} is a shape, not a model that can be run; give module:name")
    if words["global_batch"] is not None:
        raise InputError(
            "--measure runs the task's own batch: leave --global-batch out, or give the task another batch"
        )


def _measured_row(task: str, plan: Plan, forecast: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Cells and fields of one plan as it ran here, or why it did not."""
    from shardwise.errors import RefusedPlan
    from shardwise.measure.plan_here import measure_here
    from shardwise.planner.units import seconds_text
    from shardwise.task_names import resolve_task

    expected = "-" if "memory" not in forecast else _mib(max(m["allocated"] for m in forecast["memory"]))
    try:
        found = measure_here(partial(resolve_task, task), plan)
    except RefusedPlan as refused:
        return [str(refused), expected, "-", "-", "-"], {"refused": str(refused)}
    cells = [
        seconds_text(found["step_s"]), expected, _mib(found["peak_live"]), _mib(found["received_bytes"]),
        f"{found['loss']:.6g}",
    ]  # fmt: skip
    return cells, found


def _mib(size: float) -> str:
    return f"{size / 2**20:.3f} MiB"


@click.command()
@click.option(
    "-o",
    "--output",
    default="cluster.toml",
    show_default=True,
    type=click.Path(dir_okay=False),
    callback=output_file,
    help="The file.",
)
@click.option(
    "--ranks", type=WholeNumber(min=1), help="Ranks that measure at once; by default one for each GPU, or two."
)
@click.option("--quick", is_flag=True, help="Half the time: each step is timed once, so that a slow moment counts.")
@click.option("--refine", metavar="RUN", help="Do not measure: correct the file by a run that was forecast on it.")
@common
@click.pass_obj
def probe(answer: Answer, output: str, ranks: int | None, refine: str | None, quick: bool) -> None:
    """Measure this machine and write a cluster file: products, memory, collectives, disk.

    \b
    shardwise probe                          then: shardwise train --cluster cluster.toml --plan dp_replicate=2
    shardwise probe --quick                  half the time, less sure
    shardwise probe --refine runs/NAME       and the next forecast is corrected by what that run measured

    Under torchrun, srun or mpirun the launcher's ranks measure, on several hosts the links between them too, and
    rank 0 writes the file:

    \b
    torchrun --nnodes 2 --nproc-per-node 2 --no-python shardwise probe -o cluster.toml
    """
    from shardwise.cluster import Cluster

    begin(answer, "probe: loading PyTorch")
    from shardwise.measure.machine import probe as measure
    from shardwise.measure.machine import text

    if refine is not None and not speaks():
        return  # one of a launcher's ranks corrects the file
    if refine is not None:
        from shardwise.training.foresight import refine as refined

        cluster = refined(Cluster.parse(output if output.endswith(".toml") else output + ".toml"), Path(refine))
    else:
        with telling(not answer.as_json) as say:
            cluster = measure(ranks, say, quick=quick)
    if speaks():
        _write(output, cluster.to_toml())
    answer.fields.update(cluster=cluster.as_dict(), file=output)
    correction = cluster.device.correction
    lines = [text(cluster), f"written to {output}"]
    if correction is not None:
        lines.insert(1, f"  forecasts are multiplied by {correction.value:.3g} ({correction.source})")
    answer.text = "\n".join(lines)


def _how_to_train(path: str, head: str) -> str:
    """How a configuration becomes the task that the command names."""
    return (
        f"MODULE:TASK is a task with your data: hf.task(AutoConfig.from_pretrained({path!r}), {head!r}, data=...), or "
        "of the folder where it holds weights (docs/huggingface.md)"
    )


def _fixed(words: tuple[str, ...]) -> tuple[tuple[str, object], ...]:
    from shardwise.layout import Plan

    if not words:
        return ()
    parsed = Plan.parse(",".join(words))
    names = [part.partition("=")[0].strip() for word in words for part in word.split(",")]
    return tuple((name, getattr(parsed, name)) for name in names if name)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _subject(
    task: str,
    cluster: Cluster,
    words: dict[str, Any],
    precision: str,
    plan: Plan | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Subject, str]:
    """What the planner needs to know about TASK, and its batch in words."""
    from shardwise.planner.door import is_shape, subject_of

    subject = subject_of(
        task, cluster,
        global_batch=words["global_batch"], seq=words["seq"], precision=precision, software_name=words["software"],
        plan=plan, say=say or silent,
    )  # fmt: skip
    of = f" of {subject.sample}" if subject.sample else f" of {subject.seq} tokens" if is_shape(task) else ""
    return subject, f"{subject.global_batch} samples{of}"


def _measured(answer: Answer, task: str, plan: Plan, rank: int, forecast: Forecast) -> list[str]:
    """One rank run alone, with the simulated communication added."""
    from shardwise.measure.one_rank import measure_rank
    from shardwise.planner.door import is_shape
    from shardwise.planner.units import bytes_text, seconds_text
    from shardwise.task_names import resolve_task

    if is_shape(task):
        raise InputError(f"--measure-rank: {task} is a shape, not a model that can be run; give module:name")
    found = measure_rank(partial(resolve_task, task), plan, rank)
    waits = sum(seconds for name, seconds in forecast.parts.items() if "communication" in name)
    answer.fields["measured_rank"] = {**found, "with_communication_s": found["seconds"] + waits}
    return [
        f"rank {rank} run alone on this machine: {seconds_text(found['seconds'])} of compute a step, "
        f"{seconds_text(found['seconds'] + waits)} with the simulated communication",
        f"  peak of live tensor bytes {bytes_text(found['peak_live'])}, at rest {bytes_text(found['rest_live'])}",
    ]
