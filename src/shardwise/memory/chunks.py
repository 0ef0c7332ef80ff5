"""Wide tensors in chunks of positions, computed again in backward: `position_chunks=N`.

    y = act(x @ A) @ B           (B, S, H) -> (B, S, 4H) -> (B, S, H)      a feed-forward network
    l = cross_entropy(x @ W)     (B, S, H) -> (B, S, V)  -> ()             a head and its loss

A product with a matrix that widens its rows is not computed at once: it gives a `Waiting` tensor, which has a shape and
no values. What is done to it waits too, as long as each position stays by itself. An operation that leaves no more
elements than came in (the product that narrows again, the loss) computes all of them, for one chunk of positions after
the other; backward does so again, so that of the wide tensors one chunk is there at a time.

Which operations keep positions apart is not listed here. A chunk is a part of a tensor over an axis whose ranks are
turns of one rank, which can send nothing (`memory/chunk_runs.py`): an operation whose rule of `part/` has to send is
not done in chunks. Each is tried on tensors without values before it is waited for. Sums over positions are sums over
turns, and what a rule knows of the whole (the number that a mean is over) it still knows.

Live bytes: those of the wide tensors divided by N. FLOPs: one forward more of what is chunked. On the wire: nothing of
its own; sums over `tp` inside a chunk are taken in N pieces.

*What this does not do*: operations that draw (dropout between the two products), that write in place, or that mix
positions; autocast; second derivatives. Before them the wide tensor is made whole, as ever.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import RefusedPlan
from shardwise.memory.chunk_runs import InputAt, Program, ResultOf, Step, chunked
from shardwise.memory.chunk_trial import Tried, Unmade, look, look_of_rows, without_values
from shardwise.part import Part, Uncut
from shardwise.part.levels import Distributed
from shardwise.trace.leaves import replaced, tensors_in

# functions that multiply rows by a matrix, and which argument has the rows; the matrix is the one behind it
_ROWS: dict[Callable, int] = {
    F.linear: 0, torch.matmul: 0, torch.Tensor.matmul: 0, torch.Tensor.__matmul__: 0, torch.mm: 0, torch.Tensor.mm: 0,
    torch.addmm: 1, torch.Tensor.addmm: 1,
}  # fmt: skip
_calls = itertools.count(1)


class Chunks:
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

    def inside(self, forward: Callable[..., Any], *, leaves_whole: bool = False) -> Callable[..., Any]:
        """A forward whose wide tensors wait; of what it returns too, unless `leaves_whole`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.entered():
                output = forward(*args, **kwargs)
                if leaves_whole and any(isinstance(leaf, Waiting) for leaf in torch.utils._pytree.tree_leaves(output)):
                    self.left_whole = True
                return whole(output) if leaves_whole else output

        return run

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context: wide tensors wait. Inside another one, nothing changes."""
        if _HERE.chunks is not None:
            yield
            return
        _HERE.chunks = self
        try:
            with _Mode(self):
                yield
        finally:
            _HERE.chunks = None

    def notices(self) -> list[str]:
        """Returns lines for the user: what was computed in chunks, and what stayed whole."""
        stays = [
            f"{repr(path) if path else 'code'} keeps a wide tensor whole: {name} writes into it"
            for name, path in self.written.items()
        ]
        if self.left_whole:
            when = "under zero=3 its weights are there only while it runs"
            stays.append(f"what the model returns, or a block, is made whole: {when}")
        if not self.computed:
            before = f": before {', '.join(sorted(self.whole))} wide tensors are made whole" if self.whole else ""
            long = f"no product that widens, of {self.count} positions or more, was followed by one that narrows"
            return [f"position_chunks has no effect: {'; '.join([long + before, *stays])}"]
        runs = "; ".join([*self.computed, *stays])
        return [f"position_chunks={self.count} computes in chunks, and again in backward: {runs}"]


def chunked_forwards(
    module: nn.Module, blocks: Iterable[str], chunks: Chunks, leaves_whole: bool, sending: Iterable[str] = ()
) -> None:
    """Make a module's forward, and each block's that recompute runs again, compute wide tensors in chunks.

    leaves_whole  what the module or a block returns: where its weights are there while it runs alone (zero=3)
    sending       paths of modules of experts, which hand rows to other ranks
    """
    for child in map(module.get_submodule, sending):
        child.forward = _with_values(child.forward)
    chunks.paths = {id(child): path for path, child in module.named_modules()}
    for block in {id(block): block for block in map(module.get_submodule, blocks)}.values():
        block.forward = chunks.inside(block.forward, leaves_whole=leaves_whole)
    if module not in map(module.get_submodule, blocks):
        module.forward = chunks.inside(module.forward, leaves_whole=leaves_whole)


def given_values(units: Iterable[nn.Module]) -> None:
    """Make what units of zero=3 are given whole, before hooks that were registered earlier look at it."""
    for unit in units:
        unit.register_forward_pre_hook(lambda m, *given: whole(given), prepend=True, with_kwargs=True)


def _with_values(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that is given tensors that are computed, and gives such: what hands rows to other ranks sends values.

    Between the two tensors may wait.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = whole((args, kwargs))
        return whole(forward(*args, **kwargs))

    return run


class _Here(threading.local):
    """Backward, which may compute a block again, runs in threads of its own.

    pending  calls whose results wait
    """

    def __init__(self) -> None:
        self.chunks: Chunks | None = None
        self.making = False
        self.pending: weakref.WeakSet[_Call] = weakref.WeakSet()


_HERE = _Here()


@contextmanager
def _nothing_waits() -> Iterator[None]:
    before, _HERE.making = _HERE.making, True
    try:
        yield
    finally:
        _HERE.making = before


class _Call:
    """A call whose results wait.

    args, kwargs  as given, tensors that wait as themselves
    like          its results on tensors without values, as parts over turns
    least         elements of the rows that came in, of the fewest
    number        of calls whose results look like these, since the start
    dim           of rows that came in, which are no call's results: along which chunks are cut
    values        the results, once they were made whole
    """

    def __init__(self, func: Callable, args: tuple, kwargs: dict, tried: Tried, least: int, chunks: Chunks):
        self.func, self.args, self.kwargs, self.chunks = func, args, kwargs, chunks
        self.like, self.least, self.number = tried.like, least, tried.number
        self.grad = torch.is_grad_enabled()
        self.given = [t for t in tensors_in((args, kwargs)) if not isinstance(t, Waiting)]
        self.versions = [t._version for t in self.given]
        self.order = next(_calls)
        self.values: tuple[Any] | None = None
        self.dim: int | None = None
        _HERE.pending.add(self)

    def check(self) -> None:
        """Raises `RefusedPlan` where an input was written into since the call."""
        for tensor, version in zip(self.given, self.versions, strict=True):
            if tensor._version != version:
                raise RefusedPlan(
                    f"position_chunks: a tensor of shape {tuple(tensor.shape)} was written into after it had been "
                    f"given to a product that is computed later, in chunks: write into a copy, or leave "
                    "position_chunks out"
                )

    def made(self) -> Any:
        """Returns the call's results, computed whole and once."""
        if self.values is None:
            self.check()
            args, kwargs = replaced(Waiting, Waiting.made, (self.args, self.kwargs))
            with torch.set_grad_enabled(self.grad), _nothing_waits():
                self.values = (self.func(*args, **kwargs),)
            _HERE.pending.discard(self)
            self.args, self.kwargs, self.given = (), {}, []  # no longer needed, and perhaps large
        return self.values[0]


