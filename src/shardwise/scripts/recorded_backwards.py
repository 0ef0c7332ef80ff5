"""Backwards through gradients under zero=3: a penalty on what `torch.autograd.grad(..., create_graph=True)` gave.

    forward                     unit: gather . compute . free
    grad(..., create_graph)     unit: gather . compute . free               recorded; nothing is reduced
    backward of the penalty     all units gathered, where the record holds their weights; then reduced once, and freed

A record holds weights by their memory, which FSDP2 fills again at the same place whenever a unit is gathered. What
it computes runs outside of units, in an order of its own, so all of them are gathered while it is gone through, and a
unit's gradient is whole only when all of that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shardwise.parallel.fsdp import groups_of
from shardwise.parallel.full import FullShard
from shardwise.trace.backwards import watch_backwards


class Recorded:
    """The units of one model, whose backwards may be recorded. `on`: one was, since the last `optimizer.step()`."""

    def __init__(self, technique: FullShard, passes: Callable[[str], None]) -> None:
        """
        passes  called with the name of what every rank comes to
        """
        self.on = False
        self._passes, self._world = passes, dist.group.WORLD
        self._units: list[Any] = [child for child in technique.module.modules() if isinstance(child, FSDPModule)]
        self._root: Any = technique.module
        here = ref(self)
        # for as long as the model lives: its script may differentiate wherever it likes
        finalize(self, watch_backwards(lambda roots, graph, inputs: _inside(here(), graph))).atexit = False

    def may_run(self, *, records: bool) -> bool:
        """Returns whether a backward may go through these units and a record; `records`: it makes one."""
        return (self.on or records) and self._world is dist.group.WORLD  # not of a run that has ended

    @contextmanager
    def running(self, *, records: bool) -> Iterator[None]:
        """Context of a backward, which is recorded itself or goes through what was."""
        groups = [group for unit in self._units for group in groups_of(unit)]
        if self.on:
            self._passes("a backward through gradients")
            for unit in self._units:
                unit.unshard()
        gathered = self.on
        for group in groups:
            group.reduce_grads, group.reshard_after_backward = False, not gathered
        try:
            yield
        finally:
            for group in groups:
                group.reduce_grads = group.reshard_after_backward = True
                group._training_state = TrainingState.IDLE  # one that is over already would not be reduced
            if gathered and not records:
                self._root._get_fsdp_state()._root_post_backward_final_callback()  # reduces, and frees
            elif gathered:
                for unit in self._units:
                    unit.reshard()


def _inside(recorded: Recorded | None, records: bool) -> AbstractContextManager[None]:
    """Returns the context of a backward that may go through a model's units; `records`: it makes a record."""
    outermost = torch._C._current_graph_task_id() == -1
    if recorded is None or not outermost or not recorded.may_run(records=records):
        return nullcontext()
    return recorded.running(records=records)
