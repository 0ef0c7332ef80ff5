"""Modules that choose by values run on a rank's own rows where they treat rows apart, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joined_tasks import WIDTH, Routed
from torch import Tensor, nn

from shardwise import verify
from shardwise.parallel.expert.choosing import Choices, sums_of_rows
from shardwise.ranks import RankPool


@pytest.mark.parametrize("plan", ["cp=3", "cp=2,dp_replicate=2", "cp=2,tp=2"])
def test_a_mixture_that_routes_by_itself_is_given_own_positions(plan: str, pool: RankPool) -> None:
    parity = verify("joined_tasks:routed", plan, pool=pool)
    assert parity.parity, parity.text()


def test_a_mixture_that_leaves_rows_out_by_their_number_is_refused(pool: RankPool) -> None:
    assert verify("joined_tasks:routed_up_to", "cp=2", pool=pool).refused


class Reordered(Routed):
    """Keeps other things of its rows than sums."""

    def __init__(self, keep: str):
        super().__init__()
        self.keep, self.seen = keep, list[int]()
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("marks", torch.zeros(100_000))

    def forward(self, x: Tensor) -> Tensor:
        if self.keep == "list":
            self.seen.append(x.numel())
        if self.keep == "last":
            self.last.copy_(x[0, -1])
        if self.keep == "marks":
            self.marks[(x[..., 0].detach() * 1e5).long() % 100_000] = 1.0
        if self.keep == "neighbours":
            x = x + x.roll(1, 1)
        return super().forward(x)


def _sums(child: nn.Module) -> dict[str, str] | None:
    child.double()
    choices = Choices(nn.Sequential(child))
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    with choices.watching():
        child(x)

    def value(name: str, tensor: Tensor) -> Any:
        return torch.randn(tensor.shape, dtype=tensor.dtype) if isinstance(tensor, nn.Parameter) else tensor.clone()

    return sums_of_rows(child, choices.calls["0"], value)


def test_what_a_module_keeps_of_its_rows() -> None:
    assert _sums(Routed()) == {"load": "added"}
    assert _sums(Reordered("nothing")) == {"load": "added"}
    assert _sums(Routed(most=9)) is None
    assert [_sums(Reordered(keep)) for keep in ("list", "last", "marks", "neighbours")] == [None] * 4
