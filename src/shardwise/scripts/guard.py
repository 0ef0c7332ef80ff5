"""When the engine itself reads a model, which functions of torch read or write values, and what is refused of a model:
hooks that are given summands, and a conversion after `prepare`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan

_PROPERTIES = {
    "size", "dim", "stride", "is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "element_size", "storage_offset", "untyped_storage", "data_ptr", "__hash__",
    "get_device", "__delete__", "backward", "has_names", "is_shared", "new_zeros", "new_ones", "new_empty", "new_full",
}  # fmt: skip
READ = (
    "{} of a weight of which this rank holds a piece: take it in `with prepared.whole():`, where model.parameters() "
    "are whole; for an average, average.update_parameters(prepared)"
)
OUTSIDE = (
    "{} into a weight, or a gradient, of which this rank holds a piece: write in `with prepared.whole():` (grads=True: "
    "gradients too), where model.parameters() are whole"
)
TAKEN = (
    "torch.autograd.grad(..., parameters): what it gives is the gradient of this rank's samples alone, or of its part "
    "of the batch, and no rank has one process's: weigh losses by their values (prepared.sum), or read param.grad "
    "after prepared.backward(loss, retain_graph=True) of each; or, for an inner step (MAML), under replicas, "
    'zero=1 or zero=2, prepare(..., loss_scope="model"), by which every rank has whole batches'
)


class Gate:
    """Open while the engine itself reads."""

    def __init__(self) -> None:
        self._opened = 0

    @property
    def is_open(self) -> bool:
        """Whether it is the engine that reads parameters now, and not the script."""
        return self._opened > 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context: the engine reads parameters, so that it gets this rank's pieces."""
        self._opened += 1
        try:
            yield
        finally:
            self._opened -= 1


def mark_like(other: torch.Tensor, param: nn.Parameter) -> None:
    """Give a tensor that stands for a parameter the attributes that the script put on that (`p.lr_scale`)."""
    for name, value in vars(param).items():
        vars(other).setdefault(name, value)


def reads_values(func: Any) -> bool:
    """Whether a function of torch reads or writes a tensor's elements, not only its properties."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in ("data", "T", "mT", "H", "real", "imag")
    return name not in _PROPERTIES


def writes_into(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE


_IN_PLACE = frozenset(name for name in dir(torch.Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(int))


def refuse_hooks(model: nn.Module, plan: Plan) -> None:
    """Raise `RefusedPlan` for a script's hook on a parameter's gradient that would not run, or run on a summand alone.

    A rank's gradient is a summand until ranks have added theirs up: what is right for summands (a mask) is right there
    too, and `shardwise verify` tells. Shares of weights and pieces of units have no hooks, and a hook behind the sum
    that backward accumulates runs before ranks have added theirs up.
    """
    spread = plan.tp > 1 or plan.ep > 1 or plan.sharded.weights
    for name, param in model.named_parameters():
        late = _of_script(param._post_accumulate_grad_hooks)
        if plan.world_size > 1 and (late or (spread and _of_script(param._backward_hooks))):
            raise RefusedPlan(
                f"parameter '{name}' has a hook on its gradient, which is given this rank's part of a sum over ranks "
                f"where one process gives it the whole gradient (plan {plan}): change gradients after "
                "prepared.backward, by param.grad, or clip with prepared.clip_grad_norm_"
            )


def _of_script(hooks: Any) -> bool:
    """Whether a hook is neither ours nor torch's (FSDP's)."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith(("shardwise.", "torch.")) for hook in (hooks or {}).values()
    )


def guard_conversion(model: nn.Module) -> None:
    """Make `model.to`, `.double()` and the like raise where they would change a tensor; a copy keeps its own."""

    def apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if module is not model:
            return type(module)._apply(module, function, recurse)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            found = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (found.dtype, found.device) != (tensor.dtype, tensor.device):
                raise InputError(
                    f"the model is converted or moved after prepare ('{name}': {tensor.dtype} on {tensor.device} to "
                    f"{found.dtype} on {found.device}), and the plan holds its weights as they were: do that before "
                    "prepare"
                )
        return module

    vars(model)["_apply"] = types.MethodType(apply, model)
