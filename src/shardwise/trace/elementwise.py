"""Tell whether an operation is elementwise, by trying it on small random tensors, or draws random numbers.

PyTorch tags most such operations; it does not tag those that were written without its iterators (`hardshrink_backward`,
`_prelu_kernel_backward`, `log_sigmoid_forward`). An operation is elementwise if, along every dim of its result, what it
gives for one index alone is what it gives for that index among others.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwise.trace.leaves import tensors_in

SCALES = (0.3, 3.0)  # standard deviations of the values tried: below and above 1, near which thresholds lie
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class _Small:
    """Shape and dtype of a tensor on which an operation is tried."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def is_elementwise(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether each element of the results depends on that element of the (broadcast) inputs alone.

    False, without a trial, for ops that write in place, draw random numbers or return a view, and without an argument
    that has dims.
    """
    schema = func._schema
    # these have rules of their own, and are not tried on other values
    aliases = any(result.alias_info is not None for result in schema.returns)
    if schema.is_mutable or is_random(func) or aliases:
        return False
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    ndim = max((tensor.dim() for tensor in tensors), default=0)
    # 0-dim tensors leave no dim to try along; some kernels check no shapes, and would read out of bounds
    if not ndim or not fit(tensors):
        return False
    small = [_Small(_sizes(leaf, ndim), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    try:
        return _tried(func, tuple(small), spec, ndim)
    except TypeError:  # an argument that cannot be a key
        return False


def fit(tensors: list[torch.Tensor]) -> bool:
    """Whether the shapes can be broadcast to each other, as an elementwise operation's inputs must."""
    try:
        torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except RuntimeError:
        return False
    return True


def _sizes(tensor: torch.Tensor, ndim: int) -> tuple[int, ...]:
    """Returns a small shape with as many dims: 1 where the tensor has size 1, else 2 + the dim's index among `ndim`."""
    # each dim has another size, so that a transposition shows in the result's shape
    return tuple(1 if n == 1 else 2 + place for place, n in enumerate(tensor.shape, ndim - tensor.dim()))


@cache
def _tried(func: Any, leaves: tuple, spec: Any, ndim: int) -> bool:
    """Whether an op is elementwise on random tensors. `leaves`: `_Small`s for tensors, other arguments as they are."""
    none = torch._C.DisableTorchFunction()  # function modes that follow a script's random ops must not see the trial's
    with _disable_current_modes(), none, torch.no_grad(), warnings.catch_warnings(action="ignore"):
        generator = torch.Generator().manual_seed(0)
        try:
            return all(_holds(func, leaves, spec, ndim, *way, generator) for way in _ways(leaves))
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):  # not for tensors of such sizes
            return False


def _ways(leaves: tuple) -> list[tuple[float, int]]:
    """Returns (standard deviation of real values, exclusive bound of integers) of each trial.

    Some kernels use integers as memory indices without a check. So the first trial has integers of 0 alone: an op that
    indexes then reads the first element only, is found not to be elementwise, and never gets larger ones.
    """
    whole = any(isinstance(leaf, _Small) and leaf.dtype in _INTEGERS for leaf in leaves)
    return [(SCALES[0], 1)] * whole + [(scale, 3) for scale in SCALES]


def _holds(
    func: Any, leaves: tuple, spec: Any, ndim: int, scale: float, integers: int, generator: torch.Generator
) -> bool:
    """Whether, in one trial, each index of the results equals the op run on that index of the inputs alone.

    scale, integers  the trial, as `_ways` returns it
    """
    made = [_drawn(leaf, scale, integers, generator) if isinstance(leaf, _Small) else leaf for leaf in leaves]
    tensors = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    args, kwargs = tree_unflatten(made, spec)
    shapes = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    # not every kernel checks its shapes, but the meta kernels do
    by_shape = _outputs(func(*shapes[0], **shapes[1]))
    # an elementwise op gives every result the broadcast shape
    if not by_shape or any(output.shape != shape for output in by_shape):
        return False
    whole = _outputs(func(*args, **kwargs))
    for dim, size in enumerate(shape):
        for index in range(size):
            single_args = tree_map_only(torch.Tensor, lambda t, d=dim, i=index: _index(t, d - ndim, i), (args, kwargs))
            singles = _outputs(func(*single_args[0], **single_args[1]))
            pairs = zip(whole, singles, strict=True)
            # an element on its own gives another value than among others
            if not all(_same(among.narrow(dim, index, 1), of_single) for among, of_single in pairs):
                return False
    return True


def _drawn(small: _Small, scale: float, integers: int, generator: torch.Generator) -> torch.Tensor:
    """Returns a tensor of random values for a trial: normal of deviation `scale`, or integers in [0, `integers`)."""
    shape, dtype = small.shape, small.dtype
    if dtype.is_floating_point or dtype.is_complex:
        dtype = torch.promote_types(dtype, torch.float32)  # few bits would hide a difference
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else integers, shape, generator=generator).to(dtype)


def _index(tensor: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Returns the tensor at an index of a (negative) dim; all of it where it lacks the dim or is broadcast there."""
    return tensor.narrow(dim, index, 1) if tensor.dim() >= -dim and tensor.shape[dim] > 1 else tensor


def _outputs(output: Any) -> list[torch.Tensor]:
    return tensors_in(output)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal within rounding, since a vectorised kernel may round the last bits otherwise."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True)


_UNTAGGED = {"aten::binomial", "aten::_sample_dirichlet"}  # random, but without torch's tag for random ops
_OF_PARAMETERS = {  # one random number for each element of their arguments, the parameters of its distribution
    "aten::bernoulli", "aten::binomial", "aten::normal", "aten::poisson", "aten::_standard_gamma",
}  # fmt: skip
_BY_VALUES = {"aten::binomial", "aten::poisson", "aten::_standard_gamma", "aten::_sample_dirichlet"}


def is_random(func: Any) -> bool:
    """Whether an op can draw random numbers, also if its arguments switch that off (dropout in eval mode)."""
    return torch.Tag.nondeterministic_seeded in func.tags or func._schema.name in _UNTAGGED


@cache
def fills(func: Any) -> bool:
    """Whether a random operation overwrites its first argument with random numbers (`normal_`)."""
    names = [argument.name for argument in func._schema.arguments]
    first = func._schema.arguments[0].alias_info if names else None
    # `rrelu_with_noise_` draws the noise but computes what it writes from what was there
    return is_random(func) and first is not None and first.is_write and names[0] == "self" and "noise" not in names


@cache
def draws_each(func: Any) -> bool:
    """Whether a random op gives one independent random number for each element of its tensor arguments."""
    name = func._schema.name
    return is_random(func) and (fills(func) or name.endswith("_like") or name in _OF_PARAMETERS)


def asks_by_values(func: Any) -> bool:
    """Whether the count of random numbers that an op takes from the generator depends on its arguments' values."""
    return func._schema.name in _BY_VALUES


@cache
def overwrites(name: str) -> bool:
    """Whether a function of this name overwrites its first argument entirely, by copying, filling or random numbers."""
    if name in ("copy_", "zero_", "fill_"):
        return True
    packet = getattr(torch.ops.aten, name, None) if name.endswith("_") and not name.startswith("_") else None
    return packet is not None and any(fills(getattr(packet, overload)) for overload in packet.overloads())
