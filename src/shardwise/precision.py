"""Which torch dtype holds what, and the casts, by the plan's `precision` and `reduce_dtype` (layout/precisions)."""

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
    """Returns torch's dtype of a short name, such as "bf16"."""
    torch_dtype = getattr(torch, TORCH[name])
    assert isinstance(torch_dtype, torch.dtype)
    return torch_dtype


@dataclass(frozen=True)
class Precision:
    """Dtypes of one plan. `mixed` where the module computes in another dtype than its master weights."""

    compute: torch.dtype  # of the module's forward and backward
    master: torch.dtype
    reduce: torch.dtype  # in which gradients are added over ranks
    scaled: bool  # the loss is scaled against underflow, and an overflow skips the step

    @classmethod
    def of(cls, plan: Plan) -> Precision:
        """Returns the dtypes that a plan asks for."""
        row = PRECISIONS[plan.precision]
        reduce = row.summed if plan.reduce_dtype == "auto" else plan.reduce_dtype
        return cls(dtype(row.compute), dtype(row.master), dtype(reduce), row.scaled)

    @property
    def mixed(self) -> bool:
        """Whether a master copy exists beside the module's weights."""
        return self.compute != self.master

    @property
    def buffers(self) -> torch.dtype:
        """Returns the dtype of floating-point buffers, never 16 bits: statistics and tables would lose too much."""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Returns the dtype that a parameter or buffer of a module has under this precision."""
        wide = self.compute if isinstance(tensor, nn.Parameter) else self.buffers
        if tensor.is_complex():
            return wide.to_complex()
        return wide if tensor.is_floating_point() else tensor.dtype

    def cast_inputs(self, tree):
        """Returns a pytree with its floating-point tensors in the compute dtype."""
        return tree_map_only(torch.Tensor, lambda t: t.to(self.compute) if t.is_floating_point() else t, tree)

    def cast_outputs(self, tree):
        """Returns a pytree with its floating-point tensors in at least float32, in which the loss is summed."""
        wide = torch.promote_types(self.compute, torch.float32)
        if type(tree) is torch.Tensor and tree.dtype == wide:
            return tree
        return tree_map_only(torch.Tensor, lambda t: t.to(wide) if t.is_floating_point() else t, tree)


# --- modules that make or hold tensors of 32 bits beside weights of 16, or of 64

_ABOUT_DTYPES = re.compile(r"dtype|scalar type|type \(", re.I)


def met_at(task: Task, plan: Plan, error: Exception) -> Task | None:
    """Returns the task as `met` gives it; None where the error is not one of dtypes."""
    return met(task, plan) if _ABOUT_DTYPES.search(str(error)) else None


def met(task: Task, plan: Plan) -> Task | None:
    """Returns the task whose module's operations take tensors of several dtypes; None where the plan has no use."""
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
    """Returns the notice on a task that runs as `met_at` gives it."""
    return (
        f"precision={plan.precision}: the module has or makes tensors of other dtypes beside its weights; operations "
        f"that refuse them are given all in {Precision.of(plan).compute.itemsize * 8} bits, as under torch.autocast"
    )


def _meeting(module: nn.Module, dtype: torch.dtype) -> Callable:
    """Returns the module's forward where what refuses several dtypes is run again in `dtype`."""
    forward = module.__dict__.get("forward")

    def met(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = type(self).forward.__get__(self) if forward is None else forward
        if _OneDtype.active:
            return run(*args, **kwargs)
        with _OneDtype(dtype):
            return run(*args, **kwargs)

    met.one_dtype = dtype  # type: ignore[attr-defined]
    if not isinstance(module, torch.jit.ScriptModule):  # whose forward has no signature
        # its arguments are known by their names: which of them positions are cut in
        own = inspect.signature(module.forward)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        met.__signature__ = inspect.Signature([itself, *own.parameters.values()])  # type: ignore[attr-defined]
    return met


# these write into running statistics, which stay as wide as they are
_KEEP = {functional.batch_norm, torch.batch_norm, functional.instance_norm, torch.instance_norm}


class _OneDtype(TorchFunctionMode):
    """Gives an operation that refused tensors of several dtypes all in one: what it writes into has its own."""

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
            given_out = kwargs.get("out") is not None  # a copy of it would be written into, and lost
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
