"""Refuse or allow what a script does to tensors in `optimizer.param_groups`, which are only this rank's pieces.

    fast = group["params"][0]         an optimizer around another one (slow weights, an average, noise)
    slow += 0.5 * (fast.data - slow)  element by element: right on a piece
    fast.data.copy_(slow)             told: the weights are published again before anybody reads them
    fast.grad.norm()                  of the whole tensor, over ranks (`reductions`); what else hangs on all elements,
                                      and any such number of shares under tp, is refused

While the script's own code runs, groups list a piece of every parameter, so that ranks come to the same calls; the
optimizer itself, and the engine, find those with elements.

What this does not do: let a rank alone change them; every rank's script does the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import RefusedPlan
from shardwise.scripts.guard import Gate, reads_values
from shardwise.scripts.pieces import writes_into
from shardwise.scripts.reductions import answered
from shardwise.scripts.saying import names_line
from shardwise.scripts.seen_state import SeenState
from shardwise.trace.drawn import is_random
from shardwise.trace.leaves import replaced, tensors_in

_LIKE = {"clone", "zeros_like", "ones_like", "empty_like", "full_like", "to", "cpu", "double", "float", "contiguous",
         "zero_", "fill_", "copy_", "detach", "detach_", "numel", "nelement", "requires_grad_"}  # fmt: skip
_PIECE = (
    "{} of a tensor in optimizer.param_groups, which holds this rank's pieces of the weights: what hangs on more than "
    "each element itself (a norm, a mean) would be that of a piece: read model.parameters(), clip by "
    "prepared.clip_grad_norm_(max_norm), or use dp_replicate"
)


@cache
def answered_by_elements(name: str) -> bool:
    """Whether an operation of this name gives each element by the same element of what it is given, drawing nothing."""
    packet = getattr(torch.ops.aten, name.strip("_") if name.startswith("__") else name, None)
    packet = packet or getattr(torch.ops.aten, name.strip("_").removeprefix("i"), None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    draws = any(is_random(each) for each in overloads)
    return name in ("zero_", "fill_") or (not draws and any(torch.Tag.pointwise in each.tags for each in overloads))


class OwnPieces:
    """The pieces that a prepared optimizer holds, while the script's own code runs."""

    def __init__(
        self, gate: Gate, changed: Callable[[], None], gather: Callable[[Sequence[float]], list[list[float]]] | None,
        reached: Callable[[nn.Parameter], bool],
    ) -> None:  # fmt: skip
        """
        changed  called when the script writes into a piece
        gather   numbers of the ranks whose pieces make up a whole tensor; None: what they hold does not
        reached  whether a piece without elements is one of a parameter that has a gradient in this step
        """
        self._gate, self._changed = gate, weakref.WeakMethod(changed)
        self._gather, self._reached = gather, reached
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []  # and what the optimizer itself finds there
        self._kind = _kind_of(weakref.ref(self))
        self._standing: list[tuple[Optimizer, nn.Parameter]] = []  # pieces without elements in an optimizer's state
        self._masters: list[nn.Parameter] = []
        self._whole: set[int] = set()  # of those that are whole weights, beside narrower ones in the model
        self.states: SeenState | None = None  # takes the place of the optimizer's, where it holds pieces

    def watch(
        self, optimizer: Optimizer, model: nn.Module, whole: Collection[nn.Parameter],
        listed: Sequence[list[nn.Parameter]] = (),
    ) -> None:  # fmt: skip
        """Look at what is done to the pieces from here on; the model's own parameters are looked at elsewhere.

        whole   those that are no pieces: only writing into them is noticed
        listed  what groups have while they are looked at; none: what they have anyway
        """
        for group, pieces in zip(optimizer.param_groups, listed, strict=False):
            self._groups.append((group, group["params"]))
            self._stand_in(optimizer, [piece for piece in pieces if not piece.numel()], group["params"])
            group["params"] = pieces
        self._whole = {id(master) for master in whole}
        own = {id(param) for param in model.parameters()}
        held = [param for group in optimizer.param_groups for param in group["params"]]
        self._masters = [param for param in held if id(param) not in own and type(param) is nn.Parameter]
        for master in self._masters:
            master.__class__ = self._kind

    def _stand_in(self, optimizer: Optimizer, without: list[nn.Parameter], held: list[nn.Parameter]) -> None:
        """What the optimizer keeps of pieces without elements, by what it keeps of others: tensors without elements."""
        like = next((one for one in held if one.numel() and one in optimizer.state), None)
        if like is None:
            return
        for piece in without:
            optimizer.state[piece] = {
                key: value.new_empty(0) if isinstance(value, torch.Tensor) and value.shape == like.shape else value
                for key, value in optimizer.state[like].items()
            }
            self._standing.append((optimizer, piece))

    def leave(self) -> None:
        """Stop watching the pieces while the optimizer itself runs, to which they are plain parameters."""
        states, self.states = self.states, None
        for group, pieces in self._groups:
            group["params"] = pieces
        for optimizer, piece in self._standing:
            getattr(optimizer.state, "raw", optimizer.state).pop(piece, None)
        self._groups, self._standing = [], []
        for master in self._masters:
            master.__class__ = nn.Parameter
        self._masters = []
        if states is not None:
            states.leave()

    def seen_in_state(self, tensor: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        """Returns what the optimizer keeps of a piece as a tensor that is watched in the script's hands."""
        watched = tensor.shape == piece.shape and any(piece is one for one in self._masters)
        return self.seen(tensor, id(piece) in self._whole) if watched else tensor

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `func` of this rank's pieces, where that is what it is of the whole; raises `RefusedPlan` else."""
        name = getattr(func, "__name__", "")
        if self._gate.is_open or not reads_values(func):
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs), _Kept)
        whole = all(one.whole if isinstance(one, _PieceData) else id(one) in self._whole for one in given)
        data = name in ("__get__", "__set__")
        each = name.removeprefix("_foreach_")
        if not (whole or data or self._gather is None):
            number = answered(name, args, kwargs, self._gather)
            if number is not NotImplemented:
                return number
        if not (whole or data or each in _LIKE or answered_by_elements(each)):
            names_line(_refuse)(name)
        target = kwargs["out"] if "out" in kwargs else (*args, *kwargs.values())[0]
        if (writes_into(name) or "out" in kwargs or name == "__set__") and tensors_in(target, _Kept):
            changed = self._changed()
            if changed is not None:
                changed()
        made = func(*args, **kwargs)
        return replaced(torch.Tensor, lambda tensor: self.seen(tensor, whole), made)

    def seen(self, tensor: torch.Tensor, whole: bool) -> torch.Tensor:
        """Returns what was made of pieces as a tensor that is watched in the script's hands."""
        if type(tensor) is not torch.Tensor:
            return tensor
        seen = tensor.as_subclass(_PieceData)
        seen.pieces, seen.whole = weakref.ref(self), whole
        return seen


