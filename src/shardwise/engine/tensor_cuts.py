"""Derive the cuts of tensor parallelism when an engine is built, by one forward without values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shardwise.comm import Axis, of_first
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.look.one_process import blame
from shardwise.look.samples import SAMPLES, a_few, few_samples
from shardwise.mesh import Mesh
from shardwise.parallel.tensor import Derived, Followed, TensorParallel, find_cuts
from shardwise.part.pairs import hold_pairs, shapes_outside
from shardwise.precision import Precision
from shardwise.step.batching import samples_in
from shardwise.step.forward import run_alone
from shardwise.task import Task
from shardwise.trace.deferred import Built, build


def cut_tensors(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built, batch: Any,
    dealt: frozenset[str] = frozenset(),
) -> TensorParallel:  # fmt: skip
    """Returns which weights the plan's tp axis shards, and how; rank 0 derives that and sends it to all. Collective.

    batch  a few samples
    dealt  names of stacked experts' weights whose dim 0 ep shards, so that tp shards another dim

    Raises `RefusedPlan`, with the reasons, if no weight can be sharded.
    """

    def derived() -> Any:
        return derive_cuts(task, plan, precision, built, batch, dealt=dealt).encoded()

    cuts = mesh.once("cuts of tp", lambda: of_first(derived, mesh.world, mesh.device))
    return TensorParallel(Derived.decoded(cuts), replace(mesh.tp, sequence=plan.sp, early=plan.tp_overlap))


def derive_cuts(
    task: Task, plan: Plan, precision: Precision, built: Built, batch: Any, followed: Followed | None = None,
    dealt: frozenset[str] = frozenset(),
) -> Derived:  # fmt: skip
    """Returns how each parameter is sharded over `plan.tp` ranks, from a forward of a few samples without values.

    batch     a few samples
    followed  a cache of recorded forwards for this task and precision, at any degree of tp, which the call extends
    dealt     names of stacked experts' weights whose dim 0 ep shards, so that tp shards another dim

    Needs no process group. Raises `RefusedPlan` if no weight can be sharded or the forward cannot be recorded,
    `InputError` if one process fails too.
    """
    try:
        derived = find_cuts(
            built,
            batch,
            run_alone(task, precision),
            plan.tp,
            plan.tp_whole,
            sequence=plan.sp,
            dtype_of=precision.dtype_of,
            followed=followed,
            dealt=dealt,
        )
    except ShardwiseError:
        raise
    except Exception as error:
        what = (
            f"tp={plan.tp}: the forward cannot be followed on {samples_in(batch)} samples without gradients, from "
            "which the cuts are derived (one that calls torch.autograd.grad cannot be cut; use tp=1)"
        )
        raise blame(error, what, task, precision, built.module, batch) from error
    if not derived.cuts:
        # one weight for each reason, the first by name, since all weights of a model may have the same reason
        first = {reason: name for name, reason in sorted(derived.whole.items(), reverse=True) if reason}
        reasons = [f"'{name}': {reason}" for reason, name in sorted(first.items(), key=lambda item: item[1])]
        raise RefusedPlan(
            f"tp={plan.tp}: no weight of the module can be cut: " + "; ".join(reasons[:3] or ["it has no products"])
        )
    return derived


def describe(task: Task, plan: Plan, seed: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (rows, totals) on how a plan's tp shards weights, for display. Needs no ranks.

    rows    for each parameter {"parameter", "shape", "cut": role or None, "dim", "ranks": indices of the dim on each
            rank, "family": of weights that are sharded together, "whole_because": reason if it is not sharded}
    totals  {"elements", "cut_elements", "samples": in the recorded forward, "collectives": rows of the ledger,
            "received_bytes_per_sample"}

    Raises `InputError` for a plan without tp, and as `derive_cuts` does.
    """
    # an empty table would read as if no weight could be sharded
    if plan.tp == 1:
        raise InputError(f"plan {plan} cuts no weights: give tp its degree")
    sample = few_samples(task, plan, Axis.alone("data"), torch.device("cpu"))
    built = build(task.model, seed)
    built.pairs = hold_pairs(built.module)
    derived = derive_cuts(task, plan, Precision.of(plan), built, a_few(sample))
    rows = []
    for name, (shape, _) in shapes_outside(built.module).items():
        cut = derived.cuts.get(name)
        rows.append({
            "parameter": name,
            "shape": list(shape),
            "cut": None if cut is None else cut.role,
            "dim": None if cut is None else cut.dim,
            "ranks": None if cut is None else list(cut.owners.counts),
            "family": None if cut is None else cut.family,
            "whole_because": derived.whole.get(name, "") if cut is None else "",
        })  # fmt: skip
    elements = {name: param.numel() for name, param in built.module.named_parameters()}
    samples = min(samples_in(sample), SAMPLES)
    assert derived.ledger is not None
    totals = {
        "elements": sum(elements.values()),
        "cut_elements": sum(elements[name] for name in derived.cuts),
        "samples": samples,
        "collectives": derived.ledger.rows(),
        "received_bytes_per_sample": derived.ledger.received() / samples,
    }
    return rows, totals
