"""`DRAWS`: random ops as functions of key and index. A new op: also part/pointwise, trace/axis_rules, scripts/kept.

`DRAWS` has, for each random op of ATen that can be answered so, a function of (source, args, kwargs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.random.hashing import hashed

_GOLDEN = 0x9E3779B97F4A7C15  # a key of its own for the second uniform of a normal number
_aten = torch.ops.aten


@dataclass(frozen=True)
class BitSource:
    """Where a draw's randomness comes from.

    bits   of (shape, device): 53 hashed bits for each element, as int64
    below  of (shape, device, rate): whether each element's bits are below that share of 2**53
    """

    bits: Callable[[tuple[int, ...], torch.device], torch.Tensor]
    below: Callable[[tuple[int, ...], torch.device, float], torch.Tensor]


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.float64) * 2.0**-53


def _normal(bits: torch.Tensor) -> torch.Tensor:
    """Box and Muller 1958, the second uniform hashed from the first's bits."""
    radius = torch.sqrt(-2 * torch.log1p(-_uniform(bits)))
    return radius * torch.cos(2 * math.pi * _uniform(hashed(_GOLDEN, bits)))


def _fill(draw):
    """For `op_(self, ...)`: overwrite self."""

    def run(source, args, kwargs):
        tensor = args[0]
        return tensor.copy_(draw(source.bits(tensor.shape, tensor.device), args[1:], kwargs))

    return run


def _like(draw):
    """For `op_like(self, ...)`: a new tensor of self's shape."""

    def run(source, args, kwargs):
        like = torch.empty_like(args[0], **_factory(kwargs))
        return like.copy_(draw(source.bits(like.shape, like.device), args[1:], kwargs))

    return run


def _new(draw, size_at: int = 0):
    """For `op(..., size, ...)`: a new tensor."""

    def run(source, args, kwargs):
        size = args[size_at]
        integral = draw in (_draw_range, _draw_below)
        options = {"dtype": torch.int64} if integral and kwargs.get("dtype") is None else {}
        new = torch.empty(size, **{**_factory(kwargs), **options})
        return new.copy_(draw(source.bits(new.shape, new.device), (*args[:size_at], *args[size_at + 1 :]), kwargs))

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


def _bernoulli_fill(source, args, kwargs):
    tensor = args[0]
    return tensor.copy_(source.below(tensor.shape, tensor.device, _argument(args, kwargs, 1, "p", 0.5)))


def _bernoulli_like(source, args, kwargs):
    like = torch.empty_like(args[0], **_factory(kwargs))
    return like.copy_(source.below(like.shape, like.device, _argument(args, kwargs, 1, "p", 0.5)))


def _bernoulli_by(source, args, kwargs):
    tensor, probabilities = args[:2]
    return tensor.copy_(_uniform(source.bits(tensor.shape, tensor.device)) < probabilities)


def _normal_of_floats(source, args, kwargs):
    mean, std, size = args[:3]
    new = torch.empty(size, **_factory(kwargs))
    return new.copy_(_normal(source.bits(new.shape, new.device)) * std + mean)


def _multinomial(source, args, kwargs):
    """With replacement by inverting the cumulative sum; without, by a race of exponentials, as torch does it."""
    weights, count = args[0], args[1]
    if _argument(args, kwargs, 2, "replacement", False) and count > 1:
        cumulative = weights.double().cumsum(-1)
        u = _uniform(source.bits((*weights.shape[:-1], count), weights.device)) * cumulative[..., -1:]
        return torch.searchsorted(cumulative, u, right=True).clamp_(max=weights.shape[-1] - 1)
    waits = -torch.log1p(-_uniform(source.bits(weights.shape, weights.device)))
    return (weights.double() / waits.clamp_min(1e-300)).topk(count, dim=-1).indices


def _draw_exponential(bits, args, kwargs):
    return -torch.log1p(-_uniform(bits)) / _argument(args, kwargs, 0, "lambd", 1.0)


def _draw_range(bits, args, kwargs):
    low, high = args[0], args[1]
    return low + bits % (high - low)


def _draw_below(bits, args, kwargs):
    return bits % args[0]


def _bernoulli_of(source, args, kwargs):
    probabilities = args[0]
    return (_uniform(source.bits(probabilities.shape, probabilities.device)) < probabilities).to(probabilities.dtype)


def _native_dropout(source, args, kwargs):
    tensor, rate = args[0], args[1]
    keep = source.below(tensor.shape, tensor.device, 1 - rate)  # as a CPU's dropout asks, so that devices agree
    scale = 0.0 if rate == 1 else 1 / (1 - rate)
    return _aten.native_dropout_backward(tensor, keep, scale), keep  # the product of the three, in one kernel


DRAWS = {
    _aten.bernoulli_.float: _bernoulli_fill,
    _aten.bernoulli_.Tensor: _bernoulli_by,
    _aten.bernoulli.default: _bernoulli_of,
    _aten.bernoulli.p: _bernoulli_like,
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
