"""Find of which batch's samples each of a script's tensors is made, and what entered it from outside the step.

A batch's own tensors, and what the script makes of them before a model is given something of it (on another device,
normalised), stay its own for as long as they are there. What is made later is of one step, and in another one it was
kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardwise.layout.dealing import Share
from shardwise.scripts.batches import Handed
from shardwise.scripts.outside import Outside, with_line
from shardwise.scripts.saying import line_of_script
from shardwise.scripts.tape import tensors_in

_SEVERAL = (
    "samples of two batches, of which this rank holds {} and {}, are put together in one loss: ranks hold parts of "
    "other sizes of the two, so its mean is not one process's. Call backward for the loss of each batch by itself "
    "(gradients add up until step()), or give the loader drop_last=True"
)
_UNDEALT = (
    "random numbers of shape {} that were drawn between a backward and the next batch of the loader meet this rank's "
    "{} samples: every rank drew the same there, where one process draws for each sample. Draw them like the samples "
    "(torch.randn_like(x), torch.rand_like(x[:, :1])), or ask the loader for a batch in each step (for x in loader), "
    "in which draws by a size are followed too"
)


class Origin(NamedTuple):
    """A tensor of this step. `own`: made of this rank's samples; `since`: of those of earlier steps too; `beside`: of
    another loader's; `read`: the numbers among what it is made of that were read of samples of this step; `batch`:
    whose samples they are; `stays`: it was made of it before a model was given something of it."""

    tensor: weakref.ref[torch.Tensor]
    own: bool
    of: frozenset[Outside]
    since: bool = False
    beside: bool = False
    read: frozenset[Outside] = frozenset()
    batch: Handed | None = None
    stays: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, while it is there."""
        tensor = self.tensor()
        return () if tensor is None else tuple(tensor.shape)

    @property
    def fresh(self) -> bool:
        """Whether it is of this rank's samples of the batch at hand alone."""
        return self.own and not self.since and not self.beside


