"""Random numbers of distributions, each a function of the 53 hashed bits of its element.

Every element takes the same number of steps, without a rejection loop that ends when all are accepted, because the
number of one element must not depend on others, and a rehearsal has no values to decide by.
"""

from __future__ import annotations

import math

import torch

from shardwise.random.hashing import hashed

_GOLDEN = 0x9E3779B97F4A7C15  # a key of its own for the second uniform of a normal number
_TRIES = 12  # proposals for a gamma number, each accepted in 19 of 20 cases; one in 4e15 takes the mean instead
_HALVINGS = 40  # bisection steps of the interval in which a Poisson number lies


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Returns uniform float64 numbers in [0, 1), bits / 2**53, for int64 bits in [0, 2**53)."""
    return bits.to(torch.float64) * 2.0**-53


def normal(bits: torch.Tensor) -> torch.Tensor:
    """Returns standard normal numbers (Box and Muller 1958), the second uniform hashed from the first's bits."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(bits)))
    return radius * torch.cos(2 * math.pi * uniform(hashed(_GOLDEN, bits)))


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """Returns exponential numbers of rate 1."""
    return -torch.log1p(-uniform(bits))


def cauchy(bits: torch.Tensor) -> torch.Tensor:
    """Returns standard Cauchy numbers."""
    return torch.tan(math.pi * (uniform(bits) - 0.5))


def geometric(bits: torch.Tensor, p: float) -> torch.Tensor:
    """Returns geometric numbers in float64: trials, at least 1, up to the first success, of probability `p`."""
    return torch.ceil(-exponential(bits) / math.log1p(-p)).clamp_min(1) if p < 1 else torch.ones_like(uniform(bits))


def gamma(bits: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Returns gamma numbers of these shapes (> 0) and rate 1 (Marsaglia and Tsang 2000), in float64."""
    shape = shape.double()
    small = shape < 1
    d = torch.where(small, shape + 1, shape) - 1 / 3
    c = 1 / torch.sqrt(9 * d)
    value, done = d, torch.zeros_like(small)
    for attempt in range(_TRIES):
        x = normal(hashed(2 * attempt + 1, bits))
        v = (1 + c * x) ** 3
        log_u = torch.log1p(-uniform(hashed(2 * attempt + 2, bits)))
        accepted = (v > 0) & (log_u < 0.5 * x * x + d - d * v + d * torch.log(v.clamp_min(1e-300)))
        value = torch.where(accepted & ~done, d * v, value)
        done = done | accepted
    boost = torch.exp(-exponential(bits) / shape)  # of a shape below 1: that of one more, times u ** (1 / shape)
    return torch.where(small, value * boost, value)


def poisson(bits: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """Returns Poisson numbers of these rates (up to 1e12), in float64: the first count whose cumulated share passes u.

    P(count <= k) is the regularised upper incomplete gamma function of k + 1 at the rate.
    """
    rate, u = rate.double(), uniform(bits)
    # no u of 53 bits lies further out than twelve standard deviations and 60
    spread = 12 * torch.sqrt(rate) + 60
    low, high = torch.floor((rate - spread).clamp_min(0)), torch.ceil(rate + spread)
    for _ in range(_HALVINGS):
        middle = torch.floor((low + high) / 2)
        passed = torch.special.gammaincc(middle + 1, rate) > u
        low, high = torch.where(passed, low, torch.minimum(middle + 1, high)), torch.where(passed, middle, high)
    return high
