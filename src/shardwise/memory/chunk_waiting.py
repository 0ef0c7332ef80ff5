"""`Waiting` tensors: calls are deferred until one whose results are narrow, then run as one program, in chunks.

    x @ A -> act -> @ B        two calls are deferred, and the third runs all of them, chunk by chunk of positions

A `Waiting` tensor has a shape and no values. An operation on it is deferred too, or runs all deferred calls that it
needs in chunks, or has the tensor computed whole first (`memory/chunk_trial.py` decides). `memory/chunks.py` says which
products are deferred first.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from shardwise.errors import RefusedPlan
from shardwise.memory.chunk_runs import InputAt, Program, ResultOf, Step, chunked, has_gradient
from shardwise.memory.chunk_trial import Tried, Unmade, look
from shardwise.part import Uncut
from shardwise.trace.leaves import replaced, tensors_in

_calls = itertools.count(1)


class ChunkCounts:
    """The number of chunks (`count`), and counts of wide tensors that were, or were not, computed in chunks.

    computed    "rows -> widest -> result", shapes without dim 0, of a program run in chunks -> how often
    whole       name of an operation before which a wide tensor was computed whole -> how often
    written     name of an operation that wrote into one -> path of the module that did it first, "" if unknown
    left_whole  whether the module, or a block, returned one that had to be computed whole
    paths       id of a module -> its path
    """

    def __init__(self, count: int):
        self.count = count
        self.left_whole = False
        self.written: dict[str, str] = {}
        self.paths: dict[int, str] = {}
        self.computed: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()


class _Here(threading.local):
    """State of a thread; backward, which may recompute a block, has threads of its own.

    chunks   the active `Chunks`, None if nothing is deferred
    making   whether deferred calls are being computed, so that nothing new is deferred
    pending  deferred calls
    """

    def __init__(self) -> None:
        self.chunks: ChunkCounts | None = None
        self.making = False
        self.pending: weakref.WeakSet[WaitingCall] = weakref.WeakSet()


HERE = _Here()


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Context: products that widen their rows are computed at once, not deferred."""
    before, HERE.making = HERE.making, True
    try:
        yield
    finally:
        HERE.making = before


class WaitingCall:
    """A deferred call with its arguments.

    args, kwargs  as given, perhaps with `Waiting` tensors
    like          its results without values, as `Part`s or `Sum`s over turns
    least         elements of the smallest input of rows that it depends on; a larger result is deferred
    number        id that is equal for calls whose results look alike (`Tried.number`)
    grad          whether gradients were enabled
    dim           only for the input rows (`rows_of`): dim along which they are chunked
    values        (result,) once it was computed whole; else None
    """

    def __init__(self, func: Callable, args: tuple, kwargs: dict, tried: Tried, least: int, chunks: ChunkCounts):
        self.func, self.args, self.kwargs, self.chunks = func, args, kwargs, chunks
        self.like, self.least, self.number = tried.like, least, tried.number
        self.grad = torch.is_grad_enabled()
        self.plain_inputs = [t for t in tensors_in((args, kwargs)) if not isinstance(t, Waiting)]
        # the call runs later, so inputs must not be written into meanwhile (`check`)
        self.versions = [t._version for t in self.plain_inputs]
        self.order = next(_calls)
        self.values: tuple[Any] | None = None
        self.dim: int | None = None
        HERE.pending.add(self)

    def check(self) -> None:
        """Raises `RefusedPlan` if an input was written into since the call."""
        for tensor, version in zip(self.plain_inputs, self.versions, strict=True):
            if tensor._version != version:
                raise RefusedPlan(
                    f"position_chunks: a tensor of shape {tuple(tensor.shape)} was written into after it had been "
                    f"given to a product that is computed later, in chunks: write into a copy, or leave "
                    "position_chunks out"
                )

    def made(self) -> Any:
        """Returns the call's results, computed whole, not in chunks; only the first time, when it raises as `check`."""
        if self.values is None:
            self.check()
            args, kwargs = replaced(Waiting, Waiting.made, (self.args, self.kwargs))
            with torch.set_grad_enabled(self.grad), nothing_waits():
                self.values = (self.func(*args, **kwargs),)
            HERE.pending.discard(self)
            self.args, self.kwargs, self.plain_inputs = (), {}, []  # no longer needed, and perhaps large
        return self.values[0]


