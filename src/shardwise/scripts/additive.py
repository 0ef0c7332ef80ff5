"""Check a script's loss (calls begins it): one sample's part must not depend on other samples. A task's: engine/check.

The loss is the script's own code, so it cannot be run on parts of a batch, as a task's loss is. But its operations are
known (`tape`), and can be computed again on a batch of the same shape whose second half holds samples of the first,
targets and model outputs alike. Where the loss is a sum or a mean over samples, dL/d(output) of the first half stays
what it was, up to one factor: the number that the mean is over.

    cross-entropy, ignored indices     2 of 5 tokens count in the first half, 3 in the second: factor 4/5
    dice, in-batch negatives           other directions: the plan would train another model. Refused

What the script makes of the batch for the model is computed again likewise before the forward, and must stay the same
at the samples that stayed. The loss is looked at on the first batch, and again when it is made of other operations.
The script is handed views of the model's outputs, at which derivatives stop: nothing of the model is run again. A loss
that the model returns is followed from the last module inside whose result counts the samples.

Which dim has the samples is known of outputs from the look at the model, and of what the script gives the model from
where it changes with other samples; by size it is told only elsewhere: time may be as long as samples are many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.engine.samples import COSTLY_BYTES
from shardwise.errors import InputError, RefusedPlan, first_line
from shardwise.part import whole
from shardwise.scripts.batches import Handed
from shardwise.scripts.divisor import Divisor, Held, divisor_of
from shardwise.scripts.following import put_on, take_off
from shardwise.scripts.graphs import followed
from shardwise.scripts.lookout import Rows
from shardwise.scripts.more import CUT, GIVEN, NOT_AGAIN, UNCHECKED, LooksAtMore, factor_between
from shardwise.scripts.repeated import alike
from shardwise.scripts.tape import LossTape, aliased, tensors_in

_AGAIN = 3  # forwards of one batch, in which losses of several kinds are met
_FEW = 4  # samples, below which either half is kept in turn: one alone may hide what the others change
_Choice = Callable[[torch.Tensor], torch.Tensor]
_OTHERS: tuple[_Choice, ...] = (  # which samples of the kept half are in the other
    lambda first: first,
    lambda first: first[:1],
    lambda first: first[-1:],
)


@dataclass(frozen=True)
class _Again:
    """A loss computed again: its value, its gradients at some samples, what the script says or shows it divides by."""

    value: float
    gradients: torch.Tensor
    over: Any
    divisor: Divisor


class LossLook(LooksAtMore):
    """Follows a loop from a batch to its losses. One for all models of a loop."""

    def __init__(self, device: torch.device) -> None:
        self._tape = LossTape(device)
        self._on = self._recording = False  # a batch is followed; now
        self._awaited = False  # a loss of what the model gave
        self._next: Callable[[], None] | None = None  # follows the one at hand, while a loss of the last is to come
        self.wanted = True  # the next batch is to be recorded; the same on every rank
        self.unsure = False  # numbers in losses may count samples; the same on every rank
        self._began = self._first = False  # modules inside are heard of in the first batch alone
        self._origins = {}
        self._known: set[int] = set()  # kinds of losses that were looked at
        self._batch: list[torch.Tensor] = []
        self.beside: list[torch.Tensor] = []  # of other batches
        self._outputs: list[torch.Tensor] = []
        self._places: list[int] = []  # of those with a dim of samples
        self._inner: list[torch.Tensor] = []  # the last inside a model
        self._dims: dict[int, tuple[torch.Tensor, int]] = {}  # by id, where it has its samples, as far as that is known
        self._handles: list[Any] = []
        self.samples, self.total, self.dim = 0, 0, 0  # that this rank holds, that all do
        self._half = 0  # of them, that a look keeps
        self._blind = False  # which dim counts them is not known
        self._together: dict[int, int] = {}  # by kind of loss: how many neighbours go together in it (pairs of rows)
        self._start = 0  # of this rank's samples in the batch

    def begin(self, handed: Handed, *, every: bool, fresh: bool) -> None:
        """Get ready to check the loss of a batch that is at hand from now on.

        every   each rank holds two samples or more: ranks must do alike, since a graph's nodes order its collectives
        fresh   it was just handed out; else what was made of it since may be recorded already
        """
        begin = partial(self._begin, handed, every=every)
        if fresh and not (self._awaited and self._on):
            self._tape.clear()
        if not self._awaited:
            begin()
            return
        self._next = begin  # the loss of the batch before is still to come
        self.go_on()

    def _begin(self, handed: Handed, *, every: bool) -> None:
        self._forget()
        self.samples, self.dim, self._blind = handed.dealt.held.count, handed.dim or 0, handed.dim is None
        self.total, self._tape.samples, self._half = handed.dealt.part.total, self.samples, self.samples // 2
        self._start = handed.dealt.part.start if handed.dealt.part.count else 0
        self.assumed, self.leaves_out, self._even = False, False, handed.dealt.even
        self._tape.read |= not handed.tensors_alone
        self._tape.asked |= self._began or not handed.tensors_alone
        if self.wanted and every and not self._blind:
            self._first, self._began = not self._began, True
            self._batch = [one for one in handed.tensors if self._halves(one) is not None]
            self._on = True
            self._record()
        else:
            self.rest()

    def begin_again(self, handed: Handed) -> None:
        """A batch that was trained on comes into a forward once more: record if a look is wanted, else no longer."""
        handed.again += 1
        if self.wanted and not self._on:
            self.begin(handed, every=handed.dealt.several, fresh=True)
        elif not self.wanted and handed.again > _AGAIN:
            self._on = False
            self.rest()

    def _record(self) -> None:
        if not self._recording:
            put_on(self._tape)
        self._recording, self._tape.idle = True, False

    def rest(self) -> None:
        """Record nothing until the next look, and forget what was."""
        self._tape.idle = True
        self._tape.clear()

    def pause(self) -> None:
        """Stop recording what the script computes, since its loop asks for the next batch."""
        self._recording = False
        take_off(self._tape)

    def go_on(self) -> None:
        """Record again, if something was recorded when the loop asked for a batch, or a look is wanted."""
        if self._on or (self.wanted and (self._next is not None or not self._tape.idle)):
            self._record()

    def after_epoch(self) -> None:
        """Let go of the last batch's outputs, whose graph would keep a model and its groups alive."""
        if not self._awaited:
            self._forget()

    def _forget(self) -> None:
        self._on, self._awaited, self._next = False, False, None
        for kept in (self._batch, self._outputs, self._inner, self._dims):
            kept.clear()

    def places(self, call: Any) -> dict[int, int]:
        """Returns, by a given tensor's id, the dim along which it has the samples: where it changes with them."""
        given = [one for one in tensors_in(call) if type(one) is torch.Tensor and one.dim() > 1]
        given = [one for one in given if self._dims.get(id(one), (None,))[0] is not one]
        if not (self._on and given):
            return {}
        paused, self._tape.paused = self._tape.paused, True
        try:
            again, _ = self._given_again(given, _OTHERS[0], second=False)
        except NOT_AGAIN:
            return {}
        finally:
            self._tape.paused = paused
        for one, other in zip(given, again, strict=True):
            changed = ~alike(one.detach(), other) if other.shape == one.shape else torch.zeros(())
            for at in dict.fromkeys((self.dim, *range(one.dim()))) if changed.any() else ():
                halves = self._halves_along(one, at)
                if halves is not None and not changed.index_select(at, halves[1]).any():
                    self._dims[id(one)] = (one, at)
                    break
        return {key: at for key, (_, at) in self._dims.items()}

    def enter(self, module: nn.Module, call: Any, inside: Mapping[nn.Module, list[Rows | None]]) -> list[str]:
        """Check what a model's forward is given as it begins. Raises where other samples change it; returns notices.

        inside  where the outputs of modules inside have their samples, as far as that is known
        """
        if self._next is not None:
            self._next()
        if not self._on:
            return []
        self._tape.paused = True
        try:
            self.places(call)
            notices = self._look_at_given([one for one in tensors_in(call) if type(one) is torch.Tensor])
        finally:
            self._tape.paused = False
        self._tape.inside = True
        for child in module.modules():
            if child is not module and self._first:
                hook = partial(self._inside, inside.get(child))
                self._handles.append(child.register_forward_hook(hook))
        return notices

    def leave(self, output: Any, dims: list[Rows | None] | None = None) -> Any:
        """Note that the model's forward has ended; returns its output as the script is given it.

        dims    of each of its tensors, where its samples lie, as far as that is known
        """
        self._tape.inside = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._awaited = True
        return self._seen(output, self._outputs, dims)

    def _inside(self, dims: list[Rows | None] | None, module: nn.Module, given: Any, output: Any) -> Any:
        found: list[torch.Tensor] = []
        output = self._seen(output, found, dims)
        found = [one for one in found if self._halves(one) is not None]
        if found:
            self._inner[:] = found
            self._tape.module_returned()
        return output

    def _seen(self, output: Any, kept: list[torch.Tensor], dims: list[Rows | None] | None = None) -> Any:
        leaves = tree_flatten(output)[0]
        told = dict(zip(map(id, leaves), dims, strict=True)) if dims is not None and len(dims) == len(leaves) else {}

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or not tensor.dim() or tensor.is_leaf or hasattr(tensor, "is_weight"):
                return tensor
            kept.append(aliased(tensor))
            rows = told.get(id(tensor))
            if rows is not None and rows.dim < tensor.dim():
                self._dims[id(kept[-1])] = (kept[-1], rows.dim)
            return kept[-1]

        return tree_map_only(torch.Tensor, view, output) if torch.is_grad_enabled() else output

    def __call__(self, loss: torch.Tensor, weight: Any) -> list[str]:
        """Raise where `loss` is no sum or mean over this rank's samples; returns notices.

        weight  what the script says it is a mean over: a number, a tensor, or None
        """
        self._awaited = False
        if loss.grad_fn is None:
            return []
        outputs = self._with_samples()
        kind, reached = followed(loss, outputs)
        if kind in self._known:
            if self._start % self._together.get(kind, 1):
                raise RefusedPlan(CUT.format(self.total, self._start, self._together[kind]))
            return []
        if not self._on and self._blind:
            self.wanted = False
            return [f"{UNCHECKED}which dim of a batch counts its samples is not known (prepare(..., batch_dim=0))"]
        if not self._on:
            self.wanted = self.wanted or bool(reached)  # with the next batch
            return [] if self.wanted else [f"{UNCHECKED}its operations in the model are others than at first"]
        self.wanted = False
        self._known.add(kind)
        reached = reached or self._inner
        if not reached:
            return [f"{UNCHECKED}no output of the model has the {self.samples} samples of the batch"]
        if sum(one.nbytes for one in reached) > COSTLY_BYTES:
            return [f"{UNCHECKED}its outputs are large, and the look would hold them several times"]
        self._tape.paused = True
        try:
            beside = [one for one in self.beside if self._halves(one) is not None]
            sources = [*self._batch, *beside, *outputs, *reached]
            notices = self._look(loss, weight, sources, reached)
            if not notices:
                self._together[kind] = self._neighbours(loss, weight, sources, reached, self._tape.rounding(loss.dtype))
            if self._asks_again():
                self.wanted = True
                self._known.discard(kind)
            return notices
        finally:
            self._tape.paused = False

    def _with_samples(self) -> list[torch.Tensor]:
        """The model's outputs that have a dim of samples. One sample tells nothing: those that had one before."""
        if self.samples > 1:
            self._places = [at for at, one in enumerate(self._outputs) if self._halves(one) is not None]
        return [one for at, one in enumerate(self._outputs) if at in self._places]

    def _look_at_given(self, given: list[torch.Tensor]) -> list[str]:
        """Raise `RefusedPlan` where the script made what a model is given for some samples of other samples too."""
        for second in (False, True):
            for by in _OTHERS:
                try:
                    again, sources = self._given_again(given, by, second)
                except NOT_AGAIN as error:
                    return [f"{GIVEN} was not checked: it could not be computed again ({first_line(error)})"]
                for one, other in zip(given, again, strict=True):
                    if other is not one and id(one) not in sources:
                        self._compare_given(one, other, second)
        return self._look_at_more_given(given)

    def _given_again(self, given: list[torch.Tensor], by: _Choice, second: bool) -> tuple[list[torch.Tensor], set[int]]:
        """What a model is given, computed again on some samples in place of the others; the ids of what they are."""
        sources = [*self._batch, *self._with_samples()]
        written = self._written()
        with torch.no_grad():
            values = {id(one): self._doubled(one, whole(written.get(id(one), one)).detach(), by, second)
                      for one in sources}  # fmt: skip
            return self._tape.again(given, values), values.keys() - written.keys()

    def _compare_given(self, one: torch.Tensor, other: torch.Tensor, second: bool) -> None:
        halves, given = self._halves(one), one.detach()
        if halves is not None:
            given, other = (value.index_select(halves[0], halves[1 + second]) for value in (given, other))
        if halves is None and not (given.dtype.is_floating_point or given.dtype.is_complex):
            return  # a length or a count may follow the batch
        same = given.shape == other.shape and bool(alike(given, other).all())
        if not same:
            raise RefusedPlan(
                f"{GIVEN} changes with the other samples of the batch, of which each rank has a part (inputs "
                "normalised by the batch's own mean, rolled or sorted over samples): make it in the dataset or the "
                'collate function; or prepare(..., loss_scope="global"), by which a script has whole batches'
            )

    def _look(self, loss: Any, weight: Any, sources: list[torch.Tensor], reached: list[torch.Tensor]) -> list[str]:
        bar = self._tape.rounding(loss.dtype)
        value = loss.detach().item()
        for kept in (False, True) if self.samples < _FEW else (False,):
            try:
                with torch.enable_grad():
                    before = self._again(loss, weight, sources, reached, None, kept)
                    others = [self._again(loss, weight, sources, reached, by, kept) for by in _OTHERS]
            except NOT_AGAIN as error:
                return [f"{UNCHECKED}its operations could not be computed again ({first_line(error)})"]
            if abs(before.value - value) > bar * max(abs(value), 1.0):
                return [f"{UNCHECKED}it is made by operations that could not be followed"]
            for other in others if bool(before.gradients.any()) else []:
                self._compare(before, other, weight, bar)
        return self._look_at_more(loss, sources, reached, bar)

    def _neighbours(
        self, loss: Any, weight: Any, sources: list[torch.Tensor], reached: list[torch.Tensor], bar: float
    ) -> int:
        """Returns how many neighbouring samples a loss puts together: 1, or more (2 for pairs of rows)."""
        half = self._half
        try:
            for self._half in (few for few in range(1, half) if half % few == 0):
                if not any(self._changes(loss, weight, sources, reached, bar, second) for second in (False, True)):
                    break
            else:
                return half
            return self._half
        except NOT_AGAIN:
            return 1
        finally:
            self._half = half

    def _changes(
        self, loss: Any, weight: Any, sources: list[torch.Tensor], reached: list[torch.Tensor], bar: float, second: bool
    ) -> bool:
        """Whether gradients at the kept samples change with the others, by more than a factor."""
        with torch.enable_grad():
            before, other = (self._again(loss, weight, sources, reached, by, second) for by in (None, _OTHERS[0]))
        return bool(before.gradients.any()) and factor_between(before.gradients, other.gradients)[1] > bar

    def _compare(self, before: _Again, other: _Again, weight: Any, bar: float) -> None:
        factor, apart = factor_between(before.gradients, other.gradients)
        if apart > bar:
            raise RefusedPlan(
                "prepared.backward: the loss is no sum or mean over samples: what it asks of some samples' outputs "
                f"changes by {apart:.1%} with the other samples of the batch, of which each rank has a part (a ratio "
                "of sums over the batch, as in dice; negatives or weights from the batch): compute it for each sample "
                "and take the mean (dice: sum over all dims but the first), or "
                'prepare(..., loss_scope="global"), which gathers the outputs of all ranks for it'
            )
        fits = [1.0]
        if weight is None and before.divisor.kind == "unknown":
            return  # which is asked for
        if weight is None:
            fits += [now / then for then, now in zip(before.divisor.numbers, other.divisor.numbers, strict=False)]
        elif other.over is not None:
            fits.append(float(other.over) / float(weight))
        elif float(weight) != self.samples:
            return  # a number of unknown making
        if min(abs(factor - fit) for fit in fits) > max(bar, 1e-6) * factor:
            number = "what it was divided by" if weight is None else f"{float(weight):g}"
            raise InputError(
                f"prepared.backward: the loss is not a mean over {number}: with other samples beside them its "
                f"gradients at the same samples are {1 / factor:.3g} times as large, so it is divided by what "
                "depends on them (labels that are ignored, weights of classes): give that as mean_over, or as "
                "the weight of the sum. A ratio of sums over the batch (dice) is no mean over samples at all"
            )

    def _again(
        self, loss: torch.Tensor, weight: Any, sources: list[torch.Tensor], reached: list[torch.Tensor],
        by: _Choice | None, second: bool,
    ) -> _Again:  # fmt: skip
        """The loss computed again, the other half's samples chosen by `by`; with gradients at one half's samples."""
        values = {}
        for one in sources:
            with torch.no_grad():
                value = whole(one).detach().clone()
                value = value if by is None else self._doubled(one, value, by, second)
            values[id(one)] = value.requires_grad_(one.requires_grad)
        number = next((tensor for found, tensor in self._tape.numbers if found == weight), None)
        asked = weight if isinstance(weight, torch.Tensor) else number
        again, over = self._tape.again([loss, asked], values)
        inputs = [values[id(one)] for one in reached]
        found = torch.autograd.grad(again, inputs, allow_unused=True, retain_graph=True)
        rows = []
        for one, gradient in zip(reached, found, strict=True):
            halves = self._halves(one)
            if gradient is not None and halves is not None:
                rows.append(whole(gradient).index_select(halves[0], halves[1 + second]).reshape(-1).double())
        gradients = torch.cat(rows) if rows else loss.new_zeros(1)
        return _Again(
            again.detach().item(), gradients, over, divisor_of(again, Held(self.samples, self.dim, suspects=set()))
        )

    def _doubled(self, one: torch.Tensor, value: torch.Tensor, by: _Choice, second: bool) -> torch.Tensor:
        """`value`, which is or was `one`'s: the samples of one half (the second, if so), or some, in the other too."""
        halves = self._halves(one)
        assert halves is not None
        kept, other = (halves[2], halves[1]) if second else (halves[1], halves[2])
        index = torch.arange(value.shape[halves[0]], device=value.device)
        chosen = by(kept)
        index[other] = chosen[torch.arange(len(other), device=value.device) % len(chosen)]
        return value.index_select(halves[0], index)

    def _halves(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """(dim, rows of the first half of the samples, rows of the second); None without such rows."""
        one, known = self._dims.get(id(tensor), (None, 0))
        if one is tensor:
            return self._halves_along(tensor, known)
        for at in (self.dim, 0):
            if tensor.dim() > at and (not at or tensor.shape[at] == self.samples):
                found = self._halves_along(tensor, at)
                if found is not None:
                    return found
        return None

    def _halves_along(self, tensor: torch.Tensor, at: int) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """The same along one dim. One of k times the samples may have them side by side or one after the other: what
        is sure in both counts."""
        size = tensor.shape[at] if tensor.dim() > at else 0
        if size < max(self.samples, 1) or size % self.samples:
            return None
        rows = torch.arange(size, device=tensor.device)
        half = self._half
        one, other = rows % self.samples < half, rows // (size // self.samples) < half
        return at, rows[one & other], rows[~one & ~other]
