"""What a forward keeps for the next one, or makes of all samples together: equal to one process, or refused before."""

from __future__ import annotations

import numpy as np
import pytest
import remembering_tasks
import torch
from torch import nn

from shardwise import verify
from shardwise.look.first_samples import _norms_differ
from shardwise.parallel.pipeline.lasting import conflict
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build
from shardwise.trace.recorded import trace_forward
from shardwise.trace.state import ModuleState

TWO = "pp=2,microbatches=2"
CASES = [
    ("updated", TWO), ("counted", TWO), ("stored", TWO), ("telling", "pp=2"), ("dropped", TWO),
    ("dropped_by_torch", TWO), ("ghost_on_all", "dp_shard=2,zero=3"),
    *(pytest.param(name, TWO, marks=pytest.mark.long) for name in ("listed", "first", "turns", "written", "tables")),
    *(pytest.param(name, plan, marks=pytest.mark.long) for name, plan in (
        ("listed", "pp=2"), ("listed", "pp=3,microbatches=4"), ("listed", "tp=2,pp=2"),
        ("listed", "pp=2,schedule=gpipe"),
        ("listed", "dp_replicate=2,pp=2"), ("counted", "pp=4"), ("averaged", TWO), ("stored", "dp_shard=2,zero=3"),
        ("stored", "tp=2"), ("written", "tp=2"), ("stored", "dp_replicate=2,accumulate=2"),
        ("listed", "pp=2,remat=full"),
        ("ghost_on_all", "dp_replicate=3,accumulate=2"), ("ghost_on_all", "dp_shard=2,zero=2,pp=2"),
        ("ghost_on_all", "dp_shard=2,zero=1,tp=2"), ("averaged_on_all", "dp_shard=2,zero=3"), ("ghost", "tp=2,pp=2"),
        ("dropped", "pp=4,microbatches=4"), ("dropped", "pp=2,schedule=interleaved1f1b"), ("own_generators", TWO),
        ("dropped_by_torch", "pp=4,microbatches=4"), ("dropped_by_torch", "dp_shard=2,zero=3,pp=2"),
        ("dropped", "dp_shard=2,zero=3,pp=2"), ("own_generators", "dp_replicate=2"), ("own_generators", "tp=2"),
        ("dropped", "dp_shard=2,zero=3,remat=full"), ("freezes", "dp_shard=2,zero=3"),
        ("freezes", "tp=2"), ("turns", "pp=2,schedule=interleaved1f1b"),
        ("updated", "pp=2,schedule=zbh1,microbatches=4"),
    )),
]  # fmt: skip
REFUSED = [
    ("last", "pp=2", "in 'last', is in the way: what one forward leaves there, a later one reads on the other side"),
    ("ghost", "dp_replicate=2", 'loss_scope="model" (of Task, of prepare) has every rank run the model on all samples'),
    ("ghost_on_all", "dp_shard=2,zero=3,deterministic=4", 'loss_scope="model" has every data rank run'),
    ("averaged", "dp_replicate=2", "the forward leaves 'mean' in the module, computed of all samples"),
    ("listed", "pp=2,schedule=interleaved1f1b", "the forward changes 'memory' for the next one to find"),
    ("counted", "pp=2,schedule=interleaved1f1b", "use schedule=1f1b"),
    ("freezes", "pp=2", "the forward turns requires_grad of weights within a step"),
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_equal(pool: RankPool, name: str, plan: str) -> None:
    result = verify(f"remembering_tasks:{name}", plan, pool=pool, timeout_s=60, steps=3)
    assert result.parity, result.text()


@pytest.mark.parametrize(("name", "plan", "reason"), REFUSED)
def test_refused_before_the_first_step(pool: RankPool, name: str, plan: str, reason: str) -> None:
    result = verify(f"remembering_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert result.refused, result.text()
    assert reason in result.refused


def test_batch_norms_over_groups_of_samples_are_told() -> None:
    assert not _norms_differ([5, 1], [2, 1], [3, 1])
    assert not _norms_differ([], [], [])
    assert "get 3, 2 values of a channel on some samples, and 2 and 3" in _norms_differ([3, 2], [2], [3])[0]
    assert _norms_differ([4, 4], [2, 4], [3, 4])


def test_states_of_other_samples_are_refused(pool: RankPool) -> None:
    """One process sees that there is one sample less, and on a rank there are as many as before."""
    result = verify("remembering_tasks:reset", "dp_replicate=2", pool=pool, timeout_s=60)
    assert result.refused, result.text()
    assert "after one of 5 samples comes one of 4: rank 0 of 2 has as many as before" in result.refused


def test_which_cuts_have_a_stage_run_on() -> None:
    """Where the code around a cut leaves something behind it; not where a layer keeps what is its own."""

    def kept(model: type[nn.Module]) -> list[tuple[bool, str]]:
        x = torch.randn(3, remembering_tasks.WIDTH)
        flow, _ = trace_forward(build(model, 0), lambda module, batch: module(batch), x)
        return [conflict(flow, call) for call in flow.calls() if call.path in ("layers.1", "layers.2")]

    assert kept(remembering_tasks.Listed) == [(True, "")] * 2
    assert kept(remembering_tasks.Turns) == [(False, "")] * 2
    assert [why[:20] for _, why in kept(remembering_tasks.First)] == ["what one forward lea"] * 2
    assert [on for on, _ in kept(remembering_tasks.Counted)] == [True] * 2


def test_generators_are_put_back() -> None:
    module = remembering_tasks.OwnGenerators()
    module.third = torch.Generator().manual_seed(3)  # type: ignore[assignment]
    module.fourth = np.random.RandomState(3)  # type: ignore[assignment]
    state = ModuleState(module)

    def drawn() -> list[float]:
        own = module.numbers.random(), module.others.random(), module.fourth.random()
        return [*own, float(torch.rand((), generator=module.third))]

    assert not state.changed()
    first = drawn()
    assert len(state.changed()) == 4
    with state.standing_in():
        assert drawn() == first
    second = drawn()
    state.restore()
    assert [drawn(), drawn()] == [first, second]


def test_what_objects_and_containers_hold_is_put_back() -> None:
    module = remembering_tasks.Stored()
    module.pair = (torch.zeros(2), [1])  # type: ignore[assignment]
    held = module.store.states["by layer"]
    state = ModuleState(module)
    assert not state.changed()
    held[0] = torch.ones(1)
    module.store.seen += 1
    module.pair[0].add_(1)
    module.pair[1].append(2)
    assert {key for _, key in state.changed()} == {"store", "pair"}
    with state.standing_in():
        assert module.store.seen == 0
        assert held[0] is None
    assert module.store.seen == 1
    state.restore()
    assert module.store.states["by layer"] is held
    assert (held, module.store.seen, module.pair[1]) == ([None] * 4, 0, [1])
    assert not module.pair[0].any()
