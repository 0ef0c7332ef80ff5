"""The look at a script's loss: does it ask of one sample what it would ask if the other samples were others?

The loss is the script's own code, so it cannot be run on parts of a batch, as a task's loss is. But its operations are
known (`tape`), and can be computed again on a batch of the same shape whose second half holds samples of the first,
targets and model outputs alike. Where the loss is a sum or a mean over samples, dL/d(output) of the first half stays
what it was, up to one factor: the number that the mean is over.

    cross-entropy, ignored indices     2 of 5 tokens count in the first half, 3 in the second: factor 4/5
    dice, in-batch negatives           other directions: the plan would train another model. Refused

It is looked at on the first batch, and again when the loss is made of other operations. The script is handed views of
the model's outputs, at which derivatives stop: nothing of the model is run again. A loss that the model returns is
followed from the last module inside whose result counts the samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.engine.samples import COSTLY_BYTES
from shardwise.errors import InputError, RefusedPlan
from shardwise.part import whole
from shardwise.scripts.tape import Tape, tensors_in

_NODES = 4000  # of a graph that are followed
_OTHERS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (  # which samples of the first half are in the second
    lambda first: first,
    lambda first: first[:1],
    lambda first: first[-1:],
)
_UNCHECKED = "that the loss adds up over samples was not checked: "


class LossLook:
    """Follows a loop from a batch to its losses. One for all models of a loop."""

    def __init__(self, device: torch.device) -> None:
        self._tape = Tape(device)
        self._on = False
        self._wanted = True  # the next batch is to be recorded
        self._began = self._first = False  # modules inside are heard of in the first batch alone
        self._known: set[int] = set()  # kinds of losses that were looked at
        self._batch: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._inner: list[torch.Tensor] = []  # the last inside a model
        self._handles: list[Any] = []
        self.samples, self.dim = 0, 0  # of this rank's part

    def begin(self, batch: Any, samples: int, dim: int | None, *, every: bool) -> None:
        """A batch is handed out; `dim` counts its samples, None where that is not known.

        every   each rank has two samples or more: ranks must do alike, since a graph's nodes order its collectives
        """
        self._forget()
        self.samples, self.dim = samples, dim or 0
        if self._wanted and every and dim is not None:
            self._first, self._began = not self._began, True
            self._batch = [one for one in tensors_in(batch) if self._halves(one) is not None]
            self._tape.__enter__()
            self._on = True

    def end(self) -> None:
        """The loop asks for the next."""
        if self._on:
            self._on = False
            self._tape.__exit__(None, None, None)

    def _forget(self) -> None:
        self.end()
        self._tape.clear()
        for kept in (self._batch, self._outputs, self._inner):
            kept.clear()

    def enter(self, module: nn.Module) -> None:
        """The model's forward begins."""
        if not self._on:
            return
        self._tape.inside = True
        for child in module.modules():
            if child is not module and self._first:
                self._handles.append(child.register_forward_hook(lambda m, a, output: self._inside(output)))

    def leave(self, output: Any) -> Any:
        """It has ended; returns the output as the script is given it."""
        self._tape.inside = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self._seen(output, self._outputs)

    def _inside(self, output: Any) -> Any:
        found: list[torch.Tensor] = []
        output = self._seen(output, found)
        found = [one for one in found if self._halves(one) is not None]
        if found:
            self._inner[:] = found
            self._tape.module_returned()
        return output

    def _seen(self, output: Any, kept: list[torch.Tensor]) -> Any:
        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or not tensor.dim() or tensor.is_leaf:
                return tensor
            kept.append(tensor.view_as(tensor))
            return kept[-1]

        return tree_map_only(torch.Tensor, view, output) if torch.is_grad_enabled() else output

    def __call__(self, loss: torch.Tensor, weight: Any) -> list[str]:
        """Raise where `loss` is no sum or mean over this rank's samples; returns notices.

        weight  what the script says it is a mean over: a number, a tensor, or None
        """
        if self.samples < 2 or loss.grad_fn is None:
            return []
        outputs = [one for one in self._outputs if self._halves(one) is not None]
        kind, reached = _followed(loss, outputs)
        if kind in self._known:
            return []
        if not self._on:
            self._wanted = bool(reached)  # with the next batch
            return []
        self._wanted = False
        self._known.add(kind)
        reached = reached or self._inner
        if not reached:
            return [f"{_UNCHECKED}no output of the model has the {self.samples} samples of the batch"]
        if sum(one.nbytes for one in reached) > COSTLY_BYTES:
            return [f"{_UNCHECKED}its outputs are large, and the look would hold them several times"]
        self._tape.paused = True
        try:
            return self._look(loss, weight, [*self._batch, *outputs, *reached], reached)
        finally:
            self._tape.paused = False

    def _look(self, loss: Any, weight: Any, sources: list[torch.Tensor], reached: list[torch.Tensor]) -> list[str]:
        try:
            with torch.enable_grad():
                before, first, _ = self._gradients(loss, weight, sources, reached, None)
                others = [self._gradients(loss, weight, sources, reached, by)[1:] for by in _OTHERS]
        except (RuntimeError, IndexError, ValueError) as error:
            return [f"{_UNCHECKED}its operations could not be computed again ({str(error).splitlines()[0]})"]
        bar = {torch.float64: 1e-9, torch.float32: 1e-4}.get(loss.dtype, 5e-2)
        value = loss.detach().item()
        if not bool(first.any()) or abs(before.item() - value) > bar * max(abs(value), 1.0):
            return [f"{_UNCHECKED}it is made by operations that could not be followed"]
        for other, over in others:
            self._compare(first, other, weight, over, bar)
        return []

    def _compare(self, first: torch.Tensor, other: torch.Tensor, weight: Any, over: Any, bar: float) -> None:
        square = float(other.dot(other))
        factor = float(first.dot(other)) / square if square else 0.0
        apart = float((first - factor * other).abs().max() / first.abs().max())
        if apart > bar:
            raise RefusedPlan(
                "prepared.backward: the loss is no sum or mean over samples: what it asks of some samples' outputs "
                f"changes by {apart:.1%} with the other samples of the batch, of which each rank has a part (a ratio "
                "of sums over the batch, as in dice; negatives or weights from the batch): compute it for each sample "
                "and take the mean (dice: sum over all dims but the first), or describe the run as a Task with "
                'loss_scope="global"'
            )
        fits = [1.0]
        if over is not None:
            fits.append(float(over) / float(weight))
        elif weight is None or float(weight) != self.samples:
            return  # a number of unknown making
        if min(abs(factor - fit) for fit in fits) > max(bar, 1e-6) * factor:
            raise InputError(
                f"prepared.backward: the loss is not a mean over {float(weight):g}: with other samples beside them its "
                f"gradients at the same samples are {1 / factor:.3g} times as large, so it is divided by what "
                "depends on them (labels that are ignored, weights of classes): give that as mean_over, or as "
                "the weight of the sum"
            )

    def _gradients(
        self, loss: torch.Tensor, weight: Any, sources: list[torch.Tensor], reached: list[torch.Tensor],
        by: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:  # fmt: skip
        """(the loss, its gradients at the first half of the samples, what it is a mean over), computed again."""
        values = {}
        for one in sources:
            with torch.no_grad():
                value = whole(one).detach().clone()
                value = value if by is None else self._doubled(value, by)
            values[id(one)] = value.requires_grad_(one.requires_grad)
        number = next((tensor for found, tensor in self._tape.numbers if found == weight), None)
        asked = weight if isinstance(weight, torch.Tensor) else number
        again, over = self._tape.again([loss, asked], values)
        inputs = [values[id(one)] for one in reached]
        found = torch.autograd.grad(again, inputs, allow_unused=True)
        rows = []
        for value, gradient in zip(inputs, found, strict=True):
            halves = self._halves(value)
            if gradient is not None and halves is not None:
                at, first, _ = halves
                rows.append(whole(gradient).index_select(at, first).reshape(-1).double())
        return again.detach(), torch.cat(rows) if rows else loss.new_zeros(1), over

    def _doubled(self, value: torch.Tensor, by: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The first half's samples, or some of them, in the second half too."""
        halves = self._halves(value)
        assert halves is not None
        at, first, second = halves
        index = torch.arange(value.shape[at], device=value.device)
        chosen = by(first)
        index[second] = chosen[torch.arange(len(second), device=value.device) % len(chosen)]
        return value.index_select(at, index)

    def _halves(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor] | None:
        """(dim, rows of the first half of the samples, rows of the second); None without such rows.

        A dim of k times the samples may have them side by side or one after the other: what is sure in both counts.
        """
        for at in (self.dim, 0):
            size = tensor.shape[at] if tensor.dim() > at else 0
            if size == self.samples or (size > self.samples and size % self.samples == 0 and not at):
                rows = torch.arange(size, device=tensor.device)
                half = self.samples // 2
                one, other = rows % self.samples < half, rows // (size // self.samples) < half
                return at, rows[one & other], rows[~one & ~other]
        return None


def _followed(loss: torch.Tensor, outputs: list[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """(a number for the operations of the loss, the outputs it is made of); none that another of them is made of."""
    ends = {one.grad_fn: one for one in outputs}
    names, found = _walk([loss.grad_fn], ends.__contains__)
    reached = [ends[node] for node in found]
    if len(reached) > 1:
        above = [child for node in found for child, _ in node.next_functions if child is not None]
        behind = set(_walk(above, ends.__contains__)[1])
        reached = [one for one in reached if one.grad_fn not in behind]
    return zlib.crc32(" ".join(names).encode()), reached


def _walk(nodes: list[Any], is_end: Callable[[Any], bool]) -> tuple[list[str], list[Any]]:
    """The names of the nodes of a graph down to its ends, and the ends that were met."""
    waiting, seen, names, found = list(nodes), set(nodes), list[str](), list[Any]()
    while waiting and len(names) < _NODES:
        node = waiting.pop()
        if is_end(node):
            found.append(node)
            continue
        names.append(node.name())
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return names, found
