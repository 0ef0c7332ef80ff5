"""Seed the random numbers of a micro-batch, by step and data rank or by each element's global index (random/modes)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.device import attention_as_ops, generators, seed_generators
from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.python_seeds import seed_python
from shardwise.random import HIDDEN, Samples
from shardwise.step.state import RankState
from shardwise.trace.deferred import seed_of


def seed_masks(state: RankState, micro_batch: int, part: Share, *, alone: bool = True) -> None:
    """Seeds the random numbers of a micro-batch's forward.

    micro_batch  its index in the step;  part  this rank's share of it
    alone        whether no other micro-batch is between its forward and its backward
    """
    if state.global_random is not None:
        samples = Samples(part.start, part.count, part.total)
        state.global_random.begin(state.seed, state.steps_done, micro_batch, samples, alone=alone)
        return
    # Under `deterministic` the seed follows the piece, not the rank, so that any number of ranks draws the same.
    place = (micro_batch, state.data_rank) if state.order is None else ("piece", state.order.leaf)
    seed = seed_of("fast", state.seed, state.steps_done, *place)
    seed_generators(seed)
    # Python's and numpy's numbers may decide branches, in which ranks that share samples must agree
    if state.plan.world_size > state.data_ranks or state.order is not None:
        seed_python(seed)


@contextmanager
def drawing(state: RankState) -> Iterator[None]:
    """Context of forwards and backwards under which random operations give one process's numbers.

    Does nothing under randomness="fast". Operations are watched only while the module is known, or not known not, to
    use random numbers; else a generator that moves within the context shows that it does. Raises `RefusedPlan` for
    compiled blocks that do.
    """
    random, watch = state.global_random, state.watch
    if random is None:
        yield
        return
    if (notice := watch.at(state.steps_done, random)) is not None:
        # random operations inside a compiled block cannot be intercepted
        if state.plan.compile:
            raise RefusedPlan(f"the model draws random numbers, {HIDDEN}")
        state.notices.append(notice)
    # the module uses random numbers, or that is not known yet
    if not watch.idle:
        with attention_as_ops(random.scores), random.watching(state.module):
            yield
        return
    # Watching costs time for each operation, so here only the generators' states are compared before and after.
    before = [] if watch.sure or watch.moved is not None else generators(state.device)
    yield
    if before and before != generators(state.device):
        watch.moved = state.steps_done
