"""A script's operations that depend on all samples of a batch (batch norm, means), answered as of all of them.

    teacher(x)                      a batch norm in training of a module that no plan has: statistics of all samples
    autograd.grad(loss.mean(), x)   one process's mean is over all samples: this rank's gradient times n_r / sum n_r
    loss.backward(); x.grad         the same, of a backward beside the plan's, and of prepared.backward

What this does not do: scale the gradient of a loss whose divisor cannot be read (`divisor`); that is refused.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from shardwise.comm import gather_rows
from shardwise.host import row_of
from shardwise.mesh import Mesh
from shardwise.parallel.batchnorm import JoinBatchNorm
from shardwise.parallel.slots import Phase
from shardwise.part import plain
from shardwise.scripts.dealt import Dealt
from shardwise.scripts.divisor import UNKNOWN, Divisor, divisor_of
from shardwise.scripts.outside import with_line
from shardwise.scripts.saying import line_of_script

_NORMS = (functional.batch_norm, torch.batch_norm)
_KINDS = {"sum": 0.0, "mean": 1.0}
_UNSEEN = (
    "a gradient by what the model is given is of this rank's samples alone, and what its loss is a mean over cannot be "
    "seen, so its size may be another than one process's: take it of a sum over samples, or of a mean over them that "
    "ends the loss"
)


class AllSamples:
    """Answers batch norms and input gradients of a script's loop. `divided` reads what a loss is divided by."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._dealt: Dealt | None = None
        self._beside: Dealt | None = None
        self.divided: Callable[[torch.Tensor], Divisor] = lambda loss: UNKNOWN

    def begin(self, dealt: Dealt) -> None:
        """Note which samples of the batch just handed out this rank holds."""
        self._dealt, self._beside = dealt, None

    def begin_beside(self, dealt: Dealt) -> None:
        """Note which samples of another loader's batch this rank holds."""
        self._beside = dealt

    def call(self, func: Any, args: tuple, kwargs: dict, *, own: Callable[[Any], bool], beside: bool) -> Any:
        """Returns what `func` gives of these arguments, as of all samples.

        own     whether a tensor is made of this rank's samples
        beside  whether they are another loader's
        """
        if takes_statistics(func, args, kwargs) and own(args[0]):
            return self._joined(func, args, kwargs, self._beside if beside else self._dealt)
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            if any(own(one) for one in ((inputs,) if isinstance(inputs, torch.Tensor) else inputs)):
                outputs, given = args[0], args[2] if len(args) > 2 else kwargs.get("grad_outputs")
                scalars = [one for one in _tuple(outputs) if one.numel() == 1] if given is None else []
                factor = self.factor(scalars) if scalars else 1.0
                found = func(*args, **kwargs)
                return found if factor == 1.0 else tuple(None if one is None else one * factor for one in found)
        return func(*args, **kwargs)

    def _joined(self, func: Any, args: tuple, kwargs: dict, dealt: Dealt | None) -> Any:
        """A batch norm over all ranks' samples, unless every rank has the same. Collective."""
        if same_on_all([args[0]], self._mesh):
            return func(*args, **kwargs)
        phase = Phase(stand_in=dealt is not None and dealt.part.count == 0)
        return JoinBatchNorm(self._mesh.data, phase).__torch_function__(func, (), args, kwargs)

    def factor(self, losses: Sequence[torch.Tensor]) -> float:
        """Returns what the gradient of this rank's loss is multiplied by, to be that of all ranks' loss. Collective.

        Raises `RefusedPlan` where what a loss is divided by cannot be read.
        """
        found = [self.divided(loss) for loss in losses]
        numbers = {one.numbers[0] for one in found if one.kind == "mean"}
        known = len({one.kind for one in found}) == 1 and found[0].kind in _KINDS and len(numbers) < 2
        counts = self._dealt is None or self._dealt.part.count > 0
        mine = numbers.pop() if known and numbers else 0.0
        kind = _KINDS[found[0].kind] if known else -1.0
        table = gather_rows(row_of([kind, mine * counts], self._mesh.device), self._mesh.data).tolist()
        if any(row[0] != kind for row in table) or kind < 0:
            raise with_line(_UNSEEN, line_of_script())
        total = sum(row[1] for row in table)
        return mine / total if kind and total else 1.0


def takes_statistics(func: Any, args: tuple, kwargs: dict) -> bool:
    """Returns whether a function is a batch norm in training."""
    return func in _NORMS and bool(args[5] if len(args) > 5 else kwargs.get("training", False))


def same_on_all(tensors: Sequence[torch.Tensor], mesh: Mesh) -> bool:
    """Returns whether every rank of the data axis has these tensors alike. Collective."""
    check = 0
    for tensor in tensors:
        flat = plain(tensor.detach()).cpu().contiguous().reshape(-1)
        check = zlib.crc32(flat.view(torch.uint8).numpy(), check) if flat.numel() else check
    table = gather_rows(row_of([float(check)], mesh.device), mesh.data)
    return bool((table == table[0]).all())


@contextmanager
def scaled(leaves: Sequence[torch.Tensor], factor: float) -> Iterator[None]:
    """Context: what a backward inside adds to the gradients of these tensors is multiplied by `factor`."""
    before = [(leaf, None if leaf.grad is None else leaf.grad.detach().clone()) for leaf in leaves]
    yield
    with torch.no_grad():
        for leaf, was in before:
            if leaf.grad is not None:
                leaf.grad.mul_(factor)
                if was is not None:
                    leaf.grad.add_(was, alpha=1.0 - factor)


def weakly_divided(calls: weakref.ref[Any]) -> Callable[[torch.Tensor], Divisor]:
    """Returns what reads by what a loss is divided, beside its model's samples; `calls` are not kept alive."""

    def divided(loss: torch.Tensor) -> Divisor:
        known = calls()
        return divisor_of(loss, known.held_by(loss)) if known is not None else UNKNOWN

    return divided


def _tuple(given: Any) -> tuple:
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)
