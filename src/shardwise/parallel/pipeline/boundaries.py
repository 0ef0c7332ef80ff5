"""Where a stage of a forward begins and ends, and where it takes hold of what crosses: plain data. Found by cuts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from shardwise.layout.schedules import Schedule
from shardwise.parallel.pipeline.skips import Skip
from shardwise.parallel.slots import ValueOf
from shardwise.trace.backwards import Taken
from shardwise.trace.blocks import Blocks
from shardwise.trace.deferred import Built, named_tensors
from shardwise.trace.flow import ModuleCall
from shardwise.trace.own_calls import Spot

By = tuple["Holder | bool | None", ...]  # for each x: where a stage has it, True where it was sent, None without


@dataclass(frozen=True)
class CutPoint:
    """A place to cut: the entry of a call, and the numbers (in the `Flow`) of the tensors that cross it."""

    call: ModuleCall
    numbers: tuple[int, ...]
    callees: tuple[str, ...] = ()  # of a function's place: modules that the same code calls
    runs_on: bool = False  # the stage before it comes to the end of the forward too, for what is left there
    others: tuple[CutPoint, ...] = ()  # where chance leaves its call out: the next calls, up to one that is always made

    @property
    def clean(self) -> bool:
        """Returns whether every tensor that crosses the cut is an argument of the call."""
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
    start: int  # times of the flow: operations from `start` on, before `stop`
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
    by: dict[int, By] = field(default_factory=dict)  # index of such a gradient -> where this stage has its inputs
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
        """Returns the holders, on this stage, of inputs of gradients that the forward takes (`autograd.grad`)."""
        return [holder for by in self.by.values() for holder in by if isinstance(holder, Holder)]


@dataclass
class StagePlacement:
    """The stages of a forward as one pipeline rank has them.

    holders  by name of a parameter: the pipeline ranks, ascending, whose stages use it
    buffers  by name of a buffer: the pipeline rank that has its right values
    rank     this one
    """

    schedule: Schedule
    stages: list[Stage]
    holders: dict[str, tuple[int, ...]]
    buffers: dict[str, int]
    rank: int
    shared_draws: bool  # several stages use random numbers that the outermost forward draws
    notices: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # parameters and buffers into which the forward writes
    in_groups: bool = False  # the forward does not run on two or three samples, but on more
    by_values: bool = False  # shapes of what stages send may follow from values, such as lengths of sentences

    @property
    def mine(self) -> list[Stage]:
        """Returns the stages of this rank."""
        return [stage for stage in self.stages if self.schedule.owner[stage.index] == self.rank]

    @property
    def takes_gradients(self) -> bool:
        """Returns whether the forward takes gradients itself."""
        return self.stages[0].differentiates

    @property
    def talks(self) -> bool:
        """Returns whether a gradient that the forward takes itself goes from stage to stage."""
        return any(stage.over for stage in self.stages)

    @cached_property
    def tied(self) -> list[str]:
        """Returns the names of parameters that several ranks hold."""
        return [name for name, ranks in self.holders.items() if len(ranks) > 1]

    def counts_here(self, name: str) -> bool:
        """Returns whether this rank, of those that hold a parameter, is the one to count it in the gradient's norm."""
        return self.holders[name][0] == self.rank

    @property
    def absent(self) -> set[str]:
        """Returns the names of parameters that no stage of this rank holds."""
        return {name for name, ranks in self.holders.items() if self.rank not in ranks}

    def here(self, module: nn.Module, blocks: Blocks) -> Blocks:
        """Returns the blocks all of whose parameters this rank holds."""
        absent = {id(param) for name, param in module.named_parameters() if name in self.absent}
        paths = [
            path for path in blocks.paths if not any(id(p) in absent for p in module.get_submodule(path).parameters())
        ]
        return Blocks(tuple(paths), blocks.warnings)

    def values(self, built: Built, value_of: ValueOf) -> ValueOf:
        """Returns `value_of` for this rank's parameters; where asking is collective, all are asked for now."""
        if not built.notice:
            return value_of
        kept = {}  # built for real: rank 0 sends its values, so every rank asks for all, in one order
        for name, _ in list(named_tensors(built.module)):
            value = value_of(name)
            if name not in self.absent:
                kept[name] = value.cpu()
        return kept.__getitem__
