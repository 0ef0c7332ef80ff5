"""Raise where a second derivative is asked of a backward that has none of its own.

torch's `once_differentiable` marks a gradient only where the one that arrived has a derivative. A product's gradient
depends on what was multiplied, even where a constant arrives (the sum of what a convolution gives): there a second
derivative would be taken for zero without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def differentiable_once(said: str) -> Callable:
    """Returns a decorator of a `Function`'s backward: to differentiate what it gives raises `said`, whatever arrived.

    For backwards that read more than the gradient; of a linear one, torch's own is right.
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
