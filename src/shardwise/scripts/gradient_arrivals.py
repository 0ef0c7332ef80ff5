"""Hear of each gradient that arrives at a prepared model's parameters and outputs: its own, or a stray one.

prepared.backward(loss)             its own: counted
another model's backward            a GAN's: they belong to no step of this model
backward that is recorded           where positions are cut: refused; under zero=3 noted (`recorded`)
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.comm.buckets import GradientBuckets
from shardwise.engine.engine import Engine
from shardwise.engine.recipe import trainable
from shardwise.errors import RefusedPlan
from shardwise.parallel.expert import WithExperts
from shardwise.parallel.full import FullShard
from shardwise.scripts.recorded_backwards import Recorded
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.shares import Door


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as a function, or a hook, that holds a weak reference to its object, and so does not keep it alive.

    A script keeps its last output, and through autograd's hooks, which Python's collector cannot see through, that
    would keep the engine and its process groups.
    """
    known = weakref.WeakMethod(method)

    def hook(*told: Any) -> Any:
        called = known()
        return called(*told) if called is not None else None

    return hook


class Heard:
    """What is heard of gradients: `stray` came in another backward than this model's own, while not `asked`."""

    engine: Engine | None
    _door: Door | None

    def __init__(self) -> None:
        self.stray = False  # a gradient came that no backward of this model asked for
        self.asked = False  # its own backward runs
        self.recorded: list[Recorded] = []  # whose units free their weights before a second backward
        self._on_return = weakly(self._returns)  # of outputs

    @abstractmethod
    def _passes(self, what: str) -> None:
        """Raise where other ranks have come to another call than this one, `what`."""

    def _listen(self, engine: Engine) -> None:
        """Hear of gradients that arrive at parameters; of its own, which come in every step, their buckets hear."""
        for technique in techniques_of(engine):
            if isinstance(technique, FullShard):
                technique.heard = self._arrives
                self.recorded.append(Recorded(technique, weakly(self._passes)))
        in_buckets = set[int]()
        for buckets in buckets_of(engine):
            buckets.strays = weakly(self._arrives)
            in_buckets |= {id(param) for bucket in buckets.buckets for param in bucket.params}
        # now: in a backward under zero=3 the module holds what its units have gathered
        for _, param in trainable(engine.module):
            if not isinstance(param, DTensor) and id(param) not in in_buckets:
                param.register_post_accumulate_grad_hook(weakly(self._arrives))

    def _arrives(self, param: torch.Tensor) -> None:
        """Of its own backward, or of another model's behind it (a GAN's)."""
        self.stray |= not self.asked

    @names_line
    def _returns(self, gradient: torch.Tensor) -> None:
        """A gradient comes back into the model, in a backward that is recorded or in a plain one."""
        if torch.is_grad_enabled() and self._door is not None:
            raise RefusedPlan(
                "torch.autograd.grad(..., create_graph=True) through the model (a penalty on gradients) where its "
                "positions are cut: a gradient that is differentiated again would lack what other ranks send: use "
                "dp_replicate or dp_shard with zero=1 or zero=2"
            )
        if torch.is_grad_enabled():
            self.records()

    def records(self) -> None:
        """Note that a later backward may go through what was recorded."""
        for one in self.recorded:
            one.on = True


def techniques_of(engine: Engine | None) -> list[Any]:
    """Returns the data-parallel techniques that hold the engine's weights: one, or the experts' and the rest's."""
    technique: Any = engine.technique if engine is not None else None
    return [technique.rest, technique.experts] if isinstance(technique, WithExperts) else [technique]


def share_uncut(engine: Engine) -> None:
    """Give every rank the gradients of what zero=3 does not cut, as they now are. Collective."""
    for one in techniques_of(engine):
        if isinstance(one, FullShard):
            one.share_uncut()


def buckets_of(engine: Engine) -> list[GradientBuckets]:
    """Where gradients are gathered as backward makes them; FSDP2 has its own."""
    return [one.buckets for one in techniques_of(engine) if hasattr(one, "buckets")]
