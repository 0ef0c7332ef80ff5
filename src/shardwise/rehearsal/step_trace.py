"""Trace a micro-batch of a whole module on fake tensors, recompute included: ops, bytes, FLOPs. A rank's: rank_row.

The module's own forward, loss and backward run under a dispatch mode on tensors without values; nothing is computed
and no memory is used. Recompute is applied as it is in a run, so what it adds is seen, not estimated.

*What this does not do*: see kernels' workspace; follow modules that look at values other than integers
(trace/known_values.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm import Axis, Ledger
from shardwise.comm.ledger import FACTORS
from shardwise.device import generators_kept
from shardwise.engine.refused_modules import make_gradients_dense, refuse, scripted
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.look.one_process import MOST_ELEMENTS, Untried, told_alone
from shardwise.look.samples import check_data, read_samples
from shardwise.memory.live import LiveBytes
from shardwise.memory.recompute import recompute_block
from shardwise.parallel.batchnorm import CountBatchNorm, JoinBatchNorm, batch_norm_modules, sync_module
from shardwise.parallel.slots import Phase
from shardwise.part.pairs import hold_pairs
from shardwise.precision import Precision
from shardwise.rehearsal.gpu_kernels import Fused, like_gpu
from shardwise.rehearsal.op_counts import Count, in_order, wholes_of
from shardwise.rehearsal.peak_windows import PeakWindows
from shardwise.rehearsal.trace_mode import RehearsalMode, followed
from shardwise.rehearsal.workspaces import TracedValues
from shardwise.simulator.counted import StepTrace
from shardwise.step.batching import parts_of, samples_in
from shardwise.task import Task, call_arguments
from shardwise.task_names import inputs_hint
from shardwise.tiers import rehearsed
from shardwise.trace.blocks import blocks_of, find_blocks
from shardwise.trace.deferred import build as build_deferred
from shardwise.trace.deferred import checked, named_tensors, refuse_compiled, told_of_constructor
from shardwise.trace.fake import Fake
from shardwise.trace.known_values import BATCH, Values, as_real, give, unpadded
from shardwise.trace.made_before import copied
from shardwise.trace.outside_reads import ArgumentWrites


def build(task: Task, fake: FakeTensorMode, precision: Precision) -> nn.Module:
    """Returns the module with fake tensors in the plan's dtypes; `InputError` where it cannot be made so."""
    model = checked(_built(task, fake))
    outside = [tensor for _, tensor in named_tensors(model) if not (tensor.is_meta or isinstance(tensor, FakeTensor))]
    # weights that lay in memory before: a copy of the module, of whose tensors the structure alone is kept
    if any(isinstance(tensor, nn.Parameter) for tensor in outside):
        model = copied(model, {id(tensor): tensor for tensor in outside})
    refuse_compiled(model)
    if (path := scripted(model)) is not None:
        raise InputError(
            f"'{path}' was made by torch.jit and cannot be traced without values: give it as it was before"
        )
    make_gradients_dense(model)
    hold_pairs(model)  # which a forecast counts as the real numbers that they are
    made: dict[int, torch.Tensor] = {}  # by what it stands for: a weight that is tied stays so

    def ours(tensor: torch.Tensor, trained: bool = False) -> torch.Tensor:
        if id(tensor) not in made:
            whole = _without_values(tensor, fake, precision.dtype_of(tensor))
            made[id(tensor)] = _as_parameter(tensor, whole) if trained else whole
        return made[id(tensor)]

    kept = [*model.parameters(), *model.buffers()]  # else an id might be given again
    with fake:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = ours(parameter, True)
            for name, buffer in module._buffers.items():
                # a buffer that the constructor made without values, and in the plan's dtype, is kept
                if buffer is not None and not (
                    isinstance(buffer, FakeTensor) and buffer.dtype == precision.dtype_of(buffer)
                ):
                    module._buffers[name] = ours(buffer)
    del kept
    return model.train()


def _built(task: Task, fake: FakeTensorMode) -> nn.Module:
    """Returns the module without weights, as far as its constructor allows; `InputError` where it fails anyway.

    A constructor may read values of tensors that it puts on the CPU itself, whatever the default device is.
    """
    failed: list[Exception] = []
    for without_values in (fake, torch.device("meta")):
        try:
            with without_values:
                return task.model()
        except Exception as error:
            failed.append(error)
    if repr(failed[0]) == repr(failed[1]):  # no matter of values: with weights in memory it would fail alike
        raise InputError(f"the model's constructor fails: {told_of_constructor(failed[0])}") from failed[0]
    with torch.random.fork_rng(devices=[]):
        return build_deferred(task.model, 0).module


