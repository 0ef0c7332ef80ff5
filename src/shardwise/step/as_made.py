"""`gradients=as_made`: update a sub-group of parameters within backward, once its gradients are there, and free these.

    forward    loss ──> ranks gather their loss weights, whose sum divides the gradients
    backward   block k: its gradients are summed ──> divided, optimizer.step over them, freed    block k - 1: ...

Every gradient is divided, and its squares are added up, as after backward; before the first step a trial shows that
sub-groups are independent. So the bits are those of an update after backward. One more control row is sent.

If the loss is not finite, or its weight is 0, gradients are kept until after backward, as without this option. If only
the norm is not finite the run ends, since weights have moved by then.

Clipping and skipping depend on the norm of all gradients. If the tier can undo a step (its state lies on a disk), the
step is done without clipping, and undone and repeated, or skipped, if the norm demands it: step/repeat.
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
    """Updates sub-groups within backward: counts a step's gradients, and keeps norms of those that it has freed.

    flats   bucket's number -> norms of its gradients, whose squares add up to the bucket's square norm
    norms   id of a master -> such norms of its gradient; of gradients that came without a flat tensor
    """

    def __init__(self, state: RankState):
        self._state = proxy(state)
        tier = state.tier
        assert tier is not None
        self._group_of = {id(param): n for n, (_, group) in enumerate(tier.groups) for param in group.params}
        self._late = _read_again(state)
        self._flat = state.tensor is None  # under tp a rank counts only some of a bucket's gradients in the norm
        self._weights = {} if state.plan.sharded.weights else dict(state.module.named_parameters())
        self._names = {id(slot.master): slot.name for slot in state.technique.slots}
        self._order: list[int] = []  # of the last step's sub-groups
        self.forget()
        state.technique.use_as_made(self._take)

    def forget(self, clip: float | None = None) -> None:
        """Forgets the step before.

        clip  factor by which this step's gradients are multiplied, if a first run of it has shown that; None: first run
        """
        self._clip, self._kept = 1.0 if clip is None else clip, clip is None
        self.flats: dict[int, list[torch.Tensor]] = {}
        self.norms: dict[int, list[torch.Tensor]] = {}
        self._came: dict[int, int] = defaultdict(int)
        self._before, self._order = self._order, []
        self._factor: float | None = None

    def begin(self, tally: Tally) -> None:
        """Gathers all ranks' weights, from which the divisor of gradients follows, and begins the tier's step.

        Called before the backward of a step's only micro-batch. Collective.
        """
        state = self._state
        state.tier.check()
        agreed = agree(tally, 0.0, state.mesh.gradients)
        loss = agreed.total + sum(agreed.extras.values())
        if not math.isfinite(loss) or not agreed.weight > 0:
            return  # without a factor nothing is updated within backward; `normalise` deals with the step
        self._factor = self._clip / divisor_of(state, agreed.weight)
        state.tier.begin()

    def _take(self, slots: list[Slot], number: int, flat: torch.Tensor | None) -> None:
        """Called within backward when gradients have been summed; updates sub-groups that now have all of theirs.

        slots   whose gradients are there;  number  of their bucket
        flat    the bucket's gradients as one tensor; None: they lie apart
        """
        # the norm of a whole bucket is one kernel instead of one a weight
        if self._flat and flat is not None:
            self.flats[number] = norms_of([flat])
        for slot in slots:
            assert slot.master.grad is not None
            if not (self._flat and flat is not None):
                self.norms[id(slot.master)] = norms_of([slot.master.grad])
            group = self._group_of.get(id(slot.master))
            # a weight that a recomputed block still reads (`_late`) is updated after backward
            if group is not None and id(slot.master) not in self._late:
                self._came[group] += 1
                if self._factor is not None and self._came[group] == len(self._params(group)):
                    self._update(group, self._factor)
        for master in (slot.master for slot in slots if self._factor is not None):
            if master.grad is not None:  # it waits for its sub-group; as a view it would keep the bucket's memory
                master.grad = master.grad.clone()

    def _params(self, group: int) -> Sequence[torch.nn.Parameter]:
        return self._state.tier.groups[group][1].params

    @torch.no_grad()
    def _update(self, group: int, factor: float) -> None:
        """Multiplies the gradients of sub-group `group` by `factor`, runs the optimizer over it, and frees them."""
        params, place = self._params(group), len(self._order)
        if factor != 1.0:
            torch._foreach_mul_([param.grad for param in params if param.grad is not None], factor)
        # if sub-groups come in the order of the last step, the state of the next one is read meanwhile
        following = self._before[place + 1 : place + 2] if self._before[place : place + 1] == [group] else []
        self._state.tier.update(group, self._state.optimizer.step, *following, kept=self._kept)
        self._order.append(group)
        for param in params:
            param.grad = None
            # a master has a version counter of its own; this lets autograd notice a read of the weight after its update
            if (weight := self._weights.get(self._names[id(param)])) is not None:
                torch.autograd.graph.increment_version(weight)


def _read_again(state: RankState) -> set[int]:
    """Returns ids of the masters of weights that several modules share, if the plan recomputes blocks; else empty.

    A recomputed block may still read such a weight after its gradient has come, so it is updated after backward.
    """
    held = Counter(id(param) for _, param in state.module.named_parameters(remove_duplicate=False))
    shared = {name for name, param in state.module.named_parameters() if held[id(param)] > 1}
    return {id(slot.master) for slot in state.technique.slots if slot.name in shared and state.plan.remat != "none"}