class Waiting(Unmade):
    """A tensor whose call has not run yet: result `place` of it, or the only one."""

    call: _Call

    answers_first = True  # beside other tensors with rules of their own

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, wants: bool, call: _Call, place: int | None) -> Waiting:
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
        """Returns the tensor, computed whole."""
        found = self.call.made()
        return found if self.place is None else found[self.place]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _answered(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RefusedPlan(f"position_chunks: {func} was given a tensor that is not computed yet: leave it out")


def _refuse_gradient(*gradients: torch.Tensor) -> None:
    raise RefusedPlan(
        "position_chunks: a function of autograd's own (torch.autograd.Function) was given a wide tensor that is "
        "computed later, and its gradient would be lost: leave position_chunks out"
    )


class _Mode(TorchFunctionMode):
    """Products that widen wait."""

    def __init__(self, chunks: Chunks):
        super().__init__()
        self.chunks = chunks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, Waiting) for kind in types):
            return _answered(func, args, kwargs)
        if func in _ROWS and not _HERE.making:
            begun = _begun(func, args, kwargs, self.chunks)
            if begun is not None:
                return begun
        return func(*args, **kwargs)


def whole(tree: Any) -> Any:
    """Returns the same tree, list or tensor with every `Waiting` tensor computed whole."""
    return torch.utils._pytree.tree_map_only(Waiting, Waiting.made, tree)


