"""Whether code runs inside a transform of `torch.func` (vmap, grad, ...), and which tensors its wrappers hold.

Inside a transform a module is given wrappers, and what it does is one operation of whoever called the transform: it
cannot be left there for another rank, and a wrapper has no storage.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters, temporarily_clear_interpreter_stack


def transforming() -> bool:
    """Whether a transform is active."""
    return _functorch.peek_interpreter_stack() is not None


def before_transforms() -> AbstractContextManager[Any]:
    """Context: what is computed is no part of the transforms that are active, as if it had come before them."""
    return temporarily_clear_interpreter_stack() if transforming() else nullcontext()


def differentiating() -> bool:
    """Whether a transform is active that takes derivatives by a backward of its own (grad, vjp, jacrev, hessian)."""
    return transforming() and any(
        one.key() == _functorch.TransformType.Grad for one in retrieve_all_functorch_interpreters()
    )


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside the wrappers of `torch.func`'s transforms; itself where there are none."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
