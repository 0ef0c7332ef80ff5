"""Sums, gathers and deals over ranks for a script, and says how much a loss counts in its step.

prepared.sum(a, b)              each value's sum over the ranks that hold different samples
prepared.gather(keys)           the rows of all samples of a batch
backward(sum, weight)           divided by the weights of all ranks and micro-batches
backward(mean, mean_over=n)     the mean over all ranks, of this micro-batch
backward(mean)                  a mean over this rank's samples; becomes the mean over all ranks' of this micro-batch
backward(sum, summed=True)      a sum that is divided by nothing

Backward runs at the scale that one process has, except with `weight`, whose sum over ranks is known only after it.

What this does not do: check whether a loss is what it is said to be; `shardwise verify` does.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch

from shardwise.comm import gather_rows, gather_samples
from shardwise.errors import InputError, ShardwiseError
from shardwise.host import read, row_of
from shardwise.layout.dealing import Share
from shardwise.part import whole
from shardwise.scripts.gradients import Earlier, Gradients
from shardwise.scripts.part_loader import PartLoader
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.weight_access import WeightAccess


class OverRanks(WeightAccess):
    """The methods of `Prepared` that sum, gather and deal over ranks."""

    loader: PartLoader
    gradients: Gradients | None  # None until the model is spread
    _form: str | None  # the form of this step's losses: "weight", "mean_over", "mean" or "sum"
    _micro: int  # backward calls of this step
    _earlier: Earlier | None  # gradients of this step's backwards before the last `accumulate`
    _own_batches: PartLoader | None  # deals the batches that the script makes itself

    @abstractmethod
    def split(self, loader: Any, *, trains: bool = False) -> PartLoader:
        """Returns another loader, cut over ranks like the main one; see `Prepared.split`."""

    @property
    def refused(self) -> list[ShardwiseError]:
        """Returns what refused this run, as the decorator `for_good` notes it; [] as long as nothing did."""
        return self.calls.refused

    @property
    def _of_whole_batches(self) -> bool:
        """Returns whether every data rank has all samples for the loss (`loss_scope` "global" or "model")."""
        return self.calls.whole is not None

    @property
    def _apart(self) -> int:
        """Returns how many ranks have samples of their own for the loss; 1 if every rank has all of them."""
        return 1 if self._of_whole_batches else self.engine.data_ranks

    def _passes(self, what: str) -> None:
        """Checks that all ranks make the call `what`; raises `RunError` if one makes another call."""
        if self.meeting is not None and self._engine is not None:
            self.meeting.passes(what)

    @names_line
    def deal(self, *batch: Any) -> Any:
        """Returns this rank's samples of a batch that the script has made itself, equal on every rank. Collective.

        Used in place of what a loader would hand out, or beside it.
        batch  tensors, or tuples, lists and dicts of them, samples first; several arguments come back as a tuple
        """
        if self._own_batches is None:
            self._own_batches = self.split(None, trains=True)
        return self._own_batches.whole.deal(self._own_batches, batch[0] if len(batch) == 1 else batch)

    @names_line
    def barrier(self) -> None:
        """Waits until every rank has made this call, so that all may read a file that one has written. Collective."""
        self.meet("prepared.barrier()", always=True)

    @names_line
    def sum(self, *values: torch.Tensor | float) -> list[Any]:
        """Returns a list of each value's sum over the ranks that hold different samples. Collective.

        A number comes back as a float, a tensor as one of its shape, without gradient.
        """
        return self._sum(*self._counted(values))

    @names_line
    def gather(self, tensor: torch.Tensor, loader: PartLoader | None = None) -> torch.Tensor:
        """Returns a tensor's rows of all samples of the current batch, in its order, as one process has them.

        Collective.

        tensor  (samples of this rank, ...), such as keys for a queue or outputs for a metric; the result has no
                gradient
        loader  what `prepared.split` returned, if the batch is its; None: the main loader's
        Raises `InputError` if the first dim does not count this rank's samples.
        """
        self._passes("prepared.gather(...)")
        rows, dealt = whole(tensor).detach(), self.calls.of_loss
        # one data rank has all rows already
        if self._apart == 1:
            return rows
        part = loader.part if loader is not None else dealt.part if dealt is not None else None
        # of the main loader a rank without samples holds a stand-in's row, which is left out below
        held = dealt.local.count if loader is None and dealt is not None else max(1, part.count if part else 0)
        if part is None or not rows.dim() or len(rows) != held:
            raise InputError(
                f"prepared.gather: a tensor of shape {tuple(rows.shape)} has no row for each of the {held} samples "
                "that this rank has of the batch: give one whose first dim counts them"
            )
        told = gather_rows(row_of([float(part.count)], self.mesh.device), self.mesh.data)
        counts = tuple(int(count) for count in read(told.view(-1), "samples of each rank"))
        # a rank without samples ran on a stand-in, whose row is not of the batch
        return gather_samples(rows[: part.count].contiguous(), counts, self.mesh.data, "control")

    def _counted(self, values: tuple[Any, ...]) -> list[Any]:
        """Returns the values, each times 0 if this rank runs on a stand-in sample, which must not count."""
        lead, dealt = self.calls.leader, self.calls.of_loss
        apart = self._apart > 1 and lead.in_loop and not lead.other.since
        counts = dealt is None or dealt.part.count or not apart
        return [value if counts else value * 0 for value in values]

    def _sum(self, *values: torch.Tensor | float) -> list[Any]:
        """Returns each value's sum over data ranks: numbers as floats, tensors in their shape and dtype.

        One collective.
        """
        self._passes("prepared.sum(...)")
        given: list[Any] = [whole(value).detach() if isinstance(value, torch.Tensor) else value for value in values]
        device = self.mesh.device
        rows = [row_of([v], device) if _is_number(v) else v.to(device, torch.float64).reshape(-1) for v in given]
        row = torch.cat(rows) if rows else row_of([], self.mesh.device)
        # where every rank holds the whole batch, its number is the sum already
        total = row if self._of_whole_batches else gather_rows(row, self.mesh.data).sum(dim=0)
        parts = list(zip(total.split([len(one) for one in rows]), given, strict=True))
        plain = [part for part, value in parts if _is_number(value)]
        # one read for all numbers: each read makes the host wait for the device
        numbers = iter(read(torch.cat(plain), "a script's sums") if plain else [])
        return [next(numbers) if _is_number(value) else part.view(value.shape).to(value) for part, value in parts]

    def _loss_of(self, total: torch.Tensor, weight: torch.Tensor | float | None) -> torch.Tensor:
        """Returns one micro-batch's loss over all ranks, a float64 scalar; NaN if no rank has weight.

        total   this rank's summand of it
        weight  of this rank, used if the form of the step's losses is "weight"
        """
        whole, divisor = self._sum(total.detach(), self._once() if self._form != "weight" else float(weight or 0.0))
        return torch.tensor(whole / divisor if divisor else float("nan"), dtype=torch.float64)

    def _once(self) -> float:
        """Returns this rank's part of a weight that sums to 1 over ranks; 1.0 if every rank has all samples."""
        return 1.0 if self._of_whole_batches else float(self.engine.mesh.data.index == 0)

    def _factor(self, form: str, over: torch.Tensor | float | None, part: Share | None) -> float:
        """Returns the factor that turns this rank's loss into a summand of the loss over ranks.

        Collective for "mean_over".

        form   "weight", "mean_over", "mean" or "sum"
        over   what this rank's mean is over, for "mean_over"
        part   the samples that count on this rank; None if unknown
        """
        # a sum and its weight add up as they are; whole batches are counted once elsewhere
        if self._of_whole_batches or form in ("weight", "sum"):
            return 1.0
        # the script says what its mean is over, so that means over unequal numbers weigh right
        if form == "mean_over":
            (total,) = self._sum(over or 0.0)
            return float(over or 0.0) / total if total else 0.0
        # nobody knows the samples, or there is one data rank: the mean is whole
        if part is None or self._apart == 1:
            return 1.0
        return part.count / part.total if part.total else 0.0  # a mean over this rank's samples

    def _weight(self, form: str, weight: torch.Tensor | float | None, stands_in: bool) -> torch.Tensor | float:
        """Returns the weight of this rank's loss in the step; without weights a step's first backward has all, 1.

        form       how the loss is given; `InputError` if it differs from that of earlier losses of the step
        weight     the script's, for the form "weight"
        stands_in  Whether this rank runs on a stand-in sample, which has weight 0
        """
        # sums are divided by all weights of their step, and that step's have been divided already
        if form == "weight" and self._earlier is not None and not self._earlier.stepped:
            self._refuse_weights()
        if self._form not in (None, form):
            raise InputError(
                "prepared.backward: the losses of a step are given in one way: each with its weight, each with "
                "mean_over, or none"
            )
        self._form = form
        if form != "weight":
            return self._once() if self._micro == 0 else 0.0  # the step's weight of 1 comes with its first micro-batch
        # a rank that ran on a stand-in counts nothing
        if stands_in or weight is None:
            return 0.0
        return weight.detach().reshape(()) if isinstance(weight, torch.Tensor) else float(weight)

    def _refuse_weights(self) -> None:
        """Raises `InputError` for a weight in a step whose gradients were divided already."""
        k = self.engine.plan.accumulate
        raise InputError(
            f"prepared.backward(loss, weight) was called {k + 1} times before optimizer.step(): a step's sums are "
            f"divided by all of its weights: say in the plan how many there are in a step (accumulate={k + 1}; an "
            "earlier step() is fine), or give means, which add up as in one process: prepared.backward(loss, "
            "mean_over=n)"
        )


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.dim()


