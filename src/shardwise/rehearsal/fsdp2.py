"""What `fully_shard` (FSDP2) makes and frees around a module's units, on tensors without values: no ranks are needed.

    forward    unit i    gather buffer i . weights i . free buffer i-1 . compute . free weights i
    backward   unit i    weights i (their buffer was gathered ahead) . gather buffer i-1 . compute
                         free weights i . free scatter buffer i+1 . scatter buffer i . free gradients i . shard i

The buffers' lifetimes are those of torch.distributed.fsdp (`FSDPParamGroup`, `foreach_all_gather`, `foreach_reduce`,
torch 2.6 to 2.13):

    gather buffer    in forward held until the next unit has its weights, in backward until its own has them; the
                     next unit's is made when a unit's backward begins
    a weight cut along another dim than the first passes through a temporary of its size, and so does its gradient
    scatter buffer   all gradients of a unit end to end, held until the next unit's gradients are there
    shards           of gradients: made by the first micro-batch, added to by those that follow

Hooks stand where FSDP2's stand, so that units that share inputs, run twice, or never run do as they do there.

What this does not do: `wrap=`; streams, whose allocations may live a little longer on a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.precision import Precision
from shardwise.trace.blocks import inner_first

FORWARD, BACKWARD, AFTER, IDLE = "forward", "backward", "after backward", "idle"


@dataclass
class Weight:
    """One gathered parameter. Its storage comes and goes, the object stays."""

    param: nn.Parameter
    dim: int  # along which it is cut
    each: int  # elements of a rank's shard, padded
    ranks: int
    shard: torch.Tensor | None = None  # of its gradient

    @classmethod
    def of(cls, param: nn.Parameter, ranks: int) -> Weight:
        """Cut along the first dim that the ranks divide, else along the first, padded."""
        dim = cut_dim(param.shape, ranks)
        rows = -(-param.shape[dim] // ranks)
        return cls(param, dim, rows * (param.numel() // param.shape[dim]), ranks)

    def resize(self, gathered: bool) -> torch.UntypedStorage:
        """Give the parameter its storage, or take it."""
        size = self.each * self.ranks * self.param.element_size() if gathered else 0
        storage = self.param.untyped_storage()
        storage.resize_(size)
        return storage


def cut_dim(shape: Sequence[int], ranks: int) -> int:
    """The dim along which zero=3 cuts a parameter of this shape."""
    return next((dim for dim, size in enumerate(shape) if size > 0 and size % ranks == 0), 0)


def can_cut(param: torch.Tensor) -> bool:
    """Whether zero=3 cuts a parameter at all."""
    return param.dim() > 0 and param.numel() > 0


@dataclass(eq=False)
class Unit:
    """The weights that are gathered together, and where they are in their round."""

    weights: list[Weight]
    state: str = IDLE
    here: bool = False  # the weights have their storage
    buffer: torch.Tensor | None = None  # gathered, and not in the weights yet
    places: list[int] = field(default_factory=list)  # in the order of forwards


class Gathered:
    """Takes over the parameters of a module whose tensors have no values.

    units      modules whose weights are gathered together; what lies in none of them is the root's
    ranks      of dp_shard
    leave      parameters that are not gathered (experts, other stages')
    copies     a reduction works on a copy of what it is given, as gloo's does
    resized    is told of each storage that comes or goes
    aside      around what is made here, so that it does not count as the module's own work
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module],
        ranks: int,
        precision: Precision,
        leave: Iterable[nn.Parameter] = (),
        aside: Callable[[], AbstractContextManager] | None = None,
        *,
        copies: bool = False,
        resized: list[torch.UntypedStorage] | None = None,
    ):
        self.resized = resized
        self.ranks, self.precision, self.copies = ranks, precision, copies
        self._aside = aside
        self._order: list[Unit] = []  # units as their forwards ended
        self._last_gathered: torch.Tensor | None = None  # kept until the next unit of the forward has its weights
        self._scattered: torch.Tensor | None = None  # kept until the next unit's gradients are there
        self._outermost: Unit | None = None  # whose forward began first: of a block that a checkpoint repeats, its own
        self._queued = False
        self.seen: list[int] = []  # elements of each gather, in order
        self.last = True  # whether this backward is the last of the step
        taken = {id(param) for param in leave}
        self.units: list[Unit] = []
        modules = {id(child): child for child in [*inner_first(units), module]}
        for child in modules.values():
            params = [p for p in child.parameters() if id(p) not in taken and can_cut(p)]
            params = list({id(p): p for p in params}.values())
            taken |= {id(p) for p in params}
            unit = Unit([Weight.of(p, ranks) for p in params])
            self.units.append(unit)
            self._hook(child, unit)
        for unit in self.units:
            for weight in unit.weights:
                self._take(weight)

    @property
    def held(self) -> int:
        """Elements of the shards of weights on a rank."""
        return sum(weight.each for unit in self.units for weight in unit.weights)

    @property
    def rows(self) -> Counter[tuple[int, int]]:
        """(indices along the dim that is cut, elements at each) of the weights that are trained."""
        trained = [w for unit in self.units for w in unit.weights if w.param.requires_grad]
        shapes = [(w.param.shape[w.dim], w.param.numel()) for w in trained]
        return Counter((rows, elements // rows) for rows, elements in shapes)

    @property
    def held_gradients(self) -> int:
        """Bytes of the shards of gradients, once all are there."""
        trained = (w.each for unit in self.units for w in unit.weights if w.param.requires_grad)
        return sum(trained) * self.precision.master.itemsize

    def taken(self) -> list[int]:
        """Elements of each gather since the last time, in order."""
        seen, self.seen = self.seen, []
        return seen

    def start_micro_batch(self, *, last: bool) -> None:
        """Before a backward; `last`: of the step."""
        self.last = last

    def finish_micro_batch(self) -> None:
        """All that is to be done was done when the backward ended."""

    def _take(self, weight: Weight) -> None:
        """The storage padded to what is gathered, and none until then."""
        param = weight.param
        flat = torch.empty(weight.each * self.ranks, dtype=param.dtype, device=param.device)
        param.data = flat.as_strided(param.shape, _strides(param.shape))
        self._resize(weight, gathered=False)

    def _resize(self, weight: Weight, gathered: bool) -> None:
        storage = weight.resize(gathered)
        if self.resized is not None:
            self.resized.append(storage)

    def _hook(self, child: nn.Module, unit: Unit) -> None:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if unit.state in (BACKWARD, AFTER):  # run again in backward, inside a block that is recomputed
                self._gather(unit)
                self._fill(unit)
                return None
            entering, unit.state = unit.state != FORWARD, FORWARD
            self._outermost = self._outermost or unit
            self._gather(unit)
            self._fill(unit)
            return self._watched(unit, args, kwargs) if entering and torch.is_grad_enabled() else None

        def after(module: nn.Module, args: tuple, output: Any) -> None:
            if unit.state in (BACKWARD, AFTER):
                return
            if torch._C._current_graph_task_id() == -1:  # else it runs again in backward
                self._free(unit)
                unit.places.append(len(self._order))
                self._order.append(unit)
            unit.state = IDLE
            if torch.is_grad_enabled():
                for leaf in _grown(output):
                    leaf.register_hook(lambda gradient: self._enter(unit, gradient))
            if unit is self._outermost:
                self._last_gathered = self._outermost = None

        child.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        child.register_forward_hook(after)

    def _watched(self, unit: Unit, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments behind a step of the graph that backward comes to when the unit is over."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not places:
            return args, kwargs
        for place, made in zip(places, _Over.apply(self, unit, *(leaves[p] for p in places)), strict=True):
            leaves[place] = made
        return pytree.tree_unflatten(leaves, spec)

    # --- weights

    def _gather(self, unit: Unit) -> None:
        """The buffer that ranks send their shards into."""
        if unit.buffer is not None or unit.here or not unit.weights:
            return
        with self._apart():
            param = unit.weights[0].param
            count = sum(weight.each for weight in unit.weights)
            mine = param.new_empty(count) if self.precision.mixed else None  # the masters, rounded
            unit.buffer = param.new_empty(count * self.ranks)
            self.seen.append(count * self.ranks)
            del mine

    def _fill(self, unit: Unit) -> None:
        """The weights out of the buffer, which goes; in forward with the next unit's."""
        if unit.buffer is None:
            return
        if unit.state == FORWARD:
            self._last_gathered = None
        with self._apart():
            for weight in unit.weights:
                self._resize(weight, gathered=True)
            between = [torch.empty(w.each * w.ranks, dtype=w.param.dtype) for w in unit.weights if w.dim]
            unit.buffer.view(self.ranks, -1)  # out of which they are copied, all there at once
            del between
        if unit.state == FORWARD:
            self._last_gathered = unit.buffer
        unit.buffer, unit.here = None, True

    def _free(self, unit: Unit) -> None:
        if unit.here:
            for weight in unit.weights:
                self._resize(weight, gathered=False)
            unit.here = False

    # --- backward

    def _enter(self, unit: Unit, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the unit's outputs has come."""
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if unit.state != BACKWARD:
            unit.state = BACKWARD
            self._gather(unit)
            self._fill(unit)
            if unit.places and (place := unit.places.pop()) > 0:
                self._gather(self._order[place - 1])
        return gradient

    def leave(self, unit: Unit) -> None:
        """The gradients of the unit's weights are all there: one sum over the ranks."""
        unit.state = AFTER
        trained = [w for w in unit.weights if w.param.requires_grad]
        with self._apart():
            gradients = [w.param.grad if w.param.grad is not None else torch.zeros_like(w.param) for w in trained]
        for weight in trained:
            weight.param.grad = None
        self._free(unit)
        self._scattered = None
        if gradients:
            with self._apart():
                self._reduce(trained, gradients)

    def _reduce(self, weights: list[Weight], gradients: list[torch.Tensor]) -> None:
        # the loop's own variables outlive it there as they do here, and hold the last gradients to the end
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if weight.dim:  # ranks' parts one after another
                chunks = torch.chunk(gradient, self.ranks, dim=weight.dim)
                gradients[place] = torch.cat(chunks, dim=0)
        count = sum(weight.each for weight in weights)
        buffer = torch.empty(count * self.ranks, dtype=self.precision.reduce)
        gradients.clear()
        summed = torch.empty(count, dtype=self.precision.reduce)
        if self.copies:
            torch.empty_like(buffer)
        if self.precision.reduce != self.precision.master:
            summed = summed.to(self.precision.master)
        self._scattered = buffer
        start = 0
        for weight in weights:
            if weight.shard is None:
                weight.shard = summed[start : start + weight.each]
            else:
                weight.shard.add_(summed[start : start + weight.each])
            start += weight.each

    def _end(self) -> None:
        """Backward is over: units that it did not leave by their inputs are left now."""
        self._queued = False
        self._outermost = None
        for unit in reversed(self.units):  # the root first
            if unit.state != AFTER:
                self.leave(unit)
            unit.state = IDLE
            if self.last:
                unit.buffer = None
                unit.places.clear()
        if self.last:
            self._order.clear()
            self._scattered = None

    def _apart(self) -> AbstractContextManager:
        return self._aside() if self._aside is not None else torch.no_grad()


class _Over(torch.autograd.Function):
    """The identity; its backward comes when the unit behind it has been through its own."""

    @staticmethod
    def forward(ctx, gathered: Gathered, unit: Unit, *inputs: torch.Tensor):
        ctx.gathered, ctx.unit = gathered, unit
        return inputs

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        ctx.gathered.leave(ctx.unit)
        return (None, None, *gradients)


def _grown(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
