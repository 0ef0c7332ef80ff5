"""Run one forward on tensors without values, and derive cuts from it; what stays whole (`tp_whole`): `find_cuts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.comm import Axis, Ledger
from shardwise.errors import InputError, RefusedPlan, first_line
from shardwise.parallel.tensor.cut_weights import TensorParallel
from shardwise.parallel.tensor.derive import Derived, derive, kept_shares, matching, starved
from shardwise.parallel.tensor.raw_reads import RawReads
from shardwise.part import Uncut, forget
from shardwise.part.labels import Axes, WeightLabels
from shardwise.part.parameters import KEPT, ONCE, PastAttributes, see_parts
from shardwise.python_seeds import python_restored, python_states, seed_python
from shardwise.trace.deferred import Built
from shardwise.trace.fake import Fake
from shardwise.trace.known_values import Values, as_real, given_to, known_values_read, values
from shardwise.trace.module_state import ModuleState
from shardwise.trace.stand_in import Make, standing_in

Run = Callable[[nn.Module, Any], Any]  # (module, batch) -> loss, as the engine computes it


WAYS = 4  # forwards that are followed where a forward may take different ways

DtypeOf = Callable[[torch.Tensor], torch.dtype]
Followed = dict[frozenset[str], WeightLabels]  # parameters that stay whole -> the labels of a forward


class TrialModule:
    """Runs a module on tensors without values, or, where its forward reads values, on real tensors.

    Integers of the batch keep their values, as do results of these alone; experts are chosen equally often."""

    def __init__(self, built: Built, batch: Any, run: Run, dtype_of: DtypeOf):
        self.built, self.batch, self.run, self.dtype_of = built, batch, run, dtype_of
        self.fake: FakeTensorMode | None = Fake()
        self.mode: Values | None = None  # of the forward that runs without values
        self.needs_real = ""  # what it did that tensors without values cannot do
        self.past = False  # a rehearsal on cut positions met parameters that were read past their attributes

    def go_on_real(self, error: Exception) -> None:
        """Runs on real values from here on, as the module cannot without (it routes by what it computes, say)."""
        self.fake, self.needs_real = None, first_line(error)

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that stands in for a parameter or buffer."""
        if self.fake is None:
            return self.built.value(name).to(self.dtype_of(tensor), copy=True)
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=self.dtype_of(tensor), device="cpu")

    @contextmanager
    def playing(self, make: Make) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
        """Context: the module has tensors made by `make`, in training mode; yields (parameters by name, batch)."""
        module = self.built.module
        state = ModuleState(module)
        training = {child: child.training for child in module.modules()}
        module.train()
        batch = self.batch if self.fake is None else given_to(self.fake, self.batch)
        # the same module is tried several times, and trained afterwards
        try:
            draws = (torch.random.fork_rng(devices=[]), python_restored())
            known = nullcontext() if self.fake is None else values(self.fake, draws=True)
            # draws of the trial are given back, so that a run draws as one without it
            with standing_in(module, make) as named, draws[0], draws[1], known as mode, known_values_read():
                self.mode = mode
                yield named, batch
        finally:
            for child, was_training in training.items():
                child.training = was_training
            state.restore()

    def follow(self, whole: set[str]) -> WeightLabels:
        """Run one forward and loss. Returns the labels of its weights, from which cuts are derived."""
        if self.fake is not None:
            try:
                with as_real():
                    return self._follow(whole)
            except Exception as error:  # whatever the module does that tensors without values cannot
                self.go_on_real(error)
        return self._follow(whole)

    def _follow(self, whole: set[str], *, gradients: bool = False) -> WeightLabels:
        """Returns the labels of one forward; with gradients where the forward takes some itself."""
        try:
            return self._followed(whole, gradients)
        except RuntimeError as error:
            if gradients or "does not require grad" not in str(error):
                raise
        return self._follow(whole, gradients=True)  # the forward takes gradients itself

    def _followed(self, whole: set[str], gradients: bool) -> WeightLabels:
        """Returns the labels of the forward's ways, with the parameters in `whole` left out."""
        with self.playing(self.make) as (named, batch):
            axes = Axes(named, whole)
            for _ in self.ways():
                with axes.watching(self.built.module, gradients=gradients):
                    self.run(self.built.module, batch)
            return axes.result()

    def ways(self) -> Iterator[None]:
        """Yields once for each forward to try: several, by other seeds, where draws or values may choose a branch."""
        for way in range(WAYS):
            torch.default_generator.manual_seed(way)
            seed_python(way)
            before = python_states()
            yield
            # real values may decide which way a forward takes, too: only without values is one way enough
            if self.mode is not None and not self.mode.drawn and python_states() == before:
                return

    def rehearse(
        self, derived: Derived, ranks: int, sequence: bool, summed: tuple[Axis, ...] = ()
    ) -> Uncut | None:  # fmt: skip
        """Runs a forward and backward on shares; nothing is sent. Returns the `Uncut` of a missing rule, or None.

        summed  axes, rehearsed too, over which the run itself cuts activations
        """
        axis = Axis("tp", ranks, 0, None, tuple(range(ranks)), sequence=sequence, rehearsal=Ledger())
        tensor = TensorParallel(derived, axis)
        derived.ledger = axis.rehearsal
        if self.fake is not None:
            try:
                with as_real():
                    return self._rehearse(tensor, summed)
            except Exception as error:  # something reads values after all
                self.go_on_real(error)
                derived.ledger.clear()  # type: ignore[union-attr]
        return self._rehearse(tensor, summed)

    def _note_past(self) -> None:
        self.past = True

    def _rehearse(self, tensor: TensorParallel, summed: tuple[Axis, ...]) -> Uncut | None:
        """Returns the `Uncut` that a forward and backward on shares raises, or None; `RefusedPlan` for other errors."""

        def share(name: str, whole: torch.Tensor) -> torch.Tensor:
            return tensor.share(name, self.make(name, whole)).contiguous()

        with self.playing(share) as (named, batch):
            undo = see_parts(self.built.module, tensor.cuts, tensor.axis, summed=summed)
            try:
                # a forward that takes several ways must be right on all of them
                for _ in self.ways():
                    # raw reads of values, and reads past attributes, are refused or noted while shares stand in
                    raw = RawReads(tensor.cuts, named, _said(summed)) if tensor.cuts or summed else nullcontext()
                    # where positions are cut, gradients of whole weights are summands, which code that reads a weight
                    # past its attribute would miss; of weights that tp cuts `raw` tells
                    past = PastAttributes(self.built.module, self._note_past) if summed else nullcontext()
                    with raw, past:
                        loss = self.run(self.built.module, batch)
                    loss.total.backward()
            except Uncut as error:
                return error
            except InputError as error:  # ours, in words of its own: too few positions for so many ranks
                raise RefusedPlan(str(error)) from error
            except Exception as error:
                # on tensors without values, what fails is not the task's fault: it is tried on real ones
                if self.fake is not None:
                    raise
                raise RefusedPlan(_fails_cut(tensor, summed, error)) from error
            finally:
                undo()
                forget()
        return None


