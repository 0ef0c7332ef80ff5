"""Gives a script's own random operations the numbers of one process, for each sample. Driven by scripts/calls.

Between a batch and its backward, an op that draws random numbers for this rank's samples (the batch's sample dim,
mostly the first, counts them; inside the model, any dim that alone has that size) draws for all samples of the batch:

    one process   randn(8, 3)                      rows 0..7
    rank 1 of 2   randn(4, 3) -> randn(8, 3)[4:]   rows 4..7, and the generator stands where one process's stands

So noise, time steps and dropout masks are those of one process, and so are all later random numbers. For another shape
every rank draws the same numbers; inside the model that could be a mask whose samples lie in a dim that is not found,
and is refused, unless running the model on fewer samples has shown that the shape does not depend on their number.

The cost: every rank draws the whole batch's numbers. A call of torch that may draw, by the tags of its operations, runs
under a dispatch mode; others do not. Random numbers outside such calls (a scripted function, an extension's) are found
in the first 3 steps, in which all operations run under the mode, and then in all later ones if there were any.

What this does not do: follow numbers whose sample dim has the size of the part by chance, or is a multiple of it; see
some outside of the model that no call of torch draws and that come later than the first steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import get_gradient_edge
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.device import current_device, generators
from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.parallel.slots import Phase
from shardwise.part.rules.random import draws_of_one_process
from shardwise.random import BatchDims
from shardwise.scripts.script_lines import names_line
from shardwise.trace.elementwise import asks_by_values, is_random

_BACKWARDS = {"backward", "run_backward", "_engine_run_backward"}  # in which dropout may run again
_OPERATIONS = (BuiltinFunctionType, MethodDescriptorType)


def put_on(mode: TorchFunctionMode) -> None:
    """Puts a mode on top of torch's stack of function modes, unless it is there."""
    if mode not in _get_current_function_mode_stack():
        _push_mode(mode)


def take_off(mode: TorchFunctionMode) -> None:
    """Takes a mode off the stack, wherever it is in it; does nothing if it is not there."""
    if mode in _get_current_function_mode_stack():
        for one in [each for each in _popped() if each is not mode]:
            _push_mode(one)


def differentiate(loss: torch.Tensor, factor: float = 1.0, *, retain_graph: bool) -> None:
    """Calls `(factor * loss).backward()` with torch's function modes on; the tensor's own method turns them off."""
    torch.autograd.backward(get_gradient_edge(loss), torch.full_like(loss, factor), retain_graph)


def _popped() -> list[TorchFunctionMode]:
    """Empties torch's stack of function modes; returns what was on it, the lowest first."""
    stack = _get_current_function_mode_stack()
    for _ in stack:
        _pop_mode()
    return stack


@lru_cache(4096)
def may_draw(function: Callable[..., Any]) -> bool:
    """Returns whether a function of torch may draw random numbers; True if that is not known.

    An operation has tags; a Python function of torch may draw if anything may that it calls.
    """
    name = getattr(function, "__name__", "")
    if name.startswith("__"):  # operators and attributes of tensors
        return False
    if isinstance(function, OpOverload):
        return is_random(function)
    if isinstance(function, OpOverloadPacket):
        return _draws(function)
    if isinstance(function, FunctionType):
        return _calls_what_draws(function, set())
    packet = getattr(torch.ops.aten, name, None)
    if packet is None and isinstance(function, MethodDescriptorType):
        return name.endswith("_")  # a method that is no operation converts or tells; one may call what it is given
    return not isinstance(packet, OpOverloadPacket) or not isinstance(function, _OPERATIONS) or _draws(packet)


def _draws(packet: OpOverloadPacket) -> bool:
    return any(is_random(getattr(packet, one)) for one in packet.overloads())


