"""Elements of gradients that count as zero, alike on both sides of a proof."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from mutations.plant import Bug, BuggyPool

from shardwise import verify
from shardwise.proof.zeros import settle, settle_and_note
from shardwise.ranks import RankPool


def params(*gradients: list[float]) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.zeros(len(gradient), dtype=torch.float64)) for gradient in gradients]
    for param, gradient in zip(made, gradients, strict=True):
        param.grad = torch.tensor(gradient, dtype=torch.float64)
    return made


def test_both_sides_settle_what_is_rounding_beside_the_largest_and_nothing_else() -> None:
    limits: list[float] = []
    alone, ranked = params([2.0, 1e-13, -3e-13], [1e-16, -1e-12]), params([2.0, 9e-14, 1e-9])
    one = torch.optim.SGD(alone, lr=1.0)
    settle_and_note(one, limits)
    one.step()
    assert limits == [pytest.approx(2.0 * 2**-43)]
    assert [param.tolist() for param in alone] == [[-2.0, 0.0, 3e-13], [0.0, 1e-12]]
    rank = torch.optim.SGD(ranked, lr=1.0)
    settle(SimpleNamespace(optimizer=rank, steps_done=0), limits)
    rank.step()
    assert ranked[0].tolist() == [-2.0, 0.0, -1e-9]


def test_an_optimizer_that_is_free_of_scale_hides_no_gradient_that_ranks_make_up(pool: RankPool) -> None:
    assert verify("run_tasks:scale_free", "dp_replicate=2", pool=pool).parity
    made_up = Bug("a little too much", "shardwise.parallel.replicate:Replicate._reduce",
                  "assert bucket.buffer is not None", "bucket.buffer.add_(1e-11)", "", "")  # fmt: skip
    assert not verify("run_tasks:scale_free", "dp_replicate=2", pool=BuggyPool(pool, made_up)).equal
