"""Gives a script whole weights of a prepared model where it asks for them: states, copies, averages, files.

    model.state_dict()        whole tensors under the plain module's names, on the model's device (on the CPU if all of
                              them exceed an eighth of the device's memory); a submodule's likewise
    model.load_state_dict()   whole tensors, of which each rank takes its pieces
    copy.deepcopy(model)      a plain module with the present whole weights, as no plan has changed it. If ranks hold
                              pieces every rank must call it, and within a forward or a backward it is refused
    torch.save(model)         refused: the model belongs to this run

What this does not do: let one rank alone read what others hold pieces of (`agreement` names the line).
"""

from __future__ import annotations

import copy
import os
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

import shardwise
from shardwise.checkpoint.load import restore
from shardwise.device import memory_bytes, on_host
from shardwise.engine import weights_out
from shardwise.engine.engine import Engine
from shardwise.engine.load_weights import load_state_dict
from shardwise.errors import InputError, RefusedPlan
from shardwise.mesh import Mesh
from shardwise.parallel.fsdp import units_aside
from shardwise.parallel.full import FullShard
from shardwise.scripts.agreement import Meeting, same_given
from shardwise.scripts.calls import Calls
from shardwise.scripts.guard import FirstSteps, Gate
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.script_weights import OptimizerGuard
from shardwise.scripts.start import generators_kept


