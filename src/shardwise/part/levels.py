"""`Distributed`, the base of `Part` and `Sum`; the axis for which a rule is applied, the outermost first.

An operation may get tensors that are distributed over several axes. It is answered for the outermost of them first, by
a rule that knows no other axis and treats a tensor that is distributed over inner axes alone as a plain one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from shardwise.comm import Axis


@dataclass(frozen=True)
class ViewOf:
    """The base of a view that is materialised as a copy: one index of a cut dim, which its owner alone has.

    of      the tensor that is viewed
    put     writes the whole copy back into this rank's share of `of`; None if it has no share, or they share memory
    again   recreates the view from the total of `of`; set if the view was taken while both sums were unreduced
    """

    of: Distributed
    put: Callable[[torch.Tensor], Any] | None = None
    again: Callable[[torch.Tensor], torch.Tensor] | None = None


class Distributed(torch.Tensor):
    """Base class of tensors of which each rank of `axis` holds a share (`Part`) or a summand (`Sum`)."""

    local: torch.Tensor  # what this rank holds: plain, or distributed over an axis further in
    axis: Axis
    source: ViewOf | None = None  # of a view that is a copy: its base, to which writes are copied back
    recipe: tuple[Any, int] | None = None  # of a table of positions: (`TableRecipe`, `_version` when it was made)
    summed: bool = False  # whether each rank holds a summand
    deals: bool = False  # whether a range (`arange`) as long as its cut dim is cut like it
    whole_values: torch.Tensor | None = None  # in a rehearsal with values: the unsharded tensor, if it is known

    observes_inside = True  # modes that count collectives look at what the rules do, not at the operation itself

    @property
    def stored(self) -> torch.Tensor:
        """Returns the local tensor, in whose memory this rank's values are."""
        return self.local

    def settled(self) -> torch.Tensor:
        """Returns a part itself, of a sum its total over ranks. Collective."""
        return self

    def settled_local(self) -> torch.Tensor:
        """Returns this rank's share or summand, plain or distributed over an axis further in."""
        return self.local

    def like(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a tensor over the same axis with this `local`, for a part its share, for a sum its summand."""
        raise NotImplementedError


def has_cut_positions(tensor: Any) -> bool:
    """Whether an axis of positions cuts a tensor. Reduces no sum, since ranks may ask at different times."""
    while isinstance(tensor, Distributed):
        if tensor.axis.positions:
            return True
        tensor = tensor.stored
    return False


_ANSWERS: list[Callable[[Any, tuple, dict], Any]] = []


def answers_operations(answer: Callable[[Any, tuple, dict], Any]) -> Callable[[Any, tuple, dict], Any]:
    """Registers `answer` for every operation on distributed tensors (`dispatch.answer`), and returns it."""
    _ANSWERS.append(answer)
    return answer


def answered(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns an operation's result on distributed tensors, by the registered function."""
    return _ANSWERS[0](func, args, kwargs)


def written_back(tensor: Distributed) -> None:
    """Copies a written view that is a copy back into its base (`source`), and so on if that is such a view too."""
    while tensor.source is not None:
        if tensor.source.put is not None:
            tensor.source.put(tensor.settled())
        tensor = tensor.source.of  # which may be a view itself


class _State(threading.local):
    """The axis whose rule runs in this thread; thread-local, since backward may run in threads of its own."""

    depth: int | None = None  # `Axis.depth`; None: no rule runs


_STATE = _State()


def here(tensor: Distributed) -> bool:
    """Whether a tensor is distributed over the axis of the running rule; outside of rules, always True."""
    return _STATE.depth is None or tensor.axis.depth == _STATE.depth


_depth = attrgetter("axis.depth")


class answering:
    """Context in which rules are applied for the outermost axis over which one of `tensors` is distributed."""

    __slots__ = ("before", "depth")

    def __init__(self, tensors: Iterable[Distributed]):
        self.depth = min(map(_depth, tensors))

    def __enter__(self) -> None:
        self.before, _STATE.depth = _STATE.depth, self.depth

    def __exit__(self, *error: object) -> None:
        _STATE.depth = self.before
