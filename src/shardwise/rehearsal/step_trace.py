"""Traces a micro-batch of an unsharded module on fake tensors: ops, bytes, FLOPs (`trace`). A rank's: rank_row.

The module's own forward, loss and backward run under a dispatch mode on fake tensors; nothing is computed and no memory
is used. Recompute is applied as in a run, so that the ops and bytes that it adds are counted, not estimated.

*What this does not do*: count workspaces of kernels beyond those in workspaces.py; follow modules that branch on
values other than integers (trace/known_values.py).
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
    """Returns the task's module in training mode, its tensors fake and in the plan's dtypes; or raises `InputError`.

    fake  the mode to which the tensors belong
    """
    model = checked(_built(task, fake))
    outside = [tensor for _, tensor in named_tensors(model) if not (tensor.is_meta or isinstance(tensor, FakeTensor))]
    # the constructor returned a module that existed before: it is copied, so that the user's own keeps its weights
    if any(isinstance(tensor, nn.Parameter) for tensor in outside):
        model = copied(model, {id(tensor): tensor for tensor in outside})
    refuse_compiled(model)
    if (path := scripted(model)) is not None:
        raise InputError(
            f"'{path}' was made by torch.jit and cannot be traced without values: give it as it was before"
        )
    make_gradients_dense(model)
    hold_pairs(model)  # complex weights count as pairs of real numbers, as in a run
    made: dict[int, torch.Tensor] = {}  # id of a tensor -> the fake one in its place, so that tied weights stay tied

    def ours(tensor: torch.Tensor, trained: bool = False) -> torch.Tensor:
        if id(tensor) not in made:
            whole = _without_values(tensor, fake, precision.dtype_of(tensor))
            made[id(tensor)] = _as_parameter(tensor, whole) if trained else whole
        return made[id(tensor)]

    kept = [*model.parameters(), *model.buffers()]  # otherwise Python might reuse their ids
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
    """Returns the task's module, built with fake tensors, else on the meta device, else with deferred weights.

    The last is for constructors that read values of tensors. Raises `InputError` if the first two fail alike, since
    then the constructor fails in any case.
    """
    failed: list[Exception] = []
    for without_values in (fake, torch.device("meta")):
        try:
            with without_values:
                return task.model()
        except Exception as error:
            failed.append(error)
    if repr(failed[0]) == repr(failed[1]):  # missing values are not the cause
        raise InputError(f"the model's constructor fails: {told_of_constructor(failed[0])}") from failed[0]
    with torch.random.fork_rng(devices=[]):
        return build_deferred(task.model, 0).module


def _without_values(tensor: torch.Tensor, fake: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """Returns a fake tensor of the same shape and strides in `dtype`; call it with `fake` active.

    It has the device of `tensor`, or the CPU if that is "meta".
    """
    if isinstance(tensor, FakeTensor):
        return tensor.data.to(dtype)
    if tensor.device.type == "meta":  # quicker than going through `.data`
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return fake.from_tensor(tensor.data).to(dtype)


def _as_parameter(was: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns `was` itself if `whole` has its dtype and storage, else a new parameter of `whole`.

    A fake parameter made by `copy.deepcopy` has another storage than its views, which would count its bytes twice.
    """
    if was.dtype == whole.dtype and was.untyped_storage()._cdata == whole.untyped_storage()._cdata:
        return was
    return nn.Parameter(whole, was.requires_grad)


def one_sample(task: Task) -> Any:
    """Returns a batch of one sample from the task's data, or raises `InputError` if it cannot be read."""
    if task.batch is None:
        check_data(task)
        return read_samples(task, [0])
    batch = task.batch(0)
    return parts_of(batch, data_ranks=samples_in(batch))[0].batch