class WeightAccess(ABC):
    """The methods of `Prepared` that read and write whole weights."""

    model: nn.Module
    mesh: Mesh
    optimizer: Optimizer
    calls: Calls
    _optimizer_guard: OptimizerGuard
    _first: FirstSteps
    _settles: bool  # Whether `settle` must look for parameters that were replaced
    _engine: Engine | None
    _gate: Gate
    _state_gate: Gate
    meeting: Meeting | None  # None for one rank
    _pieces: bool  # Whether ranks hold pieces of weights or state
    _whole_weights: Any  # `WholeWeights`, where ranks hold pieces of weights, gradients or state; else None
    weights_version = 0  # counts changes of weights: steps, the script's writes, loads
    _copied_from: Engine | None  # see `in_pieces`

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """Returns the `Engine` that runs the plan."""

    @property
    def held_in_pieces(self) -> Engine | None:
        """Returns the engine if ranks hold pieces of weights or optimizer state; else None."""
        return self._engine if self._pieces else None

    @property
    def in_pieces(self) -> Engine | None:
        """Returns the engine if the model's own tensors are not whole weights in full precision; else None."""
        return self._copied_from

    @property
    def whole_is_open(self) -> bool:
        """Whether the script's own code runs in `prepared.whole()`."""
        return self._whole_weights is not None and self._whole_weights.is_open

    @contextmanager
    def whole(self, *, grads: bool = False, state: bool = False) -> Iterator[None]:
        """Context in which model.parameters() are whole on every rank and optimizer.param_groups list them. Collective.

        In full precision. At its end each rank takes its pieces of what was changed, which must be the same on all
        ranks.
        grads   Whether p.grad are whole gradients too; else reading p.grad raises
        state   Whether optimizer.state[p] is whole state too; else it must not be read
        Raises `InputError` within another one or a forward, and if ranks have made different changes.
        """
        if self._whole_weights is None or self._engine is None:
            yield  # every rank has all of it
            return
        with self._whole_weights.opened(grads, state):
            yield

    def whole_state(self, what: str) -> dict[str, torch.Tensor]:
        """Returns {name: whole tensor on the CPU} of weights and buffers; `what` names the call. Collective."""
        # within `whole()` every rank holds all weights: nothing is sent, so nobody is waited for
        if not self.whole_is_open:
            self.meet(what)
        if self.whole_is_open or self._engine is None:
            return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        # pieces that should be alike are checked before they are put together
        if self.held_in_pieces is not None:
            self.compare()
        with self._reading():
            return self.engine.state_dict()

    def meet(self, what: str, *, always: bool = False) -> None:
        """Waits until every rank makes the call `what` (`always`: on replicas too); `RunError` if one does not."""
        if self.meeting is not None and (always or self.held_in_pieces is not None):
            self.meeting.enter(what)

    @names_line
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns {name: whole tensor on the CPU} of the model's weights and buffers, on every rank. Collective."""
        return self.whole_state("state_dict()")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Context in which the engine may read weights, the script's writes taken; `InputError` within `whole()`."""
        if self.whole_is_open:  # what ranks hold is what it was before
            raise InputError("weights or state are saved within prepared.whole(): save after the end of the with block")
        self.settle()
        self._take_written()
        with self._gate.open(), self._state_gate.open(), self.plainly():
            yield

    def meet_with(self, what: str, given: Any) -> None:
        """Waits until all ranks make the call `what`; `RunError` if one does not, `InputError` if `given` differs."""
        if self.meeting is not None:
            self.meeting.enter(what)
            with self._gate.open(), self._state_gate.open():
                same_given(what, given, self.mesh.world, self.mesh.device)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
        """Loads whole weights and buffers; returns torch's (missing_keys, unexpected_keys). Collective.

        Raises `InputError` if ranks give different values.
        """
        return self._load("", state, strict)

    @names_line
    def _load(self, path: str, state: Mapping[str, torch.Tensor], strict: bool) -> Any:
        """Loads `state`, by names within the submodule at `path`; returns missing and unexpected keys. Collective.

        With `strict` such keys raise `InputError`, or torch's own error if weights are whole.
        """
        if not self.whole_is_open:
            self.meet_with(f"{path or 'model'}.load_state_dict(...)", dict(state))
        # torch's own loading, on whole weights: before the first call, or within `whole()`
        if self._engine is None or self.whole_is_open:
            module = self.model.get_submodule(path)
            with units_aside(module):
                return type(module).load_state_dict(module, state, strict)
        before = f"{path}." if path else ""
        with self._gate.open(), self._state_gate.open():
            given = {f"{before}{name}": value for name, value in state.items()}
            # a submodule's state lacks the rest of the model; what it lacks of its own is asked below
            found = load_state_dict(self.engine.state, given, strict and not path)
        self.weights_version += 1
        lost = [name.removeprefix(before) for name in found.missing_keys if name.startswith(before)]
        unknown = [name.removeprefix(before) for name in found.unexpected_keys]
        if strict and (lost or unknown):
            raise InputError(f"load_state_dict into '{path}': the state lacks {lost[:3]}, and has beside {unknown[:3]}")
        return _IncompatibleKeys(lost, unknown)

    @names_line
    def parameters(self) -> Iterator[torch.Tensor]:
        """Yields whole weights in the order of `model.parameters()`, one at a time; changes have no effect.

        Collective: every rank must go through all of them.
        """
        if self.whole_is_open:
            return (param.detach() for param in self.model.parameters())
        self.meet("prepared.parameters()")
        return self._whole_values()

    def _whole_values(self) -> Iterator[torch.Tensor]:
        """Yields whole weights in the order of the model's parameters, one at a time. Collective."""
        self.settle()
        self._take_written()
        for name, param in list(self.model.named_parameters()):
            with self._gate.open():
                whole = param.detach() if self._engine is None else self.engine.full_parameter(name)
            yield whole

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields the model's buffers, as `model.buffers()` does."""
        return self.model.buffers()

    @names_line
    def save_weights(self, path: str | Path) -> None:
        """Writes whole weights and buffers as one safetensors file, on rank 0. Collective."""
        self.meet("save_weights(...)")
        with self._reading():
            weights_out.save_weights(self.engine.state, path)

    def _restored(self, folder: Path) -> dict[str, Any]:
        """Loads a checkpoint's weights and state; returns what the script saved beside them. Collective."""
        with self._gate.open(), self._state_gate.open(), generators_kept():
            restored = restore(self.engine, folder)
        self.engine.notices.extend(restored.notices)
        return restored.manifest.fields["script"]

    # --- what the script does to the optimizer's pieces

    def _watch_pieces(self) -> None:
        """Begins to guard the optimizer's pieces, since the script's own code runs again."""
        engine = self._engine
        if engine is None:
            return
        self._optimizer_guard.leave()
        if self._whole_weights is not None:
            with self._gate.open():
                self._optimizer_guard.watch(self.optimizer, self.model, state=self._pieces)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Context in which the optimizer's groups and state may be read as pieces, without a guard."""
        if self._engine is not None:
            self._optimizer_guard.leave()
        with self._gate.open():
            yield
        self._watch_pieces()

    def may_have_written(self) -> None:
        """Notes that the script's own code may have written into sharded weights."""
        self.weights_version += 1
        if isinstance(self.engine.technique, FullShard):
            self.engine.technique.written = True

    def _take_written(self) -> None:
        """Copies what the script wrote into the model's weights to the optimizer's masters."""
        # masters are the model's own parameters: there is nothing to copy
        if self._engine is None or self._whole_weights is None:
            return
        technique, owners = self._engine.technique, self._engine.state.owners
        # only zero=3 keeps a flag of writes (`may_have_written`); others compare each time
        told = not isinstance(technique, FullShard) or technique.written
        # under FSDP2 masters follow a gather, in which every rank takes part
        if owners is not None and told and isinstance(technique, FullShard) and self.meeting is not None:
            self.meeting.enter("weights that the script writes into")
        with self._gate.open():
            technique.take_weights()
            # owners hold whole masters of parameters that others hold pieces of
            if owners is not None and told:
                owners.take_weights()
            if isinstance(technique, FullShard):
                technique.written = False

    def settle_state(self) -> None:
        """Moves loaded optimizer state into its tier (host memory, a file), if the plan has one."""
        if self._engine is not None and self._engine.state.tier is not None:
            self._engine.state.tier.settle_all()

    def settle(self) -> None:
        """Raises `InputError` if the script has replaced a parameter that the plan trains."""
        if self._settles and not self.whole_is_open:  # within `whole()` stand-ins are there
            self._first.places.check()

    def compare(self) -> None:
        """Raises `RunError` if weights, `RefusedPlan` if buffers differ that ranks must hold alike. Collective."""
        self.settle()  # else a rank's own pieces are ahead of the others'
        with self._gate.open():
            self._first.again()


