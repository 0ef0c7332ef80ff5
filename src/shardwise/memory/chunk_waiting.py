"""`Waiting` tensors: calls are put off until one whose results are narrow, then run as one program, in chunks.

    x @ A -> act -> @ B        two calls wait, and the third runs all of them, chunk by chunk of positions

A `Waiting` tensor has a shape and no values. What is done to it waits, runs all before it in chunks, or has it made
whole first (`memory/chunk_trial.py` says which); `memory/chunks.py` says which products begin it.
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
    """The number of chunks, and counts of wide tensors that were computed in chunks and of those that were not.

    computed  by what was computed in chunks: (rows, widest, result) as shapes without samples, how often
    whole     by name of the operation before which a wide tensor was made whole, how often
    written   of operations that wrote into one: path of the module that did it first, "" where none was running
    left_whole  whether the module, or a block, returned one, which was made whole while its weights were there
    """

    def __init__(self, count: int):
        self.count = count
        self.left_whole = False
        self.written: dict[str, str] = {}
        self.paths: dict[int, str] = {}  # by id of a module
        self.computed: Counter[str] = Counter()
        self.whole: Counter[str] = Counter()


class _Here(threading.local):
    """This thread's `Chunks` and waiting calls; backward, which may run a block again, has threads of its own.

    pending  calls whose results wait
    """

    def __init__(self) -> None:
        self.chunks: ChunkCounts | None = None
        self.making = False
        self.pending: weakref.WeakSet[WaitingCall] = weakref.WeakSet()


HERE = _Here()


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Context: products that widen are computed at once, not put off."""
    before, HERE.making = HERE.making, True
    try:
        yield
    finally:
        HERE.making = before


class WaitingCall:
    """A call that has not run yet, with its arguments.

    args, kwargs  as given, tensors that wait as themselves
    like          its results on tensors without values, as parts over turns
    least         elements of the rows that came in, of the fewest
    number        the same for all calls whose results look alike
    dim           along which chunks of the rows are cut, of a call that gives the program's input (`rows_of`)
    values        the results, once they were made whole
    """

    def __init__(self, func: Callable, args: tuple, kwargs: dict, tried: Tried, least: int, chunks: ChunkCounts):
        self.func, self.args, self.kwargs, self.chunks = func, args, kwargs, chunks
        self.like, self.least, self.number = tried.like, least, tried.number
        self.grad = torch.is_grad_enabled()
        self.plain_inputs = [t for t in tensors_in((args, kwargs)) if not isinstance(t, Waiting)]
        # the call runs later: what is written into meanwhile would not be what it was given (`check`)
        self.versions = [t._version for t in self.plain_inputs]
        self.order = next(_calls)
        self.values: tuple[Any] | None = None
        self.dim: int | None = None
        HERE.pending.add(self)

    def check(self) -> None:
        """Raises `RefusedPlan` where an input was written into since the call."""
        for tensor, version in zip(self.plain_inputs, self.versions, strict=True):
            if tensor._version != version:
                raise RefusedPlan(
                    f"position_chunks: a tensor of shape {tuple(tensor.shape)} was written into after it had been "
                    f"given to a product that is computed later, in chunks: write into a copy, or leave "
                    "position_chunks out"
                )

    def made(self) -> Any:
        """Returns the call's results, computed whole and once; raises as `check` where they were not yet."""
        if self.values is None:
            self.check()
            args, kwargs = replaced(Waiting, Waiting.made, (self.args, self.kwargs))
            with torch.set_grad_enabled(self.grad), nothing_waits():
                self.values = (self.func(*args, **kwargs),)
            HERE.pending.discard(self)
            self.args, self.kwargs, self.plain_inputs = (), {}, []  # no longer needed, and perhaps large
        return self.values[0]


