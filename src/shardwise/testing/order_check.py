"""`check_order`: records what each rank of a plan issues on a mock accelerator, and replays it as NCCL would.

    ranks   build the engine, run two steps, an evaluation, and gather weights and optimizer state, on the mock device
    here    `nccl_order.strictest` and `nccl_order.side_by_side` on the records; communicators are counted

What this does not do: see a compiled program's collectives, or checkpoints of a run, whose ranks meet in a folder.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.issued import Issued, IssueLog, Waited
from shardwise.comm.recording import listing
from shardwise.engine.engine import parallelize
from shardwise.errors import InputError
from shardwise.layout import Plan, check
from shardwise.look.one_process import needs_gradients
from shardwise.proof.settings import Settings, global_batch
from shardwise.ranks import RankPool
from shardwise.task import call_arguments
from shardwise.task_names import resolve_task
from shardwise.testing import mock_device, nccl_order

STEPS = 2


@dataclass(frozen=True)
class OrderReport:
    """The outcome of `check_order`.

    strictest      outcome on a device that runs operations one after another
    side_by_side   outcome on a device that runs communicators independently
    issued         number of operations, over all ranks
    communicators  number that the rank with the most of them makes
    """

    plan: str
    strictest: nccl_order.PlayedOrder
    side_by_side: nccl_order.PlayedOrder
    issued: int
    communicators: int

    def text(self) -> str:
        """Returns the outcome as a few lines of text."""
        lines = [f"order: {self.issued} collectives and messages, {self.communicators} communicators on a rank"]
        if self.strictest.runs:
            return f"{lines[0]}; they end on a device that runs them one after another, without buffers"
        if self.side_by_side.runs:
            lines.append("they end where a device runs communicators side by side, not where one waits for another:")
            return "\n".join([*lines, self.strictest.text()])
        return "\n".join([*lines, "they wait for each other for ever, once messages outgrow NCCL's buffers:",
                          self.side_by_side.text()])  # fmt: skip


def check_order(task: Any, plan: Plan | str, *, pool: RankPool | None = None, timeout_s: float = 600.0) -> OrderReport:
    """Runs a few steps of a task under a plan on a mock device; returns whether its operations could deadlock on NCCL.

    task   a task or its name, as in `train`; `pool`: ranks to use, None: new ones; `timeout_s`: seconds for the run

    Raises `InputError` if the plan is compiled or the task cannot run on an accelerator, `RefusedPlan` for a plan that
    is refused.
    """
    chosen = Plan.parse(plan)
    check(chosen)
    if chosen.compile:
        raise InputError("--check-order: a compiled program's collectives are not seen: give the plan without compile")
    if pool is None:
        with RankPool() as own:
            return check_order(task, chosen, pool=own, timeout_s=timeout_s)
    asked = (task, chosen, _evaluates(task))
    ranks: list[list[Issued | Waited]] = pool.run(record_rank, chosen.world_size, *asked, timeout_s=timeout_s)
    return report(str(chosen), ranks)


def report(plan: str, ranks: list[list[Issued | Waited]]) -> OrderReport:
    """Returns the `OrderReport` of `ranks`, the entries that each rank recorded."""
    issued = sum(isinstance(entry, Issued) for entries in ranks for entry in entries)
    made = max(len(nccl_order.communicators(entries)) for entries in ranks)
    return OrderReport(plan, *nccl_order.check(ranks), issued, made)


def _evaluates(task: Any) -> bool:
    """Whether the task can be evaluated: a forward that computes gradients itself fails under `no_grad`."""
    resolved = resolve_task(task)
    args, kwargs = call_arguments(resolved, global_batch(resolved, Settings(), 0))
    try:
        with torch.no_grad():
            resolved.model().eval()(*args, **kwargs)
    except RuntimeError as error:
        if not needs_gradients(error):
            raise
        return False
    return True


def record_rank(task: Any, plan: Plan, evaluates: bool = True) -> list[Issued | Waited]:
    """Returns the operations that this rank issues and waits for in `STEPS` steps and an evaluation. Collective.

    evaluates   Whether to run the evaluation
    """
    device = mock_device.install()
    # a group of several ranks needs a backend for mock tensors
    if dist.is_initialized() and dist.get_world_size() > 1:
        mock_device.join_group()
    resolved = resolve_task(task)
    settings = Settings(accumulate=plan.step_microbatches)
    log = IssueLog()
    with listing(log):
        engine = parallelize(resolved, plan, device=str(device), clip_norm=1.0)
        for step in range(STEPS):
            engine.step(global_batch(resolved, settings, step))
        # a task may have no evaluation
        if evaluates:
            engine.evaluate([global_batch(resolved, settings, STEPS)])
        # gathered and discarded, for the collectives that this issues
        for tensors in (engine.full_parameters(), engine.full_optimizer_state(), engine.full_buffers()):
            deque(tensors, maxlen=0)
    engine.close()
    return log.entries
