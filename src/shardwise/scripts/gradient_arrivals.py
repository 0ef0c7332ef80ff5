"""Hears of each gradient that arrives at a prepared model's parameters and outputs.

prepared.backward(loss)             its own: counted
another model's backward            a stray one, as in a GAN: it belongs to no step of this model
backward that is recorded           refused if positions are cut. Under zero=3 (`Recorded`):

    grad(..., create_graph)     FSDP unit: gather . compute . free          recorded; nothing is reduced
    backward of the penalty     all units gathered, because the graph holds their weights; then reduced once, and freed

A recorded graph holds weights by their memory, which FSDP2 fills again at the same place whenever a unit is gathered.
A backward through it runs outside of units, in an order of its own, so all units stay gathered meanwhile, and a unit's
gradient is whole only when all of that backward is over.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from shardwise.comm.buckets import GradientBuckets
from shardwise.engine.engine import Engine
from shardwise.engine.recipe import trainable
from shardwise.errors import RefusedPlan, first_line
from shardwise.parallel.expert import WithExperts
from shardwise.parallel.fsdp import groups_of
from shardwise.parallel.full import FullShard
from shardwise.scripts.guard import Gate
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.spread import Door
from shardwise.trace.backwards import watch_backwards


class Recorded:
    """The FSDP2 units of one model, whose backwards may be recorded (`create_graph=True`).

    on      Whether a backward was recorded since the last `optimizer.step()`
    """

    def __init__(self, technique: FullShard, passes: Callable[[str], None]) -> None:
        """Watches all backwards from here on.

        passes  called with the name of a call that all ranks must make (`Meeting.passes`)
        """
        self.on = False
        self._passes, self._world = passes, dist.group.WORLD
        self._units: list[Any] = [child for child in technique.module.modules() if isinstance(child, FSDPModule)]
        self._root: Any = technique.module
        here = ref(self)
        # for as long as the model lives: its script may differentiate wherever it likes
        finalize(self, watch_backwards(lambda roots, graph, inputs: _inside(here(), graph, inputs))).atexit = False

    def may_run(self, *, records: bool) -> bool:
        """Returns whether a backward must run in `running`.

        records  Whether the backward records a graph (`create_graph=True`)

        True for such a backward and for each one after it until the step; False once the process group has ended.
        """
        return (self.on or records) and self._world is dist.group.WORLD  # not of a run that has ended

    @contextmanager
    def running(self, *, records: bool) -> Iterator[None]:
        """Context of a backward that records a graph, or goes through a recorded one; units reduce no gradients in it.

        records  Whether this backward records a graph. If not, gradients are reduced and weights freed at the end.
                 Collective if all units are gathered
        """
        groups = [group for unit in self._units for group in groups_of(unit)]
        # a record reads weights of all units, in no unit's order: ranks meet, and gather all of them first
        if self.on:
            self._passes("a backward through gradients")
            for unit in self._units:
                unit.unshard()
        gathered = self.on
        for group in groups:
            group.reduce_grads, group.reshard_after_backward = False, not gathered
        try:
            yield
        finally:
            for group in groups:
                group.reduce_grads = group.reshard_after_backward = True
                group._training_state = TrainingState.IDLE  # one that is over already would not be reduced
            # the units did not reshard by themselves: at the end their gradients are reduced, and weights freed
            if gathered and not records:
                self._root._get_fsdp_state()._root_post_backward_final_callback()  # reduces, and frees
            # this backward is recorded too, for a later one: weights are freed, gradients are not reduced yet
            elif gathered:
                for unit in self._units:
                    unit.reshard()


@contextmanager
def _within() -> Iterator[None]:
    """Context of an `autograd.grad` within a backward: raises `RefusedPlan` in place of torch's `RuntimeError`.

    It fails because units have freed the weights after the forward whose graph it goes through; torch's message would
    only speak of their memory.
    """
    try:
        yield
    except RuntimeError as error:
        raise RefusedPlan(
            "torch.autograd.grad within a backward (a hook of a tensor, an autograd.Function) fails where zero=3 frees "
            f"weights after each forward: {first_line(error)}. Run the forward that it goes through there as well, or "
            "use zero=2"
        ) from error


def _inside(recorded: Recorded | None, records: bool, inputs: Any) -> AbstractContextManager[None]:
    """Returns the context in which a backward runs, for `watch_backwards`; an empty one unless it needs one of these.

    recorded  the model's units; None once the model is gone
    records   Whether the backward records a graph
    inputs    what gradients are taken of; empty for `loss.backward()`

    `running` for the outermost backward, `_within` for one that takes gradients inside another.
    """
    outermost = torch._C._current_graph_task_id() == -1
    if recorded is not None and not outermost and inputs:
        return _within()
    if recorded is None or not outermost or not recorded.may_run(records=records):
        return nullcontext()
    return recorded.running(records=records)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a bound method while its object lives, and returns None afterwards.

    A script keeps its last output, and through autograd's hooks, which Python's collector cannot see through, that
    would keep the engine and its process groups.
    """
    known = weakref.WeakMethod(method)

    def hook(*told: Any) -> Any:
        called = known()
        return called(*told) if called is not None else None

    return hook