def batch_bytes(batch: Any) -> float:
    """Returns the bytes of all tensors and numpy arrays of a batch; overlapping views of a storage count once."""
    leaves = pytree.tree_leaves(batch)
    spans: dict[int, tuple[int, int]] = {}
    for leaf in leaves:
        # views of one storage are one span, with the gaps (padding) between them, which are in memory as well
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            first = leaf.storage_offset()
            last = first + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)) + 1
            low, high = spans.get(key := leaf.untyped_storage()._cdata, (first * leaf.itemsize, 0))
            spans[key] = min(low, first * leaf.itemsize), max(high, last * leaf.itemsize)
    # numpy arrays are assumed to share no memory
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
    """Returns a batch of `samples` copies of a batch of one, as fake tensors; integer tensors keep their values."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):  # under `fake` the task turns it into a fake tensor
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
    """Returns the counts of one forward and backward of `samples` samples: operations, bytes and FLOPs.

    sample   a batch of one sample; None: it is read from the task
    joined   number of ranks over which batch norms take their statistics; 0: each rank takes its own
    fused    whether attention and dropout use the kernels of a GPU (rehearsal/gpu_kernels.py)
    follow   whether random operations run as they do under randomness=global
    wrap     a plan's names of the blocks that are recomputed, or whose activations move; (): the repeated ones
    moved    what a plan's `offload` says of activations
    moments  whether to note the live bytes at the arrival of each gradient

    Raises `InputError` with the failing line if the module cannot be traced.
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
            arrivals = Arrivals(model.parameters())  # the forecast itself adds the memory of gradients
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
                # inputs and outputs must live no longer than in a run, hence the `del`
                args, kwargs = inputs_of(task, batch, kept)
                with OwnBackward() as seen:
                    output = kept.cast_outputs(model(*args, **kwargs))
                del args, kwargs
                total = objective(task.loss(output, batch))
                del output
                total.backward()
            counts.arrived = [(place, live_then - base) for place, live_then in arrivals.moments]
            counts.idle, counts.own_backward = arrivals.idle, seen.met
            # a backward inside the forward reads weights of units that do not run then, so no module may be a unit
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
        # a small model is run with values in a single process; if that fails too, its error is clearer than this one
        few = None if sample is None or not 0 < counts.parameters <= MOST_ELEMENTS else repeated(sample, samples)
        raise _failing_alone(task, kept, few) or InputError(untraced(error, inside)) from error
    return counts


def forward_without_values(task: Task, sample: Any) -> None:
    """Runs the model's forward on fake tensors in eval mode, on `sample` (a batch of one), under the caller's modes."""
    kept, fake = Precision.of(Plan()), Fake()
    with as_real():
        model = build(task, fake, kept).eval()
        batch = fake_batch(fake, sample, 1)
        with fake, Values(fake), unpadded():
            args, kwargs = inputs_of(task, batch, kept)
            model(*args, **kwargs)


def _failing_alone(task: Task, precision: Precision, batch: Any) -> InputError | None:
    """Returns the error of a task that fails with real values too; None if it does not, or `batch` is None."""
    with suppress(Untried):
        return None if batch is None else told_alone(task, precision, batch)
    return None


def batch_norms(model: nn.Module, ranks: int, sent: Ledger) -> CountBatchNorm | JoinBatchNorm:
    """Returns a mode for forward and backward in which batch norms take their statistics over `ranks` data ranks.

    With `ranks` 0 each rank takes its own. Otherwise messages are noted in `sent`, on an axis named "data".
    """
    if not ranks:
        return CountBatchNorm()
    axis = Axis("data", ranks, 0, None, tuple(range(ranks)), rehearsal=sent)
    for module in batch_norm_modules(model):
        sync_module(module, axis, Phase())
    return JoinBatchNorm(axis, Phase())  # and those of modules that call it themselves


def sizes_of(sent: Ledger, ranks: int) -> Counter[tuple[str, float]]:
    """Returns {(op, mean bytes of its full tensor): calls} of the ledger `sent` of collectives over `ranks` ranks."""
    sizes: Counter[tuple[str, float]] = Counter()
    for (_, op, _), entry in sent.entries.items():
        sizes[op, entry.received_bytes / FACTORS[op](ranks) / entry.calls] += entry.calls
    return sizes


