"""The commands `plan` and `simulate`: arguments and answers; planner/ and simulator/ do the work."""

from __future__ import annotations

import json
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.answer import Answer
from shardwise.cli.forecasting import TASK, TASK_HELP, adapted, failures, maybe_where, subject_and_batch, where
from shardwise.cli.options import Number, WholeNumber, common, given, given_plan, output_file, write
from shardwise.cli.waiting import waiting
from shardwise.errors import InputError
from shardwise.progress import block

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.layout import Plan
    from shardwise.simulator.forecast import Forecast


def _goodput(
    words: dict[str, Any], forecast: Any, subject: Any, plan: Any, cluster: Cluster
) -> tuple[dict[str, Any], list[str]]:
    """Returns (goodput of a plan under failures as JSON, lines of text).

    words      the command's options by name: mtbf_hours, restart_s, checkpoint_s, saves_of
    forecast   of a step of `plan`; `subject`: the task as the planner sees it

    Raises `InputError` if both --checkpoint-s and --saves-of are given.
    """
    from shardwise.planner.door import layout_of
    from shardwise.simulator import goodput

    saved = goodput.saved_bytes(forecast.memory, layout_of(plan, subject))
    if words["checkpoint_s"] is not None and words["saves_of"] is not None:
        raise InputError("--checkpoint-s and --saves-of both tell what a checkpoint costs: give one of them")
    stall, basis = saved / goodput.COPY_BYTES_PER_S, f"a copy at {goodput.COPY_BYTES_PER_S / 1e9:g} GB/s, measured"
    if words["checkpoint_s"] is not None:
        stall, basis = words["checkpoint_s"], "as given"
    elif words["saves_of"] is not None:
        seconds, size = goodput.stall_of(words["saves_of"])
        stall = seconds * saved / size
        basis = f"{seconds:.2g} s for {size / 1e9:.3g} GB of a rank in {words['saves_of']}, in proportion to the bytes"
    disk = cluster.device.disk_gbps.value if cluster.device.disk_gbps is not None else None
    write_s = goodput.writing_s(saved, min(plan.world_size, cluster.sizes[0]), disk)
    result = goodput.goodput(
        forecast.step_s, plan.world_size, words["mtbf_hours"] * 3600, words["restart_s"], stall, write_s=write_s
    )
    result |= {"saved_bytes": saved, "basis": basis}
    stall_line = f"  a rank writes {saved / 1e9:.3g} GB and its buffer in host memory is as large; the stall: {basis}"
    return result, [*goodput.lines(result), stall_line]


