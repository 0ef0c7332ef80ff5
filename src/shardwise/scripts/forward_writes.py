"""What a model's forward writes into its weights under zero=3 comes to the ranks' pieces of them.

    self.scale.data.mul_(0.9)       into what a unit has gathered: each rank copies its piece back as the unit ends
    self.weight.data = normal       likewise; refused where the forward had used the weight before
    k.data = 0.9 * k.data + ...     a weight of a unit that does not run: as the script's own code (pieces)

A copy of a piece for each forward of a unit: comparing would make the host wait. In mixed precision, where weights are
gathered in fewer bits than they are kept in, and under recompute, they are compared, and a write is refused as the
step's gradients come.

What this does not do: tell a use from a write where both are in one unit and the tensor's memory stays the same; one
process's backward sees the written value there too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardwise.errors import RefusedPlan
from shardwise.host import read
from shardwise.parallel.fsdp import groups_of
from shardwise.parallel.full import FullShard
from shardwise.scripts.script_lines import names_line
from shardwise.step.state import RankState

_LOWER = (
    "the model's forward writes into a weight, and under precision={} zero=3 gathers it in fewer bits than it is kept "
    "in, so that what is written would not be kept: use fp32, or make it a buffer"
)
_AGAIN = (
    "the model's forward writes into a weight, and under remat={} it runs again in backward, for which zero=3 has "
    "gathered what was written: use remat=none or zero=2, or make it a buffer"
)
_USED = (
    "the model's forward gives '{}' other memory (param.data = ...) after it has used the weight, and zero=3 gathers "
    "it anew for backward: write into it (param.data.copy_(x)), or use zero=2"
)


class ForwardWrites:
    """Brings what forwards write into gathered weights to this rank's pieces of them."""

    def __init__(self, technique: FullShard, state: RankState, written: Callable[[], None]) -> None:
        """`written` is called as the outermost forward ends."""
        self._technique, self._state, self._written = technique, state, written
        self._names = {id(param): name for name, param in technique.module.named_parameters()}
        self._gathered: dict[nn.Module, list[tuple[Any, torch.Tensor, int]]] = {}
        self._differs: list[torch.Tensor] = []
        for unit in technique.units:
            unit.register_forward_pre_hook(_weakly(self._enter))
            unit.register_forward_hook(_weakly(self._leave), prepend=True)  # before the unit gives its weights back

    def _enter(self, unit: nn.Module) -> None:
        if self._state.phase.looked_at:
            return  # who looks puts weights back
        groups = groups_of(unit)
        held = [(one, one._unsharded_param.data) for group in groups for one in group.fsdp_params]
        self._gathered[unit] = [(one, memory, _uses(memory)) for one, memory in held]

    @torch.no_grad()
    def _leave(self, unit: nn.Module) -> None:
        ends = unit is self._technique.module
        again = self._state.plan.remat != "none"
        for one in [*self._gathered] if ends else [unit]:
            kept = not self._state.precision.mixed and not (again and one is not self._technique.module)
            self._take(self._gathered.get(one, []), kept=kept)
        if ends:
            self._gathered.clear()
            self._written()

    def _take(self, gathered: Iterable[tuple[Any, torch.Tensor, int]], *, kept: bool) -> None:
        pieces, local = [], []
        for fsdp_param, memory, uses in gathered:
            now = fsdp_param._unsharded_param.data
            if not memory.untyped_storage().size():
                continue  # given back
            if now.data_ptr() != memory.data_ptr():
                if _uses(memory) >= uses:  # the weight itself has left it: what is there instead is a view for backward
                    _refuse_used(self._names[id(fsdp_param.sharded_param)])
                memory.copy_(now)
                fsdp_param._unsharded_param.data = memory
            pieces.append(self._technique.cut_like(fsdp_param.sharded_param, memory))
            local.append(fsdp_param.sharded_param._local_tensor)
        if not kept:
            self._differs += [(a != b.to(a.dtype)).any() for a, b in zip(pieces, local, strict=True) if a.numel()]
        elif pieces:
            torch._foreach_copy_(local, pieces)

    def refuse_unkept(self) -> None:
        """Raise `RefusedPlan` where a forward wrote into weights that were compared."""
        differs, self._differs = self._differs, []
        if differs and read(torch.stack(differs).any(), "whether a forward wrote into weights"):
            plan = self._state.plan
            lower = self._state.precision.mixed
            raise RefusedPlan(_LOWER.format(plan.precision) if lower else _AGAIN.format(plan.remat))


@names_line
def _refuse_used(name: str) -> None:
    raise RefusedPlan(_USED.format(name))


def _uses(memory: torch.Tensor) -> int:
    """How many tensors lie in this memory."""
    found: int = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    return found


def _weakly(method: Callable[[nn.Module], None]) -> Callable[..., None]:
    known = weakref.WeakMethod(method)

    def hook(module: nn.Module, *_: Any) -> None:
        found = known()
        if found is not None:
            found(module)

    return hook
