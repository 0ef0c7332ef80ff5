"""Cuts are derived from a forward without values: no weight of a large model is made for it."""

from __future__ import annotations

from collections.abc import Callable

import architectures
import pytest
import unusual_weights

from shardwise import Plan, Task
from shardwise.engine.tensor_cuts import derive_cuts
from shardwise.part.parameters import IN_SHARES
from shardwise.precision import Precision
from shardwise.trace.deferred import build

ROUTED = {architectures.mixtral}  # how many tokens an expert has is known of values alone
OTHERS = [make for make in (*architectures.DECODERS, *architectures.OTHERS) if make not in ROUTED]
QUICK = [architectures.llama, architectures.gpt2, architectures.bert, architectures.vit, architectures.unet]


@pytest.mark.parametrize("make", [pytest.param(m, marks=() if m in QUICK else pytest.mark.long) for m in OTHERS])
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