class Origins:
    """Knows what tensors are made of, by their ids for as long as they are there."""

    def __init__(self) -> None:
        self._now: Handed | None = None  # the batch at hand
        self.following: Handed | None = None  # after a backward: a batch that waits
        self.expected: Handed | None = None  # of batches that the script has kept from a loop, the next
        self._made: dict[int, Origin] = {}
        self._before: dict[int, Origin] = {}  # of earlier steps
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}  # the models' weights
        self._undealt: dict[int, weakref.ref[torch.Tensor]] = {}  # made of draws that every rank made alike
        self._older: set[int] = set()  # what was made when the last backward ended

    def hand_out(self, handed: Handed) -> None:
        """Note the tensors of a batch that is handed out; it is at hand from `begin` on."""
        for tensor in handed.tensors:
            self._made[id(tensor)] = Origin(weakref.ref(tensor), True, frozenset(), batch=handed, stays=True)

    def batch_of(self, call: Any) -> Handed | None:
        """Returns which batch a model's arguments are made of: the one at hand, if any is; else the last of them."""
        return self._last_of([made.batch for one in tensors_in(call) if (made := self._known(one)) is not None])

    def _last_of(self, batches: list[Handed | None]) -> Handed | None:
        found = [one for one in batches if one is not None]
        return self._now if self._now in found else max(found, key=lambda one: one.number, default=None)

    def _known(self, tensor: torch.Tensor) -> Origin | None:
        made = self._made.get(id(tensor))
        return made if made is not None and made.own and made.tensor() is tensor else None

    def of_others(self) -> list[torch.Tensor]:
        """Returns tensors of other batches, of which this rank holds the same samples by their places."""
        now, found = self._now, [one for one in self._made.values() if one.stays and one.batch is not self._now]
        alike = [one for one in found if now is not None and one.batch is not None and one.batch.dealt == now.dealt]
        return [tensor for one in alike if (tensor := one.tensor()) is not None and tensor.dim()]

    def end_step(self) -> None:
        """A backward is over: what is made from here on may be of another step, of whatever batch."""
        self._older = set(self._made)

    def _turn_to(self, handed: Handed) -> None:
        """This batch is at hand: what was made in the steps before is kept, or stays its own batch's."""
        self._keep(lambda key, one: not (one.stays or (one.batch is handed and key not in self._older)))
        self._before = {key: one for key, one in self._before.items() if one.tensor() is not None}
        self._undealt = {key: one for key, one in self._undealt.items() if one() is not None}
        self._now = handed
        self.hand_out(handed)

    def _keep(self, asked: Callable[[int, Origin], bool]) -> None:
        """Take for kept what is asked."""
        for key, one in list(self._made.items()):
            gone = one.tensor() is None
            if gone or asked(key, one):
                del self._made[key]
                if not gone:
                    self._before[key] = one

    def _add(
        self, tensor: torch.Tensor, own: bool, of: frozenset[Outside] = frozenset(), *, since: bool = False,
        beside: bool = False, read: frozenset[Outside] = frozenset(), batch: Handed | None = None,
        written: bool = False,
    ) -> None:  # fmt: skip
        """Note what an operation gave; `written`: it may have written into a tensor that it gives again."""
        before = self._known(tensor)
        if before is not None and before.stays and not written:
            return  # x.to(device), which is there
        known = weakref.ref(tensor)
        stays = own and batch is not None and not (batch.met or since or beside)
        if stays and batch is not None:
            batch.inputs.append(known)
        self._made[id(tensor)] = Origin(known, own, of, since, beside, read, batch, stays)

    def _own(self, tensor: torch.Tensor) -> Origin | None:
        """What is known of a tensor that is made of this rank's samples, of this step or of an earlier one."""
        for made in (self._made, self._before):
            known = made.get(id(tensor))
            if known is not None and known.tensor() is tensor and known.own:
                return known if made is self._made else known._replace(since=True)
        return None

    def _batch(self, made: list[Origin]) -> Handed | None:
        """Which batch what is made of these is of: the one at hand, if any of them is; else the last."""
        return self._last_of([one.batch for one in made if one.own])

    def _refuse_several(self, tensor: torch.Tensor, of: Handed, batch: Handed) -> None:
        """Raise `RefusedPlan` where a graph of one batch comes to another one of which ranks hold other parts."""
        if of.dealt != batch.dealt:
            told = [f"{one.dealt.part.count} of {one.dealt.part.total}" for one in (of, batch)]
            raise with_line(_SEVERAL.format(*told), line_of_script())

    def _refuse_undealt(self, given: list[torch.Tensor], count: int) -> None:
        """Raise `RefusedPlan` where what every rank drew alike meets this rank's samples, and no weight's gradient."""
        for one in given if self._undealt else ():
            if self._is_undealt(one) and not self._has_gradient(given):
                raise with_line(_UNDEALT.format(tuple(one.shape), count), line_of_script())

    def _note_undealt(
        self, given: list[torch.Tensor], results: list[torch.Tensor], held: Share, *, drawn: bool
    ) -> None:
        """Note what every rank draws alike by a count that may be its samples', and what is made of that."""
        found = [*results, *(given[:1] if drawn else [])]  # drawn in place
        weights = {weight.shape for one in self._parameters.values() if (weight := one()) is not None}
        drawn = drawn and not any(one.shape in weights for one in given)  # noise for weights or gradients
        drawn = drawn and any(one.dim() and len(one) == held.count < held.total for one in found)
        if drawn or any(map(self._is_undealt, given)):
            self._undealt |= {id(one): weakref.ref(one) for one in found}

    def _has_gradient(self, given: list[torch.Tensor]) -> bool:
        """Whether one of these is a weight's gradient, of which each row is a weight's and no sample's."""
        grads = [weight.grad for one in self._parameters.values() if (weight := one()) is not None]
        return any(tensor is grad for tensor in given for grad in grads)

    def _is_undealt(self, tensor: torch.Tensor) -> bool:
        known = self._undealt.get(id(tensor))
        return known is not None and known() is tensor

    def _is_for_next(self, given: list[torch.Tensor]) -> bool:
        """Whether an operation after a backward is for a batch that waits already."""
        if not given or self.following is None:
            return self.following is not None
        known = [self._known(one) for one in given]
        return any(one is not None and one.batch is not None and not one.batch.spent for one in known)
