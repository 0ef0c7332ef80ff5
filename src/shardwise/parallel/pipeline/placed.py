"""`StagePlacement`: the stages of a forward, and which pipeline rank holds which parameter and buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from shardwise.layout.schedules import Schedule
from shardwise.parallel.pipeline.boundaries import Stage
from shardwise.parallel.slots import ValueOf
from shardwise.trace.blocks import Blocks
from shardwise.trace.deferred import Built, named_tensors


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
    shared_draws: bool
    notices: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # parameters and buffers into which the forward writes
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
        """Returns whether this rank is the one that counts a parameter, of those that hold it."""
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
