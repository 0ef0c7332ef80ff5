"""Whole tensors out of an engine whose ranks hold shares: parameters, gradients, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardwise.engine import export
from shardwise.engine.optimizer_state import full_optimizer_state
from shardwise.parallel.slots import DataParallel

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


class Whole:
    """What an engine's ranks gather for whoever asks. An `Engine` sets the attributes.

    names          trained parameters that this rank's stages hold; `all_names` those of all stages
    held_frozen    frozen parameters that this rank's stages hold; `frozen_names` those of all stages
    tensor         shares of tp, `experts` those of ep, `pipeline` the stages; None without that axis
    """

    names: list[str]
    all_names: list[str]
    held_frozen: set[str]
    frozen_names: list[str]
    module: nn.Module
    technique: DataParallel
    tensor: Any
    experts: Any
    pipeline: Any

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every parameter, frozen ones included, master weights first. Collective."""
        if self.pipeline is None:
            return self._held_parameters()
        return self.pipeline.spread(self._held_parameters(), self.all_names + self.frozen_names)

    def _held_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, name in enumerate(self.names):
            yield name, self._whole(name, self.technique.full_parameter(index))
        for name, param in self.module.named_parameters():
            if not param.requires_grad and name in self.held_frozen:
                held = param.full_tensor() if hasattr(param, "full_tensor") else param
                yield name, self._whole(name, held.detach())

    def full_parameter(self, name: str) -> torch.Tensor:
        """One whole parameter, its master first. Collective; not under a pipeline."""
        if name in self.names:
            return self._whole(name, self.technique.full_parameter(self.names.index(name)))
        held: Any = dict(self.module.named_parameters())[name]
        return self._whole(name, (held.full_tensor() if hasattr(held, "full_tensor") else held).detach())

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, whole gradient, None where unused) of the step just done. Collective."""
        if self.pipeline is None:
            return self._held_gradients_by_name()
        return self.pipeline.spread(self._held_gradients_by_name(), self.all_names)

    def full_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every buffer. Collective under a pipeline."""
        return self.module.named_buffers() if self.pipeline is None else self.pipeline.buffers()

    def full_optimizer_state(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """(name, state) of every trained parameter, whole whatever the technique, {} where there is none. Collective.

        Tensors may be the optimizer's own: copy what is to outlive the next step.
        """
        return full_optimizer_state(cast("Engine", self))

    def used_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of each parameter of this rank's stages, as its module computes with it. Collective.

        Beside `full_parameters`, which tells the masters: under zero=1 and 2 and in mixed precision they are others.
        """
        held = {*self.names, *self.held_frozen}
        for name, param in self.module.named_parameters():
            if name in held:
                full = param.full_tensor() if hasattr(param, "full_tensor") else param
                yield name, self._whole(name, full.detach())

    def used_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each buffer that this rank's stages use, as they have it."""
        for name, buffer in self.module.named_buffers():
            if self.pipeline is None or self.pipeline.cut.buffers[name] == self.pipeline.axis.index:
                yield name, buffer

    def _held_gradients_by_name(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for index, name in enumerate(self.names):
            yield name, self._whole(name, self.technique.full_gradient(index))

    def _whole(self, name: str, share: Any) -> Any:
        share = share if self.experts is None else self.experts.whole(name, share)
        return share if self.tensor is None else self.tensor.whole(name, share)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and persistent buffers on the CPU, under the module's own names. Collective."""
        return export.state_dict(cast("Engine", self))

    def save_weights(self, path: str | Path) -> None:
        """Whole weights and buffers as one safetensors file, written by rank 0. Collective."""
        export.save_weights(cast("Engine", self), path)
