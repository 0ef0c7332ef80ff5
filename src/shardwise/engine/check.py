"""Check before the first step that the loss adds up over samples: on a few, and on two unequal parts of them.

That single look finds what would make a distributed run differ from one process: a loss that is a mean, a contrastive
loss, a module that mixes samples or keeps statistics of its own. The same runs show which modules call batch norm,
and which dim of each random tensor is the batch; masks dealt by those dims must then add up too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.alone import needs_gradients
from shardwise.errors import RefusedPlan
from shardwise.parallel.batchnorm import FindBatchNorm, batch_norm_modules
from shardwise.random import BatchDims, ConstantRandom, GlobalRandom, Samples
from shardwise.step.loss import Loss
from shardwise.trace.deferred import written_tensors
from shardwise.trace.functional import differentiating
from shardwise.trace.state import ModuleState

Evaluate = Callable[[Any], Loss]


@dataclass
class Findings:
    """What the look at a few samples found."""

    batch_norms: list[nn.Module]
    dims: BatchDims
    notices: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # parameters that the forward writes into
    assigned: list[str] = field(default_factory=list)  # those whose .data it replaces
    changed: list[str] = field(default_factory=list)  # buffers that it changes


WEIGHTS_FREED = (
    "the forward takes gradients itself (torch.autograd.grad), whose own backward needs weights that zero=3 has freed "
    "by then: use zero=2"
)


def look(module: nn.Module, evaluate: Evaluate, whole: Any, parts: tuple[Any, Any] | None,
         sizes: tuple[int, int, int], *, joined: Callable[[Any], Loss] | None, dtype: torch.dtype, strict: bool,
         masks: bool, share: Callable[[list[str]], list[str]] = list) -> Findings:  # fmt: skip
    """Evaluate `whole` and its two `parts` (sizes gives their samples) and compare.

    Without gradients; with them for a forward that takes some itself.

    joined   for a loss declared not to add up over samples: (whole, parts) -> the loss on the parts' outputs put
             together
    strict   the plan splits samples, so what does not add up is refused; otherwise it is a notice
    masks    masks will be dealt by global index: try that too
    share    what any rank that runs a part of the forward found, so that all go the same way from there
    """

    settings = {"joined": joined, "dtype": dtype, "strict": strict, "masks": masks, "share": share}
    try:
        with torch.no_grad():
            return _look(module, evaluate, whole, parts, sizes, **settings)
    except RuntimeError as error:
        if not needs_gradients(error):
            raise
    if any(isinstance(child, FSDPModule) for child in module.modules()):
        raise RefusedPlan(WEIGHTS_FREED)
    with torch.enable_grad():
        return _look(module, evaluate, whole, parts, sizes, **settings)


def _look(module: nn.Module, evaluate: Evaluate, whole: Any, parts: tuple[Any, Any] | None,
          sizes: tuple[int, int, int], *, joined: Callable[[Any], Loss] | None, dtype: torch.dtype, strict: bool,
          masks: bool, share: Callable[[list[str]], list[str]]) -> Findings:  # fmt: skip
    def anywhere(here: object) -> bool:
        return bool(share(["here"] if here else []))

    findings = Findings([], BatchDims())
    seen = _Seen(module)
    with torch.random.fork_rng(devices=[]), seen.watching():
        run = _Runner(module, evaluate, seen)
        findings.batch_norms = batch_norm_modules(module)
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        of_whole, calls, after = run(whole)
        findings.changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        findings.batch_norms += [found for found in seen.batch_norms if found not in findings.batch_norms]
        problems = share(seen.problems())
        if parts is None:
            findings.notices.append("a batch of one sample cannot be split: the loss was not checked to add up")
        elif not problems:
            first, _, changed_by_first = run(parts[0])
            second, part_calls, changed_by_second = run(parts[1])
            findings.dims.learn(calls, part_calls, sizes[0], sizes[2])
            if anywhere(seen.reads_values and (calls or part_calls)):
                for level in (0.02, 0.98):  # the other sides of branches that chance decides
                    findings.dims.learn(run(whole, level)[1], run(parts[1], level)[1], sizes[0], sizes[2])
            problems += share(_statistics_differ(changed_by_first, changed_by_second))
            if not _finite(of_whole, first, second):
                findings.notices.append("the loss on the first samples is not finite: not checked to add up")
            elif joined is None:
                problems += _sums_differ(of_whole, first, second, sizes, dtype)
            elif strict:
                problems += _joined_differs(of_whole, _Runner(module, joined, seen)((whole, parts))[0], dtype)
            findings.notices += share(seen.repeats_differ(sizes))
            if masks and strict and joined is None and anywhere(findings.dims.known) and not problems:
                problems += _masks_differ(run, findings.dims, whole, parts, sizes, dtype)
    findings.written, findings.assigned = sorted(seen.ever_written), sorted(seen.ever_assigned)
    if problems and strict:
        raise RefusedPlan("; ".join(problems))
    findings.notices += problems
    return findings


class _Runner:
    """Evaluates the loss and leaves the module as it was."""

    def __init__(self, module: nn.Module, evaluate: Evaluate, seen: _Seen):
        self.module = module
        self.evaluate = evaluate
        self.seen = seen

    def __call__(self, batch: Any, level: float = 0.5):
        """The loss, the random calls, and each buffer, and each parameter that was written to, as they then were."""
        state = ModuleState(self.module)
        random = ConstantRandom(level)
        with self._neutral(), random.watching(self.module):
            loss = self.evaluate(batch)
        self.seen.reads_values |= random.reads_values
        changes = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        changes |= self.seen.restore_parameters()
        state.restore()
        return loss, random.calls, changes

    def masked(self, batch: Any, random: GlobalRandom, samples: Samples) -> Loss:
        """The loss with masks by global index."""
        state = ModuleState(self.module)
        random.begin(0, 0, 0, samples)
        with self._neutral(), random.watching(self.module):
            loss = self.evaluate(batch)
        self.seen.restore_parameters()
        state.restore()
        return loss

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """Batch norm without statistics. SyncBatchNorm in training would look for a CUDA device."""
        syncing = [child for child in self.module.modules() if isinstance(child, SyncBatchNorm) and child.training]
        for child in syncing:
            child.training = False
        finder = FindBatchNorm(self.seen.running)
        try:
            with finder:
                yield
        finally:
            for child in syncing:
                child.training = True
            self.seen.batch_norms += [found for found in finder.found if found not in self.seen.batch_norms]


class _Seen(TorchDispatchMode):
    """Notes what runs: modules, reentrant checkpoints, and writes into parameters, whose values it keeps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.running: list[nn.Module] = []
        self.batch_norms: list[nn.Module] = []
        self.reads_values = False
        self.calls: list[dict[str, int]] = []  # of each module, by path, in each forward
        self.reentrant = False
        self.twice: set[str] = set()  # units of zero=3 that ran more than once in a forward
        self.written: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.ever_written: set[str] = set()
        self.ever_assigned: set[str] = set()
        self.replaced: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by assigning to .data, and what it was

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Active around the evaluations."""
        handles, units = [], dict[str, int]()

        def enter(child: nn.Module, path: str) -> None:
            if child is self.module:
                units.clear()
                self.calls.append({})
            if self.calls:
                self.calls[-1][path] = self.calls[-1].get(path, 0) + 1
            if isinstance(child, FSDPModule):
                units[path] = units.get(path, 0) + 1
                if units[path] > 1:
                    self.twice.add(path)
            self.running.append(child)
            if isinstance(child, FSDPModule):
                _refuse_differentiated(path)

        def leave(child: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()  # must return None: a hook's result would replace the output

        for path, child in self.module.named_modules():
            handles.append(child.register_forward_pre_hook(lambda m, a, path=path: enter(m, path)))
            handles.append(child.register_forward_hook(leave, always_call=True))
        original = torch_checkpoint.CheckpointFunction.apply

        def reentrant(*args):
            self.reentrant = True
            return original(*args)

        torch_checkpoint.CheckpointFunction.apply = reentrant
        try:
            with self, _Assignments(self._keep_data):
                yield
        finally:
            del torch_checkpoint.CheckpointFunction.apply
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and func.namespace == "aten":
            for tensor in written_tensors(func, args, kwargs or {}):
                self._keep(tensor)
        return func(*args, **(kwargs or {}))

    def _keep(self, tensor: torch.Tensor) -> None:
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        for name, param in self.module.named_parameters():
            held = param._local_tensor if isinstance(param, DTensor) else param.detach()
            if name in self.written or held.untyped_storage()._cdata != storage._cdata:
                continue
            start, at = held.data_ptr(), tensor.data_ptr()
            if start <= at < start + held.numel() * held.element_size():
                self.written[name] = (held, held.clone())
                self.ever_written.add(name)

    def _keep_data(self, tensor: torch.Tensor) -> None:
        """Before `tensor.data = ...`, which no operation tells of."""
        for name, param in self.module.named_parameters():
            if param is tensor:
                self.replaced.setdefault(name, (tensor, tensor.data))
                self.ever_assigned.add(name)
                self.ever_written.add(name)

    def repeats_differ(self, sizes: tuple[int, int, int]) -> list[str]:
        """A notice where a module's calls are more on some samples than on others, once values were read in Python."""
        if not self.reads_values or len(self.calls) < len(sizes):
            return []
        for path in self.calls[0]:
            counts = [calls.get(path, 0) for calls in self.calls[: len(sizes)]]
            if min(counts) and len(set(counts)) > 1:
                of = ", ".join(f"{count} times on {size}" for count, size in zip(counts, sizes, strict=True))
                return [
                    f"the forward reads values of tensors in Python, and runs '{path}' {of} samples: a choice that is "
                    "made for all samples of a batch at once (the steps of a solver) comes out otherwise on each "
                    "rank's part, and results differ by as much"
                ]
        return []

    def restore_parameters(self) -> dict[str, torch.Tensor]:
        """Undo writes into parameters; returns what had been written."""
        values = {name: held.clone() for name, (held, _) in self.written.items() if held.untyped_storage().size()}
        for held, value in self.written.values():
            if held.untyped_storage().size():  # else zero=3 has freed it since: the write is lost by itself
                held.copy_(value)
        self.written.clear()
        for param, data in self.replaced.values():
            param.data = data
        self.replaced.clear()
        return values

    def problems(self) -> list[str]:
        """What zero=3 could not do right."""
        if not isinstance(self.module, FSDPModule):
            return []
        found = [
            f"the forward writes into parameter '{name}', of which zero=3 keeps only pieces between forwards, so a "
            "write would be lost: make it a buffer, or use zero=2"
            for name in sorted(self.ever_written)[:1]
        ]
        if self.reentrant and self.twice:
            found.append(
                f"unit '{min(self.twice)}' runs more than once under a reentrant checkpoint, and zero=3 would reduce "
                "its gradient before it is whole: use torch.utils.checkpoint(use_reentrant=False), or zero=2"
            )
        return found


