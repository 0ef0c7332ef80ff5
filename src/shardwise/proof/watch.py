"""Record every module's outputs and their gradients in one step, by name and samples, for locate.

Both sides of a proof record alike. A rank's tensors hold its own samples, and are compared with these samples of one
process's. Under tp shares and sums are gathered, which all ranks of the axis do in the same order.

What this does not do: see inside a module that has no modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.proof.record import kept

# (micro-batch, module path, indices of the calls around it and last its own among the module's calls in that call)
Call = tuple[int, str, tuple[int, ...]]
Key = tuple[int, str, tuple[int, ...], int]  # a call, and an index among the leaves of its output or arguments


@dataclass
class SampledTensor:
    """A tensor and which samples of the micro-batch it holds: [start, start + count) of `total`."""

    tensor: torch.Tensor
    start: int
    count: int
    total: int


@dataclass
class CallTrace:
    """Tensors of a step's module calls, by `Key` (the call and the tensor's index), in the order in which they came."""

    forward: dict[Key, SampledTensor] = field(default_factory=dict)
    arguments: dict[Key, SampledTensor] = field(default_factory=dict)
    inside: dict[Key, list[Call]] = field(default_factory=dict)  # output -> calls around its call, innermost first
    outer: dict[Key, Key] = field(default_factory=dict)  # output -> the same tensor as output of an enclosing call
    # gradients of outputs (False), and of arguments (True), of these only what flows through this call
    backward: dict[tuple[Key, bool], SampledTensor] = field(default_factory=dict)


class ModuleWatch:
    """Records the outputs, arguments and gradients of a module's calls in each micro-batch after `begin`.

    whole   tensor -> unsharded tensor
    stages  whether the module runs a pipeline stage, which replays earlier calls without gradients: these are counted
    """

    def __init__(self, module: nn.Module, whole: Callable[[Any], Any] = lambda tensor: tensor, stages: bool = False):
        self.module, self.whole, self.stages = module, whole, stages
        self.trace = CallTrace()
        self._samples: tuple[int, int, int, int] | None = None
        self._counts: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._made: dict[int, tuple[torch.Tensor, Key]] = {}
        self._open: list[Call] = []

    def begin(self, micro_batch: int, start: int, count: int, total: int) -> None:
        """Begins a micro-batch's forward on [start, start + count) of `total` samples; none is recorded for count 0."""
        self._samples = (micro_batch, start, count, total) if count else None
        self._made.clear()
        self._open.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which hooks at every module record its calls."""
        handles = []
        for path, child in self.module.named_modules():
            handles.append(child.register_forward_pre_hook(self._before_call(path), with_kwargs=True))
            handles.append(child.register_forward_hook(self._after_call(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_call(self, path: str) -> Callable:
        """Returns a hook that records the arguments of calls of the module at `path`, and their gradients."""

        def before_call(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            # calls without gradients are not compared; a stage's replayed ones are counted all the same, so that
            # later calls of the module have the same indices as in one process
            if self._samples is None or not (torch.is_grad_enabled() or self.stages):
                return None
            micro_batch, *samples = self._samples
            around = self._open[-1][2] if self._open else ()
            call = (micro_batch, path, (*around, self._counts.get((micro_batch, path, around), 0)))
            self._counts[micro_batch, path, around] = call[2][-1] + 1
            self._open.append(call)
            if not torch.is_grad_enabled():
                return None
            leaves, spec = tree_flatten((args, kwargs))
            for place, leaf in self._tensors(leaves):
                self.trace.arguments[*call, place] = SampledTensor(kept(self.whole(leaf.detach())), *samples)
                # a parameter must stay one for the module, and its gradient is compared by name anyway
                if leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                    leaves[place] = leaf.view_as(leaf)  # a tensor of its own, so that its gradient is this call's alone
                    leaves[place].register_hook(self._gradient((*call, place), True, *samples))
            return tree_unflatten(leaves, spec)

        return before_call

    def _after_call(self, path: str) -> Callable:
        """Returns a hook that records the outputs of calls of the module at `path`, and their gradients."""

        def after_call(module: nn.Module, args: tuple, output: Any) -> None:
            # `before_call` did not record this call, since it has no samples or no gradients
            if self._samples is None or all(call[1] != path for call in self._open):
                return
            call = self._open.pop()
            while call[1] != path:  # calls inside that raised, and whose error was caught
                call = self._open.pop()
            # this call is only counted
            if not torch.is_grad_enabled():
                return
            _, start, count, total = self._samples
            for place, leaf in self._tensors(tree_flatten(output)[0]):
                key = (*call, place)
                self.trace.inside[key] = self._open[::-1]
                value = kept(self.whole(leaf.detach()))
                self.trace.forward[key] = SampledTensor(value, start, count, total)
                before = self._made.get(id(leaf))
                # a module that returns its child's tensor; the inner call made it
                if before is not None and before[0] is leaf:
                    self.trace.outer[before[1]] = key
                self._made[id(leaf)] = (leaf, key)  # the tensor is held, so that its id is not reused
                if leaf.requires_grad:
                    leaf.register_hook(self._gradient(key, False, start, count, total))

        return after_call

    @staticmethod
    def _tensors(leaves: list[Any]) -> list[tuple[int, torch.Tensor]]:
        floats = ((place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        return [(place, leaf) for place, leaf in floats if leaf.is_floating_point()]

    def _gradient(self, key: Key, argument: bool, start: int, count: int, total: int) -> Callable:
        """Returns a hook that records the gradient of a call's argument or output, unsharded."""

        def gradient(grad: torch.Tensor) -> None:
            if (key, argument) not in self.trace.backward:  # a second backward through one graph calls the hook again
                value = kept(self.whole(grad.detach()))
                self.trace.backward[key, argument] = SampledTensor(value, start, count, total)

        return gradient


def rows_of(expected: SampledTensor, actual: SampledTensor) -> torch.Tensor | None:
    """Returns the part of one process's tensor that has the samples of a rank's; None if that cannot be told."""
    a, b = actual.tensor, expected.tensor
    # a tensor without a dim of samples (a mean over positions, for example) is the same on every rank
    if actual.count == actual.total or (a.shape == b.shape and not _has_rows(b, actual.total)):
        return b if a.shape == b.shape else None
    # other dims than that of samples differ: it is another tensor
    if not a.dim() or a.dim() != b.dim() or a.shape[1:] != b.shape[1:] or not _has_rows(b, actual.total):
        return None
    # dim 0 may have several entries for each sample (tokens), which lie together
    size = b.shape[0] // actual.total
    return b[actual.start * size : (actual.start + actual.count) * size] if a.shape[0] == actual.count * size else None


def _has_rows(tensor: torch.Tensor, samples: int) -> bool:
    return bool(tensor.dim()) and tensor.shape[0] > 0 and tensor.shape[0] % samples == 0