def in_run_dtype(batch: Any, precision: Precision) -> Any:
    """Returns the batch, with floating-point tensors converted to float64 if the run computes in float64."""
    if precision.compute != torch.float64:
        return batch
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)


def inputs_of(task: Task, batch: Any, precision: Precision) -> tuple[tuple, dict]:
    """Returns (args, kwargs) of the module for a batch, in the run's compute dtype; `InputError` if not such a pair."""
    args, kwargs = call_arguments(task, batch)
    return precision.cast_inputs((args, kwargs)) if precision.compute != torch.float32 else (args, kwargs)


def objective(loss: tuple) -> torch.Tensor:
    """Returns the scalar that a run differentiates: `Task.loss`'s sum and its further terms (step/objective.py)."""
    total = loss[0]
    for term in (loss[2] if len(loss) > 2 else {}).values():
        total = total + (term[0] if isinstance(term, tuple | list) else term) * 1.0
    return total


class OwnBackward(TorchFunctionMode):
    """Function mode whose `met` says whether `torch.autograd.grad` was called while it was active."""

    met = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.met = self.met or func is torch.autograd.grad
        return func(*args, **(kwargs or {}))


class Arrivals:
    """Drops the gradient of each trained parameter as soon as backward makes it, and notes which parameters got one.

    live     counts live bytes; None: nobody asks for `moments`
    moments  (index among the trained parameters, live bytes) at each arrival, in order
    """

    live: LiveBytes | None = None

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.moments: list[tuple[int, int]] = []
        self._seen: dict[int, int] = {}  # id of a parameter that got a gradient -> elements
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
        """Returns the elements of all trained parameters that got no gradient."""
        return sum(self._sizes) - sum(self._seen.values())


def note_sizes(counts: StepTrace, model: nn.Module, params: Collection[nn.Parameter], blocks: Iterable[str]) -> None:
    """Sets the sizes in `counts` of `params`, which this rank holds, of buffers, and of `blocks` (module paths)."""
    counts.parameters, counts.tensors = sum(p.numel() for p in params), len(params)
    counts.in_order = in_order(p for p in params if p.requires_grad)
    counts.wholes = wholes_of(model, (p for p in params if p.requires_grad))
    counts.sizes = Counter(counts.in_order.values())
    counts.gradients = sum(p.numel() * p.element_size() for p in params if p.requires_grad)
    counts.buffers_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
    counts.units = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in blocks]
    # weights outside of blocks belong to the root, which gathers them together
    counts.rest = counts.parameters - sum(counts.units)


NARROW = ("BFloat16", "bfloat16", "'Half'", "dtype Half")  # as torch's errors name them


class ModulePath:
    """Keeps in `path` the modules whose forward runs now, outermost first, to name the one that failed."""

    def __init__(self) -> None:
        self.path: list[str] = []

    def watch(self, model: nn.Module) -> None:
        """Adds hooks to a model and all its submodules that keep `path` current."""
        for path, child in model.named_modules():
            name = f"'{path}' ({type(child).__name__})" if path else type(child).__name__
            child.register_forward_pre_hook(lambda m, a, name=name: self.path.append(name))
            child.register_forward_hook(lambda m, a, o: self._left())

    def _left(self) -> None:
        if self.path:
            self.path.pop()


def untraced(error: BaseException, inside: ModulePath) -> str:
    """Returns the message for an `error` of a trace: the module that ran (`inside`), the line, the reason, a remedy."""
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
    """Returns "file:line: " of an error, the innermost one in the user's code, else in the model's library, else ""."""
    from traceback import extract_tb

    ours = str(Path(__file__).parents[1])
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    # the user can act on a line of their own code, less on one of a library, and not on one of torch
    own = [f for f in frames if "site-packages" not in f.filename and "dist-packages" not in f.filename]
    theirs = [f for f in frames if "/torch/" not in f.filename]
    if not (chosen := own or theirs):
        return ""
    return f"{chosen[-1].filename}:{chosen[-1].lineno}: "