def _refuse_differentiated(path: str) -> None:
    """A unit of zero=3 copies its weights into place when its forward begins, which such a transform forbids."""
    if differentiating():
        raise RefusedPlan(
            f"unit '{path}' runs inside a torch.func transform with a backward (grad, vjp, jacrev), where zero=3 "
            "cannot gather its weights: let wrap= name modules whose own forward calls the transform, or use zero=2"
        )


class _Assignments(TorchFunctionMode):
    """Calls `before(tensor)` ahead of every assignment to `tensor.data`."""

    def __init__(self, before: Callable[[torch.Tensor], None]):
        super().__init__()
        self.before = before

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == _SET_DATA:
            self.before(args[0])
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__


def _close(a: float, b: float, dtype: torch.dtype, least: float = 0.0) -> bool:
    bar = max({torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2), least)
    return abs(a - b) <= bar * max(abs(a), abs(b), 1e-6)


def _apart(
    whole: Loss, first: Loss, second: Loss, dtype: torch.dtype, least: float = 0.0
) -> tuple[str, float, float] | None:
    """The first number of the loss that does not add up: its name, the whole's, and the sum of the parts'."""
    for name, value in whole.numbers().items():
        parts = first.numbers().get(name, 0.0) + second.numbers().get(name, 0.0)
        if not _close(value, parts, dtype, least):
            return name, value, parts
    return None