def form_of(weight: object, mean_over: object, summed: bool) -> str:
    """Returns how a loss is given: "weight", "mean_over", "sum" or "mean"; raises `InputError` for two ways at once."""
    forms = [name for name, there in (("weight", weight is not None), ("mean_over", mean_over is not None),
                                      ("sum", summed)) if there]  # fmt: skip
    if len(forms) > 1:
        raise InputError(
            "prepared.backward: give weight (what a sum is divided by), mean_over (what a mean is over) or summed=True "
            "(a sum that nothing divides), and not two of them"
        )
    return forms[0] if forms else "mean"


def check_loss(loss: Any) -> None:
    """Raises `InputError` unless `loss` is a one-element tensor that depends on the model's parameters."""
    what = "prepared.backward: the loss must be one number that depends on the model's parameters"
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"{what}, got {type(loss).__name__}: give the tensor, before .item()")
    if loss.numel() != 1:
        raise InputError(f"{what}, got shape {tuple(loss.shape)}: give its .mean(), or its .sum() and how many count")
    if not loss.requires_grad:
        raise InputError(f"{what}, and this one does not: compute it outside no_grad, without .detach()")


def check_number(value: Any, name: str) -> None:
    """Raises `InputError` unless `value`, backward's argument `name`, is None or one number without gradient.

    A Python number below 0 raises too; a tensor's sign is not read, which would make the host wait for the device.
    """
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    if math.prod(shape) != 1:
        raise InputError(f"prepared.backward: {name} must be one number, got shape {shape}: give its .sum()")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise InputError(
            f"prepared.backward: {name} carries a gradient, and a loss is divided by a number: .detach() it"
        )
    if isinstance(value, int | float) and value < 0:
        raise InputError(f"prepared.backward: {name} is {value:g}, which turns the loss around: give how many count")
