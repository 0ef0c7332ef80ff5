"""Record what each rank of a plan issues on a mock accelerator, and play it as NCCL: `check_order`.

    ranks   the look, two steps, an evaluation, predictions, whole weights and optimizer state, on the mock device
    here    `nccl_order.strictest`, `nccl_order.side_by_side`; communicators counted

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
    """How a plan's collectives and messages run on a device: one after another, and communicators side by side.

    issued         operations, of all ranks
    communicators  the most that a rank makes
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
    """Returns how a plan's operations on this task would run, on ranks of `pool` (None: new ones) with a mock device.

    Raises `InputError` where the task cannot run on an accelerator, `RefusedPlan` for a plan that is refused.
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
    """Returns the `OrderReport` of the operations that all ranks issued, by rank."""
    issued = sum(isinstance(entry, Issued) for entries in ranks for entry in entries)
    made = max(len(nccl_order.communicators(entries)) for entries in ranks)
    return OrderReport(plan, *nccl_order.check(ranks), issued, made)


def _evaluates(task: Any) -> bool:
    """Returns whether one process evaluates the task: a forward that takes gradients cannot run without them."""
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
    """Returns the entries that this rank issues and waits for in a few steps and an evaluation. Collective."""
    device = mock_device.install()
    # under a launcher ranks meet on the mock device; one rank alone needs no group
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
        # gathered by name and thrown away: what is issued is what is looked at
        for tensors in (engine.full_parameters(), engine.full_optimizer_state(), engine.full_buffers()):
            deque(tensors, maxlen=0)
    engine.close()
    return log.entries
