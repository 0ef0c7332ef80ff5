"""Look at a script's loss, and at what it gives its model, on as many samples as all ranks have. Part of additive's.

The samples are this rank's, over and over (`repeated`): nothing is sent, and nothing of the model is run again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from shardwise.engine.samples import COSTLY_BYTES
from shardwise.errors import RefusedPlan
from shardwise.part import whole
from shardwise.scripts.repeated import Repeated, asked_of, ways_of
from shardwise.scripts.tape import LossTape
from shardwise.scripts.unrolled import gone_over

NOT_AGAIN = (RuntimeError, IndexError, ValueError)  # of operations on other samples
UNCHECKED = "that the loss adds up over samples was not checked: "
GIVEN = "what the model is given for some samples"
_TRIES = 3
_MOST_RANKS = 8  # whose samples are put together
_BY_NUMBER = (
    "hangs on how many samples there are, or on where it stands among them (a fixed number of samples, as e[:8] or "
    "topk(8), weights or running sums along the batch, its halves), and each rank has a part of them: let each sample "
    'stand for itself; or prepare(..., loss_scope="global"), by which a script has whole batches'
)
CUT = (
    "prepared.backward: of a batch of {} samples this rank's begin after {}, within one of the groups of {} neighbours "
    "that the loss puts together (pairs of rows), which earlier batches were not cut within: give the loader "
    'drop_last=True or batches that divide, or take prepare(..., loss_scope="global")'
)


def factor_between(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Returns how many times the second gradients the first are, and how far they are from that, relative to them."""
    square = float(second.dot(second))
    factor = float(first.dot(second)) / square if square else 0.0
    return factor, float((first - factor * second).abs().max() / first.abs().max())


