"""Where a kernel has no float64: the proof in float32, with a bar taken from one process itself.

The one process runs again with each micro-batch accumulated in two halves, which is the same sum in another order.
Its difference from the first run is what float32 rounding does here; the plan may differ by ten times that.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwise.errors import InputError
from shardwise.proof.oracle import run_oracle
from shardwise.proof.parity import Parity
from shardwise.proof.record import Record
from shardwise.proof.settings import Settings
from shardwise.task import Task

ALLOWANCE = 10
LEAST_BAR = 1e-6


def float32_oracle(task: Task, settings: Settings, failure: Exception) -> tuple[Record, dict[str, float], str]:
    """The record in float32, the bars, and what to tell the user. Raises the failure where float32 fails too."""
    from shardwise.proof.compare import compare

    narrow = replace(settings, dtype=torch.float32)
    try:
        record = run_oracle(task, narrow)
    except Exception:
        raise failure from None
    other = run_oracle(task, replace(narrow, halves=True))
    itself = Parity("", 1)
    compare(itself, record, other)
    bars = {
        "loss": itself.loss_error or 0.0,
        "gradient": max(itself.gradient_error.values(), default=0.0),
        "parameter": max(itself.parameter_error.values(), default=0.0),
        "buffer": max(itself.buffer_error.values(), default=0.0),
    }
    if bars["loss"] > 1e-4:
        raise InputError(
            f"a kernel of this task has no float64 ({failure}), and no float32 bar can be found: in one process the "
            "loss changes when a micro-batch is accumulated in halves, so the module mixes samples"
        )
    bars = {kind: max(ALLOWANCE * error, LEAST_BAR) for kind, error in bars.items()}
    first_line = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    return record, bars, f"compared in float32, since in float64 one process fails with: {first_line}"
