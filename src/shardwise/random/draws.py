"""`DRAWS`: random ops computed from hashed bits. To add an op: an entry here; a distribution: random/variates.

`DRAWS` has, for each random op of ATen that can be answered so, a function (`BitSource`, args, kwargs) -> its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.random.hashing import hashed
from shardwise.random.variates import cauchy, exponential, gamma, geometric, normal, poisson, uniform

_aten = torch.ops.aten
_IMAGINARY, _MORE = 0x1F83D9AB, 0x5BE0CD19  # hash keys, of imaginary parts and of more bits than 53


@dataclass(frozen=True)
class BitSource:
    """Functions that return the random bits of which a draw is made.

    bits   (shape, device) -> int64 tensor of 53 hashed bits for each element
    below  (shape, device, rate) -> bool tensor, whether each element's bits are below rate * 2**53
    """

    bits: Callable[[tuple[int, ...], torch.device], torch.Tensor]
    below: Callable[[tuple[int, ...], torch.device, float], torch.Tensor]


def _fill(draw):
    """Returns a `DRAWS` function for `op_(self, ...)`, which overwrites self. `draw`: (bits, args, kwargs) -> value."""

    def run(source, args, kwargs):
        tensor = args[0]
        return tensor.copy_(_numbers(draw, tensor, source, args[1:], kwargs))

    return run


def _like(draw):
    """Returns a `DRAWS` function for `op_like(self, ...)`, which gives a new tensor of self's shape."""

    def run(source, args, kwargs):
        like = torch.empty_like(args[0], **_factory(kwargs))
        return like.copy_(_numbers(draw, like, source, args[1:], kwargs))

    return run


def _new(draw, size_at: int = 0):
    """Returns a `DRAWS` function for `op(..., size, ...)`; the size is positional argument `size_at`."""

    def run(source, args, kwargs):
        size = args[size_at]
        integral = draw in (_draw_range, _draw_below)
        # torch makes integers int64 where no dtype is asked for
        options = {"dtype": torch.int64} if integral and kwargs.get("dtype") is None else {}
        new = torch.empty(size, **{**_factory(kwargs), **options})
        return new.copy_(_numbers(draw, new, source, (*args[:size_at], *args[size_at + 1 :]), kwargs))

    return run


