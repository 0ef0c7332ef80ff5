"""Random draws as functions of a key and an index: element i is hash(key, i), whoever computes it.

The hash is splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014). `DRAWS` has, for each random op of ATen that
can be answered so, a function of (bits, args, kwargs); `bits(shape, device)` gives 53 hashed bits for each element.
"""

from __future__ import annotations

import math

import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_aten = torch.ops.aten


def mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (tensor >> bits) & ((1 << (64 - bits)) - 1)


def hashed(key: int, index: torch.Tensor) -> torch.Tensor:
    """53 random bits, as int64, for each index (int64)."""
    value = index * _signed(_GOLDEN) + _signed(key)
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return _shift(value ^ _shift(value, 31), 11)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.float64) * 2.0**-53


def _normal(bits: torch.Tensor) -> torch.Tensor:
    """Box and Muller 1958, the second uniform hashed from the first's bits."""
    radius = torch.sqrt(-2 * torch.log1p(-_uniform(bits)))
    return radius * torch.cos(2 * math.pi * _uniform(hashed(_GOLDEN, bits)))


def _fill(draw):
    """For `op_(self, ...)`: overwrite self."""

    def run(bits, args, kwargs):
        tensor = args[0]
        return tensor.copy_(draw(bits(tensor.shape, tensor.device), args[1:], kwargs))

    return run


def _like(draw):
    """For `op_like(self, ...)`: a new tensor of self's shape."""

    def run(bits, args, kwargs):
        like = torch.empty_like(args[0], **_factory(kwargs))
        return like.copy_(draw(bits(like.shape, like.device), args[1:], kwargs))

    return run


def _new(draw, size_at: int = 0):
    """For `op(..., size, ...)`: a new tensor."""

    def run(bits, args, kwargs):
        size = args[size_at]
        integral = draw in (_draw_range, _draw_below)
        options = {"dtype": torch.int64} if integral and kwargs.get("dtype") is None else {}
        new = torch.empty(size, **{**_factory(kwargs), **options})
        return new.copy_(draw(bits(new.shape, new.device), (*args[:size_at], *args[size_at + 1 :]), kwargs))

    return run


def _factory(kwargs: dict) -> dict:
    return {k: kwargs[k] for k in ("dtype", "layout", "device", "memory_format") if kwargs.get(k) is not None}


def _argument(args, kwargs, place: int, name: str, default: float) -> float:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _draw_uniform(bits, args, kwargs):
    low, high = _argument(args, kwargs, 0, "from", 0.0), _argument(args, kwargs, 1, "to", 1.0)
    return _uniform(bits) * (high - low) + low


def _draw_unit(bits, args, kwargs):
    return _uniform(bits)


def _draw_normal(bits, args, kwargs):
    return _normal(bits) * _argument(args, kwargs, 1, "std", 1.0) + _argument(args, kwargs, 0, "mean", 0.0)


def _draw_standard_normal(bits, args, kwargs):
    return _normal(bits)


def _draw_bernoulli(bits, args, kwargs):
    return _uniform(bits) < _argument(args, kwargs, 0, "p", 0.5)


def _normal_of_floats(bits, args, kwargs):
    mean, std, size = args[:3]
    new = torch.empty(size, **_factory(kwargs))
    return new.copy_(_normal(bits(new.shape, new.device)) * std + mean)


def _multinomial(bits, args, kwargs):
    """With replacement by inverting the cumulative sum; without, by a race of exponentials, as torch does it."""
    weights, count = args[0], args[1]
    if _argument(args, kwargs, 2, "replacement", False) and count > 1:
        cumulative = weights.double().cumsum(-1)
        u = _uniform(bits((*weights.shape[:-1], count), weights.device)) * cumulative[..., -1:]
        return torch.searchsorted(cumulative, u, right=True).clamp_(max=weights.shape[-1] - 1)
    waits = -torch.log1p(-_uniform(bits(weights.shape, weights.device)))
    return (weights.double() / waits.clamp_min(1e-300)).topk(count, dim=-1).indices


def _draw_exponential(bits, args, kwargs):
    return -torch.log1p(-_uniform(bits)) / _argument(args, kwargs, 0, "lambd", 1.0)


def _draw_range(bits, args, kwargs):
    low, high = args[0], args[1]
    return low + bits % (high - low)


def _draw_below(bits, args, kwargs):
    return bits % args[0]


def _bernoulli_of(bits, args, kwargs):
    probabilities = args[0]
    return (_uniform(bits(probabilities.shape, probabilities.device)) < probabilities).to(probabilities.dtype)


def _native_dropout(bits, args, kwargs):
    tensor, rate = args[0], args[1]
    keep = _uniform(bits(tensor.shape, tensor.device)) < 1 - rate  # as a CPU's dropout asks, so that devices agree
    scale = 0.0 if rate == 1 else 1 / (1 - rate)
    return tensor * keep.to(tensor.dtype) * scale, keep


DRAWS = {
    _aten.bernoulli_.float: _fill(_draw_bernoulli),
    _aten.bernoulli_.Tensor: _fill(_draw_bernoulli),
    _aten.bernoulli.default: _bernoulli_of,
    _aten.bernoulli.p: _like(_draw_bernoulli),
    _aten.native_dropout.default: _native_dropout,
    _aten.uniform_.default: _fill(_draw_uniform),
    _aten.normal_.default: _fill(_draw_normal),
    _aten.exponential_.default: _fill(_draw_exponential),
    _aten.random_.default: _fill(lambda bits, args, kwargs: bits % 2**24),
    getattr(_aten.random_, "from"): _fill(_draw_range),
    _aten.random_.to: _fill(_draw_below),
    _aten.rand.default: _new(_draw_unit),
    _aten.rand_like.default: _like(_draw_unit),
    _aten.randn.default: _new(_draw_standard_normal),
    _aten.randn_like.default: _like(_draw_standard_normal),
    _aten.randint.default: _new(_draw_below, 1),
    _aten.randint.low: _new(_draw_range, 2),
    _aten.randint_like.default: _like(_draw_below),
    _aten.randint_like.low_dtype: _like(_draw_range),
    _aten.normal.float_float: _normal_of_floats,
    _aten.multinomial.default: _multinomial,
}