class Waiting(Unmade):
    """A tensor whose call has not run yet: result `place` of it, or the only one."""

    call: WaitingCall

    answers_first = True  # beside other tensors with rules of their own

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, device: torch.device, wants: bool, call: WaitingCall, place: int | None
    ) -> Waiting:
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=wants
        )
        made.call, made.place = call, place
        if wants:  # where a function of autograd's own was given it
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
        """Returns this tensor computed, whole (not chunk by chunk)."""
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
    """Returns a tensor, list or tree of tensors with every `Waiting` tensor in it computed whole."""
    if type(tree) is torch.Tensor:  # a model's output, mostly: a walk through a tree takes longer than all else here
        return tree
    return torch.utils._pytree.tree_map_only(Waiting, Waiting.made, tree)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the input tensor of rows, unchanged."""
    return tensor


def waits(call: WaitingCall) -> Any:
    """Returns `Waiting` placeholders for a call's results, computed when they are needed."""
    tensors = tensors_in((call.args, call.kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        # gradients follow from how the call was recorded, and not from the mode that asks now
        wants = call.grad and any(tensor.requires_grad for tensor in tensors)
        device = tensors[0].device

    def wrapped(like: torch.Tensor, place: int | None) -> Waiting:
        return Waiting(like, device, wants and has_gradient(like.dtype), call, place)

    # one result has no place among several
    if isinstance(call.like, torch.Tensor):
        return wrapped(call.like, None)
    return _as(call.like, [wrapped(like, place) for place, like in enumerate(call.like)])


def _as(like: Any, leaves: list) -> Any:
    """Returns the leaves in a container of `like`'s type: tuple, list or one of torch's named tuples."""
    return leaves if isinstance(like, list) else type(like)(leaves)


def answered(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Returns the results of a call on waiting tensors: `Waiting` again, or computed."""
    # those that were computed meanwhile wait no more
    args, kwargs = replaced(Waiting, lambda tensor: tensor.made() if tensor.call.values else tensor, (args, kwargs))
    waiting = tensors_in((args, kwargs), Waiting)
    if not waiting:  # all of them were computed whole before
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if any(tensor.grad_fn is not None for tensor in waiting):  # what a function of autograd's own returned
            _refuse_gradient()
    least, chunks = min(tensor.call.least for tensor in waiting), waiting[0].call.chunks
    tried = look(func, args, kwargs, least)
    # past this class, which would answer the same call again
    if tried.what == "tells":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if tried.what == "waits":  # each position by itself, and wide still
        return waits(WaitingCall(func, args, kwargs, tried, least, chunks))
    if tried.what == "ends":  # as narrow as what came in, or a sum over positions: now all that waits runs
        try:
            return _computed(WaitingCall(func, args, kwargs, tried, least, chunks))
        except Uncut:  # what a rule does with tensors that are cut over ranks as well
            pass
    if tried.what == "writes":  # what waits may read what is written into
        # in the order of the calls: a later one may read an earlier one's result
        for call in sorted(HERE.pending, key=lambda call: call.order):
            call.made()
    chunks.whole[_name(func)] += 1
    if tried.what == "writes" and _name(func) not in chunks.written:
        chunks.written[_name(func)] = _running(chunks.paths)
    args, kwargs = replaced(Waiting, Waiting.made, (args, kwargs))
    with nothing_waits():
        return func(*args, **kwargs)


def _running(paths: dict[int, str]) -> str:
    """Returns the path of the innermost module whose code is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")), "")
        if path:
            return path
        frame = frame.f_back
    return ""


class _Written:
    """Builds the program of a call and of the calls that it needs. No cycles, which would keep its inputs alive."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.inputs: list[torch.Tensor] = []
        self.sources: dict[int, int] = {}
        self.widest = torch.Size()
        self._places: dict[tuple[int, bool], int] = {}  # of inputs, by object and whether they are cut into chunks
        self._numbers: dict[int, int] = {}  # of steps, by call

    def add(self, call: WaitingCall) -> int:
        """Append this call to the program; returns its step's number."""
        if id(call) not in self._numbers:
            call.check()
            args, kwargs = replaced(torch.Tensor, self._argument, (call.args, call.kwargs))
            self.steps.append(Step(call.func, args, kwargs, call.grad))
            self._numbers[id(call)] = len(self.steps) - 1
            shapes = [self.widest, *(like.shape for like in tensors_in((call.like,)))]
            self.widest = max(shapes, key=lambda shape: (shape.numel() if shape else 0, shape[-1:]))
        return self._numbers[id(call)]

    def _argument(self, tensor: torch.Tensor) -> Any:
        """Returns what stands for a tensor in the program: an input, or the result of a call that waits."""
        if not isinstance(tensor, Waiting):
            return self._input(tensor)
        call = tensor.call
        if call.values is not None:  # computed whole meanwhile
            return self._input(tensor.made())
        if call.dim is not None:  # the rows that came in: what is cut into chunks
            call.check()
            return self._input(call.args[0], call.dim)
        return ResultOf(self.add(call), tensor.place)

    def _input(self, tensor: torch.Tensor, dim: int | None = None) -> InputAt:
        """Returns the `InputAt` of a tensor, which becomes an input of the program; `dim`: along which it is cut."""
        # one tensor may be an input twice, once in chunks and once whole
        key = id(tensor), dim is not None
        if key not in self._places:
            self._places[key] = len(self.inputs)
            self.inputs.append(tensor)
        place = self._places[key]
        if dim is not None:
            self.sources[place] = dim
        return InputAt(place)


def _computed(last: WaitingCall) -> Any:
    """Returns the results of a call, computed chunk by chunk with all waiting calls that it needs."""
    written, like = _Written(), last.like
    number = written.add(last)
    if not written.sources:  # all that it reads was made whole since
        return last.made()
    alone = isinstance(like, torch.Tensor)
    wanted = [ResultOf(number, None)] if alone else [ResultOf(number, place) for place in range(len(like))]
    program = Program(tuple(written.steps), tuple(wanted), written.sources, last.chunks.count)
    # gradients as they were where the call was written, not where its result is asked for
    with torch.set_grad_enabled(last.grad), nothing_waits():
        results = chunked(program, written.inputs)
    HERE.pending.discard(last)
    shapes = written.inputs[next(iter(written.sources))].shape, written.widest, results[0].shape
    last.chunks.computed[" -> ".join(str(tuple(shape[1:])) for shape in shapes)] += 1
    return results[0] if alone else _as(like, results)


def _name(func: Callable) -> str:
    return getattr(func, "__name__", str(func))
