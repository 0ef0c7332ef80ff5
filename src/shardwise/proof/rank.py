"""One rank's side of a proof: steps of the engine in float64; each rank compares what it holds with rank 0's record.

Rank 0 records unsharded tensors. Every rank then computes digests of what it has itself: parameters as its module
uses them, gradients, the buffers that its stages use, the optimizer's state. A tensor whose digest differs from that of
rank 0's record is kept as a `Deviation`, and compared with one process by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from shardwise.comm import gather_json
from shardwise.comm.buckets import small_buckets
from shardwise.digest import digest
from shardwise.engine.engine import Engine, parallelize
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.layout.dealing import cut
from shardwise.look.samples import checksum_of
from shardwise.mesh import Mesh
from shardwise.part import plain
from shardwise.proof.own_dtypes import rank_dtypes
from shardwise.proof.record import Deviation, Record, Tensors, kept, kept_state
from shardwise.proof.settings import Settings, global_batch, raise_eps
from shardwise.proof.sizes import sizes_of
from shardwise.proof.watch import CallTrace, ModuleWatch
from shardwise.proof.zeros import settle
from shardwise.random import Samples
from shardwise.task import Task
from shardwise.task_names import resolve_task
from shardwise.trace.double import KeepDouble, default_dtype
from shardwise.trace.module_state import outside_now
from shardwise.trace.outside_state import Reached

Answers = Iterator[tuple[str, str, torch.Tensor | None]]  # (kind, name, value) of each tensor that a rank has


def run_rank(task: Any, plan: Plan, settings: Settings, own: Plan | None = None) -> Record:
    """Returns this rank's record of steps under the plan; other ranks than 0 keep only what differs from rank 0's.

    own   the plan in its own precision, under which one step more is run for its dtypes; None: none is

    Collective.
    """
    record, mesh = _recorded(resolve_task(task), plan, settings)
    record.dtypes = None if own is None else rank_dtypes(resolve_task(task), own, settings, mesh)
    return record


def _recorded(resolved: Task, plan: Plan, settings: Settings) -> tuple[Record, Mesh]:
    """Returns (this rank's record of all steps, the mesh); other ranks than 0 keep only deviations. Collective."""
    engine, buckets = _engine(resolved, plan, settings)
    outside = outside_now(Reached(engine.module, (resolved.loss,)))
    record = Record(
        notices=list(engine.notices), buckets=min(buckets, default=0) if engine.mesh.gradients.size > 1 else 0
    )
    record.initial = _named(engine.full_parameters())
    _compare_ranks(engine, record, -1, (("parameter", n, t) for n, t in engine.used_parameters()))
    for step in range(settings.steps):
        batch = global_batch(resolved, settings, step)
        with KeepDouble(), default_dtype(settings.dtype), sizes_of(step):
            result = engine.step(batch)
        record.batches.append(checksum_of(batch))
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
        record.gradients.append(_named(engine.full_gradients()))
        record.parameters.append(_named(engine.full_parameters()))
        record.buffers.append(_named(engine.full_buffers()))
        record.states.append(_states(engine, record))
        _compare_ranks(engine, record, step, _answers(engine, record, step))
    outside.restore()  # tables that a forward cached there are in float64, and a later step has another dtype
    if engine.rank == 0:
        return record, engine.mesh
    return Record(losses=record.losses, norms=record.norms, deviations=record.deviations), engine.mesh


def trace_rank(task: Any, plan: Plan, settings: Settings, step: int) -> CallTrace:
    """Returns the `CallTrace` of this rank's modules in one step, counted from 0. Collective."""
    resolved = resolve_task(task)
    engine, _ = _engine(resolved, plan, settings)
    watch = ModuleWatch(engine.module, plain, plan.pp > 1)
    # the generator of masks is called at each micro-batch's begin with its samples, so the watch hooks in there
    random = engine.state.global_random
    assert random is not None
    begin = random.begin

    def noted(seed: int, step: int, micro_batch: int, samples: Samples, *, alone: bool = True) -> None:
        start, _ = cut(samples.total, engine.data_ranks, engine.data_rank)  # not `samples.start`, which may be wrong
        watch.begin(micro_batch, start, samples.count, samples.total)
        begin(seed, step, micro_batch, samples, alone=alone)

    for number in range(step + 1):
        batch = global_batch(resolved, settings, number)
        if number == step:
            random.__dict__["begin"] = noted  # called where a micro-batch begins
        watching = watch.watching() if number == step else nullcontext()
        with watching, KeepDouble(), default_dtype(settings.dtype), sizes_of(number):
            engine.step(batch)
    return watch.trace


def _engine(task: Task, plan: Plan, settings: Settings) -> tuple[Engine, list[int]]:
    """Returns (the engine, the number of gradient buckets of each of its techniques)."""
    # small buckets, so that gradients are reduced in several, as in a large model
    with KeepDouble(), default_dtype(settings.dtype), small_buckets() as buckets:
        engine = parallelize(task, plan, **settings.of_engine)
    raise_eps(engine.optimizer)
    settle(engine, settings.limits)
    return engine, buckets


def _named(tensors: Iterator[tuple[str, torch.Tensor | None]]) -> Tensors:
    return {name: None if tensor is None else kept(tensor) for name, tensor in tensors}


def _states(engine: Engine, record: Record) -> Tensors:
    """Returns "key of name" -> unsharded optimizer state; {} and a notice in `record` if refused. Collective."""
    states: Tensors = {}
    try:
        for name, state in engine.full_optimizer_state():
            value = record.initial[name]
            if value is not None and value.numel():  # no rank updates a sharded parameter without elements
                states |= kept_state(name, state)
    except RefusedPlan as refusal:  # raised on every rank, before any collective
        record.notices += [] if not record.states_known else [f"the optimizer's state was not compared: {refusal}"]
        record.states_known = False
    except ShardwiseError as error:
        record.differences.append(str(error))
    return states


def _answers(engine: Engine, record: Record, step: int) -> Answers:
    """Yields (kind, name, tensor or None) of all that this rank has after a step. Collective."""
    yield from (("gradient", name, tensor) for name, tensor in record.gradients[step].items())
    yield from (("parameter", name, tensor) for name, tensor in engine.used_parameters())
    yield from (("buffer", name, tensor) for name, tensor in engine.used_buffers())
    yield from (("optimizer", name, tensor) for name, tensor in record.states[step].items())


def _compare_ranks(engine: Engine, record: Record, step: int, answers: Answers) -> None:
    """Adds to the record a `Deviation` for each tensor that differs in a bit from rank 0's. Collective."""
    kinds = ("parameter",) if step < 0 else ("gradient", "parameter", "buffer", "optimizer")
    mine: dict[str, dict[str, str | None]] = {kind: {} for kind in kinds}
    # rank 0's digests are sent, not its tensors
    if engine.rank == 0:
        mine = {
            kind: {name: None if t is None else digest(t) for name, t in record.of(kind, step).items()}
            for kind in kinds
        }
    expected = gather_json(mine, engine.mesh.world, engine.device)[0]
    seen = set()
    for kind, name, tensor in answers:
        seen.add((kind, name))
        value = None if tensor is None else kept(tensor)
        # also unequal if one of the two ranks lacks the tensor
        if (None if value is None else digest(value)) != expected[kind].get(name):
            record.deviations.append(Deviation(engine.rank, step, kind, name, value))
    # a rank may lack parameters and buffers of other stages, but gradients and states are gathered on every rank
    everywhere = [(kind, name) for kind in ("gradient", "optimizer") if kind in kinds for name in expected[kind]]
    record.deviations += [Deviation(engine.rank, step, *which, None) for which in everywhere if which not in seen]