def _without_values(tensor: torch.Tensor, fake: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """Returns a fake tensor of the same shape and strides in this dtype; to be called within `fake`.

    One that is fake already, or has values, stays on its device; one of "meta" comes to the CPU.
    """
    if isinstance(tensor, FakeTensor):
        return tensor.data.to(dtype)
    if tensor.device.type == "meta":  # asking it for `.data` would cost more than all that it tells
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return fake.from_tensor(tensor.data).to(dtype)


def _as_parameter(was: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns the parameter itself where `whole` is it, else a new one of `whole`.

    A copy of a fake parameter (`copy.deepcopy`) names another storage than its views have, which would count twice.
    """
    if was.dtype == whole.dtype and was.untyped_storage()._cdata == whole.untyped_storage()._cdata:
        return was
    return nn.Parameter(whole, was.requires_grad)


def one_sample(task: Task) -> Any:
    """Returns a batch of one sample from the task's own data; `InputError` where it cannot be read."""
    if task.batch is None:
        check_data(task)
        return read_samples(task, [0])
    batch = task.batch(0)
    return parts_of(batch, data_ranks=samples_in(batch))[0].batch


def batch_bytes(batch: Any) -> float:
    """Returns the bytes of all tensors of a batch; overlapping views count once."""
    leaves = pytree.tree_leaves(batch)
    spans: dict[int, tuple[int, int]] = {}
    for leaf in leaves:
        # views of one storage count together, and gaps between them (padding) with them
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            first = leaf.storage_offset()
            last = first + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) + 1
            low, high = spans.get(key := leaf.untyped_storage()._cdata, (first * leaf.itemsize, 0))
            spans[key] = min(low, first * leaf.itemsize), max(high, last * leaf.itemsize)
    # arrays of numpy have memory of their own
    arrays = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
    return float(arrays + sum(high - low for low, high in spans.values()))


def repeated(batch: Any, times: int) -> Any:
    """Returns a batch of one sample expanded to `times` samples; nothing is copied."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.ndim:
            return np.broadcast_to(leaf, (times, *leaf.shape[1:]))
        return leaf.expand(times, *leaf.shape[1:]) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return pytree.tree_map(convert, batch)


def fake_batch(fake: FakeTensorMode, sample: Any, samples: int) -> Any:
    """Returns a batch of `samples` copies of the sample as fake tensors; integers keep their values."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):  # a task that turns it into a tensor gets one without values
            return np.concatenate([leaf] * samples) if leaf.ndim else leaf
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = fake.from_tensor(leaf)
        many = torch.cat([made] * samples) if made.dim() else made
        # the forward may read integers (lengths, indices) in Python, and must find true ones
        if leaf.is_floating_point() or leaf.is_complex():
            return many
        with _disable_current_modes():
            return give(many, torch.cat([leaf] * samples) if leaf.dim() else leaf, origins=frozenset({BATCH}))

    with fake:
        return pytree.tree_map(convert, sample)


def trace(
    task: Task, samples: int, precision: str = "fp32", recompute: str = "none", sample: Any = None, joined: int = 0,
    fused: bool = False, follow: bool = False, wrap: tuple[str, ...] = (), moved: str = "none", moments: bool = False,
) -> StepTrace:  # fmt: skip
    """Returns the counts of one micro-batch: its operations, bytes and FLOPs.

    sample   a batch of one, so that the task need not make it again
    joined   ranks over which batch norms take their statistics, none for the module's own
    fused    attention and dropout as a GPU has them (rehearsal/gpu_kernels.py)
    follow   random ops as a run answers them whose numbers are one process's (randomness=global)
    wrap     names the blocks that are recomputed, or whose activations move, where a plan does
    moved    what a plan's `offload` says of activations
    moments  live bytes are noted as each gradient comes

    A module that cannot be traced raises `InputError` with the line that failed.
    """
    kept = Precision.of(Plan(precision=precision))
    fake = Fake()
    counts, inside, writes = StepTrace(samples), ModulePath(), ArgumentWrites()
    try:
        with as_real():
            model = build(task, fake, kept)
            refuse(model, Plan(precision=precision))
            blocks = find_blocks(model).paths
            note_sizes(counts, model, [*model.parameters()], blocks)
            paths: tuple[str, ...] = ()
            if (recompute, moved) != ("none", "none"):
                paths = blocks_of(model, wrap, nested=task.branches == "same").paths
            for path in paths if recompute != "none" else ():
                recompute_block(model.get_submodule(path), recompute)
            activations = rehearsed(model, paths, moved)
            batch = fake_batch(fake, one_sample(task) if sample is None else sample, samples)
            inside.watch(model)
            writes.watch(model)
            arrivals = Arrivals(model.parameters())  # gradients are an account of their own: buckets, or shards
            live, routed, sent = LiveBytes(resized=[]), TracedValues(fake), Ledger()
            norms = batch_norms(model, joined, sent)
            rests = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch)]
            live.count(leaf for leaf in rests if isinstance(leaf, torch.Tensor))
            base = live.now
            arrivals.live = live if moments else None
            windows = PeakWindows(live, model, blocks)
            draws, kernels = followed(follow), like_gpu(fused, scores=follow)
            seen_by = RehearsalMode(routed, live, Count(counts), draws, writes=writes, fused=fused)
            with norms, kernels, fake, generators_kept(), seen_by, unpadded():
                batch = in_run_dtype(batch, kept)
                # the forward's own inputs and outputs live as long as they do in a run, hence the `del`
                args, kwargs = inputs_of(task, batch, kept)
                with OwnBackward() as seen:
                    output = kept.cast_outputs(model(*args, **kwargs))
                del args, kwargs
                total = objective(task.loss(output, batch))
                del output
                total.backward()
            counts.arrived = [(place, live_then - base) for place, live_then in arrivals.moments]
            counts.idle, counts.own_backward = arrivals.idle, seen.met
            # a backward inside the forward reads weights of units that do not run then: the root gathers all of them
            through = {path for path, _ in model.named_modules() if path} if seen.met else set()
            counts.put = activations.put_bytes() if activations is not None else {}
            windows.tell(counts, base)
            counts.enclosed = writes.paths | through
            routed.tell(counts)
            counts.follows = draws is not None and draws.met
            counts.wrote_scores = isinstance(kernels, Fused) and kernels.wrote_scores
            if isinstance(norms, CountBatchNorm):
                counts.batch_norms, counts.alone = norms.met, norms.alone
            counts.joined = sizes_of(sent, joined)
    except (InputError, RefusedPlan):
        raise
    except Exception as error:
        # a small model is tried with values, in a single process: if that fails, its error says more than the trace's
        few = None if sample is None or not 0 < counts.parameters <= MOST_ELEMENTS else repeated(sample, samples)
        raise _failing_alone(task, kept, few) or InputError(untraced(error, inside)) from error
    return counts


