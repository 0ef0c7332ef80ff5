"""`Flow`: the dataflow of one forward (ops, calls of submodules, parameters), recorded by trace/recorded.

Each tensor has a *number*, its index in `Flow.made`, `depends` and `drawn`; an in-place write gives a tensor a new one.
Times count the ops and the begins and ends of calls so far. From the tensors that each op and call reads and makes
follows which tensors are

    shared     independent of all parameters (masks, positions, rotary tables): every stage can compute them again
    crossing   at a time t: dependent on parameters, made before t and used after t

and so whether a pipeline stage can begin where a module is entered: all crossing tensors must be among the module's
arguments. No names are used, and no class is known.
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
    """One leaf of a module's output: a tensor, with its shape and dtype, or a plain value."""

    tensor: int | None  # the tensor's number; None for a plain value
    value: Any = None  # the plain value; None for a tensor
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass
class ModuleCall:
    """One call of a submodule, or of a torch function by a module's own code (`own`); `enter`, `exit`: its times."""

    path: str
    place: int  # index of the call among those of this module in the forward, from 0
    enter: int
    arguments: list[int | None]  # for each leaf of (args, kwargs) the tensor's number; None if it is no tensor
    shapes: list[tuple[int, ...] | None]  # of the same leaves
    exit: int = -1
    leaves: list[Leaf] = field(default_factory=list)  # of the output
    spec: TreeSpec | None = None  # the output's structure
    inside: list[ModuleCall] = field(default_factory=list)  # the calls made directly by this one
    own: tuple[Spot, str] | None = None  # (place in the code, name) of a torch function; None: a submodule's call
    moves: bool = False  # whether it changes plain attributes of modules, so that no stage may leave it out

    @property
    def label(self) -> str:
        """Returns this call's name in messages."""
        return f"'{self.path}'" if self.own is None else f"'{self.own[1]}' in '{self.path or 'the outermost forward'}'"

    def below(self) -> Iterator[ModuleCall]:
        """Yields every call inside this one, at any depth, in the order in which they begin."""
        for call in self.inside:
            yield call
            yield from call.below()


@dataclass
class FlowOp:
    """One op: the numbers of the tensors that it reads and makes, and its cost in FLOPs (`numbered._cost`)."""

    time: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    cost: float
    draws: bool  # whether it can draw random numbers
    reads_value: bool  # whether Python reads a value (`.item()`)
    leads: bool  # whether a gradient goes back through it
    inner: bool = False  # whether it is part of a backward that the forward itself runs


@dataclass(frozen=True)
class OwnCall:
    """Which call of a torch function, by a module's own code, made a tensor.

    whose   the call of the module whose forward the code is
    place   (file, first line of the code, offset in it, how many calls there came before)
    leaf    index of the tensor among the leaves of the function's result
    name    of the function, for messages
    """

    whose: ModuleCall
    place: Spot
    leaf: int
    name: str


Attribute = tuple[str, str]  # (path of the module, attribute)


@dataclass(frozen=True)
class Change:
    """A change of a plain attribute of a module: its time, the innermost call that runs then, and the attribute."""

    time: int
    call: ModuleCall
    place: Attribute


