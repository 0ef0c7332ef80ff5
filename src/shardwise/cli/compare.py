"""The command `compare`: forecasts of several plans side by side (planner/door), and runs here (measure/plan_here)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.answer import Answer
from shardwise.cli.forecasting import TASK, TASK_HELP, adapted, subject_and_batch, where
from shardwise.cli.options import common
from shardwise.cli.waiting import waiting
from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.layout import Plan


@click.command(epilog=TASK_HELP)
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
    with waiting(answer, "compare: loading PyTorch and the figures of the catalogue") as say:
        from shardwise.planner.door import plan_for
        from shardwise.planner.proposal_text import table

        if words["measure"]:
            _can_be_measured(task, words)
        rows: list[list[str]] = []
        by_plan: list[dict[str, Any]] = []
        # a trailing ";" gives an empty part
        texts = [text for part in plans.split(";") if (text := part.strip())]
        for number, text in enumerate(texts, 1):
            say(f"compare: forecasting {text} ({number} of {len(texts)})")
            parsed = plan_for(task, text, cluster.device)
            cells, fields = _forecast_row(task, cluster, parsed, words)
            if words["measure"]:
                say(f"compare: running {text} on this machine ({number} of {len(texts)})")
                more, measured = _measured_row(adapted(task, words), parsed, fields, words)
                cells, fields = [*cells, *more], {**fields, "measured": measured}
            rows.append([text, *cells])
            by_plan.append({"plan": str(parsed), **fields})
    if not rows:
        raise InputError('--plans: no plan given; write them as "dp_replicate=8;dp_shard=8,zero=3"')
    # a plan that cannot be forecast has a row with the reason; the command fails only if no plan can
    if all("error" in fields for fields in by_plan):
        # "dp_shard=8,tp=8" is one valid plan: the user may have meant two
        between = "" if ";" in plans or "," not in plans else '; between plans stands ";", as in "dp_shard=8;tp=8"'
        raise InputError(f"compare: none of the plans can be forecast: {by_plan[0]['error']}{between}")
    head = ["plan", "step", "MFU", "memory", "fits", "largest beside compute"]
    if words["measure"]:
        head += ["measured step", "live bytes, forecast", "measured", "received a step", "loss"]
    answer.fields.update(plans=by_plan)
    answer.text = "\n".join(table(head, rows))


def _forecast_row(task: str, cluster: Cluster, plan: Plan, words: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Returns (cells of the table, JSON fields) of one plan's forecast.

    words   the command's options by name

    If the plan cannot be forecast, the last cell and the only field, "error", tell why.
    """
    from shardwise.costs.units import bytes_text, seconds_text
    from shardwise.errors import ShardwiseError
    from shardwise.planner.door import check_plan, layout_of, possible

    try:
        check_plan(plan, cluster)
        subject, _ = subject_and_batch(task, cluster, words, plan.precision, plan)
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
    """Raises `InputError` if the task cannot be run here, or not on the batch of --global-batch."""
    from shardwise.planner.door import is_shape
    from shardwise.task_names import resolve_task

    if is_shape(task):
        raise InputError(f"--measure: {task} is a shape, not a model that can be run; give module:name")
    if words["global_batch"] is not None and resolve_task(adapted(task, words)).batch is not None:
        raise InputError(
            "--measure runs the task's own batch: leave --global-batch out, or give the task another batch"
        )


def _measured_row(
    task: Any, plan: Plan, forecast: dict[str, Any], words: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Runs one plan on this machine's ranks; returns (five cells of the table, JSON fields).

    forecast   JSON fields of the plan's forecast; `words`: the command's options by name

    If the plan is refused, the first cell and the only field, "refused", tell why.
    """
    from shardwise.costs.units import batch, seconds_text
    from shardwise.errors import RefusedPlan
    from shardwise.measure.plan_here import measure_here
    from shardwise.planner.traced_layouts import DEFAULT_SAMPLES
    from shardwise.task_names import resolve_task

    expected = "-" if "memory" not in forecast else _mib(max(m["allocated"] for m in forecast["memory"]))
    samples = DEFAULT_SAMPLES if words["global_batch"] is None else batch(str(words["global_batch"]), None)
    try:
        measured = measure_here(partial(resolve_task, task), plan, samples, randomness=words["randomness"])
    except RefusedPlan as refused:
        return [str(refused), expected, "-", "-", "-"], {"refused": str(refused)}
    cells = [
        seconds_text(measured["step_s"]), expected, _mib(measured["peak_live"]), _mib(measured["received_bytes"]),
        f"{measured['loss']:.6g}",
    ]  # fmt: skip
    return cells, measured


def _mib(size: float) -> str:
    return f"{size / 2**20:.3f} MiB"
