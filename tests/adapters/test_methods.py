"""peft's methods on many architectures: each equals one process under each plan, or is refused with the mechanism."""

from __future__ import annotations

from functools import partial

import pytest
from adapter_tasks import METHODS, NAMES, NOT_IN_PEFT, PLANS, adapted

from shardwise import verify
from shardwise.ranks import RankPool

pytest.importorskip("peft", reason="needs peft, which is not installed here")

QUICK = [("gpt2", "ia3", "tp=2"), ("t5", "norms", "dp_shard=2,zero=3")]
CELLS = [
    (name, method, plan) for name in NAMES for method in METHODS for plan in PLANS if (name, method) not in NOT_IN_PEFT
]


@pytest.mark.parametrize(
    ("name", "method", "plan"),
    [pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.long]) for cell in CELLS],
)
def test_a_method_equals_one_process_or_is_refused(name: str, method: str, plan: str, pool: RankPool) -> None:
    parity = verify(partial(adapted, name, method), plan, pool=pool, timeout_s=300)
    if parity.refused:
        assert method == "prompt" and plan.startswith("pp=2")
        assert "leave one without a trainable parameter" in parity.refused
    else:
        assert parity.parity, parity.text()
