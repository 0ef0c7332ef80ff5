"""`StagePlacement`: the stages of a forward, and which pipeline rank holds which parameter and buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from shardwise.layout.schedules import Schedule
from shardwise.parallel.pipeline.cuts import Stage
from shardwise.parallel.slots import ValueOf
from shardwise.trace.blocks import Blocks
from shardwise.trace.deferred import Built, named_tensors


@dataclass
class StagePlacement:
    """The stages, and which pipeline ranks (ascending) hold each parameter and buffer."""

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
        """The stages of this rank."""
        return [stage for stage in self.stages if self.schedule.owner[stage.index] == self.rank]

    @property
    def takes_gradients(self) -> bool:
        """Whether the forward takes gradients itself."""
        return self.stages[0].differentiates

    @property
    def talks(self) -> bool:
        """Whether such a gradient goes from stage to stage."""
        return any(stage.over for stage in self.stages)

    @cached_property
    def tied(self) -> list[str]:
        """Parameters that several ranks hold."""
        return [name for name, ranks in self.holders.items() if len(ranks) > 1]

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one that counts a parameter which several stages hold."""
        return self.holders[name][0] == self.rank

    @property
    def absent(self) -> set[str]:
        """Parameters that no stage of this rank holds."""
        return {name for name, ranks in self.holders.items() if self.rank not in ranks}

    def here(self, module: nn.Module, blocks: Blocks) -> Blocks:
        """The blocks whose parameters this rank holds."""
        absent = {id(param) for name, param in module.named_parameters() if name in self.absent}
        held = [
            path for path in blocks.paths if not any(id(p) in absent for p in module.get_submodule(path).parameters())
        ]
        return Blocks(tuple(held), blocks.warnings)

    def values(self, built: Built, value_of: ValueOf) -> ValueOf:
        """Returns `value_of` for this rank's parameters; where asking is collective, all are asked for now."""
        if not built.notice:
            return value_of
        kept = {}
        for name, _ in list(named_tensors(built.module)):
            value = value_of(name)
            if name not in self.absent:
                kept[name] = value.cpu()
        return kept.__getitem__
