"""`ScriptRecorder`: records what a process of a proven script did. Called by plain, on_ranks, torch_hooks.

`prepare` asks `recorder()`, which is None outside of a proof. In the one process of a proof `prepare` returns `Plain`
(plain), on ranks a `Prepared` that reports its backwards and steps (on_ranks); scripts that never call `prepare` are
recorded through torch's own hooks (torch_hooks). Recorded of each optimizer step:

    losses      as backward was given them, over all samples
    gradients   whole, as the optimizer's step finds them: after clipping and the script's own changes
    weights, buffers, optimizer state, settings of its groups      after the step
    samples     of the step's batches: how many, and the sum of all their numbers

What this does not do: record in a thread of the script's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from shardwise.layout import Plan
from shardwise.proof.record import Tensors, kept_state
from shardwise.proof.settings import raise_eps
from shardwise.scripts.reading import standing

Named = Iterable[tuple[str, torch.Tensor | None]]
ENDLESS = 10**6  # batches of an epoch beyond which its last is not sought: a sampler may promise any number
BESIDE, SUMMED = "a loader beside the main one", "a sum over ranks"  # entries of `ScriptRecord.met`
PIECES = "weights in pieces over ranks"


_PLACE = re.compile(r"\bparameter \d+")


class Enough(BaseException):
    """Raised in a script once its proof has seen enough steps; no `except Exception` catches it."""


@dataclass
class StepRecord:
    """One optimizer step, with the losses of its backwards; tensors are sketches by name."""

    model: int  # its number, in the order of `prepare`, from 0
    losses: list[float] = field(default_factory=list)
    forms: set[str] = field(default_factory=set)  # how backward was called: "mean", "mean_over", "weight", "sum"
    gradients: Tensors = field(default_factory=dict)
    squares: float = 0.0  # sum of squares of all gradients' elements
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)  # of the optimizer's groups: lr and the like
    samples: list[int] = field(default_factory=list)  # of each batch since the last step
    content: float = 0.0  # the sum of all numbers of those batches
    locals: list[Tensors] = field(default_factory=list)  # for each backward, gradients of this rank's loss alone


@dataclass
class ScriptRecord:
    """The record of one process of a script, which it returns to the proof."""

    steps: list[StepRecord] = field(default_factory=list)
    initial: list[Tensors] = field(default_factory=list)  # by model: parameters and buffers at `prepare`
    began: list[int] = field(default_factory=list)  # by model: steps that other models had taken at its `prepare`
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trained: list[set[str]] = field(default_factory=list)
    final: list[Tensors] = field(default_factory=list)  # state_dict() and save_weights() at the end
    beside: Tensors = field(default_factory=dict)  # of unprepared modules that the script has at its end
    plans: list[str] = field(default_factory=list)  # that the script itself gives, one for each `prepare`
    files: dict[str, str] = field(default_factory=dict)  # digests of the script and of modules beside it
    met: set[str] = field(default_factory=set)  # what it did of what a proof should see: "a save", ...
    notices: list[str] = field(default_factory=list)
    states_known: bool = True
    raised_eps: float = 0.0  # the least eps of an optimizer that was raised; 0: none was
    drew: set[int] = field(default_factory=set)  # steps in which random numbers were drawn after the batch came
    failed: tuple[str, str] | None = None  # (error in one line, traceback)
    eps: float = 0.0  # epsilon of the coarsest 16-bit dtype that it computes in; 0: none seen
    ended: bool = False  # by the proof, which had seen enough
    seen: ScriptRecord | None = None  # recorded through torch's hooks at the same time
    names: list[dict[str, str]] = field(default_factory=list)  # by optimizer: "parameter 3" -> its prepared name

    def rename(self, names: list[dict[str, str]]) -> None:
        """Renames parameters that were recorded by their index in an optimizer to their names in a model.

        names  for each optimizer, in order: {"parameter 3": name}; an index that is missing keeps its name
        """

        def of(number: int, text: str) -> str:
            # an optimizer beyond the names trains nothing that was prepared, and keeps its numbers
            known = names[number] if number < len(names) else {}
            return _PLACE.sub(lambda place: known.get(place[0], place[0]), text)

        for step in self.steps:
            for kind in ("gradients", "parameters", "states"):
                setattr(step, kind, {of(step.model, name): t for name, t in getattr(step, kind).items()})
        self.initial = [{of(n, name): t for name, t in tensors.items()} for n, tensors in enumerate(self.initial)]
        self.trained = [{of(n, name) for name in tensors} for n, tensors in enumerate(self.trained)]
        self.shapes = {of(int(key.partition(":")[0]), key): shape for key, shape in self.shapes.items()}


@dataclass(frozen=True)
class ScriptJob:
    """What a process of a proof is to run: the script `path` with `arguments`.

    plain       Whether it is the one process, in which `prepare` only records
    plan        in place of the script's own plan, None: the script's; scope: likewise for loss_scope
    limit       steps of each model after which the script is ended, None: it runs to its end; epochs: in its place
    shorten     batches of an epoch that are kept beside its last one; None: all
    apart       Whether ranks also record the gradients of their own loss, to find the cause of a difference
    exact       Whether it runs in float64, else in the script's own precision
    nudge       seed by which each weight is moved one epsilon (or `eps` if larger) up or down; 0: none is
    foreign     Whether the script sets up its ranks itself, from RANK and the like
    hooks       records through torch's hooks: "alone", or "beside" what prepare reports (`ScriptRecord.seen`)
    hides       Whether RANK and the like are hidden from the script, though ranks see them otherwise
    total       steps of all models after which the script is ended; None: as limit and epochs say
    folder      where the script runs; stands_in: in a copy of it, whose path is `scratch`
    """

    path: str
    arguments: tuple[str, ...]
    plain: bool
    plan: str | None = None
    limit: int | None = 6
    epochs: int | None = None
    shorten: int | None = None
    apart: bool = False
    scope: str | None = None
    exact: bool = True
    nudge: int = 0
    eps: float = 0.0
    foreign: bool = False
    hooks: Literal["none", "beside", "alone"] = "none"
    hides: bool = False
    total: int | None = None
    folder: str = "."
    stands_in: bool = True
    scratch: str | None = None


class ScriptRecorder:
    """Records one process that runs a job. Each model has a number, in the order of `prepare`, from 0."""

    def __init__(self, job: ScriptJob) -> None:
        self.job = job
        self.record = ScriptRecord()
        self.models: list[Any] = []  # what `prepare` made (or an optimizer), by number
        self._coming: list[StepRecord] = []  # by model, the step that comes
        self._counts: list[int] = []  # by model, its steps
        self._since = StepRecord(0)  # batches since the last step of any model
        self._ended_epochs = 0
        self._stood: Any = None  # `standing` of the generators when the current batch came

    # --- what is told of models

    def plan_for(self, given: Plan) -> Plan:
        """Returns the plan to prove in place of the script's own plan `given`, with its accumulate."""
        self.record.plans.append(str(given))
        plan = given if self.job.plan is None else Plan.parse(self.job.plan)
        accumulate = given.accumulate if plan.accumulate == 1 else plan.accumulate
        return plan.with_(accumulate=accumulate).exact("fp64" if self.job.exact else "fp32")

    def add(self, prepared: Any, named: Named, trained: set[str]) -> int:
        """Begins to record a prepared model; returns its number.

        named    (name, whole tensor) of its parameters and buffers;  trained  names of those that are trained
        """
        self.models.append(prepared)
        initial: Tensors = {}
        for name, tensor in named:
            self._note(len(self.models) - 1, name, tensor)
            initial[name] = None if tensor is None else sketch(tensor)
        self.record.initial.append(initial)
        self.record.began.append(len(self.record.steps))
        self.record.trained.append(trained)
        self._coming.append(StepRecord(len(self.models) - 1))
        self._counts.append(0)
        return len(self.models) - 1

    def raise_eps(self, optimizer: Optimizer) -> None:
        """Raises the eps of each group to at least `LEAST_EPS`, and records the smallest that was raised.

        Called again after a state was loaded, which brings the user's eps back.
        """
        raised = [*raise_eps(optimizer), *filter(None, [self.record.raised_eps])]
        self.record.raised_eps = min(raised, default=0.0)

    def may_go_on(self) -> None:
        """Raises `Enough` if every model has taken its steps; called where a backward begins, on every rank."""
        if self.job.total is not None and len(self.record.steps) >= self.job.total:
            raise Enough
        enough = self.job.limit is not None and self._counts and min(self._counts) >= self.job.limit
        # a model that never steps would let the run go on for ever: four times as many steps in all are enough
        many = self.job.limit is not None and sum(self._counts) >= 4 * self.job.limit * max(1, len(self._counts))
        if enough or many or (self.job.epochs is not None and self._ended_epochs >= self.job.epochs):
            raise Enough

    def loss(self, model: int, value: float, form: str) -> None:
        """Records a backward of a model: its loss over all samples, and its form ("mean", "weight", ...)."""
        step = self._coming[model]
        step.losses.append(value)
        step.forms.add(form)

    def local_gradients(self, model: int, gradients: Tensors) -> None:
        """Records the gradients, as sketches by name, of one backward over this rank's samples alone."""
        self._coming[model].locals.append(gradients)

    # --- what is told of a step

    @torch.no_grad()
    def before(self, model: int, gradients: Named) -> None:
        """Records whole gradients, (name, tensor or None), as an optimizer's step begins."""
        # a new record from here on: backwards after this step belong to the next
        step, self._coming[model] = self._coming[model], StepRecord(model)
        for name, gradient in gradients:
            self._note(model, f"the gradient of {name}", gradient)
            step.gradients[name] = None if gradient is None else sketch(gradient)
            if gradient is not None and gradient.numel():
                step.squares += float(gradient.detach().abs().double().square().sum())
        batches, self._since = self._since, StepRecord(0)
        step.samples, step.content = batches.samples, batches.content
        # generators moved since the batch came, so something drew within this step
        if self._stood is not None and standing() != self._stood:
            self.record.drew.add(len(self.record.steps))
        self.record.steps.append(step)

    @torch.no_grad()
    def after(self, model: int, parameters: Named, buffers: Named, states: Iterable[tuple[str, Any]],
              groups: list[dict[str, Any]]) -> None:  # fmt: skip
        """Records a model's whole parameters and buffers, and its optimizer's states and settings, after a step."""
        step = self.record.steps[-1]
        for into, named in ((step.parameters, parameters), (step.buffers, buffers)):
            for name, tensor in named:
                into[name] = None if tensor is None else sketch(tensor)
        for name, state in states:
            step.states |= {key: sketch(value) for key, value in kept_state(name, state).items()}
        step.settings = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]
        self._counts[model] += 1

    # --- what is told of batches

    def batch(self, samples: int, content: float) -> None:
        """Records that a batch was handed out: its samples over all ranks, and the content of this rank's part."""
        self._since.samples.append(samples)
        self._since.content += content
        self._stood = standing()

    def called(self, content: float) -> None:
        """Records a model's call by the content of its arguments (`content_of`), if no loader reports batches."""
        self._since.content += content

    def epoch_ends(self, *, uneven: bool) -> None:
        """Records the end of an epoch; `uneven`: its last batch had fewer samples than others."""
        self._ended_epochs += 1
        self.met("an epoch's end")
        if uneven:
            self.met("an uneven last batch")

    def met(self, what: str) -> None:
        """Records that the script did something that a proof lists, such as "a save" or "a load"."""
        self.record.met.add(what)

    def _note(self, model: int, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self.record.shapes[f"{model}:{name}"] = tuple(tensor.shape)


_RECORDER: ContextVar[ScriptRecorder | None] = ContextVar("the recorder of a proof", default=None)


def recorder() -> ScriptRecorder | None:
    """Returns the recorder of the proof that this process is part of; None outside of one."""
    return _RECORDER.get()


@contextmanager
def recording(by: ScriptRecorder) -> Iterator[ScriptRecorder]:
    """Context in which `prepare` and torch's hooks report to the recorder `by`."""
    token = _RECORDER.set(by)
    try:
        yield by
    finally:
        _RECORDER.reset(token)


def content_of(batch: Any, rows: slice | None = None, held: int = 0, dim: int = 0) -> float:
    """Returns a weighted sum of the absolute values of a batch's tensors, by which batches are compared.

    rows  the samples to count, a slice along `dim` of tensors with `held` samples; None: all
    Elements weigh by their index in the last of three or more dims, which counts no samples: a flip changes the sum.
    """
    total = 0.0
    for leaf in tree_leaves(batch):
        # sparse and nested tensors have no dense numbers to sum
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.layout is torch.strided:
            # a rank's part of a whole batch: other ranks count the other samples
            if rows is not None and leaf.dim() > dim and leaf.shape[dim] == held:
                leaf = leaf.narrow(dim, rows.start, rows.stop - rows.start)
            sizes = (leaf.detach() if leaf.is_complex() else leaf.detach().double()).abs().double()  # bools too
            # numbers weigh by place only where the last dim cannot count samples
            if leaf.dim() > 2:
                sizes = sizes @ torch.arange(leaf.shape[-1], device=leaf.device).double().cos().add(2.0)
            total += float(sizes.sum())
    return total


@torch.no_grad()
def nudge(params: Iterable[torch.Tensor], job: ScriptJob) -> None:
    """Multiplies each element of the weights by 1 + eps or 1 - eps, at random by the job's seed; nothing for seed 0."""
    if not job.nudge:
        return
    generator = torch.Generator().manual_seed(job.nudge)
    for param in params:
        if param.is_floating_point():
            values = param.to_local() if hasattr(param, "to_local") else param  # of a DTensor in one process: all of it
            signs = torch.randint(0, 2, values.shape, generator=generator).to(values) * 2 - 1
            values.mul_(1 + signs * max(torch.finfo(values.dtype).eps, job.eps))


def _plain(value: Any) -> Any:
    """Returns a setting as a number, str or tuple of these; any other object as the name of its class."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else tuple(value.flatten().tolist())
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return value if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__


WHOLE = 1024  # elements of a tensor up to which a sketch is a copy
BLOCKS = 256  # sums in the sketch of a larger one


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a float64 (complex128) CPU copy of a small tensor; of a larger one (256,) sums of runs of its elements.

    Each sum has random signs, the same in every process, so that equal changes of opposite sign do not cancel.
    """
    values = tensor.detach()
    # sparse and other layouts have no flat elements
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.numel() <= WHOLE:
        return values.cpu().to(torch.complex128 if values.is_complex() else torch.float64, copy=True)
    flat = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).reshape(-1)
    length = -(-flat.numel() // BLOCKS)
    # by NumPy, since random operations of torch are followed within a proof
    bits = np.random.default_rng(20_250_101).integers(0, 2, length)
    signs = torch.from_numpy(bits * 2.0 - 1.0).to(flat.device)
    full = flat.numel() // length
    sums = torch.zeros(BLOCKS, dtype=torch.float64)
    sums[:full] = (flat[: full * length].view(full, length).to(torch.float64) @ signs).cpu()
    if rest := flat.numel() - full * length:  # elements of the last, shorter run
        sums[full] = (flat[full * length :].to(torch.float64) @ signs[:rest]).cpu()
    return sums


class FirstAndLast:
    """A batch sampler of the first `count` batches of another one, and its last."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return min(len(self.batches), self.count + 1)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        last, beyond = None, False
        for number, batch in enumerate(self.batches):
            if number < self.count:
                yield batch
            else:
                last, beyond = batch, True
        if beyond:
            yield last


def shortened(loader: Any, recorder: ScriptRecorder) -> Any:
    """Returns the loader, whose epochs are cut in place to their first and last batches if the proof asks for it."""
    count = recorder.job.shorten
    # a subclass may iterate in its own way, whatever its batch_sampler
    if count is None or type(loader) is not DataLoader or loader.batch_sampler is None:
        return loader
    if isinstance(loader.batch_sampler, FirstAndLast):  # the loader of a second model
        return loader
    try:
        many = len(loader.batch_sampler)
    except TypeError:
        many = 0
    # 0, a length that is not known, is not shortened
    if many > ENDLESS:
        recorder.record.notices.append(f"scope: epochs of {many} batches were begun, and none came to its end")
    elif many > count + 1:
        vars(loader)["batch_sampler"] = FirstAndLast(loader.batch_sampler, count)  # DataLoader refuses an assignment
        note = f"scope: epochs of {many} batches are shortened to their first {count} and their last; --steps all: none"
        recorder.record.notices.append(note)
    return loader
