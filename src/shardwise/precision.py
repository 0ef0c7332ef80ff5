"""The torch dtypes of a plan's `precision` and `reduce_dtype` (layout/precisions), and casts to them."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.layout import Plan
from shardwise.layout.precisions import PRECISIONS, TORCH
from shardwise.task import Task


def dtype(name: str) -> torch.dtype:
    """Returns the torch dtype with a plan's short name, such as "bf16"."""
    torch_dtype = getattr(torch, TORCH[name])
    assert isinstance(torch_dtype, torch.dtype)
    return torch_dtype


@dataclass(frozen=True)
class Precision:
    """The dtypes of one plan."""

    compute: torch.dtype  # of the module's forward and backward
    master: torch.dtype  # of the master weights, which the optimizer updates
    reduce: torch.dtype  # in which gradients are summed over ranks
    scaled: bool  # whether the loss is scaled against underflow, so that an overflow skips the step

    @classmethod
    def of(cls, plan: Plan) -> Precision:
        """Returns the dtypes that a plan asks for."""
        row = PRECISIONS[plan.precision]
        reduce = row.summed if plan.reduce_dtype == "auto" else plan.reduce_dtype
        return cls(dtype(row.compute), dtype(row.master), dtype(reduce), row.scaled)

    @property
    def mixed(self) -> bool:
        """Whether master weights have another dtype than the module's weights, and so are copies."""
        return self.compute != self.master

    @property
    def buffers(self) -> torch.dtype:
        """Returns the dtype of floating-point buffers, never of 16 bits, in which statistics would lose precision."""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Returns the dtype that a parameter or buffer of the module gets under this precision."""
        wide = self.compute if isinstance(tensor, nn.Parameter) else self.buffers
        if tensor.is_complex():
            return wide.to_complex()
        return wide if tensor.is_floating_point() else tensor.dtype

    def cast_inputs(self, tree):
        """Returns the pytree with its floating-point tensors cast to the compute dtype."""
        return tree_map_only(torch.Tensor, lambda t: t.to(self.compute) if t.is_floating_point() else t, tree)

    def cast_outputs(self, tree):
        """Returns the pytree with floating-point tensors cast to float32, or float64 if that is the compute dtype."""
        wide = torch.promote_types(self.compute, torch.float32)
        if type(tree) is torch.Tensor and tree.dtype == wide:
            return tree
        return tree_map_only(torch.Tensor, lambda t: t.to(wide) if t.is_floating_point() else t, tree)


# --- modules that make or hold tensors of another dtype than their weights

_ABOUT_DTYPES = re.compile(r"dtype|scalar type|type \(", re.I)


def met_at(task: Task, plan: Plan, error: Exception) -> Task | None:
    """Returns `met(task, plan)` if the error is about dtypes, else None."""
    return met(task, plan) if _ABOUT_DTYPES.search(str(error)) else None


def met(task: Task, plan: Plan) -> Task | None:
    """Returns the task with a module whose operations accept tensors of different dtypes.

    None if the plan computes in float32, where modules have no such problem, or compiles.
    """
    compute = Precision.of(plan).compute
    if compute == torch.float32 or plan.compile:
        return None
    build = task.model

    def built() -> nn.Module:
        module = build()
        for child in module.modules():
            if not hasattr(child.__dict__.get("forward"), "one_dtype"):
                child.__dict__["forward"] = types.MethodType(_meeting(child, compute), child)
        return module

    return task.with_(model=built)


def told_met(plan: Plan) -> str:
    """Returns the notice for a task that `met_at` has changed."""
    return (
        f"precision={plan.precision}: the module has or makes tensors of other dtypes beside its weights; operations "
        f"that refuse them are given all in {Precision.of(plan).compute.itemsize * 8} bits, as under torch.autocast"
    )


def _meeting(module: nn.Module, dtype: torch.dtype) -> Callable:
    """Returns a forward for the module in which operations that refuse mixed dtypes are run again in `dtype`."""
    forward = module.__dict__.get("forward")

    def met(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = type(self).forward.__get__(self) if forward is None else forward
        if _OneDtype.active:
            return run(*args, **kwargs)
        with _OneDtype(dtype):
            return run(*args, **kwargs)

    met.one_dtype = dtype  # type: ignore[attr-defined]
    if not isinstance(module, torch.jit.ScriptModule):  # its forward has no signature
        # other rooms read argument names from the signature, to find dims of positions
        own = inspect.signature(module.forward)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        met.__signature__ = inspect.Signature([itself, *own.parameters.values()])  # type: ignore[attr-defined]
    return met


# these update running statistics in place, so they run in the widest of their dtypes
_KEEP = {functional.batch_norm, torch.batch_norm, functional.instance_norm, torch.instance_norm}


class _OneDtype(TorchFunctionMode):
    """A mode that runs an operation again with all floating-point tensors in one dtype if it refused mixed dtypes.

    That is `dtype`, except that in-place operations keep their target's dtype, and `_KEEP` the widest.
    """

    active = False

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __enter__(self) -> _OneDtype:
        _OneDtype.active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _OneDtype.active = False
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_float(leaf)}
            given_out = kwargs.get("out") is not None  # the result would be written into a cast copy and lost
            if len(dtypes) < 2 or given_out or not _ABOUT_DTYPES.search(str(error)):
                raise
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        dtype = (
            args[0].dtype if writes else max(dtypes, key=lambda dtype: dtype.itemsize) if func in _KEEP else self.dtype
        )

        def cast(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.to(dtype) if _is_float(leaf) else leaf

        return func(*tree_map_only(torch.Tensor, cast, args), **tree_map_only(torch.Tensor, cast, kwargs))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
