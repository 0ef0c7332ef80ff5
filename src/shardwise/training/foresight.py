"""Forecasts a run before it starts, and compares the forecast with measurements after it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.cluster import Cluster, Figure
from shardwise.costs.layout import of_plan
from shardwise.costs.software import software
from shardwise.errors import InputError
from shardwise.planner.traced_layouts import traced_subject
from shardwise.training.job import Job


def foresee(job: Job) -> dict[str, Any]:
    """Returns a forecast of the run on its `train.cluster`; `InputError` if the cluster has too few ranks.

    cluster, correction, pace_us   the cluster's text, factor on its step times, pace of its probe in us (None: unknown)
    step_s, parts_s                seconds of a step; {part of a step: seconds}
    parameters, gradients, optimizer, micro_batch   bytes on the rank that has most of that kind
    basis                          what the figures rest on
    """
    config, plan = job.effective.config.train, job.effective.plan
    assert config.cluster is not None
    cluster = Cluster.parse(config.cluster)
    if plan.world_size > cluster.world_size:
        raise InputError(
            f"train.cluster: plan {plan} needs {plan.world_size} ranks; {cluster} has {cluster.world_size}"
        )
    layout = of_plan(plan, global_batch=job.batch_samples, seq=1, uneven=True)
    # a run has one size of micro-batch, which is traced itself
    micro = (layout.micro_batch, layout.micro_batch)
    subject = traced_subject(
        job.build_task(), cluster, software("shardwise"), job.batch_samples, plan.precision, (plan.remat,), micro,
        randomness=job.randomness,
    )  # fmt: skip
    forecast = subject.simulate(layout)

    def most(*names: str) -> float:
        """Returns the largest sum of these memory terms over ranks, in bytes; the rank may differ between kinds."""
        return max(sum(rank.terms.get(name, 0.0) for name in names) for rank in forecast.memory)

    return {
        "cluster": str(config.cluster),
        "correction": cluster.device.correction.value if cluster.device.correction is not None else 1.0,
        "pace_us": cluster.device.pace_us.value if cluster.device.pace_us is not None else None,
        "step_s": forecast.step_s,
        "parts_s": forecast.parts,
        "parameters": most("weights", "master"),
        "gradients": most("gradients"),
        "optimizer": most("optimizer"),
        "micro_batch": most("micro-batch"),
        "basis": forecast.basis,
    }


def beside(forecast: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """Returns the forecast with two more keys, from the run's summary.

    pace     time of a fixed piece of work during the run over its time while the cluster was probed; 1.0 if unknown
    beside   "step" (seconds, the forecast times `pace`), "parameters", "gradients", "optimizer" (bytes) -> (forecast,
             measured on the rank that has most, None if not measured)
    """
    pace = summary.get("pace_us") / forecast["pace_us"] if summary.get("pace_us") and forecast["pace_us"] else 1.0
    pairs = {"step": (forecast["step_s"] * pace, summary.get("step_s"))}
    for name in ("parameters", "gradients", "optimizer"):
        measured = [rank[name] for rank in summary["memory"] if rank.get(name)]
        pairs[name] = (forecast[name], max(measured, default=None))
    return {**forecast, "pace": pace, "beside": pairs}


def refine(cluster: Cluster, run: Path) -> Cluster:
    """Returns the cluster with `correction` set to measured over forecast step time of the run in folder `run`.

    Raises `InputError` if the run is not finished, had no forecast, or too few steps to time one.
    """
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--refine: no summary.json in {run}: name the folder of a finished run") from None
    except ValueError as error:
        raise InputError(f"--refine: {run / 'summary.json'} is not a run's ({error}): name the folder of one") from None
    forecast = summary.get("forecast") if isinstance(summary, dict) else None
    if not forecast or not summary.get("step_s"):
        raise InputError(f"--refine: the run in {run} had no forecast, or too few steps to time: train with --cluster")
    factor = summary["step_s"] / (forecast["step_s"] * forecast["pace"] / forecast["correction"])
    source = f"step time of {run.name}, measured over forecast"
    return replace(
        cluster, device=replace(cluster.device, correction=Figure(float(f"{factor:.4g}"), "measured", source))
    )