@click.command(epilog=TASK_HELP)
@click.argument("task", metavar=TASK, required=False)
@maybe_where
@click.option("--from", "foreign", callback=given, metavar="FILE", help="Translate DeepSpeed's or Accelerate's file.")
@click.option("--ranks", type=WholeNumber(min=1), help="With --from: how many ranks, where the file does not say.")
@click.option("--precision", help="precision of the plans: bf16, or fp16 where tensor cores take no bf16.")
@click.option("--max-tp", type=WholeNumber(min=1), help="Largest tensor-parallel degree.")
@click.option("--max-pp", type=WholeNumber(min=1), help="Largest pipeline degree.")
@click.option("--max-cp", type=WholeNumber(min=1), help="Largest context-parallel degree.")
@click.option("--fix", multiple=True, metavar="KEY=VALUE", help="A field that every plan has: --fix tp=8; repeatable.")
@click.option("--runnable", is_flag=True, help="Only plans that this version can train.")
@click.option(
    "--min-memory-headroom",
    type=Number(0, 0.9),
    default=0.08,
    show_default=True,
    help="Share of memory kept free.",
)
@click.option(
    "--job", metavar="TIME", help="A job that takes as long on all devices (20m, 3h): its cost, and on fewer."
)
@click.option("--tokens", metavar="COUNT", help="A job of so many tokens (300B, 15T): hours and cost, and on fewer.")
@click.option("--price", type=Number(min=0), default=0.0, help="Price of one device for an hour, for a job.")
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
def plan(answer: Answer, task: str | None, **words: Any) -> None:
    """Which plans fit a cluster, which is fastest, and why the others are not. Nothing is run.

    \b
    shardwise plan llama3-405b --cluster "2048x8 h100-sxm-80gb, ib-400" --global-batch 16M-tokens --seq 8192
    shardwise plan --from ds_config.json --ranks 8         the plan that another library's file means
    """
    if words["foreign"] is not None:
        _translated(answer, task, words)
        return
    if task is None or words["cluster"] is None:
        raise click.UsageError("Missing argument 'TASK'." if task is None else "Missing option '--cluster'.")
    from shardwise.cluster import Cluster
    from shardwise.layout import check

    cluster, fixed = Cluster.parse(words["cluster"]), _fixed(words["fix"])
    with waiting(answer, "plan: loading PyTorch and the figures of the catalogue") as say:
        from shardwise.launch.lines import start_hint, start_line
        from shardwise.planner import Constraints
        from shardwise.planner import search as search_plans
        from shardwise.planner.proposal_text import first_text, proposal_dict, search_text
        from shardwise.planner.worth import AskedJob, job_lines, jobs

        asked = AskedJob.of(words["job"], words["tokens"], words["price"])
        limits = {name.removeprefix("max_"): most for name, most in words.items() if name.startswith("max_") and most}
        constraints = Constraints(
            tuple(limits.items()), fixed, words["min_memory_headroom"], check if words["runnable"] else None
        )
        precision = constraints.precision(words["precision"] or cluster.device.half)
        subject, batch = subject_and_batch(task, cluster, words, precision, say=say)
        result = search_plans(
            subject, cluster, constraints, precision=precision, say=say,
            show=None if answer.as_json else lambda first, looked_at: block(first_text(first, looked_at)),
        )  # fmt: skip
        job = jobs(subject, cluster, result, constraints, precision, asked)
    best, cluster = result.best, result.cluster or cluster
    named = task if subject.own and not subject.head else "MODULE:TASK"  # a shape or a config.json cannot be trained
    written = str(best.plan)
    if words["output"]:
        write(words["output"], best.plan.to_toml())
        written = words["output"]
    command = f"shardwise train {named} --plan '{written}'"
    command += " --set train.randomness=fast" if words["randomness"] == "fast" else ""
    lines: list[str] = []
    if words["mtbf_hours"]:
        goodput, lines = _goodput(words, best.forecast, subject, best.plan, cluster)
        answer.fields["goodput"] = goodput
        command += f" --checkpoint-every {goodput['checkpoint_every_steps']} --restarts 100"
    node = cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size
    command = start_line(command, best.plan, node)
    answer.fields.update(
        plan=str(best.plan),
        world_size=best.plan.world_size,
        cluster=cluster.as_dict(),
        proposals=[proposal_dict(p) for p in result.proposals],
        later=[proposal_dict(p) for p in result.later],
        stopped=result.stopped,
        lost=result.lost,
        notes=result.notes,
        considered=result.considered,
        fitted=result.fitted,
        command=command,
    )
    command = "\n".join([command, *start_hint(command, best.plan, node)])
    if subject.head:
        command += f"\n{_how_to_train(task, subject.head)}"
    answer.fields["job"] = [cost.as_dict() for cost in job]
    table = search_text(result, cluster, subject.name, batch, command, words["top"])
    answer.text = "\n".join([table, *job_lines(job), *lines])


