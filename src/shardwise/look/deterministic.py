"""What `deterministic` needs beside a fixed order of sums (comm/tree): one thread, samples that share nothing."""

from __future__ import annotations

import torch

from shardwise.device import on_host
from shardwise.errors import RefusedPlan
from shardwise.look.first_samples import Findings
from shardwise.step.state import RankState


def fix_threads(state: RankState) -> None:
    """Set one thread for this rank's operations, whose order of sums follows from how many there are.

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
    """Raise `RefusedPlan` for a module in which pieces of a batch would meet, or leave something behind."""
    # in eval mode it normalises by running statistics, whoever else is in the batch
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
