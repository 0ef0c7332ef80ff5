"""The methods of one step of a prepared script: `backward`, `clip_grad_norm_`, the optimizer's `step` and `zero_grad`.

prepared.backward(loss, weight)     this rank's gradients; the plan's last micro-batch of a step sums them over ranks
prepared.clip_grad_norm_(1.0)       by the norm over all ranks
optimizer.step()                    over this rank's pieces; weights are published
optimizer.zero_grad()               ends the step
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.comm import gather_rows
from shardwise.errors import InputError, RefusedPlan
from shardwise.host import row_of
from shardwise.layout import Plan
from shardwise.layout.dealing import Share
from shardwise.parallel.full import FullShard
from shardwise.part import forget, plain, whole
from shardwise.scripts.agreement import compare, note
from shardwise.scripts.gradient_arrivals import Asking, buckets_of, share_uncut
from shardwise.scripts.gradients import Earlier, Gradients
from shardwise.scripts.guard import FirstSteps
from shardwise.scripts.over_ranks import OverRanks, check_loss, check_number, form_of
from shardwise.scripts.part_loader import PartLoader
from shardwise.scripts.proof.on_ranks import RankSide
from shardwise.scripts.sample_draws import differentiate
from shardwise.scripts.script_lines import Notices, for_good, names_line, refuse_call
from shardwise.scripts.script_profile import ScriptProfile
from shardwise.scripts.step_hooks import hooks_around, hooks_aside, run_hooks
from shardwise.step.control import Tally
from shardwise.step.loss import Loss
from shardwise.step.normalise import held_gradients, norm_of_gradients, not_finite
from shardwise.step.result import StepResult
from shardwise.step.train_step import complete, update


class Stepping(OverRanks):
    """The methods of `Prepared` that make up a step; those that the script's loop calls are collective."""

    plan: Plan
    all_names: list[list[str]]  # by group of the optimizer, frozen parameters among them
    _notices: Notices
    _first: FirstSteps
    _asking: Asking  # context of this model's own backward
    side: RankSide | None  # records for a proof; None outside of one
    _shares: bool  # Whether tp or ep cut weights

    @property
    @abstractmethod
    def notices(self) -> list[str]:
        """Returns notices about this run, as sentences for whoever reads the script's output."""

    def _begin(self) -> None:
        """Sets the state of stepping to that before the first step."""
        self._tally: Tally | None = None  # sums of the current step; None before its first backward
        self._earlier: Earlier | None = None  # gradients of its backwards before the last `accumulate`
        self._micro = 0  # its calls of backward
        self._finished = False  # Whether its gradients are summed over ranks
        self._forgotten = False  # Whether the step before was forgotten already
        self._stepped = False  # Whether the optimizer used its gradients, without zero_grad since
        self._form: str | None = None
        self._result: StepResult | None = None  # of the gradients last summed
        self._usable = True  # Whether these are finite
        self._profile: ScriptProfile | None = None
        self.loss = torch.tensor(float("nan"))  # of the last complete step, over all ranks

    # --- what a script calls

    @for_good
    def backward(
        self, loss: torch.Tensor = None, weight: torch.Tensor | float | None = None, *,
        mean_over: torch.Tensor | float | None = None, also: Sequence[Stepping] = (), retain_graph: bool | None = False,
        summed: bool = False, loader: PartLoader | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Stands for `loss.backward()`; returns this micro-batch's loss over all ranks, a float64 CPU scalar.

        loss       this rank's loss, of its samples: a mean over them, unless one of the next three says otherwise
        weight     the loss is a sum, and this is what it is to be divided by, of this rank's samples (how many, how
                   many tokens): one process divides by the sum of all weights of the step, other micro-batches' too
        mean_over  what this rank's mean is over (tokens, labels that count): the loss becomes the mean over all ranks,
                   of this micro-batch alone; whatever else it was divided by stays
        summed     Whether the loss is a sum that nothing divides
        also       what `prepare` returned for other models that this loss trains too, each with its own optimizer
        retain_graph    as in `loss.backward`: another backward goes through the same graph
        loader     what `prepared.split` returned, if the loss is of its batch; None: of the main loader's

        Collective. With the plan's last micro-batch, gradients are summed over ranks and divided. What a loss is said
        to be is believed here; `shardwise verify` proves it. Raises `InputError` for no loss or weight, `RunError` if
        ranks differ.
        """
        if self.side is not None:  # a proof ends the script here once it has seen enough
            self.side.recorder.may_go_on()
        refuse_call(loss, options)
        check_loss(loss)
        for given, name in ((weight, "weight"), (mean_over, "mean_over")):
            check_number(given, name)
        form = form_of(weight, mean_over, summed)
        if self.meeting is not None:
            self.meeting.steps(form)
        together = self._together(also)
        for script in together:
            script._ready()
        # zero=3 and cut weights or positions: every rank is needed for a backward
        if self.calls.gathers:
            self._passes("prepared.backward(...)")
        engine, part = self.engine, self._part_of(loader)
        loss, weight, mean_over = whole(loss), plain(weight), plain(mean_over)
        stands_in = part is not None and part.count == 0 and not self._of_whole_batches
        if self.side is not None:
            self.side.apart(self, loss)
        # a stand-in runs the same backward, for its collectives, with a loss of 0
        factor = self._factor(form, 0.0 if stands_in else mean_over, part) * (not stands_in)
        weights = [script._weight(form, weight, stands_in) for script in together]
        with ExitStack() as inside:
            for script in together:
                # buckets are reduced once in a step; FSDP2 reduces in every backward
                last = script._micro + 1 == script.plan.accumulate or isinstance(script.engine.technique, FullShard)
                inside.enter_context(script._asking)
                script.engine.technique.start_micro_batch(last=last)
            scaled = engine.state.scale
            many = engine.plan.accumulate
            scale = scaled.factor(weights[0], engine.mesh.data, engine.device, many) if scaled is not None else 1.0
            differentiate(loss, factor * scale, retain_graph=bool(retain_graph))
        total = (loss.detach() if not loss.dim() else loss.detach().reshape(())) * factor
        for script, counted in zip(together, weights, strict=True):
            script._count(Loss(total, counted), stands_in, part)
        # with one micro-batch the step's control row has its loss already; else it takes a collective of its own
        told = self.loss if engine.plan.accumulate == 1 else self._loss_of(total, 0.0 if stands_in else weight)
        for script in together:
            if script.side is not None:
                script.side.recorder.loss(script.side.number, float(told), form)
        return told

    def _part_of(self, loader: PartLoader | None) -> Share | None:
        """Returns the samples of the loss's batch that count on this rank; None if unknown.

        loader  whose current batch it is, which it must have handed out (`InputError`); None: the main loader's
        """
        if loader is None:
            dealt = self.calls.of_loss
            return dealt.part if dealt is not None else None
        if loader.part is None:
            raise InputError("prepared.backward: loader= has handed out no batch yet, of which the loss could be")
        return loader.part

    def _together(self, also: Sequence[Stepping]) -> list[Stepping]:
        """Returns [this model, *also], which one loss trains; `InputError` if their plans do not fit."""
        for other in also:
            if not isinstance(other, Stepping) or other is self:
                raise InputError("prepared.backward: also= takes what prepare returned for other models of the loss")
            if other.plan.accumulate != self.plan.accumulate or self.engine.state.scale is not None:
                raise InputError(
                    "prepared.backward: models that one loss trains have plans of one accumulate, and none of fp16, "
                    "whose loss scales would differ"
                )
        return [self, *also]

    def _ready(self) -> None:
        """Opens this model's step for a backward; `InputError` if the loss's samples cannot be known."""
        engine = self.engine
        if self.calls.part is None and engine.data_ranks > 1:
            raise InputError(
                "prepared.backward: the loader that was given to prepare has handed out no batch, so which samples the "
                "loss belongs to is not known: go through what prepare returns (prepared = model, optimizer, loader = "
                "shardwise.prepare(...)); for a second model in the same loop, give prepare the loader that the first "
                "prepare returned"
            )
        self._open_step()

    def _count(self, loss: Loss, stands_in: bool, part: Share | None) -> None:
        """Adds a micro-batch's loss to the step's sums; the last one completes gradients.

        `stands_in`: it counts nothing.
        """
        tally = self._tally
        assert tally is not None
        with self._gate.open():
            tally.used.append(self.engine.technique.finish_micro_batch())
        # a rank without samples ran a stand-in, whose loss and used parameters must not count
        tally.stood_in |= stands_in or (part is not None and part.count == 0)
        # None: nobody knows how many, and each rank's loss counts as one
        samples = 1 if part is None else part.total if self._of_whole_batches else part.count
        tally.add(loss, 0 if stands_in else samples, {})
        self._micro += 1
        self.calls.after_backward()
        if self._micro == self.engine.plan.accumulate:
            self._finish()

    @for_good
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips gradients to `max_norm`; returns their norm over all ranks before that, a float64 scalar. Collective.

        Stands for `nn.utils.clip_grad_norm_(model.parameters(), max_norm)`. Raises `InputError` before any backward.
        """
        self._passes("prepared.clip_grad_norm_(...)")
        self._flush()
        if self._tally is None:
            raise InputError("prepared.clip_grad_norm_: there are no gradients yet: call prepared.backward first")
        with self._gate.open():
            self._whole_gradients.put_back()
            self.grad_norm = norm_of_gradients(self.engine.state)  # the script may have changed them
            gradients = held_gradients(self.engine.state)
        factor = min(1.0, max_norm / (self.grad_norm + 1e-6))
        if gradients and factor < 1.0:
            torch._foreach_mul_(gradients, factor)
            self._whole_gradients.scaled(factor)
            with self._gate.open():
                share_uncut(self.engine)
        return torch.tensor(self.grad_norm, dtype=torch.float64)

    def are_whole(self) -> bool | None:
        """Returns whether this step's gradients are summed over ranks by now; None before its first backward."""
        return None if self._tally is None else self._finished

    @property
    def _whole_gradients(self) -> Gradients:
        assert self.gradients is not None
        return self.gradients

    # --- a step

    def _open_step(self) -> None:
        """Begins a step, or continues one; gradients that a finished step has left are set aside to be added."""
        self._refuse_stray("prepared.backward")
        # a finished step whose gradients the script cleared begins anew
        if self._finished and self._cleared():
            self._discard()
        # gradients that are still there, or set by hand, are set aside and added to
        if self._finished or (self._tally is None and self._whole_gradients.are_set()):
            self._set_aside()
        if self._tally is None:
            # otherwise the technique forgot the last step already
            if not self._forgotten:
                with self._gate.open():
                    self.engine.technique.start_step()
            self._forgotten = False
            counts = self.mesh.counts and not (self.calls.counted_once and self.mesh.data.index)
            self._tally = Tally(self.engine.device, counts)
            if self._earlier is not None:
                self._tally.used.append(self._earlier.used)  # what they reached has a gradient in this step

    def _set_aside(self) -> None:
        """Sets this step's gradients aside, since a backward without `zero_grad()` adds to them. Collective."""
        if self._form == "weight" and not self._stepped:
            self._refuse_weights()
        with self._gate.open():
            self._whole_gradients.put_back()
            self._earlier = Earlier(self.engine, self._usable, stepped=self._stepped)
        self._forget()

    def _cleared(self) -> bool:
        """Whether the script has cleared all gradients by hand (`p.grad = None`, `p.grad.zero_()`). Collective."""
        with self._gate.open():
            self._whole_gradients.put_back()
            mine = not any(bool(_local(gradient).any()) for gradient in held_gradients(self.engine.state))
        return bool(gather_rows(row_of([float(mine)], self.mesh.device), self.mesh.world).all())

    def _refuse_stray(self, call: str) -> None:
        """Raises `InputError` for `call` within `whole()`, or beside gradients of a backward that is not the plan's."""
        if self.whole_is_open:
            raise InputError(f"{call} within prepared.whole(): call it after the end of the with block")
        if self.calls.stray:
            raise InputError(
                f"{call}: loss.backward() or another model's backward has left gradients in this one since its last "
                "zero_grad(), which belong to no step of the plan: for its own loss call prepared.backward(loss), of "
                "what prepare returns (prepared = model, optimizer, loader = shardwise.prepare(...)); where two models "
                "are trained, zero_grad() of its optimizer before that, and step() before the other's backward; of "
                "models that one loss trains together: prepared.backward(loss, also=[of_other])"
            )

    def _flush(self) -> None:
        """Reduces gradients that wait for the plan's last micro-batch, for a step with fewer micro-batches."""
        if self._tally is None or self._finished:
            return
        for buckets in buckets_of(self.engine):
            if not buckets.sync:
                with self._gate.open():
                    buckets.sync = True
                    buckets.finish_micro_batch()
        self._finish()

    def _finish(self) -> None:
        """Sums gradients over ranks and divides them; raises `RunError` if ranks differ in what `note` records."""
        assert self._tally is not None
        engine, tally = self.engine, self._tally
        if engine.world_size > 1:
            note(engine, tally, self.calls.checksum, generators=self.calls.randomness == "global")
        with self._gate.open():
            engine.state.on_nonfinite = "skip"  # until a step is asked for: a GradScaler leaves it out
            result, self._usable = complete(engine.state, tally)
            if engine.world_size > 1:
                compare(engine, tally)
            self._result = result
            self.grad_norm = result.grad_norm
            if self._earlier is not None:  # a backward without zero_grad() before it: what that set aside is added
                self.grad_norm, self._usable = self._earlier.add(), self._usable and self._earlier.usable
            if not self._usable:  # on one rank alone, perhaps, and a GradScaler is to find it on every one
                for gradient in held_gradients(engine.state):
                    _local(gradient).view(-1)[:1] = torch.inf
            share_uncut(engine)
        forget()
        self._finished = True
        self.loss = torch.tensor(result.loss, dtype=torch.float64)

    # --- the optimizer's calls

    @for_good
    def _step(self, inner: Callable[..., Any], closure: Callable[[], Any] | None, optimizer: Optimizer) -> Any:
        """Runs `inner`, the optimizer's own step, over this rank's pieces and returns its result. Collective.

        A `closure` is refused if tp, ep, offload or an optimizer's needs leave no whole step to it.
        """
        if self._engine is None and closure is None:
            return inner()  # nothing has a gradient yet
        # the plan's own pieces come back for the step; after it the script sees whole tensors again
        if self.whole_is_open:
            assert self._whole_weights is not None
            with self._whole_weights.paused():
                return self._step(inner, closure, optimizer)
        self._refuse_stray("optimizer.step()")
        # ranks gather or exchange pieces within a step, so all must come to it
        if self.calls.gathers or self._pieces:
            self._passes("optimizer.step()")
        if self.meeting is not None:
            self.meeting.steps("step")
        if closure is not None and self._shares:
            raise RefusedPlan("optimizer.step(closure) where tp or ep cut weights: call backward and step() instead")
        if closure is not None and self._engine is None:  # a step under way holds the weights as they were
            raise InputError(
                f"optimizer.step(closure) comes before any forward, from which plan {self.plan} derives its cuts: call "
                "the model on a batch once, in train mode, before the first step"
            )
        engine = self.engine
        if closure is not None and engine.state.tier is not None:
            raise RefusedPlan(
                "optimizer.step(closure) where the plan has it step over few weights at a time (offload, "
                "optimizer_state, masters): call backward and step() instead, or leave these out"
            )
        self.settle()
        self._take_written()
        if closure is not None:
            if engine.state.owners is not None:
                raise RefusedPlan("a closure with an optimizer that needs whole tensors: use dp_replicate")
            result = inner(lambda: self._closed(closure))
            engine.technique.publish()
            if self.side is not None:
                self.side.before(self)
        else:
            self._flush()
            with self._gate.open():
                self._whole_gradients.put_back()
            if self._tally is None and self.calls.called and not self._whole_gradients.are_set():
                self._notices.say(["optimizer.step() finds no gradient and changes nothing: no loss came "
                                   "to prepared.backward since zero_grad(), or its error was caught"])  # fmt: skip
            if self.side is not None:
                self.side.before(self)
            aside = self._pieces or engine.state.tier is not None  # which step over a part of the weights
            hooks = hooks_around(optimizer) if aside and self._usable else ([], [])
            if hooks[0]:  # the script's hooks see whole gradients; what they change goes back into the pieces
                run_hooks(optimizer, hooks[0], lambda: self.whole(grads=True))
                with self._gate.open():
                    self._whole_gradients.put_back()
            # an optimizer asked to step over gradients that are not finite: raises, unless a loss scaler expects it
            if self._tally is not None and not self._usable and self._result is not None:
                with self._gate.open():
                    not_finite(engine.state, self._result, _SKIP)
            self._optimizer_guard.leave()
            with self._gate.open(), hooks_aside(optimizer) if aside else nullcontext():
                self._first.before()
                result = update(engine.state, lambda: self._usable_step(inner))
            self._watch_pieces()
            run_hooks(optimizer, hooks[1], lambda: self.whole(grads=True))
            with self._gate.open():
                self._first.after()
        self._notices.say(self.notices)
        for one in self.calls.recorded:
            one.on = False
        engine.state.steps_done += 1
        self.weights_version += 1
        if self.side is not None:
            self.side.after(self)
        self._stepped = self._tally is not None
        if self._profile is not None:
            self._profile.stepped()
        return result

    def _usable_step(self, inner: Callable[[], Any]) -> Any:
        """Returns what the optimizer's own step returns; None, without a step, if a gradient is not finite."""
        if self._tally is not None and not self._usable:
            return None
        return inner()

    def _closed(self, closure: Callable[[], Any]) -> torch.Tensor:
        """Runs a closure; returns its loss over all ranks, the same on each, for a line search. Collective."""
        self.engine.technique.publish()
        with torch.enable_grad():
            closure()
        self._flush()
        return self.loss

    @names_line
    def _discard(self, of_optimizer: list[list[str]] | None = None) -> None:
        """Drops all gradients and sums of this step (`zero_grad`), or those of one optimizer's weights.

        of_optimizer  the names of these weights, by the optimizer's groups; None: all. The other weights keep theirs
        """
        # one of several optimizers of the model: only its weights' gradients go, unless stray ones came, which all go
        one_of_several = of_optimizer is not None and self._engine is not None
        others = {*self.engine.state.names}.difference(*of_optimizer or ()) if one_of_several else ()
        if others and self._tally is not None and not self.calls.stray:
            self._flush()
            self._whole_gradients.take_away(name for name in self.engine.state.names if name not in others)
            self._stepped = True  # nothing waits to be stepped by
            return
        self.calls.stray = False
        if self._engine is None:
            for param in self.model.parameters():  # what another loop has left, before the model is spread
                param.grad = None
            return
        if self._tally is not None and not self._finished:
            self._flush()  # what was launched is waited for
        self._earlier = None  # gradients of a backward before this one, which would have been added
        self._forget()
        if self._whole_weights is not None:
            self._whole_weights.forget_gradients()

    def _forget(self) -> None:
        """Begins a new step, without gradients, sums or a result."""
        with self._gate.open():
            self.engine.technique.start_step()
            self._whole_gradients.forget()
        self._tally, self._micro, self._finished, self._stepped = None, 0, False, False
        self._forgotten = True
        self._form = None


_SKIP = "look for numbers of the batch that are not finite, or leave such a step out: if prepared.loss.isfinite(): ..."


def _local(tensor: Any) -> torch.Tensor:
    """Returns a DTensor's elements on this rank; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