class Heard:
    """Hears of gradients that arrive at one model.

    stray     a gradient came in a backward that was not this model's, since its last `zero_grad()`
    asked     a backward of this model runs now
    recorded  one `Recorded` for each of its techniques that is FSDP2
    """

    engine: Engine | None
    _door: Door | None

    def __init__(self) -> None:
        self.stray = False  # a gradient came that no backward of this model asked for
        self.asked = False  # its own backward runs
        self.recorded: list[Recorded] = []  # whose units free their weights before a second backward
        self._on_return = weakly(self._returns)  # of outputs

    @abstractmethod
    def _passes(self, what: str) -> None:
        """Raises `RunError` if another rank makes another call than `what`."""

    def _listen(self, engine: Engine) -> None:
        """Has `_arrives` called for each gradient at a parameter, by FSDP2, by the parameter's bucket, or by a hook."""
        for technique in techniques_of(engine):
            # FSDP2 reduces within backward, and tells of each gradient itself
            if isinstance(technique, FullShard):
                technique.heard = self._arrives
                self.recorded.append(Recorded(technique, weakly(self._passes)))
        in_buckets = set[int]()
        for buckets in buckets_of(engine):
            buckets.strays = weakly(self._arrives)
            in_buckets |= {id(param) for bucket in buckets.buckets for param in bucket.params}
        # now: in a backward under zero=3 the module holds what its units have gathered
        for _, param in trainable(engine.module):
            # a DTensor's gradient is a piece: FSDP2 tells of it
            if not isinstance(param, DTensor) and id(param) not in in_buckets:
                param.register_post_accumulate_grad_hook(weakly(self._arrives))

    def _arrives(self, param: torch.Tensor) -> None:
        """Hook of a gradient at a parameter: sets `stray` unless a backward of this model runs."""
        self.stray |= not self.asked

    @names_line
    def _returns(self, gradient: torch.Tensor) -> None:
        """Hook of a gradient at an output of the model: notes a recorded backward; refuses it if positions are cut."""
        if torch.is_grad_enabled() and self._door is not None:
            raise RefusedPlan(
                "torch.autograd.grad(..., create_graph=True) through the model (a penalty on gradients) where its "
                "positions are cut: a gradient that is differentiated again would lack what other ranks send: use "
                "dp_replicate or dp_shard with zero=1 or zero=2"
            )
        if torch.is_grad_enabled():
            self.records()

    def records(self) -> None:
        """Notes that a graph of gradients was recorded, through which a later backward may go."""
        for one in self.recorded:
            one.on = True


class Asking:
    """Context of a model's own backward: gradients that arrive inside count, others are another model's."""

    def __init__(self, gate: Gate, heard: Heard, buckets: list[GradientBuckets]) -> None:
        self._gate, self._heard, self._buckets = gate, heard, buckets
        self._sleep(True)

    def _sleep(self, asleep: bool) -> None:
        """Sets whether buckets report arriving gradients as strays instead of reducing them."""
        for buckets in self._buckets:
            buckets.asleep = asleep

    def __enter__(self) -> None:
        self._gate.__enter__()
        self._heard.asked = True
        self._sleep(False)

    def __exit__(self, *error: object) -> None:
        self._sleep(True)
        self._heard.asked = False
        self._gate.__exit__()


def techniques_of(engine: Engine | None) -> list[Any]:
    """Returns the data-parallel techniques of an engine: [one], or [of other weights, of experts]; [None] for None."""
    technique: Any = engine.technique if engine is not None else None
    return [technique.rest, technique.experts] if isinstance(technique, WithExperts) else [technique]


def share_uncut(engine: Engine) -> None:
    """Sends every rank the present gradients of parameters that zero=3 replicates instead of sharding. Collective."""
    for one in techniques_of(engine):
        if isinstance(one, FullShard):
            one.share_uncut()


def buckets_of(engine: Engine) -> list[GradientBuckets]:
    """Returns the gradient buckets of an engine's techniques; FSDP2 has none of these."""
    return [one.buckets for one in techniques_of(engine) if hasattr(one, "buckets")]
