"""Find which of two ranks that differ is right: take the steps since the last checkpoint again in other places.

    place      0 1 2 3             who differs: 0 and 2
    first      rank 0 1 2 3
    again      rank 3 0 1 2        every place is taken by another rank, those that differ by ones that did not

Places compute what they did, to the bit (on a CPU), so what a place comes to now shows who was wrong then. It takes
the memory of a second engine, after that of the first was given back, and the time of the steps since the checkpoint.

What this does not do: tell where what went wrong had spread to all ranks before anything was compared
(`train.check_replicas=1` compares each step), nor on kernels that add in no order.
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
    """Returns, for each rank's place, the rank that takes its steps: never itself, nor, if possible, two suspects."""
    shifts = range(1, world)
    apart_ones = [by for by in shifts if not any((suspect + by) % world in suspects for suspect in suspects)]
    by = next(iter(apart_ones), 1)
    return [(place + by) % world for place in range(world)]


@contextmanager
def judging(job: Job, engine: Engine, keeper: Keeper) -> Iterator[None]:
    """Context: a `ReplicasDiffer` names the rank that is wrong, where taking the steps again shows it. Collective."""
    try:
        yield
    except ReplicasDiffer as differ:
        # a majority of the replicas has already shown which rank is wrong
        if differ.rank is not None or engine.world_size < 2:
            raise
        # the checkpoint being written may be the newest, and the steps are taken again from the newest
        keeper.settle()
        try:
            error = _judged(job, engine, differ)
        except Exception as problem:
            differ.add_note(f"taking the steps again failed: {type(problem).__name__}: {problem}")
            raise differ from problem
        raise error from None


def _judged(job: Job, engine: Engine, differ: ReplicasDiffer) -> ReplicasDiffer:
    """Returns the error with a verdict, from the hashes that other ranks computed in the differing ranks' places."""
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
    record_into(None)  # its ranks are not the places
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
    """Returns the hashes of this process's tensors after the run's first `steps` steps, taken in its new place."""
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
    """Frees the engine's module and optimizer; it takes no step any more."""
    vars(engine.state).update(dict.fromkeys(("module", "technique", "forward", "staged", "optimizer", "owners")))
    gc.collect()