def _finite(*losses: Loss) -> bool:
    """Whether all sums and weights are; the first step names what is not."""
    return all(math.isfinite(value) for loss in losses for value in loss.numbers().values())


def _sums_differ(whole: Loss, first: Loss, second: Loss, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[str]:
    apart = _apart(whole, first, second, dtype)
    if apart is None:
        return []
    (name, value, parts), (n, a, b) = apart, sizes
    found = f"its {name} on {n} samples and on {a} and {b} of them is {value:.6g} against {parts:.6g} in parts"
    if name.startswith("weight"):
        return [f"the loss does not add up over samples: {found}. The weight must be counted from the samples at hand"]
    return [
        f"the loss does not add up over samples: {found}. Return (sum, weight), not a mean; a loss over pairs of "
        'samples (contrastive) declares loss_scope="global"; a module that mixes samples other than by batch norm is '
        "not supported, nor is a branch or a draw of numpy's or Python's that depends on which samples are together"
    ]


def _joined_differs(whole: Loss, joined: Loss, dtype: torch.dtype) -> list[str]:
    for name, value in whole.numbers().items():
        if not _close(value, joined.numbers().get(name, 0.0), dtype):
            return [
                f'with loss_scope="global" the loss\'s {name} on a few samples is {value:.6g}, but '
                f"{joined.numbers().get(name, 0.0):.6g} on the model's outputs for parts of them put together: return "
                "what belongs to each sample (embeddings), and compute what compares samples (logits) in the loss"
            ]
    return []


def _masks_differ(run: _Runner, dims: BatchDims, whole: Any, parts: tuple[Any, Any], sizes: tuple[int, int, int],
                  dtype: torch.dtype) -> list[str]:  # fmt: skip
    n, a, b = sizes
    random = GlobalRandom(dims)
    together = run.masked(whole, random, Samples(0, n, n))
    first = run.masked(parts[0], random, Samples(0, a, n))
    second = run.masked(parts[1], random, Samples(a, b, n))
    apart = _apart(together, first, second, dtype, least=1e-6)  # draws may be float32 in a float64 run
    if apart is None:
        return []
    return [
        f"masks dealt by global index do not give one process's: with them the loss's {apart[0]} on {n} samples is "
        f"{apart[1]:.6g} against {apart[2]:.6g} in parts. A random tensor holds the samples in an order that cannot "
        "be followed (time before samples in one dim), or a generator of the module's own draws it; use "
        "randomness='fast', or draw tensors with a batch dim"
    ]


def _statistics_differ(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"'{name}' is computed from the samples of a micro-batch, by other means than batch norm, so ranks "
        "would each keep statistics of their own"
        for name, value in first.items()
        if name in second and value.shape == second[name].shape and not torch.equal(value, second[name])
    ]


def explained(error: Exception) -> RefusedPlan | None:
    """The mechanism behind an error that only zero=3 meets, if this is one."""
    if "mixed torch.Tensor and DTensor" in str(error):
        return RefusedPlan(
            "a parameter is used outside the forward of the unit that holds it, where zero=3 has only pieces of it: "
            "name units with wrap= so that a unit's parameters are used inside its forward, or use zero=2"
        )
    return None
