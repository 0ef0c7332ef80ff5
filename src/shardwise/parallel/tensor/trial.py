"""Run a forward on tensors without values, derive cuts of weights (but `tp_whole`), and rehearse them: `find_cuts`."""

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


WAYS = 4  # forwards with different seeds, if a forward may take different branches

DtypeOf = Callable[[torch.Tensor], torch.dtype]
Followed = dict[frozenset[str], WeightLabels]  # names of parameters that are not cut -> labels from a forward


class TrialModule:
    """Runs a module on tensors without values or, if its forward reads values, on real tensors.

    Integers of the batch keep their values, as do results computed from these alone; experts are chosen equally often.

    built     the module, whose initial values can be made;  batch  a few samples
    run       (module, batch) -> loss;  dtype_of  from a parameter or buffer to its dtype in the run
    fake      the mode of tensors without values; None: real ones are used
    mode      tracks known values in the last forward; None on real tensors
    needs_real  why tensors without values were not enough; "" if they are
    past      whether a rehearsal on cut positions found parameters that are read past their attributes
    """

    def __init__(self, built: Built, batch: Any, run: Run, dtype_of: DtypeOf):
        self.built, self.batch, self.run, self.dtype_of = built, batch, run, dtype_of
        self.fake: FakeTensorMode | None = Fake()
        self.mode: Values | None = None
        self.needs_real = ""
        self.past = False

    def go_on_real(self, error: Exception) -> None:
        """Makes later runs use real values, since `error` came without them (a module may route by computed values)."""
        self.fake, self.needs_real = None, first_line(error)

    def make(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what stands in for a parameter or buffer, a fake tensor, or on real values its initial value."""
        if self.fake is None:
            return self.built.value(name).to(self.dtype_of(tensor), copy=True)
        with self.fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=self.dtype_of(tensor), device="cpu")

    @contextmanager
    def playing(self, make: Make) -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
        """Context in which the module, in training mode, has tensors from `make(name, tensor)`.

        Yields (name -> parameter, batch). Afterwards state, modes and random generators are restored.
        """
        module = self.built.module
        state = ModuleState(module)
        training = {child: child.training for child in module.modules()}
        module.train()
        batch = self.batch if self.fake is None else given_to(self.fake, self.batch)
        try:
            draws = (torch.random.fork_rng(devices=[]), python_restored())
            known = nullcontext() if self.fake is None else values(self.fake, draws=True)
            # generators are restored, so that the run's random numbers do not depend on the trial
            with standing_in(module, make) as named, draws[0], draws[1], known as mode, known_values_read():
                self.mode = mode
                yield named, batch
        finally:
            for child, was_training in training.items():
                child.training = was_training
            state.restore()

    def follow(self, whole: set[str]) -> WeightLabels:
        """Runs forward and loss, and returns the labels of the weights, from which cuts are derived.

        whole   names of parameters that are not to be cut
        """
        if self.fake is not None:
            try:
                with as_real():
                    return self._follow(whole)
            except Exception as error:  # the module may do anything that fake tensors do not support
                self.go_on_real(error)
        return self._follow(whole)

    def _follow(self, whole: set[str], *, gradients: bool = False) -> WeightLabels:
        """Returns the labels; runs without autograd unless `gradients`, or if the forward itself computes gradients."""
        try:
            return self._followed(whole, gradients)
        except RuntimeError as error:
            if gradients or "does not require grad" not in str(error):
                raise
        return self._follow(whole, gradients=True)

    def _followed(self, whole: set[str], gradients: bool) -> WeightLabels:
        """Returns the labels from all branches that are tried (`ways`), without the parameters in `whole`."""
        with self.playing(self.make) as (named, batch):
            axes = Axes(named, whole)
            for _ in self.ways():
                with axes.watching(self.built.module, gradients=gradients):
                    self.run(self.built.module, batch)
            return axes.result()

    def ways(self) -> Iterator[None]:
        """Yields once for each forward to run, with another seed each; only once if no random number was drawn.

        Several are run since random numbers, or on real tensors values, may choose a branch.
        """
        for way in range(WAYS):
            torch.default_generator.manual_seed(way)
            seed_python(way)
            before = python_states()
            yield
            # on real tensors (`mode` None) values may choose a branch, so all are run
            if self.mode is not None and not self.mode.drawn and python_states() == before:
                return

    def rehearse(
        self, derived: Derived, ranks: int, sequence: bool, summed: tuple[Axis, ...] = ()
    ) -> Uncut | None:  # fmt: skip
        """Runs forward and backward on the first rank's shares; returns the `Uncut` of a missing rule, or None.

        sequence  whether activations between the pairs of products are cut along the sequence
        summed    axes over which `run` itself cuts positions, rehearsed too
        Nothing is sent; `derived.ledger` gets what would be.
        """
        axis = Axis("tp", ranks, 0, None, tuple(range(ranks)), sequence=sequence, rehearsal=Ledger())
        tensor = TensorParallel(derived, axis)
        derived.ledger = axis.rehearsal
        if self.fake is not None:
            try:
                with as_real():
                    return self._rehearse(tensor, summed)
            except Exception as error:  # it may read values, which fake tensors lack
                self.go_on_real(error)
                derived.ledger.clear()  # type: ignore[union-attr]
        return self._rehearse(tensor, summed)

    def _note_past(self) -> None:
        """Records that a parameter was read past its attribute."""
        self.past = True

    def _rehearse(self, tensor: TensorParallel, summed: tuple[Axis, ...]) -> Uncut | None:
        """Returns the `Uncut` that forward and backward on shares raise, or None; `RefusedPlan` for other errors.

        On tensors without values other errors are raised as they are.
        """

        def share(name: str, whole: torch.Tensor) -> torch.Tensor:
            """Returns what stands in for a parameter's or buffer's share."""
            return tensor.share(name, self.make(name, whole)).contiguous()

        with self.playing(share) as (named, batch):
            undo = see_parts(self.built.module, tensor.cuts, tensor.axis, summed=summed)
            try:
                for _ in self.ways():
                    raw = RawReads(tensor.cuts, named, _said(summed)) if tensor.cuts or summed else nullcontext()
                    # if positions are cut, gradients of unsharded weights are summands, which is not so for code that
                    # reads a weight past its attribute; `raw` checks sharded weights
                    past = PastAttributes(self.built.module, self._note_past) if summed else nullcontext()
                    with raw, past:
                        loss = self.run(self.built.module, batch)
                    loss.total.backward()
            except Uncut as error:
                return error
            except InputError as error:  # too few positions for so many ranks; its message needs no addition
                raise RefusedPlan(str(error)) from error
            except Exception as error:
                # tensors without values may be the cause, so the caller tries real ones
                if self.fake is not None:
                    raise
                raise RefusedPlan(_fails_cut(tensor, summed, error)) from error
            finally:
                undo()
                forget()
        return None


def _said(axes: tuple[Axis, ...]) -> str:
    """Returns names and sizes of axes for messages; "" without any."""
    return ",".join(f"{axis.name}={axis.size}" for axis in axes)


def _fails_cut(tensor: TensorParallel, summed: tuple[Axis, ...], error: Exception) -> str:
    """Returns the message for a module that fails on shares with `error`. `summed`: axes that cut positions."""
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
    """Returns the cuts of weights over `ranks` ranks, derived from a forward and rehearsed.

    batch     a few samples;  run  (module, batch) -> loss;  dtype_of  from a parameter or buffer to its dtype
    keep      patterns of parameters that are not cut (`tp_whole`)
    sequence  whether activations between pairs of products will be cut along the sequence
    followed  cache of labels, for calls with the same module, batch and dtypes; entries are added
    dealt     names of stacked weights of experts that `ep` distributes
    Raises `RefusedPlan` if the module fails on shares, `InputError` for a pattern that matches nothing.
    """
    followed = {} if followed is None else followed
    elements = {name: param.numel() for name, param in built.module.named_parameters()}
    stage = TrialModule(built, batch, run, dtype_of)
    asked = matching(list(elements), keep)
    labels = _followed(stage, asked, followed)
    best, best_labels, frozen = derive(labels, elements, ranks, dealt=dealt), labels, set[str]()
    for _ in range(4):  # weights with fewer heads than ranks are left uncut if that lets more be cut
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
    except RefusedPlan as refusal:  # weights that are stored in shares, and gathered to read, may work nevertheless
        derived = _kept(stage, ranks, sequence, best, best_labels, asked | dealt) or _raised(refusal)
    if not derived.cuts:
        derived = _kept(stage, ranks, sequence, derived, best_labels, asked | dealt) or derived
    derived.needed_real = stage.needs_real
    return derived


def _kept(
    stage: TrialModule, ranks: int, sequence: bool, derived: Derived, labels: WeightLabels, asked: set[str]
) -> Derived | None:
    """Returns cuts that only store weights in shares, which are gathered to read; None if that fails too.

    derived  the cuts that failed, or none;  asked  names of parameters that are not to be cut
    """
    whole = dict.fromkeys(derived.cuts, "its products are not cut") | derived.whole
    barred, role = {*asked, *labels.written}, KEPT
    while True:  # ends, since each round bars more weights or changes to ONCE
        kept = kept_shares(stage.built.module, ranks, whole, barred, role)
        try:
            stopped = stage.rehearse(kept, ranks, sequence) if kept.cuts else None
        except Exception as error:  # not raised, since the caller tells why products could not be cut
            if role == ONCE or _UNUSED not in str(error):
                return None
            role = ONCE  # the forward takes a gradient by a weight, which must be the tensor that it computed with
            continue
        if stopped is None:
            return kept if kept.cuts else None
        more = stopped.origins & kept.cuts.keys()
        if not more:
            return None
        barred |= more


_UNUSED = "not have been used in the graph"  # in torch's error if a gradient is taken by a tensor outside the graph


def _raised(refusal: RefusedPlan) -> NoReturn:
    """Raises the refusal; for use in an expression."""
    raise refusal


def _followed(stage: TrialModule, whole: set[str], followed: Followed) -> WeightLabels:
    """Returns the labels of a forward in which the parameters `whole` are not cut, from the cache `followed` or new."""
    key = frozenset(whole)
    if key not in followed:
        followed[key] = stage.follow(whole)
    return followed[key]


def _rehearsed(
    stage: TrialModule, derived: Derived, labels: WeightLabels, elements: dict[str, int], ranks: int, sequence: bool,
    dealt: frozenset[str],
) -> Derived:  # fmt: skip
    """Returns `derived` without the families at which a rehearsal fails, in their place perhaps others.

    labels, elements, dealt   as of `derive`, with which cuts are derived again
    Raises `Uncut` if the failure is due to no cut weight.
    """
    blocked: dict[str, str] = {}
    frozen = derived.frozen
    while derived.cuts:
        stopped = stage.rehearse(derived, ranks, sequence)
        if stopped is None:
            break
        families = {derived.cuts[name].family for name in stopped.origins if name in derived.cuts}
        if not families:  # no cut can be left out, so the loop would not end
            raise stopped
        blocked |= {name: stopped.args[0] for name, cut in derived.cuts.items() if cut.family in families}
        derived = derive(labels, elements, ranks, blocked, dealt=dealt)
    for name in frozen:
        derived.whole[name] = f"it has fewer groups of outputs than {ranks} ranks, and the others are cut without it"
    derived.frozen = frozen
    return derived
