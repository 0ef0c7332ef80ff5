"""Before the first step: the loss on a few samples, and on two unequal parts of them, must add up.

That single look finds what would make a distributed run differ from one process: a loss that is a mean, a contrastive
loss, a module that mixes samples or keeps statistics of its own. The same runs show which modules call batch norm,
and which dim of each random tensor is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.engine.loss import Loss
from shardwise.errors import InputError, RefusedPlan
from shardwise.parallel.batchnorm import FindBatchNorm, batch_norm_modules
from shardwise.random import BatchDims, ConstantRandom

SAMPLES = 5  # looked at, where the batch has as many
Evaluate = Callable[[Any], Loss]


@dataclass
class Findings:
    """What the look at a few samples found."""

    batch_norms: list[nn.Module]
    dims: BatchDims
    notices: list[str] = field(default_factory=list)


def look(module: nn.Module, evaluate: Evaluate, whole: Any, parts: tuple[Any, Any] | None,
         sizes: tuple[int, int, int], *, local: bool, dtype: torch.dtype, strict: bool) -> Findings:  # fmt: skip
    """Evaluate `whole` and its two `parts` (sizes gives their samples) and compare.

    local    the loss is declared additive over samples
    strict   the plan splits samples, so what does not add up is refused; otherwise it is a notice
    """
    findings = Findings([], BatchDims())
    with torch.no_grad(), _restored(module):
        findings.batch_norms = _find_batch_norms(module, evaluate, whole)
        with _in_eval(findings.batch_norms):
            if parts is None:
                findings.notices.append("a batch of one sample cannot be split: the loss was not checked to add up")
                return findings
            of_whole, calls, _ = _evaluate(module, evaluate, whole)
            first, _, changed_by_first = _evaluate(module, evaluate, parts[0])
            second, part_calls, changed_by_second = _evaluate(module, evaluate, parts[1])
    findings.dims.learn(calls, part_calls, sizes[0], sizes[2])
    problems = []
    if local:
        problems = _sums_differ(of_whole, first, second, sizes, dtype)
    problems += _statistics_differ(changed_by_first, changed_by_second)
    if problems and strict:
        raise RefusedPlan("; ".join(problems))
    findings.notices += problems
    return findings


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Buffers and the random state as they were."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


@contextmanager
def _in_eval(modules: list[nn.Module]) -> Iterator[None]:
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


def _find_batch_norms(module: nn.Module, evaluate: Evaluate, batch: Any) -> list[nn.Module]:
    running: list[nn.Module] = []

    def enter(child: nn.Module, args: Any) -> None:
        running.append(child)

    def leave(child: nn.Module, args: Any, output: Any) -> None:
        running.pop()  # must return None: a hook's result would replace the output

    handles = []
    for child in module.modules():
        handles.append(child.register_forward_pre_hook(enter))
        handles.append(child.register_forward_hook(leave, always_call=True))
    known = batch_norm_modules(module)
    try:
        with _in_eval(known), FindBatchNorm(running) as finder:
            _evaluate(module, evaluate, batch)
    finally:
        for handle in handles:
            handle.remove()
    return known + [found for found in finder.found if found not in known]


def _evaluate(module: nn.Module, evaluate: Evaluate, batch: Any):
    """The loss, the random calls, and how much each buffer changed."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    random = ConstantRandom()
    with random.watching(module):
        loss = evaluate(batch)
    changes = {}
    for name, buffer in module.named_buffers():
        changes[name] = buffer.clone()
        buffer.copy_(before[name])
    return loss, random.calls, changes


def _sums_differ(whole: Loss, first: Loss, second: Loss, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[str]:
    bar = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    n, a, b = sizes
    where = f"on {n} samples and on {a} and {b} of them"
    problems = []
    for name, value in whole.numbers().items():
        parts = first.numbers().get(name, 0.0) + second.numbers().get(name, 0.0)
        if not abs(value - parts) <= bar * max(abs(value), abs(parts), 1e-6):
            problems.append(
                f"the loss does not add up over samples: its {name} {where} is {value:.6g} against {parts:.6g} "
                "in parts. Return (sum, weight), not a mean; a loss over pairs of samples (contrastive) declares "
                'loss_scope="global"; a module that mixes samples other than by batch norm is not supported'
            )
            break
    return problems


def _statistics_differ(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"buffer '{name}' is computed from the samples of a micro-batch, by other means than batch norm, so ranks "
        "would each keep statistics of their own"
        for name, value in first.items()
        if value.shape == second[name].shape and not torch.equal(value, second[name])
    ]


def wrong_model(error: Exception, samples: int) -> InputError:
    """The model or loss failed on a few samples: say so before anything else is blamed."""
    return InputError(
        f"the task fails on {samples} samples, which one process would meet too: {type(error).__name__}: {error}"
    )