def _calls_what_draws(function: FunctionType, seen: set[FunctionType]) -> bool:
    """Returns whether a Python function may draw, by the names in its code and closure; `seen`: those looked at."""
    # code outside of torch has no tags to tell by
    if function.__module__.partition(".")[0] != "torch":
        return True
    seen.add(function)
    names = _names_in(function.__code__)
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    # a backward computes recomputed blocks again, with their dropout
    if names & _BACKWARDS or any(isinstance(packet, OpOverloadPacket) and _draws(packet) for packet in packets):
        return True
    inner = [*map(function.__globals__.get, names), *(cell.cell_contents for cell in function.__closure__ or ())]
    return any(isinstance(one, FunctionType) and one not in seen and _calls_what_draws(one, seen) for one in inner)


def _names_in(code: CodeType) -> set[str]:
    """Returns the global and attribute names that code uses, in nested functions too."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner) - {"handle_torch_function"}


_MIXES = (
    "a permutation of the batch's samples (torch.randperm, as in mixup) would mix a rank's own samples alone, where "
    'one process mixes all: use prepare(..., loss_scope="global"), by which every rank has whole batches, or mix them '
    "in the dataset or the collate function"
)
_BY_VALUES = (
    "{} asks for more random numbers or fewer, by the values it is given, and each rank has those of its own samples: "
    'use prepare(..., loss_scope="global"), by which every rank has whole batches, draw in the dataset, or use '
    'prepare(..., randomness="fast")'
)
_STEPS = 3  # first steps, in which all operations are followed
_LATE = (
    "random numbers are drawn between a batch and its backward, and none were in the first {} steps, so that draws "
    "were no longer followed: every rank drew the same numbers for its own samples. Draw in the first steps as well, "
    'or use prepare(..., randomness="fast")'
)
_INERT = ("dropout_p", "dropout", "p")  # arguments of which 0 switches an op's random numbers off


class SampleDraws(TorchFunctionMode):
    """Function mode that gives a script's random operations the numbers that one process draws for the same samples.

    Active while `part` is set, the samples that this rank holds. `inside`: the model's own forward runs.
    """

    def __init__(
        self, beside: Callable[[], Share | None] = lambda: None,
        of_batch: Callable[[Share, Callable[[int], bool], tuple], Share | None] = lambda part, fits, given: part,
    ) -> None:  # fmt: skip
        """Follows nothing until `begin`.
        beside      returns this rank's samples of another loader's current batch, None without one
        of_batch    (samples, whether a number of samples fits the shape, arguments) -> samples drawn for, or None
        """
        super().__init__()
        self._beside, self._of_batch = beside, of_batch
        self.part: Share | None = None
        self.dim = 0  # of a batch's tensors that counts samples
        self.inside = self._first = False
        self.phases: list[Phase] = []  # of the loop's models
        self._dims = BatchDims()  # of draws that the look at the model has seen
        self._op = ""  # name of the random operation that runs
        self.whole = False  # Whether the script has whole batches; only the model's forward is cut
        self._stands: list[bytes] = []  # the generators after the last random op seen
        self.seen = False  # Whether any random op was seen
        self._stood: list[bytes] = []  # the generators at `begin`, if nothing is followed; else []
        self._follows = False  # within a call that may draw
        self._all: _Operations | None = None  # on while all operations are followed
        self.follows_all = False  # Whether random ops ran outside of calls of torch
        self.steps = 0  # backwards so far

    @property
    def alike(self) -> bool:
        """Returns whether a model, or a module that mixes samples, now runs on equal inputs on every rank."""
        return any(phase.same for phase in self.phases)

    def begin(self, part: Share, *, whole: bool) -> None:
        """Begins to follow random ops, for the samples `part`. `whole`: the script has and draws for whole batches."""
        self.part, self.whole = part, whole
        if self.follows_all or self.steps < _STEPS:
            self._all = _Operations(self)
            self._all.__enter__()
        self._stood = [] if self.seen or self.steps < _STEPS else generators(current_device())
        if not self._stood:
            put_on(self)

    def end(self) -> None:
        """Stops following random ops, which then draw alike on every rank; `RefusedPlan` if some were missed."""
        part, self.part = self.part, None
        # nothing was followed since `begin`, as no earlier step drew: that this one did not shows by the generators
        if self._stood:
            if part is not None and self._stood != generators(current_device()):
                self._stood = []
                raise RefusedPlan(_LATE.format(_STEPS))
            return
        take_off(self)
        if self._all is not None:
            self._all.__exit__(None, None, None)
            self._all = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # switched off by an argument (training=False, p=0): nothing is drawn, so following costs for nothing
        off = kwargs.get("training") is False or any(kwargs.get(name) == 0 for name in _INERT)
        # no batch at hand, or within a call that is followed already
        if self.part is None or self._follows or not may_draw(func) or off:
            return func(*args, **kwargs)
        self._follows = True
        try:
            # in the first steps a mode over all operations is on already
            with _Operations(self) if self._all is None else nullcontext():
                return func(*args, **kwargs)
        finally:
            self._follows = False

    def operation(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the result of an operation; if it is random, this rank's samples get the numbers of one process."""
        if self.part is None or not is_random(func):
            return func(*args, **kwargs)
        draws = not _is_off(func, _named_arguments(func, args, kwargs))
        self.seen |= draws
        self.follows_all |= draws and not self._follows
        if self.whole and not self.inside and not _in_backward():  # drawn for whole batches, as in one process
            return func(*args, **kwargs)
        # outside of the model, what is drawn follows its shape alone; inside, generators are watched too
        if not self.inside:
            return self._draw(func, args, kwargs, self.part)
        self._check()
        output = self._draw(func, args, kwargs, self.part)
        self._stands = generators(current_device())
        return output

    def enter(self, *, first: bool, dims: BatchDims) -> None:
        """Notes that the model's forward begins; `first`: what it is given and returns has samples in the first dim.

        dims    in which dim random tensors have samples, learnt by running the model on fewer
        """
        if self._stood:  # nothing is followed, and what drew shows at the end
            return
        self.inside, self._first, self._stands = True, first, generators(current_device())
        self._dims = dims

    def leave(self) -> None:
        """Notes that the forward has ended. Raises `RefusedPlan` if random numbers were drawn unseen."""
        if self.inside:
            self.inside = False
            self._check()

    def _check(self) -> None:
        """Raises `RefusedPlan` if a generator has moved since the last random operation that was seen."""
        if self._stands != generators(current_device()):
            self.inside = False
            if self.part is None:
                raise RefusedPlan(
                    "the model draws random numbers, and the loader that was given to prepare has handed out no batch, "
                    "so which samples they are for is not known: go through that loader, or spread a model that has "
                    "one batch for good (a graph) by tp"
                )
            raise RefusedPlan(
                "the model draws random numbers where their samples cannot be followed (a kernel of its own): each "
                "rank would draw the same numbers for other samples. Draw them by torch's operations, switch the "
                'dropout off, or use prepare(..., randomness="fast")'
            )

    @names_line
    def _draw(self, func: Any, args: tuple, kwargs: dict, part: Share) -> Any:
        """Returns a random operation's result for the samples `part`, unchanged if it is for none; may refuse."""
        # every rank draws one process's numbers; if positions are cut each has its share of them
        if self.alike:
            with draws_of_one_process():
                return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        sized = {name for name in ("size", "shape") if name in names}
        named, self._op = _named_arguments(func, args, kwargs), str(func)
        found_part = self._whose(part, _shape_of(named, sized), args)
        # of another loader's samples, or of no batch at all
        if found_part is None:
            return func(*args, **kwargs)
        rows, total = found_part.count, found_part.total
        if rows == total:  # positions alone are cut
            with draws_of_one_process():
                return func(*args, **kwargs)
        # a permutation of this rank's own samples would mix other samples than one process does
        if func.overloadpacket is torch.ops.aten.randperm and named["n"] == rows:
            raise RefusedPlan(_MIXES)
        # dropout of 0: nothing is drawn
        if _is_off(func, named):
            return func(*args, **kwargs)
        return self._drawn_for_all(func, args, kwargs, found_part, sized)

    def _drawn_for_all(self, func: Any, args: tuple, kwargs: dict, part: Share, sized: set[str]) -> Any:
        """Returns this rank's samples of what an op draws for all; `RefusedPlan` if no dim is known to count them.

        sized  which of its arguments ("size", "shape") give a shape
        """
        rows, low, total = part.count, part.start, part.total
        names = [argument.name for argument in func._schema.arguments]
        named = _named_arguments(func, args, kwargs)
        of_classes = named.get("num_samples") == rows and named["self"].dim() == 1  # one for each sample
        # -1: running the model on fewer samples has shown that these numbers belong to none
        if of_classes and self._seen_at((rows,), rows) != -1:
            with draws_of_one_process():
                return _rows_of(func(**named | {"num_samples": total}), 0, part)
        counted: list[int] = []  # the dims that count samples

        def size(value: Any) -> Any:
            at = self._place(value, rows) if isinstance(value, list | tuple) else None
            counted.extend(() if at is None else (at,))
            return value if at is None else [*value[:at], total, *value[at + 1 :]]

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            at = self._place(tensor.shape, rows)
            if at is None:
                return tensor
            counted.append(at)
            return _among(tensor, at, low, total)

        wide_args = [size(value) if name in sized else value for name, value in zip(names, args, strict=False)]
        wide_args, wide_kwargs = tree_map_only(torch.Tensor, whole, (wide_args, dict(kwargs)))
        if not counted:
            # inside the model an unknown shape may hold samples in a dim that is not recognised; one number holds none
            if self.inside and not _is_scalar(named, sized) and self._seen_at(_shape_of(named, sized), rows) != -1:
                raise RefusedPlan(self._unknown_rows(func, named, sized, rows))
            return func(*args, **kwargs)
        if asks_by_values(func):
            raise RefusedPlan(_BY_VALUES.format(str(func.overloadpacket).removeprefix("aten.")))
        with draws_of_one_process():
            output = func(*wide_args, **wide_kwargs)
        # drawn in place: this rank's rows go back into the script's tensor
        if func._schema.is_mutable:
            args[0].copy_(wide_args[0][_rows(counted[0], low, rows)])
            return args[0]
        return _rows_of(output, counted[0], part)

    def _place(self, shape: Any, rows: int) -> int | None:
        """Returns the dim of a random tensor of this shape that counts this rank's `rows` samples; None without one."""
        fits = [at for at, size in enumerate(shape) if size == rows]
        # what the look at the model saw is certain; -1 is no dim, so None
        seen = self._seen_at(tuple(shape), rows)
        if seen is not None:
            return seen if seen in fits else None
        # inside a model whose samples lie in other dims, the batch's dim tells nothing, and size alone must be
        # unambiguous
        known = [] if self.inside and not self._first else [at for at in (self.dim, 0) if at in fits]
        return known[0] if known else fits[0] if self.inside and len(fits) == 1 else None

    def _seen_at(self, shape: tuple[int, ...], rows: int) -> int | None:
        """Returns the dim of samples learnt for the op that runs and this shape (`BatchDims.of`), None outside."""
        return self._dims.of(self._op, shape, rows) if self.inside or _in_backward() else None

    def _whose(self, part: Share, shape: tuple[int, ...], args: tuple) -> Share | None:
        """Returns whose samples numbers of this shape are for, the main batch's or another loader's; None: nobody's."""
        if not self.inside:
            of_batch = self._of_batch(part, lambda count: self._place(shape, count) is not None, args)
            if of_batch is None:
                return None
            part = of_batch
        other = self._beside()
        fits = [one for one in (part, other) if one is not None and self._place(shape, one.count) is not None]
        return fits[0] if fits else part

    def _unknown_rows(self, func: Any, named: dict, sized: set[str], rows: int) -> str:
        """Returns the message of refusing a random tensor in which this rank's `rows` samples cannot be found."""
        if "dropout_state" in str(func):
            return (
                "a recurrent layer's dropout is drawn inside a kernel of cuDNN, where which numbers belong to which "
                "sample is not known: torch.backends.cudnn.enabled = False while it runs (one process then draws "
                'by torch as well), dropout=0, or prepare(..., randomness="fast")'
            )
        return (
            f"the model draws random numbers of shape {_shape_of(named, sized)} ({func}), of which no dim is sure to "
            f"count the {rows} samples of this rank, so which of one process's numbers belong to them is not "
            'known: draw with samples first, switch the dropout off, or use prepare(..., randomness="fast")'
        )


