"""Copies of a prepared model, or of a module of it: plain modules with whole weights, as no plan has changed them.

    teacher = copy.deepcopy(model)     after prepare as before it, with the weights of now; on every rank
    torch.save(model), pickle          refused: the model belongs to this run

Under tp, zero=3 and the like, where ranks hold pieces, a copy gathers the weights, and every rank makes it; within the
model's own forward or a backward it is refused.

What this does not do: copy what a script has put in a module's attributes otherwise than `copy.deepcopy` does.
"""

from __future__ import annotations

import copy
import types
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.scripts.script_lines import names_line

_OURS = (str(Path(shardwise.__file__ or "").parent), str(Path(torch.__file__ or "").parent / "distributed"))
_STATE = {"_tensor_cuts", "_read_outside", "_set_outside", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
_OF_FSDP = "__composable_api"


class Copies:
    """What `copy.deepcopy` makes of one model's modules. Made before anything is changed in them."""

    def __init__(self, model: nn.Module, prepared: Any) -> None:
        self._model, self._prepared = weakref.ref(model), weakref.ref(prepared)
        self._before: dict[int, tuple[Any, Any]] = {
            id(module): (type(module), vars(module).get("forward")) for module in model.modules()
        }
        for module in model.modules():
            vars(module)["__deepcopy__"] = types.MethodType(_copier(self), module)
            vars(module)["__reduce_ex__"] = types.MethodType(_refuse, module)

    @names_line
    def copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """Returns a plain copy of one module, of its weights as they are now. Collective where ranks hold pieces."""
        if id(self) not in memo:
            memo[id(self)] = self
            with torch._C.DisableTorchFunction():  # within a forward, what follows operations follows the module's own
                memo.update(self._whole(module))
        kind, forward = self._before[id(module)]
        made: Any = kind.__new__(kind)
        memo[id(module)] = made
        for name, value in vars(module).items():
            if name == "forward" and (forward is not None or not _is_ours(value)):
                made.__dict__[name] = copy.deepcopy(forward if _is_ours(value) else value, memo)
            elif name.endswith("_hooks"):
                made.__dict__[name] = type(value)(
                    (key, copy.deepcopy(hook, memo)) for key, hook in value.items() if not _is_ours(hook)
                )
            elif name not in _STATE and not name.startswith(_OF_FSDP) and not _is_ours(value):
                made.__dict__[name] = copy.deepcopy(value, memo)
        if isinstance(made, nn.RNNBase):
            made._flat_weights = [getattr(made, name, None) for name in made._flat_weights_names]
        return made

    def _whole(self, module: nn.Module) -> dict[int, Any]:
        """By id, what stands in a copy for each parameter, and for each buffer of which this rank holds a part."""
        prepared, model = self._prepared(), self._model()
        engine = prepared.in_pieces if prepared is not None and not prepared.whole_is_open else None
        weights: dict[str, torch.Tensor] = {}
        if engine is not None:
            assert prepared is not None
            if not prepared.calls.is_outside:
                raise RefusedPlan(
                    f"copy.deepcopy of a {type(module).__name__} within the model's forward or a backward, where ranks "
                    "hold pieces of its weights: make the copy in the constructor, or before prepare"
                )
            weights = prepared.whole_state("copy.deepcopy of the model")
        assert model is not None
        made: dict[int, Any] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            value = weights[name].to(param.device) if name in weights else param.detach()
            value = value.as_subclass(torch.Tensor).clone()
            made[id(param)] = nn.Parameter(value, param.requires_grad)
        made |= {id(buffer): weights[name].to(buffer.device).clone() for name, buffer in model.named_buffers()
                 if name in weights}  # fmt: skip
        return made


def _copier(copies: Copies) -> Any:
    def __deepcopy__(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return copies.copy(module, memo)

    return __deepcopy__


@names_line
def _refuse(module: nn.Module, protocol: Any) -> Any:
    raise RefusedPlan(
        f"pickling the model itself, or a module of it ({type(module).__name__}): prepared, it belongs to this run and "
        "its ranks: save model.state_dict() (of every rank, written by one) and load it into a new model"
    )


def _is_ours(value: Any) -> bool:
    """Whether an attribute or a hook of a module was put there by a plan."""
    value = value.func if isinstance(value, partial) else value
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_OURS)
