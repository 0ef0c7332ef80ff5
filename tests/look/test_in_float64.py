"""Whether choices that a forward makes for a whole batch are met in float64, of large models by few gradients."""

from __future__ import annotations

import pytest
import torch
from module_tasks import OUT, WIDTH, task
from torch import Tensor, nn

from shardwise.look import in_float64
from shardwise.look.in_float64 import task_differs
from shardwise.step.batching import slice_samples


class Solver(nn.Module):
    """Takes as many steps as its batch needs, or as each sample needs."""

    def __init__(self, by_sample: bool):
        super().__init__()
        self.norm, self.step, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.by_sample = by_sample

    def _solved(self, x: Tensor) -> Tensor:
        for _ in range(20):
            change = 0.5 * torch.tanh(self.step(self.norm(x))) - 0.5 * x
            x = x + change
            if change.abs().max() < 1e-3:
                break
        return x

    def forward(self, x: Tensor) -> Tensor:
        solved = torch.cat([self._solved(row) for row in x.split(1)]) if self.by_sample else self._solved(x)
        return self.out(solved)


@pytest.mark.parametrize("small", [2**16, WIDTH, 0])
@pytest.mark.parametrize("most_drawn", [2**24, 0])
def test_a_choice_for_the_batch_is_met_with_few_gradients_too(
    small: int, most_drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_float64, "SMALL", small)
    monkeypatch.setattr(in_float64, "MOST_DRAWN", most_drawn)
    for by_sample in (True, False):
        solver = task(lambda by_sample=by_sample: Solver(by_sample))
        whole = solver.batch(0)
        parts = slice_samples(whole, 0, 4), slice_samples(whole, 4, 7)
        text = task_differs(solver, solver.model(), whole, parts, 0, every=False)
        assert (text is None) == by_sample, text
