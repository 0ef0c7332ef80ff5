"""`Flow`: which tensor goes where in one forward (ops, submodules, parameters). Written by trace/recorded.

For each op it has the tensors that it reads and makes, and for each module call what goes in and comes out. From it
follows

    shared     what does not depend on any parameter (masks, positions, rotary tables): anybody can compute it again
    crossing   at a moment e: what depends on parameters, was made before e and is used after e

so that it can be told whether the forward can be cut where a module is entered: whatever crosses must be among the
module's arguments. No names are used, and no class is known.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from shardwise.trace.backwards import Taken, influenced
from shardwise.trace.own_calls import Spot
from shardwise.trace.without_gradient import Place


@dataclass
class Leaf:
    """One leaf of what a module returned: a tensor by its shape, or a plain value."""

    tensor: int | None  # its number
    value: Any = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass
class ModuleCall:
    """One call of a submodule; `enter` and `exit` count the ops and calls before them."""

    path: str
    place: int  # the n-th call of this module in the forward, from 0
    enter: int
    arguments: list[int | None]  # the number of each tensor leaf of (args, kwargs)
    shapes: list[tuple[int, ...] | None]
    exit: int = -1
    leaves: list[Leaf] = field(default_factory=list)
    spec: TreeSpec | None = None
    inside: list[ModuleCall] = field(default_factory=list)
    own: tuple[Spot, str] | None = None  # not the call of a module, but of a function of torch by its code: which
    moves: bool = False  # it changes a plain attribute of a module, by more than another tensor in it

    @property
    def label(self) -> str:
        """Returns this call's name in messages."""
        return f"'{self.path}'" if self.own is None else f"'{self.own[1]}' in '{self.path or 'the outermost forward'}'"

    def below(self) -> Iterator[ModuleCall]:
        """Yields every call inside this one, in the order they were entered."""
        for call in self.inside:
            yield call
            yield from call.below()


@dataclass
class FlowOp:
    """One op: the numbers of tensors that it reads and makes, and its cost (`numbered._cost`)."""

    time: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    cost: float
    draws: bool
    reads_value: bool
    leads: bool  # a gradient goes back through it
    inner: bool = False  # of the backward of a gradient that the forward takes: done where its forward was


@dataclass(frozen=True)
class OwnCall:
    """Where a forward's own code made a tensor: which of its calls of a function of torch, and a leaf of the result.

    whose   the call of the module whose forward it is
    place   of the call among that forward's own ones
    leaf    number of the tensor in what the function returned
    name    of the function, for messages
    """

    whose: ModuleCall
    place: Spot
    leaf: int
    name: str


Attribute = tuple[str, str]  # (path of the module, attribute)


@dataclass(frozen=True)
class Change:
    """A change of a plain attribute: its time, the call inside which it came, and the attribute."""

    time: int
    call: ModuleCall
    place: Attribute


