"""Gradients of weights sharded by FSDP2 (zero=3), in the hands of the script.

    p.grad.norm(), .mul_(c)   by the pieces, as torch's sharded tensors compute it; norms are plain numbers
    p.grad[0], p.grad + t     raises: read it in prepared.whole(grads=True)
    k.data = x                within the forward, of a unit that does not run: the piece of x becomes the weight

What a forward writes into weights that its units have gathered is refused where the model is looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.errors import InputError, RefusedPlan
from shardwise.parallel.full import FullShard
from shardwise.part.pairs import as_pairs
from shardwise.scripts.gradients import Gradients
from shardwise.scripts.guard import reads_values, writes_into
from shardwise.scripts.script_lines import refuse
from shardwise.trace.leaves import replaced, tensors_in

_GRADIENT = (
    "{} of a gradient of which ranks hold pieces: read and write whole ones in `with prepared.whole(grads=True):`, or "
    "clip by prepared.clip_grad_norm_(max_norm)"
)


class ShardedGradients:
    """Gradients of the sharded weights of one `FullShard`, and weights that a forward gives other memory."""

    def __init__(
        self, technique: FullShard, weights: Any, gradients: Gradients, in_units: dict[int, Any], cuts: set[str]
    ) -> None:  # fmt: skip
        """
        weights     the `ScriptWeights` that this is part of
        in_units    FSDP's record of each parameter, by id
        cuts        names of parameters whose gradients are seen gathered: shares of tp and ep
        """
        self._technique, self._gate, self._in_units, self._gradients = technique, weights.gate, in_units, gradients
        self._index = {id(param): at for at, param in enumerate(technique.params)}
        named = dict(technique.module.named_parameters())
        self._through = {id(named[name]) for name in {*cuts, *technique.pairs} & named.keys()}
        self._pairs = {id(named[name]) for name in technique.pairs & named.keys()}
        self._gradient_kind = _gradient_kind(weakref.ref(weights))

    def gradient(self, param: DTensor) -> torch.Tensor | None:
        """`param.grad`: the pieces, or the whole one, where the script has set it or tp and ep cut the weight too."""
        if id(param) in self._through or self._gradients.is_seen(param):
            return self._gradients.get(param)
        self._gradients.refuse_early(param)
        found = torch.Tensor.grad.__get__(param) if self._index.get(id(param)) in self._technique._used else None
        if type(found) is DTensor:
            found.__class__ = self._gradient_kind
        return found

    def set_gradient(self, param: DTensor, value: torch.Tensor | None) -> None:
        """`param.grad = value`, whole, or in pieces as it was read."""
        at = self._index.get(id(param))
        if isinstance(value, DTensor) and at is not None:  # FSDP's own too, where a backward through gradients ends
            self._gradients.by_hand = True
            with self._gate.open():
                self._technique.set_gradient(at, value)
        else:
            self._gradients.set(param, value.full_tensor() if isinstance(value, DTensor) else value)

    def assign(self, param: DTensor, value: torch.Tensor) -> None:
        """`param.data = value` in the forward: the storage is another one from here on, as in one process."""
        value = value.detach()
        if id(param) in self._pairs and value.is_complex() and not isinstance(value, DTensor):
            value = as_pairs(value)
        if (value.shape, value.dtype, value.device) != (param.shape, param.dtype, param.device):
            raise InputError(
                f"param.data = a tensor of {tuple(value.shape)}, {value.dtype} on {value.device}, where the weight is "
                f"{tuple(param.shape)}, {param.dtype} on {param.device}: the plan holds its pieces as they were"
            )
        self._technique.written = True
        if isinstance(value, DTensor):
            local = value.redistribute(param.device_mesh, param.placements).to_local().contiguous()
        else:
            local = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local().clone()
        param._local_tensor = local
        if id(param) in self._in_units:
            _take_up(self._in_units[id(param)])
        at = self._index.get(id(param))
        if at is not None:
            self._technique.slots[at].master.data = self._technique.piece(at, param.detach())


def _take_up(of_unit: Any) -> None:
    """Let FSDP take up a shard's other memory, also while the script has it under another name (pruning)."""
    within, leaf = of_unit._module_info.module._parameters, of_unit._module_info.param_name
    stands, within[leaf] = leaf in within, of_unit.sharded_param
    of_unit.reset_sharded_param()
    if not stands:
        del within[leaf]


def _gradient_kind(weights_ref: Callable[[], Any]) -> type[DTensor]:
    class ShardedGradient(DTensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            kwargs, weights = kwargs or {}, weights_ref()
            asked = weights is not None and weights.is_asked
            name = getattr(func, "__name__", "")
            if asked and reads_values(func) and not _by_pieces(name, args, kwargs):
                refuse(RefusedPlan(_GRADIENT.format(name)))
            with torch._C.DisableTorchFunctionSubclass():
                made = func(*args, **kwargs)
            return replaced(DTensor, _as(cls), made) if asked else made

    return ShardedGradient


def _as(kind: type[DTensor]) -> Callable[[DTensor], torch.Tensor]:
    def see(tensor: DTensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor.full_tensor()  # a norm: a number, on every rank
        if type(tensor) is DTensor:
            tensor.__class__ = kind
        return tensor

    return see


def _by_pieces(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether torch's sharded tensors answer a function by their pieces as it is of whole tensors."""
    if name in ("__get__", "__set__", "detach", "clone", "zero_", "fill_", "full_tensor", "to_local", "item"):
        return True
    sized = [one for one in tensors_in((args, kwargs)) if one.dim()]  # numbers are whole on every rank
    return not sized or (all(isinstance(one, DTensor) for one in sized) and _is_by_elements(name))


@cache
def _is_by_elements(name: str) -> bool:
    """Whether an operation gives each element by the same element of what it is given, or a sum, drawing nothing."""
    name = name.removeprefix("_foreach_")
    if name.startswith("__"):
        name = name.strip("_").removeprefix("i" if writes_into(name) else "") + "_" * writes_into(name)
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    draws = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    by_elements = {torch.Tag.pointwise, torch.Tag.reduction}
    return not draws and any(by_elements & set(overload.tags) for overload in overloads)
