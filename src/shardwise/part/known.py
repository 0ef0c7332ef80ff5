"""In a rehearsal with values, keep the unsharded tensor beside a rank's share, for what Python reads.

A rehearsal sends nothing, so a number that a run reduces over ranks is that of one share. For example `mask.all()` is
true if the padding lies on another rank, and a module that branches on it takes another branch than in a run. So
tensors of a batch, and what is computed of them without weights, keep the unsharded tensor beside the share; a result
that leaves a rule as a plain tensor or a Python number is taken from there.

    ids (B, S), a rank's share     ids != 0   .all()     what this rank alone would say
    known: ids (B, S)              ids != 0   .all()     what Python is told

What this does not do: follow what is computed with weights, whose reductions stay those of one share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.host import has_values
from shardwise.part.levels import Distributed
from shardwise.trace.elementwise import is_random
from shardwise.trace.known_values import give, shadow
from shardwise.trace.leaves import replaced, tensors_in

MOST = 1 << 24  # elements that are computed whole beside a share


def note_known(tensor: Distributed, whole: torch.Tensor) -> None:
    """Stores a copy of `whole` in `tensor.whole_values`, in a rehearsal, if its values are known and it is small."""
    values = _values(whole)
    if tensor.axis.rehearsal is not None and values is not None and values.numel() <= MOST:
        with _disable_current_modes():
            tensor.whole_values = values.to(tensor.dtype, copy=True)  # a batch is moved to a dtype when it is cut


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a plain tensor itself, of a fake one the values known for it; None if it has no values."""
    if isinstance(tensor, FakeTensor):
        return shadow(tensor)
    return tensor if has_values(tensor) else None


def with_known(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed], answer: Callable[[], Any]) -> Any:
    """Runs the rule `answer()`; returns its result, with unsharded values attached if all `inputs` have them."""
    whole = _of_whole(func, args, kwargs, inputs)
    output = answer()
    if whole is None:
        # written with what is not known: the whole values kept so far are no longer the tensor's
        if func._schema.is_mutable and isinstance(args[0], Distributed):
            args[0].whole_values = None
        return output
    if not isinstance(output, tuple | list):
        return _with_whole_values(output, whole)
    results = [_with_whole_values(result, whole_result) for result, whole_result in zip(output, whole, strict=True)]
    return type(output)(results)


def _of_whole(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed]) -> Any:
    """Returns the result on unsharded values; None if an input's are not known, is a weight, or `func` is random."""
    plain = [tensor for tensor in tensors_in((args, kwargs)) if not isinstance(tensor, Distributed)]
    if any(tensor.whole_values is None for tensor in inputs) or any(tensor.requires_grad for tensor in plain):
        return None
    # a draw here would move the generator; what is written into a plain tensor would be written twice
    if is_random(func) or (func._schema.is_mutable and not isinstance(args[0], Distributed)):
        return None
    if any(_values(tensor) is None for tensor in plain):
        return None
    whole = replaced(Distributed, lambda tensor: tensor.whole_values, (args, kwargs))
    whole_args, whole_kwargs = replaced(FakeTensor, _values, whole)
    try:
        with _disable_current_modes():  # of a trace: what only one process computes is no work of a rank
            return func(*whole_args, **whole_kwargs)
    except Exception:  # whatever it is, the rule says it
        return None


def _with_whole_values(output: Any, whole: Any) -> Any:
    """Returns `output` with `whole` in `whole_values`; a number or a plain tensor is replaced by `whole`."""
    # a number in Python (`.item()`) is answered by one process's value
    if not isinstance(output, torch.Tensor):
        return whole
    # of another shape (a selection by a rank's own mask), or too large to be kept beside
    if not isinstance(whole, torch.Tensor) or whole.shape != output.shape or whole.numel() > MOST:
        return output
    # a fake tensor carries values as its shadow
    if isinstance(output, FakeTensor):
        with _disable_current_modes():
            return give(output, whole.to(output.dtype, copy=True))
    # a plain tensor left the rule whole: it is one process's
    if not isinstance(output, Distributed):
        return whole.to(output.dtype, copy=True)
    output.whole_values = whole
    return output
