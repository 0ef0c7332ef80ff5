"""`TorchHooks`: records a script that never calls `prepare`, by torch's own hooks on optimizers, modules and backward.

    names       "parameter N" by index in the optimizer; if the script sets up its ranks, names in the outermost module
                that was called, without what wrappers add, and with the module's number if several have such a name
    losses      the tensors on which `backward()` is called
    gradients   as `optimizer.step()` finds them, of a closure those of its last call; of DTensors and of FSDP1's flat
                parameters the whole tensors

What this does not do: know a name in a module that was never called.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.errors import InputError
from shardwise.scripts.proof.recorder import PIECES, ScriptRecorder, content_of, nudge, sketch

# parts of names that wrappers add
_WRAPPED = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_forward_module|_checkpoint_wrapped_module)(?=\.)")


class TorchHooks:
    """Context in which every optimizer that steps is recorded, as a model of its own, numbered by its first step."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self._roots: list[nn.Module] = []  # outermost modules called by the script, in order
        self._tops: dict[int, nn.Module] = {}  # id of a root -> the outermost module that holds it
        self._numbers: dict[int, int] = {}  # id of an optimizer -> its number
        self._losses: list[float] = []  # since the last step
        self._heard = set[int]()  # ids of parameters that have a gradient hook
        self._asked: list[dict[int, torch.Tensor]] = []  # by backward since: parameter's id -> sketched gradient
        self._seen: list[Any] = []  # optimizers, held so that their ids are not used again
        self._inside = 0  # nesting depth of optimizer steps
        self._closure: Any = None  # of the current step
        self._stack = ExitStack()

    def __enter__(self) -> TorchHooks:
        for handle in (
            register_module_forward_pre_hook(self._called),  # torch's global ones, as a script may pickle its model
            register_module_forward_hook(self._given, with_kwargs=True),
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ):
            self._stack.callback(handle.remove)
        backward = torch.Tensor.backward

        @wraps(backward)
        def recorded_backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._backward(tensor)
            return backward(tensor, *args, **kwargs)

        torch.Tensor.backward = recorded_backward
        self._stack.callback(setattr, torch.Tensor, "backward", backward)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # --- what torch tells

    def _called(self, module: nn.Module, args: tuple) -> None:
        """Hook before a module's forward: notes the outermost modules, whose names parameters get."""
        if any(module is root for root in self._roots):
            return
        held = {id(param) for param in module.parameters()}
        # inside an outermost module, by its parameters: called without gradients it is an evaluation
        if not held or any(held <= {id(param) for param in root.parameters()} for root in self._roots):
            if held and not torch.is_grad_enabled() and not module.training:
                self._recorder.met("an evaluation")
            return
        met = {id(param) for root in self._roots for param in root.parameters()}
        nudge((param for param in module.parameters() if id(param) not in met), self._recorder.job)
        # this module may hold earlier ones, which were called by themselves first
        self._roots = [root for root in self._roots if not {id(p) for p in root.parameters()} <= held] + [module]
        # gradients of each backward are kept only in the run that looks for a cause
        for param in module.parameters() if self._recorder.job.apart else ():
            if param.requires_grad and id(param) not in self._heard:
                self._heard.add(id(param))
                self._stack.callback(param.register_hook(partial(self._asks, id(param))).remove)

    def _given(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Hook after a module's forward: records its arguments' content, for an outermost module in training."""
        if torch.is_grad_enabled() and any(module is root for root in self._roots):
            self._recorder.called(content_of((args, kwargs)))

    def _asks(self, param: int, gradient: torch.Tensor) -> None:
        """Hook of a parameter's gradient: records it, on this rank alone. `param`: the parameter's id."""
        if self._asked:
            before = self._asked[-1].get(param)
            mine = sketch(gradient)
            self._asked[-1][param] = mine if before is None else before + mine

    def _backward(self, loss: torch.Tensor) -> None:
        """Records a backward on `loss`, or raises `Enough`."""
        self._recorder.may_go_on()
        self._asked.append({})
        if loss.numel() == 1:
            self._losses.append(float(loss.detach()))

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Hook before an optimizer's step: records a new one's weights, and gradients unless a closure makes them."""
        self._inside += 1
        if self._inside > 1:  # an optimizer within another one
            return
        self._closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # behind the optimizer
        self._recorder.raise_eps(optimizer)
        with self._readable(grads=True):
            named = self._named(optimizer)
            if id(optimizer) not in self._numbers:
                self._seen.append(optimizer)
                # ranks that share weights may rightly have equal losses; others with equal losses may each train alone
                if any(isinstance(param, DTensor) and param.device_mesh.size() > 1 for _, param in named):
                    self._recorder.met(PIECES)
                whole = [(name, _whole(param)) for name, param in named]
                trained = {name for name, param in named if param.requires_grad}
                self._numbers[id(optimizer)] = self._recorder.add(optimizer, whole, trained)
            if self._closure is None:
                self._finds(optimizer, named)

    def _finds(self, optimizer: Optimizer, named: list[tuple[str, torch.Tensor]]) -> None:
        """Records an optimizer's step: gradients of its parameters (`named`) and the losses since the step before."""
        number = self._numbers[id(optimizer)]
        for value in self._losses:
            self._recorder.loss(number, value, "mean")
        self._losses = []
        # asked for only in the run that looks for a cause
        for asked in self._asked if self._recorder.job.apart else ():
            self._recorder.local_gradients(number, {name: asked.pop(id(param), None) for name, param in named})
        self._asked = [asked for asked in self._asked if asked]  # of other optimizers' parameters
        grads = [(name, None if p.grad is None else _whole(p.grad)) for name, p in named if p.requires_grad]
        self._recorder.before(number, grads)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Hook after an optimizer's step: records whole weights, buffers, states, and a closure's gradients."""
        self._inside -= 1
        if self._inside:  # of an optimizer that another one steps
            return
        # a closure runs within the step, so its gradients are there only now
        if self._closure is not None:
            with self._readable(grads=True):
                self._finds(optimizer, self._named(optimizer))
        buffers = self._of_roots(optimizer, "buffers")
        flat = self._units()
        # FSDP1's flat pieces have no state of single parameters
        named = [] if flat else self._named(optimizer)
        kept = ((name, optimizer.state.get(param, {})) for name, param in named)
        states = [(name, {key: _whole(value) for key, value in state.items()}) for name, state in kept]
        if flat and self._recorder.record.states_known:
            self._recorder.record.states_known = False
            self._recorder.record.notices.append(
                "scope: the optimizer's state over FSDP1's flat pieces is not compared"
            )
        with self._readable():
            parameters = [(name, _whole(param)) for name, param in self._named(optimizer)]
            self._recorder.after(self._numbers[id(optimizer)], parameters, buffers, states, optimizer.param_groups)

    # --- names and whole tensors

    def _named(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, parameter) of the modules that the optimizer trains, then of its other parameters."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # a foreign script may list parameters in another order on ranks, so that module names match and indices do not
        names = self._names(self._roots_of(optimizer), "parameters") if self._recorder.job.foreign else {}
        of_roots = self._of_roots(optimizer, "parameters") if names else []
        there = {id(param) for _, param in of_roots}
        beside = [(place, param) for place, param in enumerate(params) if id(param) not in there]
        return of_roots + [(names.get(id(param), f"parameter {place}"), param) for place, param in beside]

    def _roots_of(self, optimizer: Optimizer) -> list[nn.Module]:
        """Returns the outermost modules of which the optimizer trains a parameter; all of them if it trains none."""
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [root for root in self._roots if any(id(param) in held for param in root.parameters())] or self._roots

    def _of_roots(self, optimizer: Optimizer, kind: str) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, tensor) of all "parameters" or "buffers" (`kind`) of the modules that the optimizer trains."""
        roots = self._roots_of(optimizer)
        names = self._names(roots, kind)
        tensors = {id(tensor): tensor for root in roots for _, tensor in getattr(root, f"named_{kind}")()}
        return [(names[key], tensor) for key, tensor in tensors.items()]

    def _names(self, roots: list[nn.Module], kind: str) -> dict[int, str]:
        """Returns {id of a tensor: its name in one of `roots`}; in a foreign script, in the module outermost around it.

        A Lightning module's networks, for example, are called one by one in one process, and inside a wrapper on ranks.
        """
        tops = list(dict.fromkeys(map(self._top, roots))) if self._recorder.job.foreign else roots
        rows: dict[int, tuple[int, str]] = {}
        # a tied weight has the first of its names
        for number, top in enumerate(tops):
            for name, tensor in getattr(top, f"named_{kind}")():
                rows.setdefault(id(tensor), (number, _bare(name)))
        # two modules may each give a name: then a module's number tells them apart
        uses = Counter(name for _, name in rows.values())
        return {key: name if uses[name] == 1 else f"{number}.{name}" for key, (number, name) in rows.items()}

    def _top(self, root: nn.Module) -> nn.Module:
        """Returns `outermost(root)`, found once."""
        if id(root) not in self._tops:
            self._tops[id(root)] = outermost(root)
        return self._tops[id(root)]

    def _units(self) -> list[nn.Module]:
        """Returns FSDP1's outermost units (`FullyShardedDataParallel` modules)."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        units = (FullyShardedDataParallel.fsdp_modules(root, root_only=True) for root in self._roots)
        return [unit for of_root in units for unit in of_root]

    @contextmanager
    def _readable(self, *, grads: bool = False) -> Iterator[None]:
        """Context in which FSDP1's parameters are whole, with `grads` their gradients too."""
        with ExitStack() as inside:
            for unit in self._units():
                whole = unit.summon_full_params(unit, with_grads=grads, writeback=False)
                try:
                    inside.enter_context(whole)
                except NotImplementedError as error:
                    raise InputError(
                        f"verify: FSDP does not give whole gradients here ({error}): FSDP(..., use_orig_params=True) "
                        "does, and trains alike"
                    ) from None
            yield


def _whole(value: Any) -> Any:
    """Returns a DTensor's whole tensor (collective); any other value unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def outermost(module: nn.Module) -> nn.Module:
    """Returns the module that holds this one, through others, and is held by none; `module` itself if nothing holds it.

    Of several the one with the most parameters, then the one with the longest names, as a wrapper adds nothing to them.
    """
    parents: dict[int, list[nn.Module]] = {}
    for parent in gc.get_objects():
        # not isinstance, which asks an object for its __class__: a dead weak proxy raises there
        if issubclass(type(parent), nn.Module):
            # a module whose __init__ has not run yet has no _modules
            for child in vars(parent).get("_modules", {}).values():
                parents.setdefault(id(child), []).append(parent)
    # upwards, holder by holder; `met` ends circles
    met, front = {id(module): module}, [module]
    while front:
        above = {id(up): up for child in front for up in parents.get(id(child), ()) if id(up) not in met}
        met |= above
        front = list(above.values())

    def reach(top: nn.Module) -> tuple[int, int]:
        """Returns (parameters, total length of their names) below a module."""
        names = [_bare(name) for name, _ in top.named_parameters()]
        return len(names), sum(map(len, names))

    # in a circle of holders none is held by nobody: `default`
    return max((top for key, top in met.items() if key not in parents), key=reach, default=module)


def _bare(name: str) -> str:
    """Returns a parameter's name without what wrappers add to it ("module.", "_orig_mod.")."""
    before = ""
    while before != name:
        before, name = name, _WRAPPED.sub(r"\1", name).replace("..", ".").lstrip(".")
    return name
