"""Cuts are derived from a forward without values: no weight of a large model is made for it."""

from __future__ import annotations

from collections.abc import Callable

import architectures
import module_tasks
import pytest
import unusual_densities
import unusual_signals
import unusual_weights

from shardwise import Plan, Task
from shardwise.comm import Axis
from shardwise.engine.tensor_cuts import derive_cuts
from shardwise.parallel.tensor import Derived, TensorParallel
from shardwise.part.parameters import IN_SHARES
from shardwise.precision import Precision
from shardwise.trace.deferred import build

ALL = [*architectures.DECODERS, *architectures.OTHERS]
QUICK = [getattr(architectures, name) for name in ("llama", "gpt2", "mixtral", "bert", "vit", "unet")]


@pytest.mark.parametrize("make", [pytest.param(m, marks=() if m in QUICK else pytest.mark.long) for m in ALL])
def test_no_weight_is_made_to_derive_cuts(make: Callable[[], Task], monkeypatch: pytest.MonkeyPatch) -> None:
    task, plan = make(), Plan(tp=2)
    built = build(task.model, 0)
    monkeypatch.setattr(built, "value", lambda name: pytest.fail(f"'{name}' is made"))
    assert derive_cuts(task, plan, Precision.of(plan), built, task.batch(0)).cuts


def test_what_stands_for_a_cut_weight_is_cut_as_it_came_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """`functional_call` puts a weight plus a product in the weight's place: its products are shared all the same."""
    task, plan = unusual_weights.low_rank(), Plan(tp=2)
    built = build(task.model, 0)
    monkeypatch.setattr(built, "value", lambda name: pytest.fail(f"'{name}' is made"))
    cuts = derive_cuts(task, plan, Precision.of(plan), built, task.batch(0)).cuts
    assert cuts["base.0.weight"].role not in IN_SHARES


@pytest.mark.parametrize("make", [module_tasks.time_first, unusual_signals.transcription], ids=["chance", "lengths"])
def test_ways_by_chance_and_lengths_of_the_batch_need_no_weight(
    make: Callable[[], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that one draw leaves out is followed in some other of the forwards, so that it is cut as well."""
    task, plan = make(), Plan(tp=2)
    built = build(task.model, 0)
    monkeypatch.setattr(built, "value", lambda name: pytest.fail(f"'{name}' is made"))
    cuts = derive_cuts(task, plan, Precision.of(plan), built, task.batch(0))
    assert len(cuts.cuts) > 2 and not cuts.needed_real


def test_who_needs_real_weights_is_told() -> None:
    """A flow whose first forward reads the statistics of what it computes."""
    task, plan = unusual_densities.glow(), Plan(tp=2)
    cuts = derive_cuts(task, plan, Precision.of(plan), build(task.model, 0), task.batch(0))
    (_, notice) = TensorParallel(Derived.decoded(cuts.encoded()), Axis("tp", 2, 0, None, (0, 1))).notices()
    assert "rank 0 made every weight" in notice and "_local_scalar_dense" in notice