class LooksAtMore:
    """The part of `LossLook` that asks what more samples change."""

    _tape: LossTape
    samples: int
    total: int
    _batch: list[torch.Tensor]
    assumed = False  # numbers were taken for counts of samples, which parts of other sizes tell; the same on every rank
    leaves_out = False  # samples, of those that the script goes over one by one; on this rank
    _even = True  # all ranks hold as many
    _origins: dict[tuple[str, float], set[str]]  # by node and number, where that came from
    _tries = 0  # looks after which something was assumed

    @abstractmethod
    def _halves(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """Returns (dim of the samples, rows of their first half, of their second); None where no dim counts samples."""

    @abstractmethod
    def _with_samples(self) -> list[torch.Tensor]:
        """The model's outputs that have a dim of samples."""

    def is_number(self, node: Any, number: float, origin: str) -> bool:
        """Returns whether a number that a node of autograd was given is known to come from there: "counts", "written".

        In a batch that is not recorded, what all nodes of its kind were given of it in those that were.
        """
        key, live = (node.name(), abs(number)), bool(self._tape.made)
        if live:
            self._origins.setdefault(key, set()).add(self._tape.made.get(node, {}).get(abs(number), ""))
            return self._tape.made.get(node, {}).get(abs(number)) == origin
        return self._origins.get(key) == {origin}

    def _written(self) -> dict[int, torch.Tensor]:
        """By id, what was written into, as it was."""
        return {id(one.args[0]): one.before for one in reversed(self._tape.operations) if one.before is not None}

    def _look_at_more_given(self, given: list[torch.Tensor]) -> list[str]:
        """Raise `RefusedPlan` where the script gives a model other than all samples, each as it is."""
        sources, written = [*self._batch, *self._with_samples()], self._written()
        wrong, unknown = False, False
        for way in self._ways(sources):
            try:
                with torch.no_grad():
                    values = {id(one): way.of(whole(written.get(id(one), one)).detach(), self._place(one))
                              for one in sources}  # fmt: skip
                    again = way.again(given, values)
            except NOT_AGAIN:
                unknown = True
                continue
            made = [(one, other) for one, other in zip(given, again, strict=True) if other is not one]
            if all(self._halves(one) is None or way.is_repetition(other, one) for one, other in made):
                self._assume(way.assumed or (way.guesses and wrong))
                return []
            wrong = wrong or not way.is_unrolled
            unknown |= way.is_unrolled
        if wrong and not unknown:
            raise RefusedPlan(f"{GIVEN} {_BY_NUMBER}")
        values = {id(one): whole(written.get(id(one), one)) for one in sources}
        return self._look_at_rows(given, values, {id(one): self._place(one) for one in sources}, GIVEN)

    def _look_at_rows(self, wanted: list[Any], values: dict[int, torch.Tensor], places: dict[int, int],
                      what: str) -> list[str]:  # fmt: skip
        """Note where the script goes over samples one by one, and leaves some out; returns notices."""
        way = next(iter(self._ways([one for one in values.values() if one.dim()])), None)
        if way is None:
            return []
        with torch.no_grad():
            gone = gone_over(way, wanted, {key: way.of(one.detach(), places[key]) for key, one in values.items()})
        if gone.left and self._tape.read:
            return [f"{what} leaves out some samples that the script goes over one by one: whether by how many there "
                    "are, or by what they hold, was not checked"]  # fmt: skip
        self.leaves_out |= gone.left
        self._assume(gone.over and not gone.left)
        return []

    def refuse_left_out(self) -> None:
        """Raise `RefusedPlan`: a rank's loss leaves out samples, and no value told which."""
        raise RefusedPlan(f"prepared.backward: what the loss asks of a sample's outputs {_BY_NUMBER}")

    def _ways(self, sources: list[torch.Tensor]) -> list[Repeated]:
        """How the batch's samples may be repeated to as many as all ranks have."""
        total = min(self.total, _MOST_RANKS * self.samples)
        total = total if total > self.samples else 2 * self.samples
        costly = sum(one.nbytes for one in sources) * total > COSTLY_BYTES * self.samples
        several = any(one.shape[self._place(one)] > self.samples for one in sources)
        return [] if costly or self.samples < 2 else ways_of(self._tape, self.samples, total, several)

    def _place(self, one: torch.Tensor) -> int:
        """The dim along which a tensor has its samples."""
        halves = self._halves(one)
        return halves[0] if halves is not None else 0

    def _assume(self, assumed: bool) -> None:
        """Note that numbers were guessed to count samples, so that an unevenly dealt batch is to confirm it."""
        self.assumed |= assumed and self._even and self._tries < _TRIES

    def _asks_again(self) -> bool:
        """Whether the look is to be taken again on the next batch."""
        self._tries += self.assumed
        return self.assumed

    def _look_at_more(
        self, loss: Any, sources: list[torch.Tensor], reached: list[torch.Tensor],
        bar: float,
    ) -> list[str]:  # fmt: skip
        """Raise `RefusedPlan` where a sample is asked something else among as many samples as all ranks have."""
        reached = [one for one in reached if self._halves(one) is not None]
        sources = [one for one in sources if self._halves(one) is not None]
        values = {id(one): whole(one).detach().requires_grad_(one.requires_grad) for one in sources}
        places = {id(one): self._place(one) for one in sources}
        wrong, unknown = 0.0, False
        for way in self._ways(sources) if reached else []:
            try:
                with torch.enable_grad():
                    found = asked_of(way, loss, values, places, reached)
            except NOT_AGAIN:
                unknown = True
                continue
            if not (found.apart or found.factor):
                return [f"{UNCHECKED}it is made by operations that could not be followed"]
            if found.apart <= bar and not (way.bent and _is_other(found.factor, way)):
                self._assume(way.assumed or (way.guesses and wrong > 0))
                return []
            unknown |= way.is_unrolled
            wrong = wrong or found.apart or 1.0
        if wrong and not unknown:
            self.refuse_left_out()
        return self._look_at_rows([loss], values, places, "the loss")


def _is_other(factor: float, way: Repeated) -> bool:
    """Whether a loss grows otherwise than a sum over samples, or a mean over them, does."""
    return all(abs(factor - one) > 1e-6 * one for one in (1.0, way.samples / way.total))
