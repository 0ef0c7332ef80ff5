"""Between a script's batches and around its model's calls: whose samples are drawn for, what is looked at, and when.

for x in loader     the part is known, draws are watched
model(x)            the first one in training is looked at; inside, a draw must belong to samples
backward            draws are the script's own business again, alike on every rank
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from shardwise.comm import broadcast
from shardwise.device import seed_generators
from shardwise.engine.engine import Engine
from shardwise.layout.dealing import Part
from shardwise.mesh import Mesh
from shardwise.parallel.batchnorm import sync_module
from shardwise.scripts.draws import SampleDraws
from shardwise.scripts.loader import Events
from shardwise.scripts.lookout import look_at_model
from shardwise.scripts.spread import seen_outside
from shardwise.trace.deferred import seed_of


class Calls(Events):
    """Follows a script's loop (as the loader's `Events`) and the calls of its model."""

    def __init__(self, model: nn.Module, mesh: Mesh, randomness: str, seed: int) -> None:
        self.model, self.mesh = model, mesh
        self.randomness, self.seed = randomness, seed
        self.engine: Engine | None = None
        self.draws = SampleDraws() if randomness == "global" and mesh.data.size > 1 else None
        self.part: Part | None = None
        self.checksum = 0  # of all samples so far
        self.called = False  # the model, in training
        self._draws_on = False
        self._looked = mesh.data.size == 1
        self._forwards = 0

    # --- the loop

    def before_epoch(self) -> None:
        """Every rank continues from rank 0's generator, so that samplers draw alike."""
        world, device = self.mesh.world, self.mesh.device
        if world.size > 1:
            state = torch.get_rng_state().to(device)
            broadcast(state, world, 0, "control")
            torch.set_rng_state(state.cpu())
            if device.type == "cuda":
                on_device = torch.cuda.get_rng_state(device).to(device)
                broadcast(on_device, world, 0, "control")
                torch.cuda.set_rng_state(on_device.cpu(), device)

    def before_batch(self, part: Part, checksum: int) -> None:
        """A batch is handed to the script."""
        self.part = part
        self.checksum = zlib.crc32(str(checksum).encode(), self.checksum)
        if self.engine is not None:
            self.engine.phase.stand_in = part.count == 0
        self.resume()

    def after_batch(self) -> None:
        """The script asks for the next."""
        self.suspend()

    def after_epoch(self) -> None:
        """The loop has ended."""
        self.suspend()

    def resume(self) -> None:
        """Watch draws for the samples of the batch at hand."""
        if self.draws is not None and self.part is not None and not self._draws_on:
            self.draws.part = self.part
            self.draws.__enter__()
            self._draws_on = True

    def suspend(self) -> None:
        """Draws after backward are the script's own business, alike on every rank."""
        if self.draws is not None and self._draws_on:
            self.draws.part = None
            self.draws.__exit__(None, None, None)
            self._draws_on = False

    # --- the model

    def watch(self, engine: Engine) -> None:
        """The model's weights are in place: follow its calls from here on."""
        self.engine = engine
        engine.phase.stand_in = self.part is not None and self.part.count == 0
        self.model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)  # before units gather
        self.model.register_forward_hook(self._leave, with_kwargs=True)
        self.resume()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        assert self.engine is not None
        precision = self.engine.precision
        if precision.mixed:
            args, kwargs = precision.cast_inputs((args, kwargs))
        if not (module.training and torch.is_grad_enabled()):
            return args, kwargs
        self.called = True
        if not self._looked:
            self._looked = True
            self._look(self.engine, args, kwargs)
        if self.draws is not None:
            self.draws.inside = True
        elif self.randomness == "fast" and self.engine.data_ranks > 1:
            self._forwards += 1
            seed_generators(seed_of("fast", self.seed, self._forwards, self.engine.data_rank))
        return args, kwargs

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        assert self.engine is not None
        if self.draws is not None:
            self.draws.inside = False
        if self.engine.precision.mixed:
            output = self.engine.precision.cast_outputs(output)
        return output if self.engine.tensor is None else seen_outside(output)

    def _look(self, engine: Engine, args: tuple, kwargs: dict) -> None:
        """On the first batch: does each sample's output depend on that sample alone?"""
        self.suspend()
        batch_norms, notices = look_at_model(engine, args, kwargs)
        for module in batch_norms:
            sync_module(module, engine.mesh.data, engine.phase)
        engine.notices += notices
        self.resume()
