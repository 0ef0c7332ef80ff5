"""Running sums, products and extremes along cut positions: as one process has them, backward too."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shardwise import verify
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Part, plain, to_part
from shardwise.ranks import RankPool

DOUBLE = torch.float64


def _with_zeros(x: torch.Tensor) -> torch.Tensor:
    """Rows with no zero, one, and several, of which some are next to each other."""
    x = x.clone()
    x[0, 3 % x.shape[1]] = 0
    x[1, :, 0] = 0
    x[:, x.shape[1] // 2 :, 1] = 0
    return x


def _tied(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).round()


def _unknown(x: torch.Tensor) -> torch.Tensor:
    """Values that are no numbers, and infinities."""
    x = x.clone()
    x[0, x.shape[1] // 2, 0], x[1, 0, 1], x[1, -1, 1] = math.nan, math.inf, -math.inf
    return x


def _picked(x: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Values, and where they were found, counted in."""
    return found[0] * x.tanh() + found[1]


# name -> (function of (B, S, C), what is done to random numbers before)
CASES: dict[str, tuple[Callable, Callable]] = {
    "sum": (lambda x: x.cumsum(1), torch.clone),
    "sum in another dtype": (lambda x: x.float().cumsum(1, dtype=DOUBLE), torch.clone),
    "exponentials": (lambda x: torch.logcumsumexp(x, -2), torch.clone),
    "product": (lambda x: x.cumprod(1), torch.clone),
    "product, by name": (lambda x: torch.cumprod(input=x, dim=-2), torch.clone),
    "product in a dtype": (lambda x: x.cumprod(1, dtype=DOUBLE), torch.clone),
    "product with zeros": (lambda x: torch.cumprod(x, 1), _with_zeros),
    "product of another dim": (lambda x: torch.cumprod(x, 2), _with_zeros),
    "largest": (lambda x: _picked(x, x.cummax(1)), torch.clone),
    "largest of equal ones": (lambda x: _picked(x, torch.cummax(x, 1)), _tied),
    "largest, with unknown values": (lambda x: torch.cummax(x, 1).values.nan_to_num(3.0, 5.0, -5.0), _unknown),
    "smallest": (lambda x: _picked(x, x.cummin(-2)), torch.clone),
    "smallest of equal ones": (lambda x: _picked(x, x.cummin(1)), _tied),
    "where the smallest is": (lambda x: x * x.cummin(1).indices, _tied),
    "several": (lambda x: x.cummax(1).values.cumsum(1) * x.flip(1).cumprod(1), torch.clone),
}


def _dealings(n: int, ranks: int) -> dict[str, Owners]:
    dealt = np.random.default_rng(n).integers(0, ranks, n)
    last = np.full(n, ranks - 1)
    return {
        "blocks": Owners.blocks(n, ranks),
        "zigzag": Owners.zigzag(n, ranks),
        "any": Owners.of(dealt, ranks),
        "all on the last": Owners.of(last, ranks),
    }


def _off(case: str, n: int, owners: Owners, axis) -> float:
    """The largest difference from one process, of the result and of the gradient."""
    function, prepared = CASES[case]
    whole = prepared(torch.randn(2, n, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(n)))
    reference = whole.clone().requires_grad_()
    expected = function(reference)
    weight = torch.randn(expected.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    (expected * weight).sum().backward()
    local = owners.take(whole, 1, axis.index).clone().requires_grad_()
    out = function(to_part(local, 1, owners, axis))
    assert isinstance(out, Part)
    (out * weight).sum().backward()
    apart = [plain(out.detach()) - expected, owners.take(reference.grad, 1, axis.index) - local.grad]
    return max(float(each.detach().abs().max()) if each.numel() else 0.0 for each in apart)


def _all(plan: str) -> dict[str, float]:
    (axis,) = build_mesh(Plan.parse(plan), torch.device("cpu")).inner
    return {
        f"{case}, {n} positions dealt in {kind}": _off(case, n, owners, axis)
        for case in CASES
        for n in (1, 5, 11, 24)
        for kind, owners in _dealings(n, axis.size).items()
    }


@pytest.mark.parametrize("plan", ["cp=2", "cp=3", "cp_ulysses=2"])
def test_scans_along_cut_positions_equal_those_of_one_process(pool: RankPool, plan: str) -> None:
    off = pool.run(_all, Plan.parse(plan).world_size, plan, timeout_s=120)
    wrong = {case: value for each in off for case, value in each.items() if not value < 1e-12}
    assert not wrong, wrong


@pytest.mark.parametrize(
    "plan", ["cp=3", "cp=2,cp_ulysses=2", "cp=2,tp=2,sp=true", "cp=2,dp_shard=2,zero=3", "domain=2"]
)
def test_a_module_of_running_products_and_extremes_equals_one_process(pool: RankPool, plan: str) -> None:
    found = verify("sequence_tasks:running_extremes", plan, pool=pool)
    assert found.parity, found.text()
