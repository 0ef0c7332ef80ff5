"""Whether code runs inside a transform of `torch.func` (vmap, grad, ...), and which tensors its wrappers hold.

Inside a transform a module is given wrappers, and what it does is one operation of whoever called the transform: it
cannot be left there for another rank, and a wrapper has no storage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch import apis, eager_transforms
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters, temporarily_clear_interpreter_stack

_aten = torch.ops.aten
_RUN = ((apis, "vmap_impl"), (eager_transforms, "grad_impl"), (eager_transforms, "grad_and_value_impl"),
        (eager_transforms, "_jvp_with_argnums"), (eager_transforms, "_vjp_with_argnums"))  # fmt: skip


def counted_transforms(call: Callable[[str, Callable[..., Any], tuple, dict], Any]) -> Callable[[], None]:
    """Makes each outermost transform run as `call(name, run, args, kwargs)`, which returns its result.

    Returns the undo function.
    """
    before = [(room, name, getattr(room, name)) for room, name in _RUN]

    def run(name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # a transform inside another one is part of that one's call
        return inner(*args, **kwargs) if transforming() else call(name, inner, args, kwargs)

    for room, name, inner in before:
        setattr(room, name, partial(run, name, inner))

    def undo() -> None:
        for room, name, inner in before:
            setattr(room, name, inner)

    return undo


def transforming() -> bool:
    """Whether a transform of `torch.func` is active."""
    return _functorch.peek_interpreter_stack() is not None


def before_transforms() -> AbstractContextManager[Any]:
    """Context without the active transforms, so that what is computed inside counts as computed before them."""
    return temporarily_clear_interpreter_stack() if transforming() else nullcontext()


def differentiating() -> bool:
    """Whether a transform is active that takes derivatives by a backward of its own (grad, vjp, jacrev, hessian)."""
    return transforming() and any(
        level.key() == _functorch.TransformType.Grad for level in retrieve_all_functorch_interpreters()
    )


def with_values(func: Any) -> Any:
    """Returns the op to run for one that a dispatch mode gets: `zeros` for `_efficientzerotensor`, else `func`.

    Forward derivatives make zeros that torch 2.13 does not allocate; reading those under a mode crashes the process.
    """
    return _aten.zeros.default if func is _aten._efficientzerotensor.default else func


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside the wrappers of `torch.func`'s transforms; `tensor` itself if it is not wrapped."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def differentiable_once(said: str) -> Callable:
    """Returns a decorator for the backward of a `Function`: differentiating its results raises `said`.

    For backwards that read more than the gradient; a linear one can be differentiated by torch's own means.
    """

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not torch.is_grad_enabled():
                return results
            # `once_differentiable` would mark nothing where the gradient that arrived is a constant
            marked = torch._C._functions.DelayedError(said.encode(), len(results))
            return marked(*(None if result is None else result.detach().requires_grad_() for result in results))

        return once

    return decorate