@dataclass
class Flow:
    """One forward, written down: tensors are numbered in order, times count operations and calls."""

    root: ModuleCall
    ops: list[FlowOp]
    made: list[int]  # when each tensor was made; -1: it was there before
    depends: list[bool]  # on a parameter
    drawn: list[bool]  # depends on a random number, and on no parameter
    last_use: list[int]
    overwritten: dict[int, int]  # when a tensor was written to, and so got another number
    parameters: dict[int, int]  # number -> id of the parameter object
    buffers: dict[int, int]
    returned: list[int]  # the tensors of the output
    end: int
    without_gradient: frozenset[Place]  # calls that run where gradients are switched off
    own: dict[int, OwnCall]  # number -> where a forward's own code made it
    functions: list[ModuleCall]  # calls of torch's functions by forwards' own code, in order
    taken: list[Taken] = field(default_factory=list)  # gradients that the forward takes itself, in order
    backwards: list[int] = field(default_factory=list)  # when it runs one by other means (`loss.backward()`)
    sized: set[int] = field(default_factory=set)  # tensors of which the size depends on values that need parameters
    rewrites: list[dict[int, int]] = field(default_factory=list)  # of a write: tensors on one memory -> afterwards
    stateful: set[int] = field(default_factory=set)  # ids of parameters and buffers that are written by an operation
    later: list[Flow] = field(default_factory=list)  # forwards that find what this one left, where that matters
    carried: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a later one: number -> (which, number there)
    varies: frozenset[tuple[str, int]] = frozenset()  # calls (path, place) that chance leaves out of other forwards
    repeats: frozenset[str] = frozenset()  # modules called as often as there are samples, or as these say
    moved: bool = False  # the generators of Python's or numpy's module
    changes: list[Change] = field(default_factory=list)  # of plain attributes, where they matter
    _influenced: dict[int, set[int]] = field(default_factory=dict)

    @cached_property
    def reaching(self) -> set[int]:
        """Returns the numbers of the tensors from which the output, or a written parameter or buffer, is computed."""
        state = {n for n in (*self.parameters, *self.buffers) if self.made[n] >= 0}  # what a write has numbered anew
        numbers = {*self.returned, *state, *(n for taken in self.taken for n in taken.by)}
        for op in reversed(self.ops):
            # what Python reads decides what the forward does; a backward of its own reads whatever its forward kept
            if op.reads_value or op.inner or not numbers.isdisjoint(op.makes):
                numbers.update(op.reads)
        return numbers

    @cached_property
    def read_draws(self) -> list[int]:
        """Returns the times at which code reads a random value, by which it may branch."""
        read = (op for op in self.ops if op.reads_value)
        return [op.time for op in read if any(self.drawn[number] for number in op.reads)]

    def around(self, time: int) -> ModuleCall:
        """Returns the innermost call whose code runs at a time."""
        owner = self.root
        while inner := [call for call in owner.inside if call.enter <= time <= call.exit]:
            owner = inner[0]
        return owner

    @cached_property
    def order(self) -> list[tuple[str, int]]:
        """Returns (path, place) of every call, in the order they were entered."""
        return [(call.path, call.place) for call in self.calls()]

    @property
    def outline(self) -> list[tuple[float, int, int]]:
        """Returns (cost, how many tensors it reads, how many it makes) of each operation, to compare forwards by."""
        return [(op.cost, len(op.reads), len(op.makes)) for op in self.ops]

    def forget_what_is_left(self) -> None:
        """Recomputes `last_use` without operations whose results only stay in plain attributes of the module."""
        if self.taken or self.backwards:  # whose backward reads what any part of the forward kept
            return
        # else an operation whose result stays in an attribute of the module would keep it alive
        self.last_use = [-1] * len(self.made)
        for op in self.ops:
            # what Python reads decides what the forward does, so it counts as used
            if op.reads_value or not self.reaching.isdisjoint(op.makes):
                for number in op.reads:
                    self.last_use[number] = op.time
        for number in self.returned:
            self.last_use[number] = self.end

    def calls(self) -> Iterator[ModuleCall]:
        """Yields every call below the root, in the order they were entered."""
        return self.root.below()

    def crossings(self, *, functions: bool = False) -> Iterator[tuple[ModuleCall, list[int]]]:
        """Yields (call, numbers): tensors that depend on parameters, made before the call is entered and used after.

        functions  for calls of torch's functions by forwards' own code, in place of the calls of submodules
        """
        ahead = [
            (made, number)
            for number, made in enumerate(self.made)
            if self.depends[number] and number not in self.parameters and self.last_use[number] > made
        ]
        ahead.sort(reverse=True)
        alive: set[int] = set()
        for call in self.functions if functions else self.calls():
            # calls come in order of time, so each tensor enters `alive` once and leaves it once
            while ahead and ahead[-1][0] < call.enter:
                # ascending by the time at which each was made
                alive.add(ahead.pop()[1])
            alive = {number for number in alive if self.last_use[number] > call.enter}
            yield call, sorted(alive)

    def crossing_at(self, moment: int) -> list[int]:
        """Returns the numbers of the tensors that depend on parameters, made before a moment and used after it."""
        made = enumerate(self.made)
        of_forward = (n for n, when in made if self.depends[n] and when < moment and n not in self.parameters)
        return [number for number in of_forward if self.last_use[number] > moment]

    @cached_property
    def callers(self) -> list[list[ModuleCall]]:
        """Returns, for each operation, the calls inside which it runs, outermost first, without the root."""
        callers, calls, stack = list[list[ModuleCall]](), [*self.calls()], [self.root]
        at = 0
        for op in self.ops:
            # calls and operations both ascend in time, so both lists are walked once
            while at < len(calls) and calls[at].enter <= op.time:
                # a call that ended before this one began is no caller of it
                while stack[-1] is not self.root and stack[-1].exit < calls[at].enter:
                    stack.pop()
                stack.append(calls[at])
                at += 1
            # calls that ended since the last operation
            while stack[-1] is not self.root and stack[-1].exit < op.time:
                stack.pop()
            callers.append(stack[1:])
        return callers

    @cached_property
    def written_buffers(self) -> list[tuple[int, int]]:
        """Returns (time of the first use, of the last) of each buffer that an operation writes into."""
        spans: dict[int, tuple[int, int]] = {}
        for op in self.ops if not self.stateful.isdisjoint(self.buffers.values()) else ():
            # a write gives a buffer another number: one buffer may have several
            for state in {self.buffers[n] for n in (*op.reads, *op.makes) if n in self.buffers} & self.stateful:
                spans[state] = spans.get(state, (op.time, 0))[0], op.time
        return [*spans.values()]

    @cached_property
    def written_spans(self) -> list[tuple[int, int, int]]:
        """Returns (first use, last use, id) of each parameter or buffer into which values that depend on parameters go.

        All of it belongs into one stage: what one micro-batch leaves there, the next one finds.
        """
        states = self.parameters | self.buffers
        # a parameter that was given another number was written to
        written = {states[number] for number in states if self.made[number] >= 0 and self.depends[number]}
        spans: dict[int, tuple[int, int]] = {}
        # all uses of it, whatever number it had then
        for op in self.ops if written else ():
            for state in {states[n] for n in (*op.reads, *op.makes) if n in states} & written:
                spans[state] = spans.get(state, (op.time, 0))[0], op.time
        return [(first, last, state) for state, (first, last) in spans.items()]

    def written_around(self, moment: int) -> int | None:
        """Returns the id of a parameter or buffer that is written and is used before and after this time, or None."""
        return next((state for first, last, state in self.written_spans if first < moment <= last), None)

    def rewritten_after(self, moment: int) -> list[int]:
        """Returns tensors on one memory, made before a moment, that are used after a later write into it; or [].

        Two or more, such as a slice and its base: sent apart, they would not share what is written.
        """
        for time, used in self._rewritten:
            if time > moment and len(before := [number for number in used if self.made[number] < moment]) > 1:
                return before
        return []

    @cached_property
    def _rewritten(self) -> list[tuple[int, list[int]]]:
        """Returns (time, tensors on one memory that are used afterwards, two or more) of each write."""
        used = {number for number, last in enumerate(self.last_use) if last >= 0}
        rewritten = []
        for renumbered in reversed(self.rewrites):  # what a later write gives another number is used under that one too
            # a write gives every tensor on that memory a new number
            after = [old for old, new in renumbered.items() if new in used]
            used.update(after)
            # one tensor on a memory needs no other name
            if len(after) > 1:
                after = [old for old in after if self.depends[old] and old not in self.parameters]
                rewritten.append((self.overwritten[next(iter(renumbered))], after))
        return rewritten[::-1]

    @cached_property
    def led(self) -> set[int]:
        """Returns the numbers of the tensors that receive a gradient of the output."""
        numbers = set(self.returned)
        for op in reversed(self.ops):
            if op.leads and not numbers.isdisjoint(op.makes):
                numbers.update(op.reads)
        return numbers

    def times(self, made: OwnCall, moment: int) -> int:
        """Returns how many calls of the line of code that made a tensor have returned before event `moment`.

        Stages compare it with what they count as they run, to see a forward that takes another way.
        """
        return bisect.bisect_left(self._exits.get((made.whose.path, made.whose.place, made.place[:3]), []), moment)

    @cached_property
    def _exits(self) -> dict[tuple, list[int]]:
        """Returns the times at which calls of torch's functions returned, in order, by the code that made them."""
        exits_by_code: dict[tuple, list[int]] = {}
        for call in self.functions:
            if call.own is not None:
                exits_by_code.setdefault((call.path, call.place, call.own[0][:3]), []).append(call.exit)
        return {code: sorted(exits) for code, exits in exits_by_code.items()}

    def influenced_by(self, number: int) -> set[int]:
        """Returns the numbers of the tensors computed from one, itself among them."""
        if number not in self._influenced:
            self._influenced[number] = influenced(self.ops, (number,))
        return self._influenced[number]

    @cached_property
    def call_leaves(self) -> dict[int, list[tuple[ModuleCall, bool, int]]]:
        """Returns tensor's number -> [(call, True: an argument, False: a result, its place among those leaves)]."""
        places: dict[int, list[tuple[ModuleCall, bool, int]]] = {}
        for call in self.calls():
            for leaf, argument in enumerate(call.arguments):
                if argument is not None:
                    places.setdefault(argument, []).append((call, True, leaf))
            for leaf, result in enumerate(call.leaves):
                if result.tensor is not None:
                    places.setdefault(result.tensor, []).append((call, False, leaf))
        return places

    @cached_property
    def in_order(self) -> list[tuple[int, int]]:
        """Returns (when made, number) of every tensor that was made in the forward, in order."""
        return sorted((made, number) for number, made in enumerate(self.made) if made >= 0)

    def maker(self, number: int) -> str:
        """Returns the path of the innermost module that made a tensor."""
        return self.around(self.made[number]).path