class _Operations(TorchDispatchMode):
    """Dispatch mode that sends each operation through `SampleDraws.operation`."""

    def __init__(self, draws: SampleDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._draws.operation(func, args, kwargs or {})


def _among(tensor: torch.Tensor, at: int, low: int, total: int) -> torch.Tensor:
    """Returns `tensor` with `total` samples along `at`: its own from index `low` on, copies of its first elsewhere.

    Its dims lie in memory in the order of the tensor's, in which numbers are drawn into it.
    """
    dims = list(range(tensor.dim()))
    order = sorted(dims, key=lambda dim: (-tensor.stride(dim), tensor.shape[dim] == 1))
    as_it_lies = order == dims or 0 in tensor.stride()  # expanded: in no order
    mine, at = (tensor, at) if as_it_lies else (tensor.permute(order), order.index(at))
    wide = mine[_rows(at, 0, 1)].expand(*mine.shape[:at], total, *mine.shape[at + 1 :]).clone()
    wide[_rows(at, low, mine.shape[at])] = mine
    return wide if as_it_lies else wide.permute([order.index(dim) for dim in dims])


def _shape_of(given: dict, sized: set[str]) -> tuple[int, ...]:
    """Returns the shape of what a random op draws: its argument in `sized`, else its first tensor's; () for neither."""
    return next((tuple(given.get(name) or ()) for name in sized), None) or next(
        (tuple(value.shape) for value in given.values() if isinstance(value, torch.Tensor)), ()
    )


def _named_arguments(func: Any, args: tuple, kwargs: dict) -> dict:
    """Returns {name: value} of the arguments that an operation is given."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def _is_off(func: Any, given: dict) -> bool:
    """Returns whether a random op draws nothing because its dropout is 0."""
    off = [given.get(one.name, one.default_value) for one in func._schema.arguments if one.name in _INERT]
    return bool(off) and all(isinstance(value, int | float) and value == 0 for value in off)


def _rows(dim: int, low: int, count: int) -> tuple[slice, ...]:
    """Returns an index (tuple of slices) of `count` elements from `low` on along `dim`."""
    return (*[slice(None)] * dim, slice(low, low + count))


def _rows_of(output: Any, dim: int, part: Share) -> Any:
    """Returns the output with copies of this rank's samples, in each tensor that has all samples along `dim`."""

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        has_all = tensor.dim() > dim and tensor.shape[dim] == part.total
        return tensor[_rows(dim, part.start, part.count)].clone() if has_all else tensor

    return tree_map_only(torch.Tensor, mine, output)


def _in_backward() -> bool:
    """Returns whether a backward runs, in which a block may be computed again."""
    return torch._C._current_graph_task_id() != -1


def _is_scalar(given: dict, sized: set[str]) -> bool:
    """Returns whether a single number is drawn, which is the same on every rank and in one process."""
    for name in sized:
        return list(given[name]) in ([], [1])
    tensor = next((value for value in given.values() if isinstance(value, torch.Tensor)), None)
    return tensor is not None and tensor.numel() == 1
