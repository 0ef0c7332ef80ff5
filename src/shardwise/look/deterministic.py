"""What `deterministic` needs beside a fixed order of sums (comm/tree): one thread, and samples that are independent."""

from __future__ import annotations

import torch

from shardwise.device import on_host
from shardwise.errors import RefusedPlan
from shardwise.look.first_samples import Findings
from shardwise.step.state import RankState


def fix_threads(state: RankState) -> None:
    """Sets one thread for this rank's operations, since the order of their sums depends on the number of threads.

    Raises `RefusedPlan` on an accelerator.
    """
    if not on_host(state.device):
        raise RefusedPlan(
            f"deterministic on {state.device}: kernels of an accelerator add in an order of their own, by atomic "
            "additions and by what a library chooses; it is built for CPUs"
        )
    if torch.get_num_threads() != 1:
        state.notices.append(
            f"deterministic: one thread in each rank, where there were {torch.get_num_threads()}: a sum within an "
            "operation is taken in another order on another number of threads"
        )
        torch.set_num_threads(1)


def refuse_shared(findings: Findings) -> None:
    """Raises `RefusedPlan` for a module in which pieces of a batch depend on each other or change its state."""
    # in eval mode it normalises by running statistics, independent of the other samples
    if any(module.training for module in findings.batch_norms):
        raise RefusedPlan(
            "deterministic: batch norm joins all samples of a micro-batch, and each piece is computed alone: use a "
            "norm within samples (group norm, layer norm), or put it into eval mode"
        )
    moved = [f"buffer '{name}'" for name in findings.changed] + [f"parameter '{name}'" for name in findings.written]
    if moved:
        raise RefusedPlan(
            f"deterministic: the forward changes {moved[0]}, which would happen once for each "
            "piece that a rank computes, and so another number of times on other ranks"
        )