def _numbers(draw, tensor: torch.Tensor, source: BitSource, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the random numbers for `tensor`, in its shape; of a complex one the imaginary part has its own bits.

    args, kwargs  parameters of the distribution, as the op takes them
    """
    bits = source.bits(tensor.shape, tensor.device)
    if draw in (_draw_uniform, _draw_unit):
        bits = _held(bits, tensor.dtype)
    if not tensor.is_complex():
        return draw(bits, args, kwargs)
    beside = hashed(_IMAGINARY, bits)
    if draw is _draw_unit:
        beside = _held(beside, tensor.dtype)
    if draw not in (_draw_normal, _draw_standard_normal):
        return torch.complex(draw(bits, args, kwargs), draw(beside, args, kwargs))
    unit = torch.complex(normal(bits), normal(beside)) / math.sqrt(2)  # of variance 1, half of it in each part
    return unit * _argument(args, kwargs, 1, "std", 1.0) + _argument(args, kwargs, 0, "mean", 0.0)


def _held(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bits, clamped so that the uniform number made of them is not rounded up to 1 in `dtype`."""
    digits = _digits(dtype)
    return bits if digits == 53 else bits.clamp_max(2**53 - 2 ** (53 - digits))


def _digits(dtype: torch.dtype) -> int:
    """Returns the number of binary digits of a floating-point dtype's significand, 24 for float32."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _factory(kwargs: dict) -> dict:
    return {k: kwargs[k] for k in ("dtype", "layout", "device", "memory_format") if kwargs.get(k) is not None}


def _argument(args, kwargs, place: int, name: str, default: float) -> float:
    """Returns the argument at index `place` of `args`, else `kwargs[name]`, else `default`."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def _draw_uniform(bits, args, kwargs):
    low, high = _argument(args, kwargs, 0, "from", 0.0), _argument(args, kwargs, 1, "to", 1.0)
    return uniform(bits) * (high - low) + low


def _draw_unit(bits, args, kwargs):
    return uniform(bits)


def _draw_normal(bits, args, kwargs):
    return normal(bits) * _argument(args, kwargs, 1, "std", 1.0) + _argument(args, kwargs, 0, "mean", 0.0)


def _draw_standard_normal(bits, args, kwargs):
    return normal(bits)


def _bernoulli_fill(source, args, kwargs):
    tensor = args[0]
    return tensor.copy_(source.below(tensor.shape, tensor.device, _argument(args, kwargs, 1, "p", 0.5)))


def _bernoulli_like(source, args, kwargs):
    like = torch.empty_like(args[0], **_factory(kwargs))
    return like.copy_(source.below(like.shape, like.device, _argument(args, kwargs, 1, "p", 0.5)))


def _bernoulli_by(source, args, kwargs):
    tensor, probabilities = args[:2]
    return tensor.copy_(uniform(source.bits(tensor.shape, tensor.device)) < probabilities)


def _normal_of_floats(source, args, kwargs):
    mean, std, size = args[:3]
    new = torch.empty(size, **_factory(kwargs))
    return new.copy_(normal(source.bits(new.shape, new.device)) * std + mean)


def _normal_by(source, args, kwargs):
    """Returns normal numbers of `mean` and `std`, at least one of them a tensor, in their broadcast shape."""
    mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    like: torch.Tensor = mean + std  # of their common shape
    return (normal(source.bits(like.shape, like.device)) * std + mean).to(like.dtype)


def _random_fill(source, args, kwargs):
    """Returns self, overwritten with integers from 0 up to the bound of its dtype, as `Tensor.random_()` has it."""
    tensor = args[0]
    if tensor.dtype is torch.bool:
        bound = 2
    elif tensor.is_floating_point():
        bound = 2 ** _digits(tensor.dtype)  # below it the dtype holds all integers
    else:
        bound = min(torch.iinfo(tensor.dtype).max + 1, 2**53)  # there are 53 bits for each element
    return tensor.copy_(source.bits(tensor.shape, tensor.device) % bound)


def _of_each(draw):
    """Returns a `DRAWS` function for `op(self)`, whose element of self is the parameter of the number's distribution.

    draw  (bits, parameters) -> numbers
    """

    def run(source, args, kwargs):
        tensor = args[0]
        return draw(source.bits(tensor.shape, tensor.device), tensor).to(tensor.dtype)

    return run


def _gamma(source, args, kwargs):
    shape = args[0]
    drawn = gamma(source.bits(shape.shape, shape.device), shape).to(shape.dtype)
    return drawn.clamp_min(torch.finfo(shape.dtype).tiny)  # never 0, as torch, since callers take the logarithm


def _dirichlet(source, args, kwargs):
    like, limits = args[0], torch.finfo(args[0].dtype)
    shares = gamma(source.bits(like.shape, like.device), like).clamp_min(torch.finfo(torch.float64).tiny)
    # neither 0 nor 1, as torch, since a Beta distribution takes the logarithms of both
    return (shares / shares.sum(-1, keepdim=True)).to(like.dtype).clamp(limits.tiny, 1 - limits.eps / 2)


def _rrelu(func):
    """Returns a `DRAWS` function for the rrelu op `func`, which writes the drawn slopes into `noise` for backward."""

    def run(source, args, kwargs):
        tensor, noise = args[:2]
        if not _argument(args, kwargs, 4, "training", False):
            return func(*args, **kwargs)
        low, high = _argument(args, kwargs, 2, "lower", 1 / 8), _argument(args, kwargs, 3, "upper", 1 / 3)
        slopes = uniform(source.bits(tensor.shape, tensor.device)) * (high - low) + low
        noise.copy_(torch.where(tensor <= 0, slopes.to(tensor.dtype), 1))
        return tensor.mul_(noise) if func is _aten.rrelu_with_noise_.default else tensor * noise

    return run


def _multinomial(source, args, kwargs):
    """Returns (..., count) indices of `weights`; with replacement by the cumulative sum, without by exponential races.

    args  (weights, count, replacement)
    """
    weights, count = args[0], args[1]
    if _argument(args, kwargs, 2, "replacement", False) and count > 1:
        cumulative = weights.double().cumsum(-1)
        u = uniform(source.bits((*weights.shape[:-1], count), weights.device)) * cumulative[..., -1:]
        return torch.searchsorted(cumulative, u, right=True).clamp_(max=weights.shape[-1] - 1)
    waits = exponential(source.bits(weights.shape, weights.device))
    # the smallest time / weight wins; a time of 0 would give inf, and NaN for a weight of 0
    return (weights.double() / waits.clamp_min(1e-300)).topk(count, dim=-1).indices


def _draw_exponential(bits, args, kwargs):
    return exponential(bits) / _argument(args, kwargs, 0, "lambd", 1.0)


def _draw_cauchy(bits, args, kwargs):
    return cauchy(bits) * _argument(args, kwargs, 1, "sigma", 1.0) + _argument(args, kwargs, 0, "median", 0.0)


def _draw_log_normal(bits, args, kwargs):
    return (normal(bits) * _argument(args, kwargs, 1, "std", 2.0) + _argument(args, kwargs, 0, "mean", 1.0)).exp()


def _draw_geometric(bits, args, kwargs):
    return geometric(bits, args[0])


def _draw_range(bits, args, kwargs):
    low, high = args[0], args[1]
    return low + _remainder(bits, high - low)


def _draw_below(bits, args, kwargs):
    return _remainder(bits, args[0])


def _remainder(bits: torch.Tensor, span: int | torch.Tensor) -> torch.Tensor:
    """Returns integers in [0, span), made of 53 bits, or of 63 if the span is above 2**53."""
    if isinstance(span, torch.Tensor) or span <= 2**53:
        return bits % span
    if span > 2**63:
        raise ValueError(f"integers are drawn from {span} numbers: at most 2**63")
    bits = (bits << 10) ^ hashed(_MORE, bits)
    return bits if span == 2**63 else bits % span


def _bernoulli_of(source, args, kwargs):
    probabilities = args[0]
    return (uniform(source.bits(probabilities.shape, probabilities.device)) < probabilities).to(probabilities.dtype)


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
    _aten.random_.default: _random_fill,
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
    _aten.randint_like.Tensor: _like(_draw_below),
    _aten.normal.float_float: _normal_of_floats,
    _aten.normal.Tensor_Tensor: _normal_by,
    _aten.normal.Tensor_float: _normal_by,
    _aten.normal.float_Tensor: _normal_by,
    _aten.cauchy_.default: _fill(_draw_cauchy),
    _aten.log_normal_.default: _fill(_draw_log_normal),
    _aten.geometric_.default: _fill(_draw_geometric),
    _aten.poisson.default: _of_each(poisson),
    _aten._standard_gamma.default: _gamma,
    _aten._sample_dirichlet.default: _dirichlet,
    _aten.rrelu_with_noise.default: _rrelu(_aten.rrelu_with_noise.default),
    _aten.rrelu_with_noise_.default: _rrelu(_aten.rrelu_with_noise_.default),
    _aten.multinomial.default: _multinomial,
}