class Waiting(Unmade):
    """A result of a deferred call; `place`: its index among the call's results, None if it is the only one."""

    call: WaitingCall

    answers_first = True  # its rules come before those of other tensor subclasses in an operation

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, device: torch.device, wants: bool, call: WaitingCall, place: int | None
    ) -> Waiting:
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=wants
        )
        made.call, made.place = call, place
        if wants:  # the hook fires only if a `torch.autograd.Function` was given this tensor
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        return made

    @property
    def like(self) -> torch.Tensor:
        return self.call.like if self.place is None else self.call.like[self.place]

    @property
    def number(self) -> int:
        return self.call.number

    def made(self) -> torch.Tensor:
        """Returns this tensor computed whole, not in chunks."""
        results = self.call.made()
        return results if self.place is None else results[self.place]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return answered(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RefusedPlan(f"position_chunks: {func} was given a tensor that is not computed yet: leave it out")


def _refuse_gradient(*gradients: torch.Tensor) -> None:
    raise RefusedPlan(
        "position_chunks: a function of autograd's own (torch.autograd.Function) was given a wide tensor that is "
        "computed later, and its gradient would be lost: leave position_chunks out"
    )


def whole(tree: Any) -> Any:
    """Returns a pytree with every `Waiting` tensor in it computed whole."""
    if type(tree) is torch.Tensor:  # the most frequent case, in which walking a tree would be slow
        return tree
    return torch.utils._pytree.tree_map_only(Waiting, Waiting.made, tree)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns its argument; the function of the call that stands for a program's input rows."""
    return tensor


def waits(call: WaitingCall) -> Any:
    """Returns `Waiting` tensors for a call's results, nested as the call gives them."""
    tensors = tensors_in((call.args, call.kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        # by the grad mode at the time of the call
        wants = call.grad and any(tensor.requires_grad for tensor in tensors)
        device = tensors[0].device

    def wrapped(like: torch.Tensor, place: int | None) -> Waiting:
        return Waiting(like, device, wants and has_gradient(like.dtype), call, place)

    if isinstance(call.like, torch.Tensor):
        return wrapped(call.like, None)
    return _as(call.like, [wrapped(like, place) for place, like in enumerate(call.like)])


def _as(like: Any, leaves: list) -> Any:
    """Returns `leaves` in a container of `like`'s type: a tuple, a list or one of torch's named tuples."""
    return leaves if isinstance(like, list) else type(like)(leaves)


def answered(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Returns the results of a call on `Waiting` tensors: `Waiting` again, or computed."""
    # tensors whose call was computed meanwhile
    args, kwargs = replaced(Waiting, lambda tensor: tensor.made() if tensor.call.values else tensor, (args, kwargs))
    waiting = tensors_in((args, kwargs), Waiting)
    if not waiting:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if any(tensor.grad_fn is not None for tensor in waiting):  # made by a `torch.autograd.Function`
            _refuse_gradient()
    least, chunks = min(tensor.call.least for tensor in waiting), waiting[0].call.chunks
    tried = look(func, args, kwargs, least)
    # without this class's own rule, which would be called again
    if tried.what == "tells":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if tried.what == "waits":  # treats each position by itself, and its result is wide
        return waits(WaitingCall(func, args, kwargs, tried, least, chunks))
    if tried.what == "ends":  # its result is narrow, or a sum over positions, so the program runs in chunks now
        try:
            return _computed(WaitingCall(func, args, kwargs, tried, least, chunks))
        except Uncut:  # on tensors that ranks shard too, a rule may need to communicate
            pass
    if tried.what == "writes":  # deferred calls may read what is written into
        # in the order of the calls, since a later one may read an earlier one's result
        for call in sorted(HERE.pending, key=lambda call: call.order):
            call.made()
    chunks.whole[_name(func)] += 1
    if tried.what == "writes" and _name(func) not in chunks.written:
        chunks.written[_name(func)] = _running(chunks.paths)
    args, kwargs = replaced(Waiting, Waiting.made, (args, kwargs))
    with nothing_waits():
        return func(*args, **kwargs)


def _running(paths: dict[int, str]) -> str:
    """Returns the path of the innermost running module; "" if none of `paths` (id of a module -> path) runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")), "")
        if path:
            return path
        frame = frame.f_back
    return ""


class _Written:
    """Builds the program of a call and the deferred calls that it needs.

    steps    the recorded calls in order;  inputs  tensors of the program
    sources  index of an input -> dim along which it is chunked;  widest  shape of the largest result
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.inputs: list[torch.Tensor] = []
        self.sources: dict[int, int] = {}
        self.widest = torch.Size()
        self._places: dict[tuple[int, bool], int] = {}  # (id of a tensor, whether it is chunked) -> index of the input
        self._numbers: dict[int, int] = {}  # id of a call -> index of its step

    def add(self, call: WaitingCall) -> int:
        """Appends a call, after those that it needs, to the program; returns the index of its step."""
        if id(call) not in self._numbers:
            call.check()
            args, kwargs = replaced(torch.Tensor, self._argument, (call.args, call.kwargs))
            self.steps.append(Step(call.func, args, kwargs, call.grad))
            self._numbers[id(call)] = len(self.steps) - 1
            shapes = [self.widest, *(like.shape for like in tensors_in((call.like,)))]
            self.widest = max(shapes, key=lambda shape: (shape.numel() if shape else 0, shape[-1:]))
        return self._numbers[id(call)]

    def _argument(self, tensor: torch.Tensor) -> Any:
        """Returns what stands for a tensor argument in the program: `InputAt`, or `ResultOf` a deferred call."""
        if not isinstance(tensor, Waiting):
            return self._input(tensor)
        call = tensor.call
        if call.values is not None:  # computed whole meanwhile
            return self._input(tensor.made())
        if call.dim is not None:  # the input rows, which are chunked
            call.check()
            return self._input(call.args[0], call.dim)
        return ResultOf(self.add(call), tensor.place)

    def _input(self, tensor: torch.Tensor, dim: int | None = None) -> InputAt:
        """Makes a tensor an input of the program; returns its `InputAt`. `dim`: along which it is chunked, or None."""
        # a tensor may be an input twice, once chunked and once whole
        key = id(tensor), dim is not None
        if key not in self._places:
            self._places[key] = len(self.inputs)
            self.inputs.append(tensor)
        place = self._places[key]
        if dim is not None:
            self.sources[place] = dim
        return InputAt(place)


def _computed(last: WaitingCall) -> Any:
    """Returns the results of a call, computed chunk by chunk with all deferred calls that it needs."""
    written, like = _Written(), last.like
    number = written.add(last)
    if not written.sources:  # all its inputs were computed whole meanwhile
        return last.made()
    alone = isinstance(like, torch.Tensor)
    wanted = [ResultOf(number, None)] if alone else [ResultOf(number, place) for place in range(len(like))]
    program = Program(tuple(written.steps), tuple(wanted), written.sources, last.chunks.count)
    # the grad mode of the call
    with torch.set_grad_enabled(last.grad), nothing_waits():
        results = chunked(program, written.inputs)
    HERE.pending.discard(last)
    shapes = written.inputs[next(iter(written.sources))].shape, written.widest, results[0].shape
    last.chunks.computed[" -> ".join(str(tuple(shape[1:])) for shape in shapes)] += 1
    return results[0] if alone else _as(like, results)


def _name(func: Callable) -> str:
    return getattr(func, "__name__", str(func))
