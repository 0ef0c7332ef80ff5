"""Compute a script's loss again on its rank's samples over and over, as many as all ranks have. Called by additive.

    a rank's samples   s0 s1 s2 s3                     e[:4].mean() asks something of all of them
    as many as all     s0 s1 s2 s3 s0 s1 s2 s3         and here of the first four alone: refused

One and the same sample is asked the same wherever it stands and however many there are. So what takes a fixed number of
samples (slices, `topk`), or goes by their places (running sums, weights by position, a batch cut in two), shows where a
rank has just as many of them as it takes.

An operation that is given a number of samples (`view(len(x), -1)`) is given the number of all. Where the script's text
does not tell a count from a constant (`stated`), that is taken by which what the operation gives repeats itself too.

What this does not do: repeat a loop over samples, whose operations are as many as they are. It is left unlooked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.device import on_host
from shardwise.part.levels import Distributed
from shardwise.scripts.tape import SELECTS, LossTape, Operation, changed_numbers, numbers_in, tensors_in


@dataclass
class Repeated:
    """`samples` of a rank, over and over to `total`. `views`: of several rows of each, the views lie one after another.
    `assumed` tells whether a number was taken for a count that the script's text does not show as one; `guesses`
    whether those that nothing tells are; `bent` whether one grew otherwise than the samples, as min(len(x), 6)."""

    tape: LossTape
    samples: int
    total: int
    views: bool = True
    guesses: bool = False
    assumed: bool = field(default=False, init=False)
    bent: bool = field(default=False, init=False)
    unrolled: set[tuple[int, str]] = field(default_factory=set, init=False)

    def of(self, tensor: torch.Tensor, at: int) -> torch.Tensor:
        """Returns a tensor with its samples along dim `at` repeated."""
        views = tensor.shape[at] // self.samples
        if views > 1 and self.views:
            rows = torch.arange(self.total, device=tensor.device) % self.samples
            return tensor.unflatten(at, (views, self.samples)).index_select(at + 1, rows).flatten(at, at + 1)
        size = tensor.shape[at] * self.total // self.samples
        return tensor.index_select(at, torch.arange(size, device=tensor.device) % tensor.shape[at])

    def again(self, wanted: list[Any], values: dict[int, torch.Tensor]) -> list[Any]:
        """Returns `wanted`, computed again of these repeated tensors; on the CPU, since other numbers may be wrong."""
        if on_host(self.tape.device) or any(isinstance(one, Distributed | DTensor) for one in values.values()):
            return self.tape.again(wanted, values, self._called)
        tape, asked, given = self.tape.on_host(wanted, values)
        found = tape.again(asked, given, self._called)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.tape.device), found)

    def _called(self, one: Operation, call: tuple[tuple, dict], touched: bool) -> Any:
        """What an operation gives now."""
        if one.drawn:
            if any(tensor.requires_grad for tensor in tensors_in(one.output)):
                raise RuntimeError("what was drawn has a gradient")
            return tree_map_only(torch.Tensor, self._drawn, one.output)
        if not (touched or one.stated.may_be_of(self.samples) or one.stated.unknown):
            return one.output
        if touched and getattr(one.function, "__name__", "") in SELECTS:
            self._note_selected(one)
        counts = self._counts(one, call)
        if not counts:
            return one.function(*call[0], **call[1]) if touched else one.output
        sure = one.stated.may_be_of(self.samples) or self.guesses
        if not (touched or sure):
            return one.output
        if one.before is not None or not touched:
            return self._given_more(one, call, counts if sure else [])
        return self._tried(one, call, counts)

    def _counts(self, one: Operation, call: tuple[tuple, dict]) -> list[int]:
        """Which of a call's numbers may be counts, by their places."""
        written = one.stated.written
        return [
            at
            for at, number in enumerate(numbers_in(call))
            if self.tape.may_count(number)
            and abs(float(number)) not in written
            and (one.stated.may_be_of(self.samples) or one.stated.unknown)
        ]

    def _tried(self, one: Operation, call: tuple[tuple, dict], counts: list[int]) -> Any:
        """By the first choice of counts that repeats what the operation gave; by a sure one if none does."""
        grown = any(
            self._is_longer(old, new)
            for old, new in zip(tensors_in((one.args, one.kwargs)), tensors_in(call), strict=False)
        )
        ways: list[list[int]] = [[at] for at in counts] + ([counts] if len(counts) > 1 else [])
        kept: Any = None
        if not one.stated.may_be_of(self.samples):
            ways = [[], *ways]
        for way in ways if grown else []:
            try:
                found = self._given_more(one, call, way)
            except (RuntimeError, IndexError, ValueError, TypeError):
                continue
            kept = found if not way else kept
            if self._repeats(found, one.output):
                self.assumed |= bool(way) and not one.stated.may_be_of(self.samples)
                return found
        sure = one.stated.may_be_of(self.samples) or self.guesses
        return self._given_more(one, call, counts if sure else [])

    def _given_more(self, one: Operation, call: tuple[tuple, dict], counts: list[int]) -> Any:
        """Returns the operation's result with the numbers at these places scaled to all ranks' samples."""
        at = -1

        def changed(number: Any) -> Any:
            nonlocal at
            at += 1
            if at not in counts:
                return number
            more = self._scaled(number)
            stated = one.stated.amounts.get(number)
            found = stated(self.total / self.samples) if stated is not None else more
            self.bent |= found != more
            return found

        args, kwargs = changed_numbers(call, changed)
        return one.function(*args, **kwargs)

    def _scaled(self, number: float) -> float:
        if abs(number) < 1:
            return number * self.samples / self.total
        more = number * self.total / self.samples
        return round(more) if type(number) is int else more

    def _drawn(self, tensor: torch.Tensor) -> torch.Tensor:
        fits = tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % self.samples == 0
        return self.of(tensor, 0) if fits else tensor

    def _is_longer(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        return old.shape != new.shape

    def _repeats(self, found: Any, before: Any) -> bool:
        """Whether what is found is what was before, over and over."""
        news, olds = tree_flatten(found)[0], tree_flatten(before)[0]
        return len(news) == len(olds) and all(
            self.is_repetition(new, old) for new, old in zip(news, olds, strict=True) if isinstance(old, torch.Tensor)
        )

    def is_repetition(self, new: Any, old: torch.Tensor) -> bool:
        """Returns whether `new` is `old` over and over along some dim."""
        if not isinstance(new, torch.Tensor) or new.dim() != old.dim():
            return False
        for at in range(old.dim()):
            longer = new.shape[at] * self.samples == old.shape[at] * self.total
            if longer and new.shape[:at] == old.shape[:at] and new.shape[at + 1 :] == old.shape[at + 1 :]:
                ways = (False, True) if old.shape[at] > self.samples and old.shape[at] % self.samples == 0 else (False,)
                return any(self._same(new, old, at, views) for views in ways)
        return False

    def _same(self, new: torch.Tensor, old: torch.Tensor, at: int, views: bool) -> bool:
        way = Repeated(self.tape, self.samples, self.total, views)
        return bool(alike(new.detach(), way.of(old.detach(), at)).all())

    def _note_selected(self, one: Operation) -> None:
        numbers = numbers_in((one.args[1:], one.kwargs))
        if isinstance(one.args[0], torch.Tensor) and numbers and one.stated.unknown:
            self.unrolled.add((id(one.args[0]), repr(numbers)))

    @property
    def is_unrolled(self) -> bool:
        """Returns whether the same tensor was asked for several places by number, as a loop over samples does."""
        asked = [tensor for tensor, _ in self.unrolled]
        return len(set(asked)) < len(asked)


def alike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which elements are the same, but for rounding."""
    if not (one.numel() and (one.dtype.is_floating_point or one.dtype.is_complex)):
        return one == other
    bar = {torch.float64: 1e-9, torch.float32: 1e-4}.get(one.dtype, 5e-2)
    return torch.isclose(other, one, rtol=bar, atol=bar * float(one.abs().max()), equal_nan=True)


@dataclass(frozen=True)
class Asked:
    """What a loss asks of samples' outputs, one row each: `apart` is how much it changes with more of them, beside one
    factor."""

    apart: float
    factor: float


def asked_of(way: Repeated, loss: Any, values: dict[int, torch.Tensor], places: dict[int, int],
             reached: list[torch.Tensor]) -> Asked:  # fmt: skip
    """Returns how the gradients at `reached` change where there are `way.total` samples.

    values  by id, what the loss is computed again from; `places`: along which dim each has its samples
    """
    once = Repeated(way.tape, way.samples, way.samples, way.views)
    found = []
    for each in (once, way):
        given = {key: each.of(value, places[key]).detach().requires_grad_(value.requires_grad)
                 for key, value in values.items()}  # fmt: skip
        (again,) = each.again([loss], given)
        inputs = [given[id(one)] for one in reached]
        gradients = torch.autograd.grad(again, inputs, allow_unused=True)
        found.append(
            [torch.zeros_like(one) if got is None else got for one, got in zip(inputs, gradients, strict=True)]
        )
    befores = [way.of(one, places[id(at)]) for one, at in zip(found[0], reached, strict=True)]
    before, now = (torch.cat([one.reshape(-1).double() for one in each]) for each in (befores, found[1]))
    if not (bool(before.isfinite().all()) and bool(now.isfinite().all())):
        raise RuntimeError("a gradient is not finite, whatever the samples")
    square, most = float(before.dot(before)), float(before.abs().max())
    factor = float(now.dot(before)) / square if square else 0.0
    if not factor:
        return Asked(float("inf") if bool(now.any()) or square else 0.0, factor)
    return Asked(float((now / factor - before).abs().max()) / most, factor)


Ways = Callable[[bool, bool], Repeated]


def ways_of(tape: LossTape, samples: int, total: int, several: bool) -> list[Repeated]:
    """Returns the ways to repeat them, the surest first; `several`: some tensors have several rows of each sample."""
    views = (True, False) if several else (True,)
    return [Repeated(tape, samples, total, by, guess) for guess in (False, True) for by in views]
