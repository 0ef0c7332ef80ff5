"""Find modules of experts by one forward; make `ExpertParallel` from the plan (parallel/expert has the exchange)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.comm import of_first
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.parallel.expert import ExpertParallel, find_experts, find_row_wise
from shardwise.parallel.expert.expert_forward import ExpertCall, Stack
from shardwise.parallel.tensor import TensorParallel
from shardwise.precision import Precision
from shardwise.random.modes import EACH_ITS_OWN
from shardwise.step.forward import run_alone
from shardwise.task import Task
from shardwise.trace.deferred import Built


def spread_experts(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built, batch: Any
) -> ExpertParallel:
    """Returns the module's experts, dealt over the plan's ep axis. Collective.

    batch  a few samples, for the forward by which rank 0 finds the experts; it sends the result to all
    Raises as `look_for_experts` does.
    """
    stacks = mesh.once("dealt experts", lambda: _from_rank_0(
        lambda: look_for_experts(task, plan, precision, built, batch), mesh
    ))  # fmt: skip
    return ExpertParallel(stacks, mesh.ep)


def own_row_experts(task: Task, mesh: Mesh, precision: Precision, built: Built, batch: Any) -> list[Stack]:
    """Returns the stacks of `row_wise_experts`, which rank 0 finds and sends to all. Collective."""
    return mesh.once("experts by rows", lambda: _from_rank_0(
        lambda: row_wise_experts(task, precision, built, batch), mesh
    ))  # fmt: skip


def row_wise_experts(task: Task, precision: Precision, built: Built, batch: Any) -> list[Stack]:
    """Returns the modules of experts whose result for a token does not depend on other tokens.

    If positions are cut, such a module can be called with this rank's tokens only. `batch`: a few samples.
    """
    return find_row_wise(built, batch, run_alone(task, precision), precision.dtype_of)


def _from_rank_0(find: Callable[[], list[Stack]], mesh: Mesh) -> list[Stack]:
    """Returns, on every rank, the stacks that `find()` returns on rank 0. Collective."""
    rows = of_first(  # as JSON, which keeps no classes and makes lists of tuples
        lambda: [[s.path, s.experts, s.names, s.call and [s.call.rows, s.call.index, s.call.weight], s.counters,
                  s.sums, s.members, s.keys, s.draws, s.program] for s in find()],
        mesh.world, mesh.device,
    )  # fmt: skip
    return [
        Stack(path, experts, tuple(names), call and ExpertCall(*call), tuple(counters), tuple(map(tuple, sums)),
              tuple(members), tuple(keys), draws, program)
        for path, experts, names, call, counters, sums, members, keys, draws, program in rows
    ]  # fmt: skip


def look_for_experts(task: Task, plan: Plan, precision: Precision, built: Built, batch: Any) -> list[Stack]:
    """Returns the modules of experts that can be dealt over `plan.ep` ranks. `batch`: a few samples.

    Raises `RefusedPlan`, with the reason, if there are none or they cannot be dealt.
    """
    return find_experts(built, batch, run_alone(task, precision), plan.ep, precision.dtype_of)


def rows_alone(stacks: list[Stack]) -> list[Stack]:
    """Returns `stacks` if each may be called with a rank's own tokens only (positions are cut); else `RefusedPlan`."""
    together = next((stack.path for stack in stacks if stack.call is None), None)
    if together is not None:
        raise RefusedPlan(
            f"'{together}' deals rows to its experts, and what it gives for one row depends on others, or it is called "
            "with more than its rows (..., H): ep does not go beside cp, cp_ulysses or domain there; leave one out"
        )
    return stacks


def refuse_draws(experts: ExpertParallel | None) -> None:
    """Raises `RefusedPlan` if experts use random numbers (dropout); called only under randomness="global".

    A token that arrives from another rank has lost its global index, on which its random numbers would depend.
    """
    path = next((stack.path for stack in experts.stacks if stack.draws), None) if experts is not None else None
    if path is not None:
        raise RefusedPlan(
            f"ep={experts.axis.size}: the experts of '{path}' draw (dropout), and rows that travel to them lose their "  # type: ignore[union-attr]
            f"place among all, by which one process draws: {EACH_ITS_OWN}"
        )


def beside_cuts(experts: ExpertParallel, module: nn.Module, tensor: TensorParallel | None) -> ExpertParallel:
    """Returns `experts` with `rows` set: the size of dim 0 of each of their weights on this rank, after tp's cuts."""
    cuts = {} if tensor is None else {name: cut for name, cut in tensor.cuts.items() if cut.dim == 0}
    rows = {name: param.shape[0] for name, param in module.named_parameters() if name in experts.dealt}
    here = 0 if tensor is None else tensor.axis.index
    return replace(experts, rows=rows | {name: cuts[name].owners.counts[here] for name in cuts if name in rows})


def names_of(stacks: list[Stack]) -> frozenset[str]:
    """Returns the names of the stacked weights, of shape (experts, ...), without those of experts kept in a list."""
    return frozenset(name for stack in stacks for name in stack.names if not stack.members)
