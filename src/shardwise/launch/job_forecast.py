"""Forecasts hours, devices and price of a job from its configuration, without running it."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.config import Effective
from shardwise.planner.door import check_plan, layout_of, possible, subject_of
from shardwise.planner.proposal_text import Proposal, forecast_lines
from shardwise.planner.worth import JobCost, job_lines
from shardwise.progress import Say, silent
from shardwise.training.job import make_job

SHOWN = 1  # lines of a forecast that are shown: the step time; `simulate` shows all


def job_cost(effective: Effective, cluster: Cluster, price: float, say: Say = silent) -> JobCost:
    """Returns the forecast cost of a run on a cluster; `InputError` or `RefusedPlan` if it cannot run.

    price   of a device for an hour; `say`: called with a text on what is done next
    """
    plan = effective.plan
    check_plan(plan, cluster)
    job = make_job(effective, keep=True)
    subject = subject_of(
        job.build_task(), cluster, global_batch=job.batch_samples, precision=plan.precision, plan=plan, say=say,
        randomness=job.randomness,
    )  # fmt: skip
    layout = layout_of(plan, subject)
    best = Proposal(plan, layout, possible(subject.simulate(layout)), "as given")
    return JobCost(best, plan.world_size, job.steps, price)


def cost_lines(cost: JobCost, cluster: Cluster) -> list[str]:
    """Returns lines of text: the step time, a remark if it does not fit, the job's hours and its price."""
    forecast, capacity = cost.best.forecast, cluster.device.memory_bytes
    lines = forecast_lines(forecast)[:SHOWN]
    if not forecast.fits(capacity):
        lines.append(f"DOES NOT FIT: {forecast.shortage(capacity)}; `shardwise plan` looks for plans that do")
    return [*lines, *job_lines([cost])]