def hold(prepared: WeightAccess, *, whole: bool) -> None:
    """Gives the model and its submodules this run's `load_state_dict`, and unless `whole` its `state_dict`.

    whole   Whether the model's own tensors are whole and in full precision, so that its own `state_dict` is right
    """
    paths = dict(prepared.model.named_modules(remove_duplicate=False))
    for path, module in paths.items():
        module.__dict__["load_state_dict"] = types.MethodType(_loading(prepared, path, module), module)
        if not whole:
            module.__dict__["state_dict"] = types.MethodType(_telling(prepared, path, module), module)


def _loading(prepared: WeightAccess, path: str, known: nn.Module) -> Callable[..., Any]:
    """Returns the `load_state_dict` for the submodule `known` at `path`; a deep copy of it loads by its own."""

    def load(module: nn.Module, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False):
        if module is not known:
            return type(module).load_state_dict(module, state_dict, strict, assign)
        if assign:
            raise RefusedPlan("load_state_dict(assign=True): the weights' storage is the plan's; leave assign out")
        return prepared._load(path, state_dict, strict)

    return load


def _telling(prepared: WeightAccess, path: str, known: nn.Module) -> Callable[..., Any]:
    """Returns the `state_dict` for the submodule `known` at `path`: of whole tensors, collective."""

    @names_line
    def state_dict(module: nn.Module, *args: Any, **options: Any) -> dict[str, Any]:
        # a copy's, the engine's own read, or weights that are whole in their places: torch's own answer is right
        if module is not known or prepared._state_gate.is_open or prepared._engine is None or prepared.whole_is_open:
            return type(module).state_dict(module, *args, **options)
        asked = {"destination": None, "prefix": "", "keep_vars": False, **options}
        asked |= dict(zip(asked, args, strict=False))
        into, prefix = asked["destination"], asked["prefix"]
        # keep_vars asks for the parameters themselves, which here are pieces
        if asked["keep_vars"]:
            raise RefusedPlan("state_dict(keep_vars=True): this rank holds pieces of the weights; leave keep_vars out")
        prepared.meet(f"{path or 'model'}.state_dict()")
        with prepared._reading():
            weights, own = prepared.engine.state_dict(), type(module).state_dict(module)
        state: Any = OrderedDict() if into is None else into
        before = f"{path}." if path else ""
        weights = _near({key: value for key, value in weights.items() if key.startswith(before)}, prepared.mesh.device)
        for name in own:
            # buffers and what the plan does not hold come from the module itself
            state[f"{prefix}{name}"] = weights.get(f"{before}{name}", own[name])
        if into is None:
            state._metadata = getattr(own, "_metadata", OrderedDict())
        return state

    return state_dict