def _said(axes: tuple[Axis, ...]) -> str:
    return ",".join(f"{axis.name}={axis.size}" for axis in axes)


def _fails_cut(tensor: TensorParallel, summed: tuple[Axis, ...], error: Exception) -> str:
    """Returns the message for a module that runs whole and fails on shares."""
    said = first_line(error) if isinstance(error, RefusedPlan) else f"{type(error).__name__}: {first_line(error)}"
    if summed:
        return f"{_said(summed)}: the module runs whole, but not once its positions are cut: {said}"
    return (
        f"tp={tensor.axis.size}: the module runs whole, but not once its weights are cut: {said}; "
        "keep what it is about whole by tp_whole=..., or use tp=1"
    )


def find_cuts(
    built: Built, batch: Any, run: Run, ranks: int, keep: tuple[str, ...] = (), *, sequence: bool = False,
    dtype_of: DtypeOf, followed: Followed | None = None, dealt: frozenset[str] = frozenset(),
) -> Derived:  # fmt: skip
    """Returns the cuts over `ranks`, derived from a forward and rehearsed.

    keep      patterns: parameters that match one stay whole
    dealt     stacked weights of experts that another axis deals
    sequence  between the pairs, activations will be cut along the sequence
    followed  labels of earlier calls with the same module, batch and dtypes; grows
    Raises `RefusedPlan` where the module runs whole and not on shares, `InputError` for a pattern that matches nothing.
    """
    followed = {} if followed is None else followed
    elements = {name: param.numel() for name, param in built.module.named_parameters()}
    stage = TrialModule(built, batch, run, dtype_of)
    asked = matching(list(elements), keep)
    labels = _followed(stage, asked, followed)
    best, best_labels, frozen = derive(labels, elements, ranks, dealt=dealt), labels, set[str]()
    for _ in range(4):  # weights that starve their family stay whole, as long as that lets more be cut
        more = set(starved(labels, ranks)) - frozen
        if not more:
            break
        frozen |= more
        labels = _followed(stage, asked | frozen, followed)
        tried = derive(labels, elements, ranks, dealt=dealt)
        if sum(elements[n] for n in tried.cuts) > sum(elements[n] for n in best.cuts):
            best, best_labels, best.frozen = tried, labels, set(frozen)
    try:
        derived = _rehearsed(stage, best, best_labels, elements, ranks, sequence, dealt)
    except RefusedPlan as refusal:  # no product can be cut: weights in shares, gathered to read, need no rule
        derived = _kept(stage, ranks, sequence, best, best_labels, asked | dealt) or _raised(refusal)
    if not derived.cuts:
        derived = _kept(stage, ranks, sequence, derived, best_labels, asked | dealt) or derived
    derived.needed_real = stage.needs_real
    return derived


