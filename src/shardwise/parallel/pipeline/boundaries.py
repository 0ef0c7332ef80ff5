"""Where a stage of a forward begins and ends, and where it takes hold of what crosses: plain data. Found by cuts."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.parallel.pipeline.skips import Skip
from shardwise.trace.flow import ModuleCall
from shardwise.trace.own_calls import Spot
from shardwise.trace.taken import Taken

By = tuple["Holder | bool | None", ...]  # for each x: where a stage has it, True where it was sent, None without


@dataclass(frozen=True)
class CutPoint:
    """A place to cut: the entry of a call, and the tensors that cross it."""

    call: ModuleCall
    numbers: tuple[int, ...]
    callees: tuple[str, ...] = ()  # of a function's place: modules that the same code calls
    runs_on: bool = False  # the stage before it comes to the end of the forward too, for what is left there
    others: tuple[CutPoint, ...] = ()  # where chance leaves its call out: the next calls, up to one that is always made

    @property
    def clean(self) -> bool:
        """Returns whether all that crosses the cut is given to the call as arguments."""
        return set(self.numbers) <= set(self.call.arguments)

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """Returns the shapes of the tensors that cross, where the place is clean."""
        return [self.call.shapes[self.call.arguments.index(number)] for number in self.numbers]


@dataclass(frozen=True)
class Holder:
    """Where a tensor can be taken hold of while a stage runs: a leaf of a module call's arguments or result.

    path, place  the call: of which module, and the how-manieth of its calls in the forward
    is_argument  the leaf is one of the arguments, else of the result
    written      somebody writes into it later
    own          of what the call's own code made: which of its calls of a function of torch, and the function's name
    callees      modules that the call's code calls, whose functions are not counted
    times        that the code has made this call when the boundary is met
    """

    path: str
    place: int
    is_argument: bool
    leaf: int
    written: bool = False
    own: tuple[Spot, str] | None = None
    callees: tuple[str, ...] = ()
    times: int = 0


@dataclass(frozen=True)
class Edge:
    """A place where a stage begins or ends, with a holder for each tensor that crosses it."""

    point: CutPoint
    holders: tuple[Holder, ...]


@dataclass
class Stage:
    """One stage's part of the forward: from the entry of one call (or the start) to that of another (or the end)."""

    index: int
    entry: CutPoint | None
    exit: CutPoint | None
    start: int
    stop: int
    parameters: set[int]  # ids of the parameters that it uses
    buffers: set[int]
    cost: float
    skips: list[Skip] = field(default_factory=list)
    received: list[Holder] = field(default_factory=list)
    sent: list[Holder] = field(default_factory=list)
    entries: list[Edge] = field(default_factory=list)  # where it begins: the first of these that a forward comes to
    exits: list[Edge] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)  # gradients that the forward takes itself, of all stages
    by: dict[int, By] = field(default_factory=dict)  # of each of them: where this stage has what it is taken by
    differentiates: bool = False  # whether it takes any, by whatever means
    over: frozenset[int] = frozenset()  # which go back over the stage's beginning, to the one before
    answers: bool = False  # whether one comes back over its end
    careful: bool = False  # before it the forward writes into parameters, which are absent here
    runs_on: bool = False  # to the end of the forward, for what it leaves there

    @property
    def holders(self) -> list[Holder]:
        """Returns every place at which the stage takes hold of a tensor."""
        return [*self.kept, *(holder for edge in (*self.entries, *self.exits) for holder in edge.holders)]

    @property
    def kept(self) -> list[Holder]:
        """Returns where the stage has the tensors by which others take gradients."""
        return [holder for by in self.by.values() for holder in by if isinstance(holder, Holder)]
