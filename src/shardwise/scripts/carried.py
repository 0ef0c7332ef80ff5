"""Find what a model's forward computes from tensors and numbers that it kept in plain attributes from forwards before.

    self.center = 0.9 * self.center + 0.1 * h.detach().mean(0)      read and kept: nothing trained is made of it yet
    return self.head(h - self.center)                               enters what is trained, after however many steps

What was there when the forward began is followed through operations without gradients to the first that has one, and is
compared over ranks with what else enters the step's loss (`kept`). What is kept and only looked at (the last attention,
a running loss) is left alone, as are rows of samples (a recurrent state goes on with them). A number is known by its
value, once its attribute was seen to change.

What this does not do: see operations inside of compiled code, or tell rows of samples from a matrix of as many rows.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.scripts.outside import Outside, digest, has_memory, held_of, number_of
from shardwise.scripts.saying import is_called_by_engine, line_of_script
from shardwise.scripts.tape import tensors_in
from shardwise.trace.drawn import overwrites
from shardwise.trace.remembered import OWN_OF_TORCH, Place, leaves

_OFTEN = 4  # times that a place is looked at each time; then at every power of two


class Carried:
    """Follows one forward at a time, of a model in training."""

    def __init__(self, passages: tuple[str, ...]) -> None:
        """`passages`: files that stand between an operation and the code that calls it."""
        self._passages = (__file__, *passages)
        self._held: dict[int, tuple[torch.Tensor, Place]] = {}  # and what is made of it without a gradient
        self._numbers: dict[float, Place] = {}
        self._last: weakref.WeakKeyDictionary[nn.Module, dict[Place, list[float]]] = weakref.WeakKeyDictionary()
        self._moving: dict[Place, dict[str, Any]] = {}  # numbers that change, and the attributes that they are among
        self._times: Counter[tuple[Place, str]] = Counter()
        self._found: dict[tuple[Place, str], Outside] = {}

    def begin(self, model: nn.Module, known: Callable[[torch.Tensor], bool]) -> None:
        """A forward begins. `known`: what the script has made in this step is followed elsewhere."""
        self.end()
        numbers: dict[Place, list[float]] = {}
        for place, attributes, one in _attributes(model):
            if isinstance(one, float):
                numbers.setdefault(place, []).append(one)
                self._moving.setdefault(place, attributes) if self._has_moved(model, place, numbers) else None
            elif not (isinstance(one, nn.Parameter) or known(one)):
                self._held[id(one)] = (one, place)
        self._last[model] = numbers
        self._numbers = {one: place for place in self._moving for one in numbers.get(place, [])}

    def _has_moved(self, model: nn.Module, place: Place, numbers: dict[Place, list[float]]) -> bool:
        before = self._last.get(model, {}).get(place)
        return before is not None and before[: len(numbers[place])] != numbers[place]

    def end(self) -> frozenset[Outside]:
        """The forward is over; returns what entered operations with gradients from the forwards before."""
        found = frozenset(self._found.values())
        self._held, self._numbers, self._found = {}, {}, {}
        return found

    def see(self, func: Any, args: tuple, kwargs: dict, output: Any, rows: Callable[[tuple[int, ...]], bool]) -> None:
        """Follow one operation of the forward. `rows`: whether a shape may have a row for each sample."""
        if not (self._held or self._moving):
            return
        given, name = tensors_in((args, kwargs)), getattr(func, "__name__", "")
        if overwrites(name) and given and self._held.pop(id(given[0]), None) is not None:
            given = given[1:]  # what it held is gone
        carried = [self._held[id(one)] for one in given if id(one) in self._held]
        numbers = self._carried_numbers((*args, *kwargs.values())) if self._moving else []
        results = tensors_in(output) if carried or numbers else []
        for one in results:
            if not one.requires_grad:
                self._held[id(one)] = (one, carried[0][1] if carried else numbers[0][1])
        if any(one.requires_grad for one in results) and not is_called_by_engine(*self._passages):
            for tensor, place in carried:
                self._note_tensor(tensor, place, rows)
            for number, place in numbers:
                self._note(place, "a number", lambda number=number: number_of("", number))  # type: ignore[misc]

    def _carried_numbers(self, given: tuple) -> list[tuple[float, Place]]:
        floats = [one for one in given if isinstance(one, float)]
        if not floats:
            return []
        now = {one: place for place, held in self._moving.items() for one in leaves(held.get(place[1]))
               if isinstance(one, float)}  # fmt: skip
        known = self._numbers | now
        return [(one, known[one]) for one in floats if one in known]

    def _note_tensor(self, tensor: torch.Tensor, place: Place, rows: Callable[[tuple[int, ...]], bool]) -> None:
        held, shape = held_of(tensor), tuple(tensor.shape)
        if has_memory(held) and not (len(shape) > 1 and rows(shape)):
            self._note(place, f"a tensor of shape {shape}", lambda: Outside("", "", *digest(held)))

    def _note(self, place: Place, kind: str, look: Callable[[], Outside]) -> None:
        key = (place, kind)
        if key in self._found:
            return
        self._times[key] += 1
        if self._times[key] <= _OFTEN or self._times[key] & (self._times[key] - 1) == 0:
            seen, named = look(), ".".join(filter(None, place))
            self._found[key] = Outside(line_of_script(), f"'{named}' ({kind})", seen.check, seen.like, carried=True)


def _attributes(model: nn.Module) -> Iterator[tuple[Place, dict[str, Any], Any]]:
    """Each tensor and number that modules keep in plain attributes, and in buffers that are not saved."""
    for path, child in model.named_modules():
        attributes = vars(child)
        for key, value in attributes.items():
            if key not in OWN_OF_TORCH:
                for one in leaves(value):
                    yield (path, key), attributes, one
        for key in child._non_persistent_buffers_set:
            if child._buffers.get(key) is not None:
                yield (path, key), child._buffers, child._buffers[key]
