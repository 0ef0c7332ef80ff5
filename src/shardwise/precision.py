"""Which torch dtype holds what, and the casts, by the plan's `precision` and `reduce_dtype` (layout/precisions)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.layout import Plan
from shardwise.layout.precisions import PRECISIONS, TORCH


def dtype(name: str) -> torch.dtype:
    """Returns torch's dtype of a short name, such as "bf16"."""
    found = getattr(torch, TORCH[name])
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True)
class Precision:
    """Dtypes of one plan. `mixed` where the module computes in another dtype than its master weights."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    scaled: bool  # the loss is scaled against underflow, and an overflow skips the step

    @classmethod
    def of(cls, plan: Plan) -> Precision:
        """The dtypes that a plan asks for."""
        row = PRECISIONS[plan.precision]
        reduce = row.summed if plan.reduce_dtype == "auto" else plan.reduce_dtype
        return cls(dtype(row.compute), dtype(row.master), dtype(reduce), row.scaled)

    @property
    def mixed(self) -> bool:
        """Whether a master copy exists beside the module's weights."""
        return self.compute != self.master

    @property
    def buffers(self) -> torch.dtype:
        """The dtype of floating-point buffers, never 16 bits: statistics and tables would lose too much."""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def held(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that a parameter or buffer of a module has under this precision."""
        wide = self.compute if isinstance(tensor, nn.Parameter) else self.buffers
        if tensor.is_complex():
            return wide.to_complex()
        return wide if tensor.is_floating_point() else tensor.dtype

    def cast_inputs(self, tree):
        """Floating-point tensors of a pytree in the compute dtype."""
        return tree_map_only(torch.Tensor, lambda t: t.to(self.compute) if t.is_floating_point() else t, tree)

    def cast_outputs(self, tree):
        """Floating-point outputs in at least float32, so that the loss is summed in it."""
        wide = torch.promote_types(self.compute, torch.float32)
        return tree_map_only(torch.Tensor, lambda t: t.to(wide) if t.is_floating_point() else t, tree)
