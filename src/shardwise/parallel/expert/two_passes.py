"""Run a mixture whose experts are modules in a list, each expert on the rank of `ep` that holds it.

Such a module routes tokens itself; its forward calls one expert after another, each on rows that it chose. All ranks'
rows must be known before any are sent, and results before the forward goes on, so the forward runs twice:

    first     an expert returns zeros; the rows that it was given are recorded, with their autograd graph
    between   rows travel to the ranks that hold their experts, are computed there, and results travel back
    second    an expert returns its results, and the forward goes on with them

Backward: graph of the second forward -> results -> experts, on their owners -> rows -> graph of the first forward.
This is correct if no expert's rows depend on another expert's result, which a trial shows (`listed`).

The module's own random numbers (a router's noise) are the same in both forwards. An expert draws random numbers on the
rank that holds it.

An expert that no rank calls does not run, and its weights have no gradient, as in one process.

What this does not do: save the module's other parts (a router, a shared expert) from running twice in forward; in
backward they run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm import Axis, gather_rows
from shardwise.device import generators_now
from shardwise.errors import RunError
from shardwise.host import put, read, require
from shardwise.parallel.expert.exchange import exchanged
from shardwise.parallel.expert.expert_tensor import ReadOtherwise
from shardwise.part import whole
from shardwise.python_seeds import python_kept
from shardwise.trace.double import KeepDouble
from shardwise.trace.leaves import tensors_in
from shardwise.trace.module_state import ModuleState, kept_in

Key = int | str  # a position among a call's arguments, or a keyword
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MOST_DIMS = 4  # of a row that is sent
_FORM = 2 + _MOST_DIMS  # numbers in a form, by which ranks describe rows to each other; see `_form`


@dataclass
class RowsAsked:
    """A recorded call of the expert with index `expert`, on `tensors` (n, ...) with one n."""

    expert: int
    tensors: list[torch.Tensor]

    @property
    def rows(self) -> int:
        """The number n of rows."""
        return self.tensors[0].shape[0]


class ListedExperts:
    """The experts of one mixture, in a list of modules; runs them for all ranks of `axis`.

    path     of the mixture, for messages
    experts  all modules; this rank holds the weights of `here` of them from index `first` on, others' are empty
    keys     the arguments in which an expert gets its rows
    draws    whether experts use torch's random numbers
    count    number of experts on all ranks
    """

    def __init__(
        self, path: str, experts: Sequence[nn.Module], keys: tuple[Key, ...], axis: Axis, *, draws: bool = False
    ):
        self.path, self.experts, self.keys, self.axis, self.draws = path, experts, keys, axis, draws
        self.count = len(experts)
        self._divide()
        self._forms: dict[Any, tuple[int, ...]] = {}  # (forms of rows, autocast) -> form of the result
        self._own: dict[int, Callable[..., Any] | None] = {}  # expert -> its instance's forward while it is replaced
        self._switches: tuple | None = None  # `switches_now` when the mixture began
        self._changing: list[tuple[dict[str, Any], str]] = []  # (table, key) of state that the mixture's forward writes

    def _divide(self) -> None:
        """Sets `here`, the number of experts that this rank holds, and `first`, the index of the first of them."""
        self.here = self.count // self.axis.size
        self.first = self.axis.index * self.here

    def run(self, child: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns the result of `forward(*args, **kwargs)`, the mixture's own, which runs twice. Collective.

        child   the mixture
        Raises `RunError` if experts are called differently than before step one, or the two forwards differ.
        """
        as_before = generators_now(), python_kept()
        asked = self.asked(child, forward, args, kwargs)
        results, beside = self._computed(asked, (args, kwargs))
        behind_experts = generators_now() if self.draws else None
        for put_back in as_before:
            put_back()
        replies = iter(zip(asked, results, strict=True))
        with self._answering(lambda expert, a, k: self._replied(replies, expert, a, k)) as finished:
            made = finished(forward(*args, **kwargs))
        if next(replies, None) is not None:
            raise self._differs()
        # else the random numbers that follow would repeat those of the experts
        if behind_experts is not None:
            behind_experts()
        return tied(made, beside)

    # --- the two forwards

    def asked(self, child: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> list[RowsAsked]:
        """Runs the mixture's first forward; returns the calls of experts that it makes. Its state is restored."""
        asked: list[RowsAsked] = []
        self._switches = switches_now(self._device())
        # selective recompute counts operations, and what is copied here may differ between its two forwards
        with _disable_current_modes():
            before = ModuleState(child, only=self._changing or _own_state(child, self.experts))
        with self._answering(lambda expert, a, k: self._noted(asked, expert, a, k)) as finished:
            finished(forward(*args, **kwargs))
        # the first run shows which of all attributes are written, so that later runs save only these
        self._changing = self._changing or [*before.changed(), *_buffers(child, self.experts)]
        with _disable_current_modes():
            before.restore()
        return asked

    @contextmanager
    def _answering(self, answer: Callable[[int, tuple, dict], Any]) -> Iterator[Callable[[Any], Any]]:
        """Context in which expert n's forward returns `answer(n, args, kwargs)`; yields a function for the result."""
        with ExitStack() as below:
            for number, expert in enumerate(self.experts):
                answered = lambda *args, number=number, **kwargs: answer(number, args, kwargs)  # noqa: E731
                self._own[number] = below.enter_context(_with_forward(expert, answered))
            yield lambda made: made

    def _noted(self, asked: list[RowsAsked], expert: int, args: tuple, kwargs: dict) -> torch.Tensor:
        """Records an expert's call in `asked`; returns zeros in the shape and dtype of its result.

        Raises `RunError` if it is called with other arguments than rows, or under other switches than the mixture.
        """
        tensors = rows_of(self.keys, args, kwargs)
        if self._switches not in (None, switches_now(self._device())):
            told = f"ep={self.axis.size}: the experts of '{self.path}' {OWN_SWITCHES}; use ep=1"
            raise RunError(told) from ReadOtherwise(f"its experts {OWN_SWITCHES}")
        if tensors is None:
            raise RunError(
                f"the experts of '{self.path}' are called with other arguments than at the look before the first step: "
                "under ep each is called with its rows (n, ...) alone; use ep=1"
            )
        asked.append(RowsAsked(expert, [whole(tensor) for tensor in tensors]))  # under tp they may be sharded
        _, dims, *sizes = self._form_of_result(asked[-1].tensors)
        return tensors[0].new_zeros((asked[-1].rows, *sizes[:dims]), dtype=self._result_dtype(asked[-1].tensors))

    def _replied(self, replies: Iterator[Any], expert: int, args: tuple, kwargs: dict) -> torch.Tensor:
        """Returns the result for an expert's call in the second forward, from `replies`, pairs (`RowsAsked`, result).

        Raises `RunError` if the call is not the one of the first forward.
        """
        call, result = next(replies, (None, None))
        tensors = rows_of(self.keys, args, kwargs) or []
        if call is None or call.expert != expert or [t.shape for t in tensors] != [t.shape for t in call.tensors]:
            raise self._differs()
        # values are compared too, since results are of the first forward's rows, and the trial may have missed a
        # random operation that makes the second's rows differ
        for first, second in zip(call.tensors, tensors, strict=True):
            require(_alike(first, whole(second)), self._differs)
        return result

    def _differs(self) -> RunError:
        """Returns the error for two forwards that differ."""
        return RunError(
            f"ep={self.axis.size}: '{self.path}' gives its experts other rows when it runs again: their rows hang on "
            "what another expert gave, on chance, or on what a forward leaves behind; use ep=1"
        )

    # --- between them

    def _computed(self, asked: list[RowsAsked], inputs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Exchanges rows and runs this rank's experts, between the two forwards. Collective.

        Returns ([result of each call in `asked`], [empty tensors to which the mixture's result must be `tied`]).
        inputs   the mixture's arguments, to tie a rank that calls no expert into the graph
        """
        table, forms = self._told(asked)
        called = [expert for expert in range(self.count) if any(row[expert] for row in table)]
        if not called:
            return [], []
        order = sorted(range(len(asked)), key=lambda number: asked[number].expert)
        tensors = [
            torch.cat([asked[number].tensors[place] for number in order]) if asked else _none_of(form, inputs)
            for place, form in enumerate(forms[:-1])
        ]
        rows = [[max(count - 1, 0) for count in row] for row in table]
        sent = [sum(rows[self.axis.index][self._held_by(rank)]) for rank in range(self.axis.size)]
        here = slice(self.first, self.first + self.here)
        received = [sum(row[here]) for row in rows]
        arrived = exchanged(self.axis, sent, received, [_in_graph(tensor) for tensor in tensors])
        done = self._of_owned(arrived, [row[here] for row in rows], called, forms[-1])
        (back,) = exchanged(self.axis, received, sent, [done])
        # clones, since the mixture may write into a result in place, and views of one tensor would share its version
        pieces = [piece.clone() for piece in back.split([asked[number].rows for number in order])] if asked else []
        results = [piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda pair: pair[0])]
        return results, self._beside(called) + ([] if asked else [back])

    def _device(self) -> torch.device:
        """Returns the device of the experts' weights."""
        return next(self.experts[self.first].parameters()).device

    def _held_by(self, rank: int) -> slice:
        """Returns the indices of the experts that a rank of the axis holds."""
        return slice(rank * self.here, (rank + 1) * self.here)

    def _told(self, asked: list[RowsAsked]) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """Tells all ranks this rank's counts of rows. Collective.

        Returns ([for each rank a list with, for each expert, 0 if not called, else 1 + number of rows],
        [form of each tensor of rows, and last that of the result]).
        """
        counts = [0] * self.count
        for call in asked:
            counts[call.expert] = max(counts[call.expert], 1) + call.rows
        own = [_form(tensor) for tensor in asked[0].tensors] if asked else [(0,) * _FORM] * len(self.keys)
        own.append(self._form_of_result(asked[0].tensors) if asked else (0,) * _FORM)
        device = self._device()
        mine = [*counts, *itertools.chain.from_iterable(own)]
        table = self._of_all(mine, device) if self.axis.rehearsal is None else _rehearsed(mine, self.axis, len(counts))
        # a rank that calls no expert learns the forms from another rank
        told = next((row[len(counts) :] for row in table if any(row[len(counts) :])), [0] * _FORM * len(own))
        forms = [tuple(told[at : at + _FORM]) for at in range(0, len(told), _FORM)]
        return [row[: len(counts)] for row in table], forms

    def _of_all(self, mine: list[int], device: torch.device) -> list[list[int]]:
        """Returns the integers `mine` of each rank. Collective."""
        table = gather_rows(put(list(map(float, mine)), device), self.axis)
        return [[int(number) for number in row] for row in read(table, "rows for experts")]

    def _of_owned(
        self, arrived: list[torch.Tensor], rows: list[list[int]], called: list[int], form: tuple[int, ...]
    ) -> torch.Tensor:
        """Returns the results of this rank's experts for the rows that arrived, in the order of these rows.

        arrived  tensors of rows, sorted by sender and then by expert
        rows     for each sender, the number of rows for each expert of this rank
        called   indices of the experts that some rank calls;  form  of results, needed if none of these is here
        """
        pieces = [tensor.split([count for of_rank in rows for count in of_rank]) for tensor in arrived]
        results: dict[tuple[int, int], torch.Tensor] = {}
        for local in range(self.here):
            if self.first + local not in called:
                continue
            of_all = [torch.cat([piece[rank * self.here + local] for rank in range(len(rows))]) for piece in pieces]
            done = whole(self.call(self.first + local, of_all))
            for rank, piece in enumerate(done.split([of_rank[local] for of_rank in rows])):
                results[rank, local] = piece
        if not results:
            return tied(_empty(form, arrived[0]), arrived)  # so that backward reaches the same exchanges on every rank
        return torch.cat([results[key] for key in sorted(results)])

    def call(self, expert: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the result (n, ...) of an expert that this rank holds, for its tensors of rows (n, ...).

        expert   index among all
        """
        given = dict(zip(self.keys, tensors, strict=True))
        return self.experts[expert](
            *(given[key] for key in self.keys if isinstance(key, int)),
            **{key: value for key, value in given.items() if isinstance(key, str)},
        )

    def _beside(self, called: list[int]) -> list[torch.Tensor]:
        """Returns the (here empty) weights of other ranks' experts in `called`, which have gradients in one process."""
        elsewhere = [self.experts[expert] for expert in called if not 0 <= expert - self.first < self.here]
        return [param for expert in elsewhere for param in expert.parameters() if param.requires_grad]

    # --- what results look like

    def _form_of_result(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Returns the form of an expert's result for rows like `tensors`.

        An expert of this rank is run on one row of ones, once for each form of rows and state of autocast.
        """
        dtypes = torch.is_autocast_enabled(tensors[0].device.type), torch.get_autocast_dtype(tensors[0].device.type)
        key = (*map(_form, tensors), *dtypes)
        if key not in self._forms:
            # outside of modes, since selective recompute counts operations, and these run in one of its two forwards
            # only; but with `KeepDouble`, which decides about casts
            double = any(isinstance(mode, KeepDouble) for mode in _get_current_dispatch_mode_stack())
            kept = KeepDouble() if double else nullcontext()
            with self._own_forward(), torch.no_grad(), _disable_current_modes(), kept:
                ones = [tensor.detach().new_ones((1, *tensor.shape[1:])) for tensor in tensors]
                self._forms[key] = _form(whole(self.call(self.first, ones)))
        return self._forms[key]

    def _own_forward(self) -> AbstractContextManager[Any]:
        """Context in which this rank's first expert has its own forward, even inside `_answering`."""
        return _with_forward(self.experts[self.first], self._own[self.first])

    def _result_dtype(self, tensors: Sequence[torch.Tensor]) -> torch.dtype:
        """Returns the dtype of an expert's result for rows like `tensors`."""
        return _DTYPES[self._form_of_result(tensors)[0]]


# refused, since experts run between the two forwards, outside of contexts that the mixture enters
OWN_SWITCHES = "run under torch.autocast or torch.no_grad of the mixture's own, and their rank does not"


def switches_now(device: torch.device) -> tuple:
    """Returns (autocast's dtype on the device, False if autocast is off; whether gradients are enabled)."""
    on = torch.is_autocast_enabled(device.type)
    return on and torch.get_autocast_dtype(device.type), torch.is_grad_enabled()


def rows_of(keys: Sequence[Key], args: tuple, kwargs: dict) -> list[torch.Tensor] | None:
    """Returns the tensors (n, ...) of an expert's call; None unless its arguments are `keys`, all tensors of one n."""
    if [*range(len(args)), *kwargs] != list(keys):
        return None
    tensors = [*args, *kwargs.values()]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        return None
    return tensors if len({tensor.shape[0] for tensor in tensors}) == 1 else None


@contextmanager
def _with_forward(expert: nn.Module, forward: Callable[..., Any] | None) -> Iterator[Callable[..., Any] | None]:
    """Context in which the module's instance has this forward; None: its class's.

    Yields the instance's forward from before, or None.
    """
    before = vars(expert).pop("forward", None)
    if forward is not None:
        vars(expert)["forward"] = forward
    try:
        yield before
    finally:
        vars(expert).pop("forward", None)
        if before is not None:
            vars(expert)["forward"] = before


def _around(child: nn.Module, experts: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns a mixture's modules except those of its experts, which run once."""
    inside = {id(module) for expert in experts for module in expert.modules()}
    return [module for module in child.modules() if id(module) not in inside]


def _own_state(child: nn.Module, experts: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Returns (table, key) of each buffer and attribute that a mixture's forward may write, without its experts'."""
    return [place for module in _around(child, experts) for place in kept_in(module)]


def _buffers(child: nn.Module, experts: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Returns (table, key) of each buffer of a mixture, without its experts'."""
    return [(module._buffers, key) for module in _around(child, experts) for key in module._buffers]


@torch.no_grad()
def _alike(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns whether two tensors are equal up to rounding, as a bool tensor (); NaN counts as equal."""
    if not first.is_floating_point():
        return (first == second).all()
    apart = (first - second).abs() > torch.finfo(first.dtype).eps ** 0.5 * (first.abs() + 1)
    return ~apart.any()  # a NaN shows in the loss, with its own error


# --- rows as numbers


def _form(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the form of a tensor (n, ...), (index in `_DTYPES`, dims of a row, sizes of these padded with zeros).

    Raises `RunError` if such rows cannot be sent.
    """
    sizes = tensor.shape[1:]
    if tensor.dtype not in _DTYPES or len(sizes) > _MOST_DIMS:
        raise RunError(f"experts under ep are given rows of {tensor.dtype}, {tuple(sizes)} each, which are not sent")
    return (_DTYPES.index(tensor.dtype), len(sizes), *sizes, *[0] * (_MOST_DIMS - len(sizes)))


def _empty(form: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of 0 rows of this form, on the device of `like`."""
    code, dims, *sizes = form
    return like.new_empty((0, *sizes[:dims]), dtype=_DTYPES[code])


def _none_of(form: tuple[int, ...], inputs: Any) -> torch.Tensor:
    """Returns a tensor of 0 rows of this form, tied to a float tensor of `inputs`.

    Backward of the mixture's input then runs through the exchange also on a rank that calls no expert.
    """
    floats = [tensor for tensor in tensors_in(inputs) if tensor.is_floating_point()]
    empty = _empty(form, floats[0])
    return tied(empty, [floats[0]]) if empty.is_floating_point() else empty


def _in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a float tensor with `requires_grad` if gradients are enabled, as other ranks' may have; else `tensor`."""
    if torch.is_grad_enabled() and tensor.is_floating_point() and not tensor.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor


def _rehearsed(mine: list[int], axis: Axis, experts: int) -> list[list[int]]:
    """Returns, in a rehearsal, the integers of all ranks, which are `mine` with counts scaled by ranks' loads.

    experts   number of counts at the beginning of `mine`; forms follow
    """
    assert axis.rehearsal is not None
    axis.rehearsal.record("control", "all_gather", axis.name, 8 * len(mine) * axis.size, axis.size)
    loads = axis.rehearsal.loads or (1,) * axis.size
    own = loads[axis.index]
    counts = [[count and 1 + (2 * (count - 1) * load + own) // (2 * own) for count in mine[:experts]] for load in loads]
    return [[*row, *mine[experts:]] for row in counts]


# --- backward on ranks without rows


class _Tied(torch.autograd.Function):
    """Identity of the first tensor, whose backward gives the other tensors gradients of zeros."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Returns a view of `tensor`."""
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        """Returns the gradient for `tensor`, and zeros for each of `others`."""
        return (gradient, *(gradient.new_zeros(s, dtype=t, device=d) for s, t, d in ctx.others))


def tied(made: Any, others: Sequence[torch.Tensor]) -> Any:
    """Returns a module's result `made`, whose first float tensor depends on `others` in autograd's graph.

    Backward then reaches `others`, with zeros, also where they had no part in the result.
    """
    leaves, spec = tree_flatten(made)
    place = next((n for n, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
    if place is None or not others or not torch.is_grad_enabled():
        return made
    leaves[place] = _Tied.apply(leaves[place], *others)
    return tree_unflatten(leaves, spec)
