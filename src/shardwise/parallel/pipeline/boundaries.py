"""Where a stage begins and ends, and where the tensors that cross are found in the forward, as plain data (cut_points).

Times and tensor numbers are those of trace/flow.
"""

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

# for each tensor that a gradient is taken with respect to: its holder on a stage; True: the stage before sends it;
# None: the stage lacks it
By = tuple["Holder | bool | None", ...]


@dataclass(frozen=True)
class CutPoint:
    """A place where a stage can begin, at the entry of a call.

    call     of a submodule, or of a torch function by a module's own code
    numbers  numbers of the tensors that cross, which the stage before must send
    callees  if `call` is a function's, paths of the modules that the same code calls
    runs_on  whether the stage before must run on to the end of the forward, which changes state behind this place
    others   if the call is left out by chance, the next calls in its stead, up to one that every forward makes
    """

    call: ModuleCall
    numbers: tuple[int, ...]
    callees: tuple[str, ...] = ()
    runs_on: bool = False
    others: tuple[CutPoint, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether every tensor that crosses is an argument of the call."""
        return set(self.numbers) <= set(self.call.arguments)

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        """Returns the shapes of the tensors that cross; only for a `clean` place."""
        return [self.call.shapes[self.call.arguments.index(number)] for number in self.numbers]


@dataclass(frozen=True)
class Holder:
    """Where a tensor is found while a stage runs, as a leaf of a module call's arguments or result.

    path, place  path of the called module, and index of the call among its calls in the forward
    is_argument  whether the leaf is one of the arguments; else it is one of the result
    leaf         its index among these leaves
    written      whether the forward writes into the tensor later
    own          for a tensor that the call's own code made: (which call of a torch function, the function's name)
    callees      paths of modules that this code calls, whose own functions are not counted as its
    times        how often that line of code has run when the boundary is reached
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
    """A place where a stage begins or ends, with a holder for each tensor of `point.numbers`."""

    point: CutPoint
    holders: tuple[Holder, ...]


@dataclass
class Stage:
    """One stage's part of the forward, from the entry of one call (or the start) to that of another (or the end).

    entry, exit        where it begins and ends; None for the first stage's entry, the last one's exit
    start, stop        the stage has the operations with times in [start, stop);  cost  the sum of their costs
    parameters         ids of the parameters that it uses;  buffers  the same of buffers
    skips              calls outside of its part that it leaves out
    entries, exits     its beginning and end, each first the usual place, then those for calls left out by chance
    received, sent     holders of the tensors that cross `entry`, and `exit`
    taken              gradients that the forward itself computes (`torch.autograd.grad`), of all stages
    by                 index in `taken` -> where this stage has the tensors that the gradient is taken with respect to
    differentiates     whether the forward itself computes gradients, by whatever means
    over               indices in `taken` of gradients that go back over the stage's beginning to the stage before
    answers            whether such a gradient comes back over the stage's end
    careful            whether to run the code before it with `OnNothing` from the first time on
    runs_on            whether it runs on to the end of the forward, for the state that is changed there
    """

    index: int
    entry: CutPoint | None
    exit: CutPoint | None
    start: int
    stop: int
    parameters: set[int]
    buffers: set[int]
    cost: float
    skips: list[Skip] = field(default_factory=list)
    received: list[Holder] = field(default_factory=list)
    sent: list[Holder] = field(default_factory=list)
    entries: list[Edge] = field(default_factory=list)
    exits: list[Edge] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    by: dict[int, By] = field(default_factory=dict)
    differentiates: bool = False
    over: frozenset[int] = frozenset()
    answers: bool = False
    careful: bool = False
    runs_on: bool = False

    @property
    def holders(self) -> list[Holder]:
        """Returns the holders of all tensors that the stage must find while it runs."""
        return [*self.kept, *(holder for edge in (*self.entries, *self.exits) for holder in edge.holders)]

    @property
    def kept(self) -> list[Holder]:
        """Returns the holders, on this stage, of the tensors with respect to which the forward takes gradients."""
        return [holder for by in self.by.values() for holder in by if isinstance(holder, Holder)]


@dataclass
class StagePlacement:
    """The stages of a forward as one pipeline rank has them.

    schedule      says which pipeline rank runs each stage (`owner`), and in which order
    stages        all stages, those of other ranks too
    holders       name of a parameter -> the pipeline ranks, ascending, whose stages use it
    buffers       name of a buffer -> the pipeline rank that has its right values
    rank          this pipeline rank
    shared_draws  whether several stages use random numbers that the outermost forward draws
    notices       lines for the user
    written       names of parameters and buffers into which the forward writes
    in_groups     whether the forward fails on two or three samples, but runs on more
    by_values     whether shapes of what stages send may depend on values, such as lengths of sentences
    """

    schedule: Schedule
    stages: list[Stage]
    holders: dict[str, tuple[int, ...]]
    buffers: dict[str, int]
    rank: int
    shared_draws: bool
    notices: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    in_groups: bool = False
    by_values: bool = False

    @property
    def mine(self) -> list[Stage]:
        """Returns the stages of this rank."""
        return [stage for stage in self.stages if self.schedule.owner[stage.index] == self.rank]

    @property
    def takes_gradients(self) -> bool:
        """Whether the forward itself computes gradients."""
        return self.stages[0].differentiates

    @property
    def talks(self) -> bool:
        """Whether a gradient that the forward itself computes goes from stage to stage."""
        return any(stage.over for stage in self.stages)

    @cached_property
    def tied(self) -> list[str]:
        """Returns the names of parameters that several ranks hold."""
        return [name for name, ranks in self.holders.items() if len(ranks) > 1]

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one, of those that hold the parameter, that counts it in the gradient norm."""
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
        """Returns a function from name to initial value, for this rank's parameters. Collective if `built.notice`.

        value_of   the same for all parameters
        """
        if not built.notice:
            return value_of
        kept = {}  # rank 0 sends values, so all ranks must ask for all of them in the same order, here
        for name, _ in list(named_tensors(built.module)):
            value = value_of(name)
            if name not in self.absent:
                kept[name] = value.cpu()
        return kept.__getitem__
