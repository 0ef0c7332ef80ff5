"""Check and add up what `Task.loss` returned: a sum, a weight and named extra terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import InputError
from shardwise.task import OF_TENSORS, Task

NO_GRAPH = (
    "Task.loss returned a sum that does not depend on any trainable parameter: return it with its graph, without "
    ".item(), .detach() or torch.no_grad()"
)
TWICE = (
    "Task.loss calls backward itself, or the model or the loss keeps a tensor with its graph from one step to the next "
    "(a recurrent state): detach() what is kept, and return the sum alone"
)
_SHAPE = "Task.loss must return (sum, weight) or (sum, weight, {name: extra})"


@dataclass
class Extra:
    """A named extra term of the loss: its sum (), and its own weight (None: the main loss's weight)."""

    total: torch.Tensor
    weight: torch.Tensor | float | None


@dataclass
class Loss:
    """One evaluation of the loss, as `Task.loss` returned it.

    total   sum over samples (), attached to the graph
    weight  number of samples or tokens that count; perhaps a tensor on the device, which is not read here since the
            host would wait for the forward
    extras  name -> further sum, perhaps with a weight of its own
    """

    total: torch.Tensor
    weight: torch.Tensor | float
    extras: dict[str, Extra] = field(default_factory=dict)

    @property
    def terms(self) -> float:
        """Returns the sum of absolute values of the samples' losses if a subclass knows it; else 0."""
        return 0.0

    def with_extras(self, extras: dict[str, Extra]) -> Loss:
        """Returns a copy with more extra terms."""
        return Loss(self.total, self.weight, {**self.extras, **extras})

    def numbers(self) -> dict[str, float]:
        """Returns {name: value} of every sum and weight, as "sum", "weight", "extra 'x'", "weight of extra 'x'".

        The host waits for the values. Raises `InputError` for a negative weight.
        """
        numbers = {"sum": float(self.total.detach()), "weight": not_negative(float(self.weight), "weight")}
        for name, extra in self.extras.items():
            numbers[f"extra '{name}'"] = float(extra.total.detach())
            if extra.weight is not None:
                what = f"weight of extra '{name}'"
                numbers[what] = not_negative(float(extra.weight), what)
        return numbers

    def dtypes(self) -> dict[str, torch.dtype]:
        """Returns {name as in `numbers`: dtype} of every sum and weight that is a floating-point tensor."""
        values: dict[str, Any] = {"sum": self.total, "weight": self.weight}
        for name, extra in self.extras.items():
            values |= {f"extra '{name}'": extra.total, f"weight of extra '{name}'": extra.weight}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}


def is_second_backward(error: BaseException) -> bool:
    """Whether the error is that of a second backward through a graph that was freed."""
    return isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error)


def loss_on(task: Task, output: Any, batch: Any) -> Loss:
    """Returns `Task.loss(output, batch)` as a `Loss`; raises `InputError` as `read_loss` does.

    A TypeError or AttributeError in the loss gets a note if the output, or for a loss module the batch, is no tensor.
    """
    try:
        returned = task.loss(output, batch)
    except (TypeError, AttributeError) as error:
        if not isinstance(output, torch.Tensor):
            error.add_note(_instead_of_a_tensor(output))
        elif isinstance(task.loss, torch.nn.Module) and not isinstance(batch, torch.Tensor):
            error.add_note(f"Task.loss is called with (output, batch), and {type(task.loss).__name__} {OF_TENSORS}")
        raise
    return read_loss(returned)


def _instead_of_a_tensor(output: Any) -> str:
    """Returns a note on an output that is no tensor: its type, and how `Task.loss` can take a tensor from it."""
    # the likeliest mistake first: a forward without `return`
    if output is None:
        return "The model returned None: let its forward end in `return`"
    if isinstance(output, Mapping):
        keys = ", ".join(repr(key) for key in output)
        first, kind = next(iter(output), "name"), type(output).__name__
        return f"The model returned a {kind} of {keys}: take from it in Task.loss, as output[{first!r}]"
    if isinstance(output, tuple | list):
        return f"The model returned {_describe(output)}: take the tensor from it in Task.loss, as output[0]"
    # an object with tensors in attributes, as a library's outputs are
    names = [name for name, value in getattr(output, "__dict__", {}).items() if isinstance(value, torch.Tensor)]
    of = f", as output.{names[0]}" if names else ""
    return f"The model returned {_describe(output)}: take the tensor from it in Task.loss{of}"


def read_loss(returned: Any) -> Loss:
    """Returns what `Task.loss` returned, (sum, weight) or (sum, weight, extras), as a `Loss`; else `InputError`."""
    # the likeliest mistake first: a mean
    if isinstance(returned, torch.Tensor):
        raise InputError(f"{_SHAPE}, got one tensor: a mean hides the weight that parts of a batch must share")
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        raise InputError(f"{_SHAPE}, got {_describe(returned)}")
    total, weight = returned[0], returned[1]
    # a tensor of one element that is not a scalar is still one number
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        raise InputError(f"{_SHAPE}: the sum must be a tensor with one element, got {_describe(total)}")
    if total.is_complex():
        raise InputError(f"{_SHAPE}: the sum is {total.dtype}, and a loss is real: take its .real or .abs()")
    # extras are left out by most tasks
    extras = returned[2] if len(returned) == 3 else {}
    if not isinstance(extras, dict):
        raise InputError(f"{_SHAPE}: the extra terms must be a dict, got {_describe(extras)}")
    return Loss(total.reshape(()), _number(weight, "weight"), {k: _extra(k, v) for k, v in extras.items()})


def not_negative(value: float, what: str) -> float:
    """Returns `value`, a weight that messages call `what`; `InputError` if it is negative (steps would go uphill)."""
    if value < 0:
        raise InputError(
            f"Task.loss returned {value:g} as the {what}, which divides the sum and turns its sign around: return how "
            "many samples or tokens count, 0 or more"
        )
    return value


def _extra(name: str, value: Any) -> Extra:
    """Returns one extra term, a tensor or (sum, weight), as an `Extra`; `InputError` for anything else."""
    if isinstance(value, tuple | list) and len(value) == 2:
        value, weight = value[0], _number(value[1], f"weight of extra '{name}'")
    else:
        weight = None
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise InputError(f"{_SHAPE}: extra '{name}' must be a tensor with one element, got {_describe(value)}")
    return Extra(value.reshape(()), weight)


def _number(value: Any, what: str) -> torch.Tensor | float:
    """Returns a weight as a float, or as a detached () tensor that is not read; `InputError` for anything else.

    what  the weight's name in messages
    """
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise InputError(
            f"{_SHAPE}: the {what} carries a gradient, and sums are divided by it without one: give {what}.detach() "
            "where it counts samples, or divide in the sum and return how many samples count"
        )
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())  # not read here; `normalise` refuses a negative one
    if isinstance(value, int | float) and not math.isfinite(value):
        raise InputError(f"{_SHAPE}: the {what} is {value:g}: return how many samples or tokens count, 0 or more")
    if isinstance(value, int | float):
        return not_negative(float(value), what)
    raise InputError(f"{_SHAPE}: the {what} must be one number, got {_describe(value)}")


def _describe(value: Any) -> str:
    """Returns a value's type, with its shape or length, for messages."""
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    length = f" of length {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{shape}{length}"
