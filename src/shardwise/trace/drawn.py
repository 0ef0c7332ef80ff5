"""Which operations draw random numbers, and which of those draw for each element by itself. How: random/draws."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_UNTAGGED = {"aten::binomial", "aten::_sample_dirichlet"}  # they draw, and torch does not say so
_OF_PARAMETERS = {  # a number for each element of their arguments, by which it is distributed
    "aten::bernoulli", "aten::binomial", "aten::normal", "aten::poisson", "aten::_standard_gamma",
}  # fmt: skip
_BY_VALUES = {"aten::binomial", "aten::poisson", "aten::_standard_gamma", "aten::_sample_dirichlet"}


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers, unless its arguments switch that off."""
    return torch.Tag.nondeterministic_seeded in func.tags or func._schema.name in _UNTAGGED


@cache
def fills(func: Any) -> bool:
    """Whether a random operation writes what it draws over its first argument, whatever that held (`normal_`)."""
    names = [argument.name for argument in func._schema.arguments]
    first = func._schema.arguments[0].alias_info if names else None
    # `rrelu_with_noise_` draws noise, and reads the tensor that it writes into
    return is_random(func) and first is not None and first.is_write and names[0] == "self" and "noise" not in names


@cache
def draws_each(func: Any) -> bool:
    """Whether a random operation gives one number for each element of its tensors, which it draws by itself."""
    name = func._schema.name
    return is_random(func) and (fills(func) or name.endswith("_like") or name in _OF_PARAMETERS)


def asks_by_values(func: Any) -> bool:
    """Whether the count of numbers that an operation draws depends on the values of its arguments."""
    return func._schema.name in _BY_VALUES


@cache
def overwrites(name: str) -> bool:
    """Whether a function of this name leaves nothing of what its first argument held: it copies, or draws (`fills`)."""
    if name in ("copy_", "zero_", "fill_"):
        return True
    packet = getattr(torch.ops.aten, name, None) if name.endswith("_") and not name.startswith("_") else None
    return packet is not None and any(fills(getattr(packet, overload)) for overload in packet.overloads())
