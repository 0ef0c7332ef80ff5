"""The proof in a run's own precision: what is told of weights whose gradient is rounding alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, sequences, task
from torch import Tensor, nn

from shardwise import Plan, Task
from shardwise.proof import own_precision
from shardwise.proof.outcome import Parity
from shardwise.proof.own_precision import plain_steps, verify_precision
from shardwise.proof.settings import Settings


class Keyed(nn.Module):
    """Attention in which every key has the same bias, so that no softmax sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, 8) for _ in range(3))
        self.out = nn.Linear(8, OUT)
        nn.init.zeros_(self.key.bias)  # beside which its rounding shows

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)).mean(1))


def keyed() -> Task:
    return task(Keyed, sequences)


class Job:
    def build_task(self) -> Task:
        return task(Keyed, sequences)


def proven(added: float) -> Parity:
    """The proof of ranks that round otherwise than one process, and move the keys' bias by `added` beside."""

    def on_ranks(function: Any, ranks: int, job: Any, plan: Plan, settings: Settings, rate: float) -> list[Any]:
        run = plain_steps(job.build_task(), plan, replace(settings, nudge=9), rate)
        run.weights["key.bias"] = run.weights["key.bias"] + added
        return [run] * ranks

    return verify_precision(Job(), Plan(dp_replicate=2), Settings(), on_ranks)


def test_a_weight_that_moves_by_rounding_alone_is_no_gap_in_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_precision, "MOST_BAR", 0.0)  # it may be further off than it moved, or less, by chance
    parity = proven(0.0)
    notes = [note for note in parity.notes if "moved by rounding alone: 'key.bias' differs by" in note]
    assert notes and not any("'key.bias'" in told for told in parity.unproven)


def test_a_gradient_that_it_should_not_have_is_found() -> None:
    parity = proven(1e-4)
    assert not parity.equal and parity.parameter_error["key.bias"] > parity.bar("parameter", "key.bias")
