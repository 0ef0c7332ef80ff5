"""Seed a micro-batch's random draws by step, place and rank, or have them dealt by global index (random/modes)."""

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
    """Seed the masks of a micro-batch; `alone`: no other one waits for its backward."""
    if state.global_random is not None:
        samples = Samples(part.start, part.count, part.total)
        state.global_random.begin(state.seed, state.steps_done, micro_batch, samples, alone=alone)
        return
    # With pieces the seed must not follow the rank: any number of ranks draws the same.
    place = (micro_batch, state.data_rank) if state.order is None else ("piece", state.order.leaf)
    seed = seed_of("fast", state.seed, state.steps_done, *place)
    seed_generators(seed)
    # ranks that share a sample must take the same ways through the module, and so must a piece on any rank
    if state.plan.world_size > state.data_ranks or state.order is not None:
        seed_python(seed)


@contextmanager
def drawing(state: RankState) -> Iterator[None]:
    """Context of forwards and backwards: random numbers by global index, where asked for and where the module draws.

    Raises `RefusedPlan` for compiled blocks that were found to draw.
    """
    random, watch = state.global_random, state.watch
    if random is None:
        yield
        return
    if (notice := watch.at(state.steps_done, random)) is not None:
        # a compiled block hides its draws, which would be others than one process's
        if state.plan.compile:
            raise RefusedPlan(f"the model draws random numbers, {HIDDEN}")
        state.notices.append(notice)
    # the module draws, or nobody knows yet
    if not watch.idle:
        with attention_as_ops(random.scores), random.watching(state.module):
            yield
        return
    # Nothing is watched, at no cost: a generator that moves is how draws after all show.
    before = [] if watch.sure or watch.moved is not None else generators(state.device)
    yield
    if before and before != generators(state.device):
        watch.moved = state.steps_done