def _near(whole: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the tensors on the device; on the CPU, where they are, if they exceed an eighth of its memory."""
    # an unknown size of the device's memory is no reason to stay away from it
    room = None if on_host(device) else memory_bytes(device)
    if on_host(device) or (room is not None and sum(each.nbytes for each in whole.values()) > room // 8):
        return whole
    return {name: each.to(device) for name, each in whole.items()}


_OURS = (
    f"{Path(shardwise.__file__ or '').parent}{os.sep}",
    f"{Path(torch.__file__ or '').parent / 'distributed'}{os.sep}",
)
_STATE = {"_tensor_cuts", "_read_outside", "_set_outside", "_is_fsdp_managed_module", "_fsdp_use_orig_params"}
_OF_FSDP = "__composable_api"


class Copies:
    """Makes `copy.deepcopy` of a model's modules give plain modules with whole weights.

    Made before the plan changes these modules.
    """

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
        """Returns a plain copy of one module with its present whole weights; `memo` as in `copy.deepcopy`.

        If ranks hold pieces it is collective, and raises `RefusedPlan` within a forward or a backward.
        """
        # the first of a model's copies gathers its weights, and all of its modules share them
        if id(self) not in memo:
            memo[id(self)] = self
            with torch._C.DisableTorchFunction():  # within a forward, what follows operations follows the module's own
                memo.update(self._whole(module))
        kind, forward = self._before[id(module)]
        made: Any = kind.__new__(kind)
        memo[id(module)] = made
        for name, value in vars(module).items():
            # the engine puts its own forward on a module: a copy gets the module's own
            if name == "forward" and (forward is not None or not _is_ours(value)):
                made.__dict__[name] = copy.deepcopy(forward if _is_ours(value) else value, memo)
            elif name.endswith("_hooks") and isinstance(value, dict):
                made.__dict__[name] = type(value)(
                    (key, copy.deepcopy(hook, memo)) for key, hook in value.items() if not _is_ours(hook)
                )
            # state of ours, and FSDP2's attributes, are none of the copy's
            elif name not in _STATE and not name.startswith(_OF_FSDP) and not _is_ours(value):
                made.__dict__[name] = copy.deepcopy(value, memo)
        # RNNBase keeps a list of its weights, made of its attributes
        if isinstance(made, nn.RNNBase):
            made._flat_weights = [getattr(made, name, None) for name in made._flat_weights_names]
        return made

    def _whole(self, module: nn.Module) -> dict[int, Any]:
        """Returns {id of a parameter, or of a cut buffer: its whole tensor for a copy}; `RefusedPlan` in a forward."""
        prepared, model = self._prepared(), self._model()
        engine = prepared.in_pieces if prepared is not None and not prepared.whole_is_open else None
        weights: dict[str, torch.Tensor] = {}
        if engine is not None:
            assert prepared is not None
            # within a forward or a backward other ranks are elsewhere: nothing could be gathered
            if not prepared.calls.is_outside:
                raise RefusedPlan(
                    f"copy.deepcopy of a {type(module).__name__} within the model's forward or a backward, where ranks "
                    "hold pieces of its weights: make the copy in the constructor, or before prepare"
                )
            weights = prepared.whole_state("copy.deepcopy of the model")
        assert model is not None
        made: dict[int, Any] = {}
        # tied names share one tensor in the copy, as in the model
        for name, param in model.named_parameters(remove_duplicate=False):
            value = weights[name].to(param.device) if name in weights else param.detach()
            value = value.as_subclass(torch.Tensor).clone()
            made[id(param)] = nn.Parameter(value, param.requires_grad)
        # a buffer that ranks hold cut is whole in the copy
        made |= {id(buffer): weights[name].to(buffer.device).clone() for name, buffer in model.named_buffers()
                 if name in weights}  # fmt: skip
        return made


def _copier(copies: Copies) -> Any:
    def __deepcopy__(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return copies.copy(module, memo)

    return __deepcopy__


@names_line
def _refuse(module: nn.Module, protocol: Any) -> Any:
    """Raises `RefusedPlan`, as the `__reduce_ex__` of a prepared module."""
    raise RefusedPlan(
        f"pickling the model itself, or a module of it ({type(module).__name__}): prepared, it belongs to this run and "
        "its ranks: save model.state_dict() (of every rank, written by one) and load it into a new model"
    )


def _is_ours(value: Any) -> bool:
    """Whether an attribute or a hook of a module was put there by a plan, or by torch.distributed."""
    value = value.func if isinstance(value, partial) else value
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_OURS)
