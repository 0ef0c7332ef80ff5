"""Cuts are derived from a forward without values: no weight of a large model is made for it."""

from __future__ import annotations

from collections.abc import Callable

import architectures
import pytest

from shardwise import Plan, Task
from shardwise.engine.tensor_cuts import derive_cuts
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