def _translated(answer: Answer, task: str | None, words: dict[str, Any]) -> None:
    """Fills in the answer with the plan and settings of another library's file, and a sentence for each of its keys."""
    from pathlib import Path

    from shardwise.config.other_configs import read
    from shardwise.layout import check

    # a task and a cluster are for a search
    if task is not None or words["cluster"] is not None:
        raise click.UsageError("--from translates a file; a search is the same command without it")
    made = read(Path(words["foreign"]), words["ranks"])
    parsed = made.finished()
    check(parsed)
    settings = " ".join(f"--set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in made.settings.items())
    command = f"shardwise train TASK --plan '{parsed}'" + (f" {settings}" if settings else "")
    if words["output"]:
        write(words["output"], parsed.to_toml())
    answer.fields.update(plan=str(parsed), world_size=parsed.world_size, command=command, notes=made.told)
    width = max(len(key) for key, _ in made.told)
    answer.text = "\n".join([f"{key:{width}}  {text}" for key, text in made.told] + ["", f"plan: {parsed}", command])


@click.command(epilog=TASK_HELP)
@click.argument("task", metavar=TASK)
@click.option(
    "--plan",
    "plan_text",
    required=True,
    callback=given_plan,
    help="The plan to simulate: tp=8,pp=16,dp_shard=128,zero=1 or a .toml file.",
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
@click.option("--price", type=Number(min=0), help="Price of one device for an hour; gives the cost of tokens.")
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
    with waiting(answer, "simulate: loading PyTorch and the figures of the catalogue") as say:
        from shardwise.cluster.cluster_words import in_words
        from shardwise.planner.door import check_plan, layout_of, plan_for, possible
        from shardwise.planner.proposal_text import forecast_lines, lacking, rank_map
        from shardwise.simulator import step_page, timeline

        cluster = Cluster.parse(words["cluster"])
        parsed = plan_for(task, plan_text, cluster.device)
        # before the forecast, so that the JSON has the plan even if it fails below
        answer.fields.update(plan=str(parsed), world_size=parsed.world_size)
        check_plan(parsed, cluster)
        subject, batch = subject_and_batch(task, cluster, words, parsed.precision, parsed, say)
        layout = layout_of(parsed, subject)
        say(f"{subject.name}: simulating a step of {parsed}")
        forecast = possible(subject.simulate(layout))
    lacks, capacity = lacking(parsed), cluster.device.memory_bytes
    answer.fields.update(forecast.as_dict(), cluster=cluster.as_dict(), fits=forecast.fits(capacity))
    answer.fields.update(runnable=lacks or True, notes=list(subject.remarks))
    lines = [
        f"{subject.name} under {parsed} on {in_words(cluster)}, {batch}",
        *_idle(parsed.world_size, cluster.world_size),
        *subject.remarks,
        *forecast_lines(forecast),
        *_communicators(answer, parsed),
        *rank_map(layout, cluster),
    ]
    # a plan that does not fit has a forecast too, which shows how much memory is missing
    if not answer.fields["fits"]:
        answer.code = 3
        lines.append(
            f"DOES NOT FIT: {forecast.shortage(capacity)}; `shardwise plan` with the same words looks for plans that do"
        )
    # some techniques can be forecast but not run
    if lacks:
        lines.append(f"this version does not run the plan: {lacks}")
    if words["measure_rank"] is not None:
        lines += _measured(answer, task, parsed, subject.global_batch, words, forecast)
    if words["scale"]:
        rows = timeline.scaling(subject.simulate, layout)
        answer.fields["scaling"] = rows
        lines += timeline.scaling_lines(rows)
    if words["mtbf_hours"]:
        answer.fields["goodput"], goodput_lines = _goodput(words, forecast, subject, parsed, cluster)
        lines += goodput_lines
    if words["price"] is not None:
        # `what` is "tokens" for a text model, else "samples"
        cost, what = forecast.cost_per_million(words["price"])
        answer.fields[f"cost_per_million_{what}"] = cost
        lines.append(f"cost of a million {what}: {cost:.4g} (at {words['price']:g} for a device and hour)")
    title = f"{subject.name}, {parsed}"
    for option, made in (("trace", timeline.chrome), ("html", partial(step_page.page, capacity=capacity))):
        if words[option]:
            write(words[option], made(forecast, title))
            lines.append(f"timeline written to {words[option]}")
    answer.text = "\n".join(lines)


def _how_to_train(path: str, head: str) -> str:
    """Returns a hint on how to write a task for a model that was built from a config.json.

    path   of the configuration; `head`: "base" for a model without head, else the head's name
    """
    from shardwise.cluster.catalogue import configuration

    read, keys = f"AutoConfig.from_pretrained({path!r})", configuration(path)
    if keys is not None:
        given = ", ".join(f"{name}={value!r}" for name, value in keys.items() if name != "model_type")
        read = f"AutoConfig.for_model({keys['model_type']!r}, {given})"
    if head == "base":
        return (
            f"MODULE:TASK is a task of your own with your head, loss and data around AutoModel.from_config("
            f"{read}) (docs/own-module.md)"
        )
    return (
        f"MODULE:TASK is a task with your data: hf.task({read}, {head!r}, data=...), or "
        "of the folder where it holds weights (docs/huggingface.md)"
    )


def _fixed(words: tuple[str, ...]) -> tuple[tuple[str, object], ...]:
    """Returns (key of a plan, parsed value) for each "KEY=VALUE" of --fix."""
    from shardwise.layout import Plan

    if not words:
        return ()
    parsed = Plan.parse(",".join(words))
    names = [part.partition("=")[0].strip() for word in words for part in word.split(",")]
    return tuple((name, getattr(parsed, name)) for name in names if name)


def _idle(ranks: int, devices: int) -> list[str]:
    """Returns [a line on devices that a plan of `ranks` leaves unused]; [] if it uses all."""
    return (
        [f"the plan has {ranks:,} ranks: {devices - ranks:,} of {devices:,} devices stand idle"]
        if ranks < devices
        else []
    )


def _communicators(answer: Answer, plan: Plan) -> list[str]:
    """Returns [a line on a rank's communicators and their bytes], and puts them into the answer; [] if it has none."""
    from shardwise.layout.communicators import COMMUNICATOR_BYTES, communicators

    made = communicators(plan)
    answer.fields["communicators"] = {"names": list(made), "bytes": COMMUNICATOR_BYTES * len(made)}
    size = COMMUNICATOR_BYTES * len(made) / 1e6
    each = f"communicators of a rank: {len(made)} ({', '.join(made)}), some {size:.0f} MB outside the allocator"
    return [f"{each} (assumed {COMMUNICATOR_BYTES / 1e6:.0f} MB each)"] if made else []


def _measured(
    answer: Answer, task: str, plan: Plan, samples: int, words: dict[str, Any], forecast: Forecast
) -> list[str]:
    """Runs rank --measure-rank of the plan alone on this machine; returns lines on its time and memory.

    samples    of a global batch; `forecast`: its communication times are added to the measured time
    """
    from shardwise.costs.units import bytes_text, seconds_text
    from shardwise.measure.one_rank import measure_rank
    from shardwise.planner.door import is_shape
    from shardwise.task_names import resolve_task

    if is_shape(task):
        raise InputError(f"--measure-rank: {task} is a shape, not a model that can be run; give module:name")
    rank = words["measure_rank"]
    measured = measure_rank(partial(resolve_task, adapted(task, words)), plan, samples, rank, words["randomness"])
    waits = sum(seconds for name, seconds in forecast.parts.items() if "communication" in name)
    answer.fields["measured_rank"] = {**measured, "with_communication_s": measured["seconds"] + waits}
    return [
        f"rank {rank} run alone on this machine: {seconds_text(measured['seconds'])} of compute a step, "
        f"{seconds_text(measured['seconds'] + waits)} with the simulated communication",
        f"  peak of live tensor bytes {bytes_text(measured['peak_live'])}, at rest {bytes_text(measured['rest_live'])}",
    ]
