"""One rank's side of a proof: steps of the engine in float64; each rank compares what it holds with rank 0's record.

Rank 0 records whole tensors. Every rank then answers for what it has itself: parameters as its module computes with
them, gradients, the buffers that its stages use, the optimizer's state. It tells digests; where one differs from that
of rank 0's record, the tensor is kept and compared with one process by itself.
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

Answers = Iterator[tuple[str, str, torch.Tensor | None]]  # kind, name, value


def run_rank(task: Any, plan: Plan, settings: Settings, own: Plan | None = None) -> Record:
    """Returns the record of training under the plan; ranks but 0 keep only what differs from rank 0's. Collective.

    own   the plan in its own precision, in which one step more is taken for its dtypes; None: it is not
    """
    record, mesh = _recorded(resolve_task(task), plan, settings)
    record.dtypes = None if own is None else rank_dtypes(resolve_task(task), own, settings, mesh)
    return record


def _recorded(resolved: Task, plan: Plan, settings: Settings) -> tuple[Record, Mesh]:
    """Returns (the record of all steps, the mesh); ranks but 0 keep only what differs from rank 0. Collective."""
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
    outside.restore()  # tables that a forward keeps there are in float64, and no step in another dtype makes them anew
    if engine.rank == 0:
        return record, engine.mesh
    return Record(losses=record.losses, norms=record.norms, deviations=record.deviations), engine.mesh


def trace_rank(task: Any, plan: Plan, settings: Settings, step: int) -> CallTrace:
    """Returns the outputs of this rank's modules in one step, and their gradients. Collective."""
    resolved = resolve_task(task)
    engine, _ = _engine(resolved, plan, settings)
    watch = ModuleWatch(engine.module, plain, plan.pp > 1)
    # the generator of masks is told where each micro-batch begins, and of which samples: the watch listens there
    random = engine.state.global_random
    assert random is not None
    begin = random.begin

    def noted(seed: int, step: int, micro_batch: int, samples: Samples, *, alone: bool = True) -> None:
        start, _ = cut(samples.total, engine.data_ranks, engine.data_rank)  # what is told may be what is wrong
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
    """Returns (the engine, how many gradient buckets each of its techniques has)."""
    # small buckets, so that gradients travel in several, as those of a large model do
    with KeepDouble(), default_dtype(settings.dtype), small_buckets() as buckets:
        engine = parallelize(task, plan, **settings.of_engine)
    raise_eps(engine.optimizer)
    settle(engine, settings.limits)
    return engine, buckets


def _named(tensors: Iterator[tuple[str, torch.Tensor | None]]) -> Tensors:
    return {name: None if tensor is None else kept(tensor) for name, tensor in tensors}


def _states(engine: Engine, record: Record) -> Tensors:
    """Returns the optimizer's whole state by "key of name"; a refusal is noted in the record instead. Collective."""
    states: Tensors = {}
    try:
        for name, state in engine.full_optimizer_state():
            value = record.initial[name]
            if value is not None and value.numel():  # under zero nobody updates what has no elements
                states |= kept_state(name, state)
    except RefusedPlan as refusal:  # on every rank alike, before anything is sent
        record.notices += [] if not record.states_known else [f"the optimizer's state was not compared: {refusal}"]
        record.states_known = False
    except ShardwiseError as error:
        record.differences.append(str(error))
    return states


def _answers(engine: Engine, record: Record, step: int) -> Answers:
    """Yields (kind, name, tensor or None) of this rank's gradients, parameters, buffers and states. Collective."""
    yield from (("gradient", name, tensor) for name, tensor in record.gradients[step].items())
    yield from (("parameter", name, tensor) for name, tensor in engine.used_parameters())
    yield from (("buffer", name, tensor) for name, tensor in engine.used_buffers())
    yield from (("optimizer", name, tensor) for name, tensor in record.states[step].items())


def _compare_ranks(engine: Engine, record: Record, step: int, answers: Answers) -> None:
    """Add to the record a `Deviation` for each tensor that differs in a bit from rank 0's. Collective."""
    kinds = ("parameter",) if step < 0 else ("gradient", "parameter", "buffer", "optimizer")
    mine: dict[str, dict[str, str | None]] = {kind: {} for kind in kinds}
    # rank 0's digests stand for all: one message of text, not of tensors
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
        # a tensor on one side alone is a difference too
        if (None if value is None else digest(value)) != expected[kind].get(name):
            record.deviations.append(Deviation(engine.rank, step, kind, name, value))
    # of parameters and buffers a rank may lack those of other stages; gradients and states are gathered everywhere
    everywhere = [(kind, name) for kind in ("gradient", "optimizer") if kind in kinds for name in expected[kind]]
    record.deviations += [Deviation(engine.rank, step, *which, None) for which in everywhere if which not in seen]
