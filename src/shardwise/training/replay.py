"""Finds which of two ranks whose replicas differ is wrong, by replaying the steps since the last checkpoint.

    place      0 1 2 3             the replicas of ranks 0 and 2 differ
    first      rank 0 1 2 3
    again      rank 3 0 1 2        each process takes the part of another rank; the suspects' parts go to others

A part gives the same bits whichever process computes it (on a CPU), so the replay shows which first result was wrong.
It needs the memory of a second engine, after the first was freed, and the time of the steps since the checkpoint.

What this does not do: find the rank if the error had spread to all ranks before replicas were compared
(`train.check_replicas=1` compares each step), or if kernels add in a varying order.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from shardwise.checkpoint import publish
from shardwise.checkpoint.replicas import Hashes, HashesByRank, ReplicaCheck, ReplicasDiffer, verdict
from shardwise.comm import everybody, gather_json
from shardwise.comm.recording import begin as record_into
from shardwise.engine.engine import Engine
from shardwise.guard.points import reach
from shardwise.ranks.nodes import apart
from shardwise.training.job import Job
from shardwise.training.keeping import Keeper
from shardwise.training.rank_parts import batches_of, engine_of, loader_of
from shardwise.training.resume import home_of

TIMEOUT_S = 1800.0


def places(world: int, suspects: set[int]) -> list[int]:
    """Returns a list: entry r is the process (old rank) that replays the part of rank r.

    It is never r itself and, if some cyclic shift allows it, no suspect replays the part of a suspect.
    """
    shifts = range(1, world)
    apart_ones = [by for by in shifts if not any((suspect + by) % world in suspects for suspect in suspects)]
    by = next(iter(apart_ones), 1)
    return [(place + by) % world for place in range(world)]


@contextmanager
def judging(job: Job, engine: Engine, keeper: Keeper) -> Iterator[None]:
    """Context in which a `ReplicasDiffer` without a blamed rank leads to a replay, which may name it. Collective."""
    try:
        yield
    except ReplicasDiffer as differ:
        # a majority of the replicas has already shown which rank is wrong
        if differ.rank is not None or engine.world_size < 2:
            raise
        # a checkpoint that is being written becomes the newest, from which the steps are replayed
        keeper.settle()
        try:
            error = _judged(job, engine, differ)
        except Exception as problem:
            differ.add_note(f"taking the steps again failed: {type(problem).__name__}: {problem}")
            raise differ from problem
        raise error from None


def _judged(job: Job, engine: Engine, differ: ReplicasDiffer) -> ReplicasDiffer:
    """Replays the steps with exchanged ranks; returns `differ` with the verdict on which rank is wrong. Collective.

    The engine cannot be used afterwards.
    """
    newest = next(iter(publish.scan(home_of(job.effective, job.folder))), None)
    # rank 0's answer, since all ranks have to resume from the same checkpoint
    source = gather_json(None if newest is None else str(newest), engine.mesh.world, engine.device)[0] or job.resume
    suspects = {rank for held in differ.hashes.values() for rank in held}
    order, rank = places(engine.world_size, suspects), engine.rank
    if rank == 0:
        begins = f"from {source}" if source else "from the beginning"
        sys.stderr.write(f"\n{differ}\nthe steps {begins} are taken again, each rank in another one's place\n")
    # freed before the second engine is built, which needs the same memory
    _let_go(engine)
    record_into(None)  # stop recording: the supervisor's ranks are not those of the replay
    with apart(order, TIMEOUT_S):
        mine = _again(job.with_(resume=source, effective=_quiet(job)), differ.step)
        table = gather_json([rank, mine], everybody(), engine.device)
    retaken: HashesByRank = {}
    for name, by_rank in differ.hashes.items():
        for place in by_rank:
            who, theirs = table[place]
            retaken.setdefault(name, {})[who] = theirs[name][1]
    return differ.judged(*verdict(differ.hashes, retaken))


def _again(job: Job, steps: int) -> Hashes:
    """Builds a new engine for this process's new rank and runs it up to step `steps`; returns its tensors' hashes."""
    task = job.build_task()
    engine = engine_of(job, task)
    with ExitStack() as stack:
        loader = loader_of(job, task, engine)
        if loader is not None:
            stack.enter_context(loader)
        keeper = Keeper(job, engine, None, loader)
        stack.callback(keeper.close)
        first = keeper.begin()
        check = ReplicaCheck(engine, every=steps)
        stack.enter_context(engine.around("update", check.before_update))
        batches = batches_of(job, task, loader, first)
        for step in range(first, steps):
            reach("input", step, engine.state)
            engine.step(next(batches))
        return check.taken()


def _quiet(job: Job) -> Any:
    """Returns the run's configuration without checkpoints and comparisons of replicas."""
    config = job.effective.config
    train = config.train.model_copy(update={"checkpoint_every": 0, "check_replicas": None})
    return replace(job.effective, config=config.model_copy(update={"train": train}))


def _let_go(engine: Engine) -> None:
    """Frees the engine's module, storage and optimizer; the engine cannot be used afterwards."""
    vars(engine.state).update(dict.fromkeys(("module", "technique", "forward", "staged", "optimizer", "owners")))
    gc.collect()
