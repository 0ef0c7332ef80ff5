"""What stands for torch's random operations is distributed as they are; the order is one of a second implementation."""

from __future__ import annotations

import sys

import pytest
import torch

from shardwise.data.order import Order
from shardwise.proof.literal_draws import difference
from shardwise.proof.literal_order import sample_at
from shardwise.random import variates
from shardwise.random.draws import DRAWS, BitSource

_aten = torch.ops.aten
X = torch.zeros(8, 3, dtype=torch.float64)
SHARES = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
DRAWN = {
    _aten.bernoulli_.float: (X, 0.3),
    _aten.bernoulli_.Tensor: (X, SHARES.clamp(max=1)),
    _aten.bernoulli.default: (SHARES.clamp(max=1),),
    _aten.bernoulli.p: (X, 0.3),
    _aten.native_dropout.default: (X + 1, 0.2, True),
    _aten.uniform_.default: (X, -1.0, 3.0),
    _aten.normal_.default: (X, 0.5, 2.0),
    _aten.exponential_.default: (X, 2.0),
    getattr(_aten.random_, "from"): (X, 2, 9),
    _aten.random_.to: (X, 9),
    _aten.rand.default: ([8, 3],),
    _aten.rand_like.default: (X,),
    _aten.randn.default: ([8, 3],),
    _aten.randn_like.default: (X.to(torch.complex128),),
    _aten.randint.default: (9, [8, 3]),
    _aten.randint.low: (2, 9, [8, 3]),
    _aten.randint_like.default: (X, 9),
    _aten.randint_like.low_dtype: (X, 2, 9),
    _aten.normal.float_float: (0.5, 2.0, [8, 3]),
    _aten.normal.Tensor_Tensor: (SHARES, SHARES),
    _aten.normal.Tensor_float: (SHARES, 2.0),
    _aten.normal.float_Tensor: (0.5, SHARES),
    _aten.cauchy_.default: (X, 0.5, 2.0),
    _aten.log_normal_.default: (X, 0.5, 0.3),
    _aten.geometric_.default: (X, 0.3),
    _aten.poisson.default: (SHARES * 5,),
    _aten._standard_gamma.default: (SHARES,),
    _aten._sample_dirichlet.default: (SHARES,),
    _aten.rrelu_with_noise.default: (X - 1, X, 0.1, 0.4, True),
    _aten.rrelu_with_noise_.default: (X - 1, X, 0.1, 0.4, True),
}


def test_every_rule_is_drawn_here() -> None:
    left_out = {_aten.multinomial.default, _aten.random_.default, _aten.randint_like.Tensor}
    assert DRAWS.keys() - DRAWN.keys() == left_out


@pytest.mark.parametrize("func", DRAWN, ids=str)
def test_a_rule_draws_as_torch_does(func: object) -> None:
    assert difference(func, DRAWN[func], {}) == []  # type: ignore[index]


def test_numbers_that_are_too_narrow_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["shardwise.random.draws"], "normal", lambda bits: variates.normal(bits) * 0.95)
    assert "draws other numbers than torch's" in difference(_aten.randn.default, ([8, 3],), {})[0]


@pytest.mark.parametrize("length", [1, 2, 7, 40, 1000])
def test_the_order_is_that_of_the_loader(length: int) -> None:
    places = range(2 * length + 3)
    assert [sample_at(length, 5, place) for place in places] == Order(length, 5).indices(0, len(places)).tolist()


def _of(bits: int, func: object, *args: object, **kwargs: object) -> torch.Tensor:
    """Returns what a rule draws where every element has these bits."""
    source = BitSource(lambda shape, device: torch.full(tuple(shape), bits), lambda *given: X > 0)
    return DRAWS[func](source, args, kwargs)  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float64])
def test_uniform_numbers_stay_below_one_in_any_dtype(dtype: torch.dtype) -> None:
    drawn = _of(2**53 - 1, _aten.rand.default, [3], dtype=dtype)
    assert torch.view_as_real(drawn).max() < 1 if dtype.is_complex else drawn.max() < 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.int64])
def test_integers_for_a_dtype_are_those_that_it_holds(dtype: torch.dtype) -> None:
    for bits in (2**53 - 1, 2**53 - 2, 200):
        drawn = _of(bits, _aten.random_.default, torch.empty(2, dtype=dtype)).double()
        assert (drawn >= 0).all() and drawn.isfinite().all()
    assert not _of(2**53 - 2, _aten.random_.default, torch.empty(2, dtype=torch.bool)).any()


def test_integers_of_a_long_range_lie_in_it() -> None:
    source = BitSource(lambda shape, device: torch.randint(2**53, tuple(shape)), lambda *given: X > 0)
    for low, high in ((-(2**62), 2**62), (0, 2**62)):
        drawn = DRAWS[_aten.randint.low](source, (low, high, [200]), {})
        assert low <= drawn.min() and drawn.max() < high and (drawn.double().mean() - (low + high) / 2).abs() < 2**60


def test_gamma_numbers_are_never_nothing_and_shares_neither_nothing_nor_all() -> None:
    source = BitSource(lambda shape, device: torch.randint(2**53, tuple(shape)), lambda *given: X > 0)
    few = torch.full((500, 2), 1e-3)
    assert (DRAWS[_aten._standard_gamma.default](source, (few,), {}) > 0).all()
    shares = DRAWS[_aten._sample_dirichlet.default](source, (few,), {})
    assert ((shares > 0) & (shares < 1)).all()