@dataclass
class Flow:
    """The record of one forward. Lists are by tensor number; times count ops and begins and ends of calls."""

    root: ModuleCall  # of the whole module
    ops: list[FlowOp]  # in order of time
    made: list[int]  # time at which each tensor was made; -1: before the forward
    depends: list[bool]  # whether it depends on a parameter
    drawn: list[bool]  # whether it depends on a random number and on no parameter
    last_use: list[int]  # time of the last op that reads it, or `end` for an output; -1: never used
    overwritten: dict[int, int]  # number -> time of the in-place write that gave the tensor another number
    parameters: dict[int, int]  # number -> id of the parameter object
    buffers: dict[int, int]  # number -> id of the buffer object
    returned: list[int]  # numbers of the output's tensors
    end: int  # time at which the forward ends
    without_gradient: frozenset[Place]  # calls that run while gradients are switched off
    own: dict[int, OwnCall]  # number -> the call in a module's own code that made it
    functions: list[ModuleCall]  # calls of torch functions by modules' own code, in order
    taken: list[Taken] = field(default_factory=list)  # gradients that the forward takes itself, in order
    backwards: list[int] = field(default_factory=list)  # times at which it runs `loss.backward()` or the like
    sized: set[int] = field(default_factory=set)  # tensors whose size depends on values that depend on parameters
    rewrites: list[dict[int, int]] = field(default_factory=list)  # per write: old -> new numbers on that storage
    stateful: set[int] = field(default_factory=set)  # ids of parameters and buffers into which an op writes
    later: list[Flow] = field(default_factory=list)  # the next forwards, if this one leaves state for them
    carried: dict[int, tuple[int, int]] = field(default_factory=dict)  # number -> (earlier forward, its number there)
    varies: frozenset[tuple[str, int]] = frozenset()  # calls (path, place) that not every run makes (layer dropout)
    repeats: frozenset[str] = frozenset()  # paths of modules whose number of calls depends on the samples
    moved: bool = False  # whether Python's `random` or numpy's global generator advances
    changes: list[Change] = field(default_factory=list)  # of plain attributes; recorded if `later` may matter
    _influenced: dict[int, set[int]] = field(default_factory=dict)

    @cached_property
    def reaching(self) -> set[int]:
        """Returns the numbers of the tensors that influence the output or a written parameter or buffer.

        Tensors whose values Python reads, or that a backward of the forward's own reads, are among them.
        """
        state = {n for n in (*self.parameters, *self.buffers) if self.made[n] >= 0}  # those written in the forward
        numbers = {*self.returned, *state, *(n for taken in self.taken for n in taken.by)}
        for op in reversed(self.ops):
            # what Python reads decides what the forward does; a backward of its own reads whatever its forward kept
            if op.reads_value or op.inner or not numbers.isdisjoint(op.makes):
                numbers.update(op.reads)
        return numbers

    @cached_property
    def read_draws(self) -> list[int]:
        """Returns the times at which Python reads a random value (`drawn`), by which the forward may branch."""
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
        """Returns (path, place) of every submodule call, in the order in which they begin."""
        return [(call.path, call.place) for call in self.calls()]

    @property
    def outline(self) -> list[tuple[float, int, int]]:
        """Returns (FLOPs and memory cost, tensors read, tensors made) of each op, to compare forwards by."""
        return [(op.cost, len(op.reads), len(op.makes)) for op in self.ops]

    def forget_what_is_left(self) -> None:
        """Recomputes `last_use` without ops whose results only stay in plain attributes of the module."""
        if self.taken or self.backwards:  # their backwards may read what any part of the forward saved
            return
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
        """Yields (call, numbers of tensors that depend on parameters, made before the call and used after).

        functions  whether the calls are those of torch functions by modules' own code, instead of those of submodules
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
        """Returns the numbers of the tensors that depend on parameters, made before time `moment` and used after it."""
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
        """Returns (time of the first use, time of the last use) of each buffer that an op writes into."""
        spans: dict[int, tuple[int, int]] = {}
        for op in self.ops if not self.stateful.isdisjoint(self.buffers.values()) else ():
            # a write gives a buffer another number: one buffer may have several
            for state in {self.buffers[n] for n in (*op.reads, *op.makes) if n in self.buffers} & self.stateful:
                spans[state] = spans.get(state, (op.time, 0))[0], op.time
        return [*spans.values()]

    @cached_property
    def written_spans(self) -> list[tuple[int, int, int]]:
        """Returns (first use, last use, id) of each written parameter or buffer whose contents depend on parameters.

        All its uses must lie in one stage, since the next micro-batch reads what this one leaves there.
        """
        states = self.parameters | self.buffers
        # a parameter that was given another number was written to
        written = {states[number] for number in states if self.made[number] >= 0 and self.depends[number]}
        spans: dict[int, tuple[int, int]] = {}
        # uses under any of its numbers
        for op in self.ops if written else ():
            for state in {states[n] for n in (*op.reads, *op.makes) if n in states} & written:
                spans[state] = spans.get(state, (op.time, 0))[0], op.time
        return [(first, last, state) for state, (first, last) in spans.items()]

    def written_around(self, moment: int) -> int | None:
        """Returns the id of a parameter or buffer in `written_spans` used before and after time `moment`, or None."""
        return next((state for first, last, state in self.written_spans if first < moment <= last), None)

    def rewritten_after(self, moment: int) -> list[int]:
        """Returns two or more tensors on one storage, made before `moment`, that a write after it changes; or [].

        For example a slice and its base, both used after the write: sent as two messages, they would not share it.
        """
        for time, used in self._rewritten:
            if time > moment and len(before := [number for number in used if self.made[number] < moment]) > 1:
                return before
        return []

    @cached_property
    def _rewritten(self) -> list[tuple[int, list[int]]]:
        """Returns (time, two or more tensors on the written storage that are used afterwards) of each write."""
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
        """Returns the numbers of the tensors through which a gradient of the output flows."""
        numbers = set(self.returned)
        for op in reversed(self.ops):
            if op.leads and not numbers.isdisjoint(op.makes):
                numbers.update(op.reads)
        return numbers

    def times(self, made: OwnCall, moment: int) -> int:
        """Returns how often the line of code that made a tensor has been called and returned before time `moment`.

        Stages compare it with their own count, to notice a forward that takes another branch than the recorded one.
        """
        return bisect.bisect_left(self._exits.get((made.whose.path, made.whose.place, made.place[:3]), []), moment)

    @cached_property
    def _exits(self) -> dict[tuple, list[int]]:
        """Returns (module path, place of its call, place in the code) -> ascending times at which calls returned."""
        exits_by_code: dict[tuple, list[int]] = {}
        for call in self.functions:
            if call.own is not None:
                exits_by_code.setdefault((call.path, call.place, call.own[0][:3]), []).append(call.exit)
        return {code: sorted(exits) for code, exits in exits_by_code.items()}

    def influenced_by(self, number: int) -> set[int]:
        """Returns the numbers of the tensors computed from tensor `number`, itself included."""
        if number not in self._influenced:
            self._influenced[number] = influenced(self.ops, (number,))
        return self._influenced[number]

    @cached_property
    def call_leaves(self) -> dict[int, list[tuple[ModuleCall, bool, int]]]:
        """Returns tensor number -> [(call, True for an argument or False for a result, index among those leaves)]."""
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
        """Returns (time, number) of every tensor that was made in the forward, ascending."""
        return sorted((made, number) for number, made in enumerate(self.made) if made >= 0)

    def maker(self, number: int) -> str:
        """Returns the path of the innermost module whose code made tensor `number`."""
        return self.around(self.made[number]).path
