"""What a script takes from its prepared model and gives it: whole weights, which this rank holds in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.engine.engine import Engine
from shardwise.engine.load import load_state_dict
from shardwise.errors import RefusedPlan
from shardwise.scripts.guard import Gate


class Held(ABC):
    """The part of `Prepared` that is about weights."""

    model: nn.Module
    _engine: Engine | None
    _gate: Gate
    _state_gate: Gate

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """What runs the plan."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's whole weights and buffers, on the CPU of every rank. Collective."""
        if self._engine is None:
            return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
        with self._state_gate.open():
            return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
        """Whole weights and buffers into the model, on every rank; `model.load_state_dict(state)` calls this."""
        if self._engine is None:
            return type(self.model).load_state_dict(self.model, state, strict)
        with self._gate.open(), self._state_gate.open():
            return load_state_dict(self.engine.state, state, strict)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Whole values, in the order of `model.parameters()`, for an average or a look: changing them has no effect.

        Collective: every rank goes through all of them. One is whole at a time.
        """
        for name, param in list(self.model.named_parameters()):
            with self._gate.open():
                whole = param.detach() if self._engine is None else self.engine.full_parameter(name)
            yield whole

    def buffers(self) -> Iterator[torch.Tensor]:
        """Those of the model, as `model.buffers()`."""
        return self.model.buffers()

    def save_weights(self, path: str | Path) -> None:
        """Whole weights and buffers as one safetensors file, written by rank 0. Collective."""
        with self._state_gate.open():
            self.engine.save_weights(path)

    def memory(self) -> dict[str, int | None]:
        """Bytes on this rank, as `Engine.memory`."""
        with self._gate.open():
            return self.engine.memory()


def loading(prepared: Held) -> Callable[..., Any]:
    """What `model.load_state_dict` becomes; a copy of the model keeps its own."""

    def load(module: nn.Module, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False):
        if module is not prepared.model:
            return type(module).load_state_dict(module, state_dict, strict, assign)
        if assign:
            raise RefusedPlan("load_state_dict(assign=True): the weights' storage is the plan's; leave assign out")
        return prepared.load_state_dict(state_dict, strict)

    return load