# --- what becomes of a call


def _begun(func: Callable, args: tuple, kwargs: dict, chunks: Chunks) -> Waiting | None:
    """The result of a product that widens, waiting; None where it is computed as ever."""
    place = _ROWS[func]
    rows, matrix = (args[place], args[place + 1]) if len(args) > place + 1 else (None, None)
    if not isinstance(rows, torch.Tensor) or not isinstance(matrix, torch.Tensor) or not _may_wait(rows, matrix):
        return None
    if matrix.shape[0 if func is F.linear else 1] <= rows.shape[-1]:
        return None
    first = _rows(rows, chunks)
    if first is None:
        return None
    args = (*args[:place], first, *args[place + 1 :])
    tried = look(func, args, kwargs, rows.numel())
    return _waits(_Call(func, args, kwargs, tried, rows.numel(), chunks)) if tried.what == "waits" else None


def _may_wait(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    settled = rows
    while isinstance(settled, Part):
        settled = settled.local
    return (
        rows.is_floating_point() and rows.dim() > 1 and matrix.dim() == 2 and not isinstance(settled, Distributed)
        and not transforms and not rows.is_inference() and not torch.is_autocast_enabled(rows.device.type)
    )  # fmt: skip


def _rows(rows: torch.Tensor, chunks: Chunks) -> Waiting | None:
    """The rows, of which chunks are cut along the longest dim; of (B, S, H) seen as (B * S, H), along B or S."""
    base = rows._base if rows.dim() == 2 else None
    if base is None or base.dim() < 3 or base.shape[-1] != rows.shape[-1] or base.numel() != rows.numel():
        base = rows
    dim = max(range(base.dim() - 1), key=lambda d: (base.shape[d], d))
    if base.shape[dim] < chunks.count:
        return None
    call = _Call(rows_of, (base,), {}, look_of_rows(without_values(base), dim, chunks.count), base.numel(), chunks)
    call.dim = dim
    first = _waits(call)
    if base is rows:
        return first
    tried = look(torch.reshape, (first, tuple(rows.shape)), {}, 0)
    return (
        _waits(_Call(torch.reshape, (first, tuple(rows.shape)), {}, tried, 0, chunks))
        if tried.what == "waits"
        else None
    )


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the input tensor of rows, unchanged."""
    return tensor


def _waits(call: _Call) -> Any:
    """The call's results, as tensors that wait."""
    tensors = tensors_in((call.args, call.kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        wants = call.grad and any(tensor.requires_grad for tensor in tensors)
        device = tensors[0].device

    def wrapped(like: torch.Tensor, place: int | None) -> Waiting:
        return Waiting(like, device, wants and like.dtype.is_floating_point, call, place)

    if isinstance(call.like, torch.Tensor):
        return wrapped(call.like, None)
    return _as(call.like, [wrapped(like, place) for place, like in enumerate(call.like)])


def _as(like: Any, leaves: list) -> Any:
    """Leaves in a tuple, list or named tuple of torch's."""
    return leaves if isinstance(like, list) else type(like)(leaves)


def _answered(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A call with tensors that wait among its arguments."""
    args, kwargs = replaced(Waiting, lambda each: each.made() if each.call.values else each, (args, kwargs))
    waiting = tensors_in((args, kwargs), Waiting)
    if not waiting:
        return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        if any(each.grad_fn is not None for each in waiting):  # what a function of autograd's own returned
            _refuse_gradient()
    least, chunks = min(each.call.least for each in waiting), waiting[0].call.chunks
    tried = look(func, args, kwargs, least)
    if tried.what == "tells":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if tried.what == "waits":
        return _waits(_Call(func, args, kwargs, tried, least, chunks))
    if tried.what == "ends":
        try:
            return _computed(_Call(func, args, kwargs, tried, least, chunks))
        except Uncut:  # what a rule does with tensors that are cut over ranks as well
            pass
    if tried.what == "writes":  # what waits may read what is written into
        for call in sorted(_HERE.pending, key=lambda call: call.order):
            call.made()
    chunks.whole[_name(func)] += 1
    if tried.what == "writes" and _name(func) not in chunks.written:
        chunks.written[_name(func)] = _running(chunks.paths)
    args, kwargs = replaced(Waiting, Waiting.made, (args, kwargs))
    with _nothing_waits():
        return func(*args, **kwargs)


def _running(paths: dict[int, str]) -> str:
    """The path of the innermost module whose code is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = paths.get(id(frame.f_locals.get("self")), "")
        if path:
            return path
        frame = frame.f_back
    return ""


class _Written:
    """A program of a call and of all before it that it needs; no cycles, which would keep its inputs."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.inputs: list[torch.Tensor] = []
        self.sources: dict[int, int] = {}
        self.widest = torch.Size()
        self._places: dict[tuple[int, bool], int] = {}  # of inputs, by object and whether they are cut into chunks
        self._numbers: dict[int, int] = {}  # of steps, by call

    def add(self, call: _Call) -> int:
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
        if not isinstance(tensor, Waiting):
            return self._given(tensor)
        call = tensor.call
        if call.values is not None:
            return self._given(tensor.made())
        if call.dim is not None:
            call.check()
            return self._given(call.args[0], call.dim)
        return ResultOf(self.add(call), tensor.place)

    def _given(self, tensor: torch.Tensor, dim: int | None = None) -> InputAt:
        key = id(tensor), dim is not None
        if key not in self._places:
            self._places[key] = len(self.inputs)
            self.inputs.append(tensor)
        place = self._places[key]
        if dim is not None:
            self.sources[place] = dim
        return InputAt(place)


def _computed(last: _Call) -> Any:
    """The results of a call, and of all before it that it needs, chunk by chunk."""
    written, like = _Written(), last.like
    number = written.add(last)
    if not written.sources:  # all that it reads was made whole since
        return last.made()
    alone = isinstance(like, torch.Tensor)
    wanted = [ResultOf(number, None)] if alone else [ResultOf(number, place) for place in range(len(like))]
    program = Program(tuple(written.steps), tuple(wanted), written.sources, last.chunks.count)
    with torch.set_grad_enabled(last.grad), _nothing_waits():
        found = chunked(program, written.inputs)
    _HERE.pending.discard(last)
    shapes = written.inputs[next(iter(written.sources))].shape, written.widest, found[0].shape
    last.chunks.computed[" -> ".join(str(tuple(shape[1:])) for shape in shapes)] += 1
    return found[0] if alone else _as(like, found)


def _name(func: Callable) -> str:
    return getattr(func, "__name__", str(func))