def forward_without_values(task: Task, sample: Any) -> None:
    """Run the model's forward in evaluation on one sample, under the caller's modes; only integers have values."""
    kept, fake = Precision.of(Plan()), Fake()
    with as_real():
        model = build(task, fake, kept).eval()
        batch = fake_batch(fake, sample, 1)
        with fake, Values(fake), unpadded():
            args, kwargs = inputs_of(task, batch, kept)
            model(*args, **kwargs)


def _failing_alone(task: Task, precision: Precision, batch: Any) -> InputError | None:
    """Returns the error of a task that fails with real values too; None where it does not, or nothing can be tried."""
    with suppress(Untried):
        return None if batch is None else told_alone(task, precision, batch)
    return None


def batch_norms(model: nn.Module, ranks: int, sent: Ledger) -> CountBatchNorm | JoinBatchNorm:
    """Returns a mode for forward and backward: batch norms as a run on so many data ranks has them.

    `ranks` is 0 for those of the module itself; else what they send is noted in `sent`, on an axis named "data".
    """
    if not ranks:
        return CountBatchNorm()
    axis = Axis("data", ranks, 0, None, tuple(range(ranks)), rehearsal=sent)
    for module in batch_norm_modules(model):
        sync_module(module, axis, Phase())
    return JoinBatchNorm(axis, Phase())  # and those of modules that call it themselves


def sizes_of(sent: Ledger, ranks: int) -> Counter[tuple[str, float]]:
    """Returns the number of calls by (op, mean bytes of its whole tensors) that a rehearsal sent over `ranks`."""
    sizes: Counter[tuple[str, float]] = Counter()
    for (_, op, _), entry in sent.entries.items():
        sizes[op, entry.received_bytes / FACTORS[op](ranks) / entry.calls] += entry.calls
    return sizes


def in_run_dtype(batch: Any, precision: Precision) -> Any:
    """Returns the batch, its floating-point tensors in float64 where the run computes in float64."""
    if precision.compute != torch.float64:
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


