"""`gradients=as_made`: update a sub-group of parameters within backward, once its gradients are there, and free these.

    forward    loss ──> rows of weights, of all ranks: what gradients are divided by
    backward   block k: its gradients are summed ──> divided, optimizer.step over them, freed    block k - 1: ...

Every gradient is divided, and its squares added up, as after backward; sub-groups are tried to be independent before
the first step. So bits are those of gradients that are held together. Nothing is sent for it but one more row.

A loss that is not finite, or without weight, is known by then, and its gradients wait as ever. A norm that is not
finite though the loss is ends the run: weights have moved by then.

Clipping, and leaving out a step, follow from the norm of all gradients. Where the tier can take a step back (its state
lies on the disk), it is taken as if neither were needed, and repeated or left out where it was: step/repeat.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from weakref import proxy

import torch

from shardwise.parallel.slots import Slot
from shardwise.step.control import Tally, agree
from shardwise.step.normalise import divisor_of, norms_of
from shardwise.step.state import RankState


class AsMade:
    """Which gradients of this step have come, and what is divided by.

    flats   norms of runs of each flat tensor of gradients, by its number; `norms`: of each master, by its id
    """

    def __init__(self, state: RankState):
        self._state = proxy(state)
        tier = state.tier
        assert tier is not None
        self._group_of = {id(param): n for n, (_, group) in enumerate(tier.groups) for param in group.params}
        self._late = _read_again(state)
        self._flat = state.tensor is None  # else ranks of tp count some of a flat tensor alone
        self._weights = {} if state.plan.sharded.weights else dict(state.module.named_parameters())
        self._names = {id(slot.master): slot.name for slot in state.technique.slots}
        self._order: list[int] = []  # of the last step's sub-groups
        self.forget()
        state.technique.use_as_made(self._take)

    def forget(self, clip: float | None = None) -> None:
        """Forget the step before; `clip`: what this one's gradients are clipped by, where a first run has told."""
        self._clip, self._kept = 1.0 if clip is None else clip, clip is None
        self.flats: dict[int, list[torch.Tensor]] = {}
        self.norms: dict[int, list[torch.Tensor]] = {}
        self._came: dict[int, int] = defaultdict(int)
        self._before, self._order = self._order, []
        self._factor: float | None = None

    def begin(self, tally: Tally) -> None:
        """Agree on what gradients are divided by, before the backward of a step's only micro-batch. Collective."""
        state = self._state
        state.tier.check()
        agreed = agree(tally, 0.0, state.mesh.gradients)
        loss = agreed.total + sum(agreed.extras.values())
        if not math.isfinite(loss) or not agreed.weight > 0:
            return  # all gradients will be looked at
        self._factor = self._clip / divisor_of(state, agreed.weight)
        state.tier.begin()

    def _take(self, slots: list[Slot], number: int, flat: torch.Tensor | None) -> None:
        """Take the gradients that bucket `number` brought (`flat`: as one tensor); updates sub-groups that are full."""
        # the norm of a whole bucket is one kernel instead of one a weight
        if self._flat and flat is not None:
            self.flats[number] = norms_of([flat])
        for slot in slots:
            assert slot.master.grad is not None
            if not (self._flat and flat is not None):
                self.norms[id(slot.master)] = norms_of([slot.master.grad])
            group = self._group_of.get(id(slot.master))
            # a weight that a block run again still reads (`_late`) is updated after backward, as ever
            if group is not None and id(slot.master) not in self._late:
                self._came[group] += 1
                if self._factor is not None and self._came[group] == len(self._params(group)):
                    self._update(group, self._factor)
        for master in (slot.master for slot in slots if self._factor is not None):
            if master.grad is not None:  # it waits for its sub-group, and is to keep nobody else's memory
                master.grad = master.grad.clone()

    def _params(self, group: int) -> Sequence[torch.nn.Parameter]:
        return self._state.tier.groups[group][1].params

    @torch.no_grad()
    def _update(self, group: int, factor: float) -> None:
        """Divide the gradients of a sub-group by `1 / factor`, step over it, and free them."""
        params, place = self._params(group), len(self._order)
        if factor != 1.0:
            # sub-groups come in the order of the last step: the state of the next one is read meanwhile
            torch._foreach_mul_([param.grad for param in params if param.grad is not None], factor)
        following = self._before[place + 1 : place + 2] if self._before[place : place + 1] == [group] else []
        self._state.tier.update(group, self._state.optimizer.step, *following, kept=self._kept)
        self._order.append(group)
        for param in params:
            param.grad = None
            # else a backward that reads a weight after its update would not notice, where masters have other counts
            if (weight := self._weights.get(self._names[id(param)])) is not None:
                torch.autograd.graph.increment_version(weight)


def _read_again(state: RankState) -> set[int]:
    """Returns ids of masters of weights that several modules hold, where blocks run again and read them."""
    held = Counter(id(param) for _, param in state.module.named_parameters(remove_duplicate=False))
    shared = {name for name, param in state.module.named_parameters() if held[id(param)] > 1}
    return {id(slot.master) for slot in state.technique.slots if slot.name in shared and state.plan.remat != "none"}
