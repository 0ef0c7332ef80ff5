"""Runs a script's own calls of a model's submodules as calls of the whole model.

    h = model.encoder(x)           model(x), in which only the encoder runs: FSDP units gather, random operations are
    model.log_prob(x)              followed, positions are cut. Likewise modules that a method of the model calls,
    G_AB(real), G_BA(real)         and those of several models that one optimizer trains
    model.forward(x)               model(x)

Between such calls the script's own code runs, inside a method of the model too, and reads whole weights.

What this does not do: follow a module that went through torch.compile; it runs as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.errors import InputError
from shardwise.part.parameters import unannounced
from shardwise.scripts.script_lines import refuse


class Several(nn.ModuleList):
    """Modules that one optimizer trains, prepared as one model; the script calls each by itself."""


def as_one(model: Any) -> Any:
    """Returns a tuple or list of modules as one `Several`; any other value unchanged."""
    several = isinstance(model, tuple | list) and all(isinstance(one, nn.Module) for one in model)
    return Several(model) if several else model


def as_given(model: nn.Module) -> Any:
    """Returns what `as_one` was given: a `Several` as a tuple of its modules, any other model unchanged."""
    return tuple(model) if isinstance(model, Several) else model


class Entries:
    """Receives each call of a model's modules, and runs a submodule's call by the script within one of the model.

    now     the submodule that the running call of the model stands for; None otherwise
    depth   1 while a module runs, else 0
    closed  Whether calls are refused, because `prepared.whole()` is open
    """

    def __init__(self, model: nn.Module, routes: Callable[[], bool]) -> None:
        """Installs `call` on every module.

        routes  returns whether the script's own code runs, whose call of a submodule becomes one of the model
        """
        self._model, self._routes = model, routes
        self.now: nn.Module | None = None
        self.depth, self._paused, self._running = 0, False, False
        self.closed = False
        if type(model).forward is nn.Module.forward:  # FSDP2 takes no list of modules without one
            model.__class__ = unannounced(type(model), {"forward": _nothing})
        for module in model.modules():
            # a module that went through torch.compile keeps its compiled call
            if module._compiled_call_impl is None:
                module.__dict__["_compiled_call_impl"] = Way(self.call, module)
        own = model.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # a script that calls model.forward(x) gets the whole call, hooks included
            return self._model(*args, **kwargs) if self._is_outermost() else own(*args, **kwargs)

        model.__dict__["forward"] = forward

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which calls of modules run unchanged, because the engine makes them."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _is_outermost(self) -> bool:
        """Returns whether the script makes this call: no module, backward or engine code runs around it."""
        backward = torch._C._current_graph_task_id() != -1
        return not (self.depth or self._paused or backward) and self._routes()

    def call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Runs `module(*args, **kwargs)` and returns its output; within a call of the model if the script calls it.

        Raises `InputError` while `closed`.
        """
        if self.depth:  # a module that the running one calls
            return module._call_impl(*args, **kwargs)
        if self.closed:
            refuse(InputError(
                f"a {type(module).__name__} of the model is called within prepared.whole(), or in a hook of "
                "optimizer.step(), where its weights are whole and no plan runs: call it before or after, in the loop"
            ))  # fmt: skip
        # the model itself, or a call that the script does not make (the engine's, one in a backward): run as it is
        if module is self._model or not self._is_outermost():
            self.depth = 1
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                self.depth = 0
        # a submodule that the script calls: it stands in the model's forward for one call of the model
        held = self._model.__dict__["forward"]
        self.now, self._model.__dict__["forward"] = module, self._standing_for(module, held)
        try:
            return self._model(*args, **kwargs)
        finally:
            self.now, self._model.__dict__["forward"] = None, held

    def _standing_for(self, module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a forward for the model that runs `module` instead; if `module` calls the model, `own` runs."""

        @functools.wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return own(*args, **kwargs)
            self._running = True
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                self._running = False

        return forward


class ClassAttributes:
    """Moves attributes that a forward writes into its class (`type(self).seen += 1`) to the script's own class.

    A plan replaces the class of some modules by a subclass of its own, which would receive such writes.
    """

    def __init__(self, model: nn.Module) -> None:
        """Notes each module's class; called before the plan changes the model."""
        self._own = {child: type(child) for child in model.modules()}
        self._made: dict[type, tuple[type, set[str]]] = {}

    def changed(self) -> None:
        """Notes which classes the plan has made and which attributes they have; called after the plan's changes."""
        pairs = {type(child): kind for child, kind in self._own.items() if type(child) is not kind}
        self._made = {made: (kind, set(vars(made))) for made, kind in pairs.items()}

    def give_back(self) -> None:
        """Move attributes written since `changed` from the plan's classes to the script's own."""
        for made, (kind, before) in self._made.items():
            for name in [name for name in vars(made) if name not in before and not name.startswith("__")]:
                setattr(kind, name, vars(made)[name])
                delattr(made, name)


class Way(functools.partial[Any]):
    """The `_compiled_call_impl` of a module, which torch calls in place of its forward: `Entries.call`."""


def _nothing(self: nn.Module, *args: Any) -> None:
    """Forward of a list of modules; raises `NotImplementedError`, because only its modules are called."""
    raise NotImplementedError(f"{type(self).__name__} is a list of modules: call one of them")
