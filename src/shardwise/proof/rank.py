"""One rank's side of a proof: the engine under the plan, in float64, everything gathered and recorded on rank 0."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from shardwise.engine.engine import Engine, parallelize
from shardwise.layout import Plan
from shardwise.proof.record import Record, kept
from shardwise.proof.settings import Settings, global_batch, raise_eps
from shardwise.task_names import resolve_task
from shardwise.trace.double import KeepDouble, default_dtype


def run_rank(task: Any, plan: Plan, settings: Settings) -> Record | None:
    """Train under the plan and record; None on every rank but 0. Collective."""
    resolved = resolve_task(task)
    with KeepDouble():
        engine = parallelize(
            resolved, plan, seed=settings.seed, randomness="global", clip_norm=settings.clip_norm, device="cpu"
        )
    raised = raise_eps(engine.optimizer)
    record = Record(notices=list(engine.notices))
    if raised:
        record.notices.append(f"Adam-family eps raised from {min(raised):g} to 1e-4 on both sides")
    record.initial = _parameters(engine)
    for step in range(settings.steps):
        last = step == settings.steps - 1
        batch = global_batch(resolved, settings, step)
        with engine.observe() if last else nullcontext() as ledger, KeepDouble(), default_dtype(settings.dtype):
            result = engine.step(batch)
        record.ledger = ledger.rows() if ledger is not None else []
        record.losses.append(result.loss)
        record.gradients.append({n: None if g is None else kept(g) for n, g in engine.full_gradients()})
        record.parameters.append(_parameters(engine))
        record.buffers.append({name: kept(buffer) for name, buffer in engine.full_buffers()})
    return record if engine.rank == 0 else None


def _parameters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: kept(tensor) for name, tensor in engine.full_parameters()}