def inputs_of(task: Task, batch: Any, precision: Precision) -> tuple[tuple, dict]:
    """Returns (args, kwargs) of the module for a batch, in its dtype; `InputError` where Task.inputs gives others."""
    args, kwargs = call_arguments(task, batch)
    return precision.cast_inputs((args, kwargs)) if precision.compute != torch.float32 else (args, kwargs)


def objective(loss: tuple) -> torch.Tensor:
    """Returns the scalar that a run differentiates: `Task.loss`'s sum and its further terms (step/objective.py)."""
    total = loss[0]
    for term in (loss[2] if len(loss) > 2 else {}).values():
        total = total + (term[0] if isinstance(term, tuple | list) else term) * 1.0
    return total


class OwnBackward(TorchFunctionMode):
    """Function mode that notes in `met` whether a forward takes gradients itself."""

    met = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.met = self.met or func is torch.autograd.grad
        return func(*args, **(kwargs or {}))


class Arrivals:
    """Drops the gradient of each trained parameter as it comes, and notes which did.

    live   counts bytes, where those at each arrival are asked for: `moments`, (place, bytes)
    """

    live: LiveBytes | None = None

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.moments: list[tuple[int, int]] = []
        self._seen: dict[int, int] = {}  # elements by parameter that a gradient came to
        self._sizes: list[int] = []
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._drop, len(self._sizes)))
                self._sizes.append(parameter.numel())

    def _drop(self, place: int, parameter: torch.Tensor) -> None:
        if self.live is not None:
            self.moments.append((place, self.live.now))
        self._seen.setdefault(id(parameter), parameter.numel())
        parameter.grad = None

    @property
    def idle(self) -> int:
        """Returns the elements of parameters that no gradient reached."""
        return sum(self._sizes) - sum(self._seen.values())


def note_sizes(counts: StepTrace, model: nn.Module, params: Collection[nn.Parameter], blocks: Iterable[str]) -> None:
    """Set a trace's sizes of the parameters that are held here, of buffers and of blocks (their paths)."""
    counts.parameters, counts.tensors = sum(p.numel() for p in params), len(params)
    # by what the optimizer moves and what is gathered: sizes that repeat are counted
    counts.in_order = in_order(p for p in params if p.requires_grad)
    counts.wholes = wholes_of(model, (p for p in params if p.requires_grad))
    counts.sizes = Counter(counts.in_order.values())
    counts.gradients = sum(p.numel() * p.element_size() for p in params if p.requires_grad)
    counts.buffers_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
    counts.units = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in blocks]
    # what lies outside of blocks is gathered at once
    counts.rest = counts.parameters - sum(counts.units)


NARROW = ("BFloat16", "bfloat16", "'Half'", "dtype Half")  # as torch's errors name them


class ModulePath:
    """Paths of the modules whose forward runs, so that a failure can be placed."""

    def __init__(self) -> None:
        self.path: list[str] = []

    def watch(self, model: nn.Module) -> None:
        """Follow the forwards of a model and of all modules in it."""
        for path, child in model.named_modules():
            name = f"'{path}' ({type(child).__name__})" if path else type(child).__name__
            child.register_forward_pre_hook(lambda m, a, name=name: self.path.append(name))
            child.register_forward_hook(lambda m, a, o: self._left())

    def _left(self) -> None:
        if self.path:
            self.path.pop()


def untraced(error: BaseException, inside: ModulePath) -> str:
    """Returns the message of a model that could not be traced: the module, the line, the reason, what to do."""
    where = f"in {inside.path[-1]}, " if inside.path else ""
    text = (str(error).strip().splitlines() or ["(no message)"])[0]
    what = f"{type(error).__name__}: {text}"
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        what = (
            f"a value that only a real run has is asked for ({text}); decide by shapes or by integers of the batch, "
            "or compute both ways and choose with torch.where"
        )
    elif any(name in text for name in NARROW):  # "Unsupported dtype BFloat16", as Fourier transforms say
        what += "; an op of it does not take that precision: plan with precision=fp32"
    return f"the model cannot be traced without values: {where}{_line_of(error)}{what}{inputs_hint(error)}"


def _line_of(error: BaseException) -> str:
    """Returns the place of an error: the innermost line of the user's own code, else of the model's library."""
    from traceback import extract_tb

    ours = str(Path(__file__).parents[1])
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    # the user's own code first, then the innermost line of a library that is not torch's
    own = [f for f in frames if "site-packages" not in f.filename and "dist-packages" not in f.filename]
    theirs = [f for f in frames if "/torch/" not in f.filename]
    if not (chosen := own or theirs):
        return ""
    return f"{chosen[-1].filename}:{chosen[-1].lineno}: "