def _kept(
    stage: TrialModule, ranks: int, sequence: bool, derived: Derived, labels: WeightLabels, asked: set[str]
) -> Derived | None:
    """Returns cuts that only store weights in shares, where no product can be shared; None where that fails too."""
    whole = dict.fromkeys(derived.cuts, "its products are not cut") | derived.whole
    barred, role = {*asked, *labels.written}, KEPT
    while True:  # each round bars more weights, or gathers once instead of at every read
        kept = kept_shares(stage.built.module, ranks, whole, barred, role)
        try:
            stopped = stage.rehearse(kept, ranks, sequence) if kept.cuts else None
        except Exception as error:  # not raised: the user is told why nothing could be cut
            if role == ONCE or _UNUSED not in str(error):
                return None
            role = ONCE  # the forward takes a gradient by a weight: what it computes with must be that very tensor
            continue
        if stopped is None:
            return kept if kept.cuts else None
        more = stopped.origins & kept.cuts.keys()
        if not more:
            return None
        barred |= more


_UNUSED = "not have been used in the graph"  # by torch, of a gradient by another tensor than what was computed with


def _raised(refusal: RefusedPlan) -> NoReturn:
    raise refusal


def _followed(stage: TrialModule, whole: set[str], followed: Followed) -> WeightLabels:
    """Returns the labels of a forward in which the parameters `whole` stay whole, remembered in `followed`."""
    key = frozenset(whole)
    if key not in followed:
        followed[key] = stage.follow(whole)
    return followed[key]


def _rehearsed(
    stage: TrialModule, derived: Derived, labels: WeightLabels, elements: dict[str, int], ranks: int, sequence: bool,
    dealt: frozenset[str],
) -> Derived:  # fmt: skip
    """Returns `derived` without the families that a rehearsal stops at. Raises `Uncut` where it names none of them."""
    blocked: dict[str, str] = {}
    frozen = derived.frozen
    while derived.cuts:
        stopped = stage.rehearse(derived, ranks, sequence)
        if stopped is None:
            break
        families = {derived.cuts[name].family for name in stopped.origins if name in derived.cuts}
        if not families:  # leaving out no cut would mend it, and the loop would not end
            raise stopped
        blocked |= {name: stopped.args[0] for name, cut in derived.cuts.items() if cut.family in families}
        derived = derive(labels, elements, ranks, blocked, dealt=dealt)
    for name in frozen:
        derived.whole[name] = f"it has fewer groups of outputs than {ranks} ranks, and the others are cut without it"
    derived.frozen = frozen
    return derived
