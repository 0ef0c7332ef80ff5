"""Complex parameters stored as real tensors of (real, imaginary) pairs, which their module reads as complex ones.

    the module's own    weight: (in, out, modes) complex64
    held                weight: (in, out, modes, 2) float32, trained, sharded, cut and sent like any other
    self.weight         `view_as_complex` of it, on the same memory, under its own name

Gradients need no rule, since that of a complex number consists of those of its two parts. Outside of the module
(optimizers, state dicts, checkpoints) pairs are converted to the complex tensor (`as_complex`).

What this does not do: show complex numbers to code in the forward that takes parameters past their attributes, as by
`parameters()`. Such code is refused (`attributes_alone`).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.errors import RefusedPlan
from shardwise.part.assigned import follow_data
from shardwise.part.parameters import as_class_gives, unannounced
from shardwise.trace.leaves import tensors_in
from shardwise.trace.own_calls import by_a_module
from shardwise.trace.stand_in import exchange

_PAIRS = "_read_as_complex"  # attribute of a module: names of its own parameters that are pairs
_CLASSES: dict[type, type] = {}


def as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a complex tensor as a real one with a last dim of 2, on the same memory; a real tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """Returns a real tensor (..., 2) as a complex one (...), on the same memory if strides and offset allow that."""
    if pairs.storage_offset() % 2 or any(stride % 2 for stride in pairs.stride()[:-1]) or pairs.stride(-1) != 1:
        pairs = pairs.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(pairs)


def hold_pairs(module: nn.Module) -> frozenset[str]:
    """Replaces every complex parameter of `module` by a real one of pairs; returns their names (`pairs_in`)."""
    made: dict[int, nn.Parameter] = {}
    originals = list(module.parameters())  # else an id might be given again
    for child in module.modules():
        params = {leaf: param for leaf, param in child._parameters.items() if param is not None and param.is_complex()}
        if not params:
            continue
        for leaf, param in params.items():
            # a weight that two modules share stays one parameter
            if id(param) not in made:
                made[id(param)] = _param_of_pairs(param)
            child._parameters[leaf] = made[id(param)]
        child.__dict__[_PAIRS] = frozenset(params) | child.__dict__.get(_PAIRS, frozenset())
        child.__class__ = _reading_complex(type(child))
    del originals
    # so that `module.weight.data = complex values` reaches the pairs; and what modules keep in lists is these too: a
    # forward that reads one there is refused, where it would train the tensor that nobody holds any more
    if made:
        follow_data(module)
        exchange(module, made)
    return pairs_in(module)


def pairs_in(module: nn.Module) -> frozenset[str]:
    """Returns the qualified names of the parameters that a module stores as pairs and reads as complex numbers."""
    ids = {
        id(child._parameters[leaf])
        for child in module.modules()
        for leaf in child.__dict__.get(_PAIRS, ())
        if child._parameters.get(leaf) is not None
    }
    return frozenset(name for name, param in module.named_parameters() if id(param) in ids)


def shapes_outside(module: nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    """Returns name -> (shape, whether complex) of each parameter as before `hold_pairs`."""
    pairs = pairs_in(module)
    return {
        name: (param.shape[:-1], True) if name in pairs else (param.shape, param.is_complex())
        for name, param in module.named_parameters()
    }


def _param_of_pairs(param: nn.Parameter) -> nn.Parameter:
    pairs = nn.Parameter(as_pairs(param.detach()), requires_grad=param.requires_grad)
    pairs.__dict__.update(param.__dict__)  # marks that users or libraries left on it
    return pairs


def _read(pairs: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(pairs)


def _asked_by_fsdp() -> bool:
    """Whether the caller that reads a parameter is FSDP2's code, which needs the real pairs that it sharded."""
    frame: FrameType | None = sys._getframe(2)  # past `__getattr__`
    for _ in range(3):  # and past a reader of `part.parameters`
        if frame is None or frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return frame is not None
        frame = frame.f_back
    return False


def _reading_complex(kind: type) -> type:
    """Returns a subclass whose attributes give complex numbers where a parameter is stored as pairs."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    # the module's class was changed by an earlier call
    if kind in _CLASSES.values():
        return kind

    def __getattr__(self: nn.Module, name: str) -> Any:
        parameters = self.__dict__.get("_parameters", {})
        pairs = parameters.get(name) if name in self.__dict__.get(_PAIRS, ()) else None
        if pairs is None or pairs.is_complex():  # another parameter, set in its place
            return kind.__getattr__(self, name)  # type: ignore[attr-defined]
        asked = getattr(type(pairs), "answers_as_complex", None)  # of a script's own code (scripts/script_weights)
        # FSDP2 takes what it reads for its own shard; to a script's own code the parameter itself answers as complex
        if (isinstance(pairs, DTensor) and _asked_by_fsdp()) or (asked is not None and asked()):
            return pairs
        numbers = _read(pairs)
        numbers.reads_weight = True  # for `self.weight.data = ...`: see `part.assigned`
        return as_class_gives(kind, self, name, numbers)

    _CLASSES[kind] = unannounced(kind, {"__getattr__": __getattr__})
    return _CLASSES[kind]


def attributes_alone(module: nn.Module) -> AbstractContextManager[Any]:
    """Returns a context that refuses a forward which uses the pairs of a complex parameter past its attribute.

    Enter it after all other function modes, since it looks for the caller in the frame next to its own.
    """
    return _RawPairs(module) if pairs_in(module) else nullcontext()


class _RawPairs(TorchFunctionMode):
    """Mode that raises `RefusedPlan` if a module's code passes pairs, taken past the attribute, to a torch function."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._places = [
            (child._parameters, leaf, f"{path}.{leaf}" if path else leaf)
            for path, child in module.named_modules()
            for leaf in child.__dict__.get(_PAIRS, ())
        ]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # torch's and the engine's own code mean the pairs
        if func not in _ALIKE and by_a_module(sys._getframe(1)):
            ids = {id(tensor) for tensor in tensors_in((args, kwargs))}
            for parameters, leaf, name in self._places:  # asked each time: units of zero=3 put others in their place
                if id(parameters[leaf]) in ids:
                    raise RefusedPlan(
                        f"the forward takes '{name}' past its module's attribute, as by parameters(), where it would "
                        f"find the complex parameter as pairs of real numbers ({getattr(func, '__name__', func)}): "
                        "read it as an attribute of its module, or use replicas, zero=1 or zero=2"
                    )
        return func(*args, **(kwargs or {}))


_ALIKE = frozenset((  # functions that answer alike for pairs and for complex numbers
    torch.Tensor.device.__get__, torch.Tensor.requires_grad.__get__, torch.Tensor.is_leaf.__get__,
    torch.Tensor.is_cuda.__get__, torch.Tensor.is_meta.__get__, torch.Tensor.layout.__get__,
    torch.Tensor.register_hook, torch.Tensor.data_ptr,
))  # fmt: skip