class _Kept:
    """A piece, or what was made of one."""


class _PieceData(torch.Tensor, _Kept):
    pieces: weakref.ref[OwnPieces]
    whole: bool

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        pieces = next((one.pieces() for one in tensors_in((args, kwargs or {}), _PieceData)), None)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) if pieces is None else pieces.answer(func, args, kwargs or {})


def _kind_of(known: weakref.ref[OwnPieces]) -> type[nn.Parameter]:
    own = torch.Tensor.grad

    class Piece(nn.Parameter, _Kept):
        @property
        def grad(self) -> torch.Tensor | None:
            pieces, found = known(), own.__get__(self)
            if found is None and pieces is not None and not self.numel() and pieces._reached(self):
                found = torch.empty_like(self).detach()
            if pieces is None or found is None or pieces._gate.is_open:
                return found
            return pieces.seen(found, id(self) in pieces._whole)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            own.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            own.__delete__(self)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            pieces = known()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {})) if pieces is None else pieces.answer(func, args, kwargs or {})

    return Piece


def _refuse(name: str) -> None:
    raise RefusedPlan(_PIECE.format(name))


class Stale:
    """A model's parameters, which are to be brought up to the optimizer's pieces before anybody reads them."""

    def __init__(self, model: nn.Module, gate: Gate, settle: Callable[[], None]) -> None:
        self._gate, self._settle = gate, weakref.WeakMethod(settle)
        self._held = [(param, type(param)) for param in model.parameters()]
        kinds = {kind: self._kind(kind) for _, kind in self._held}
        for param, kind in self._held:
            param.__class__ = kinds[kind]

    def end(self) -> None:
        """Note that the model's parameters are up to date again."""
        for param, kind in self._held:
            param.__class__ = kind
        self._held = []

    def _kind(self, kind: type) -> type:
        known = weakref.ref(self)

        class Behind(kind):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                stale = known()
                if stale is not None and not stale._gate.is_open and reads_values(func):
                    settle = stale._settle()
                    stale.end()
                    if settle is not None:
                        settle()
                    return func(*args, **(kwargs or {}))
                return super().__torch_function__(func, types, args, kwargs or {})

        return Behind
