"""Terms of a loss that are made of weights alone: a penalty by hand, of which every rank computes all.

    ce + 1e-2 * sum(w.pow(2).sum() for w in weights)   a mean beside it: the mean over ranks leaves the penalty as it is
    mse.sum() + penalty                                a sum beside it: ranks' sums are added up, and the penalty is in
                                                       each of them. Refused

What this does not do: know a penalty that an operation makes of weights and of an index, a mask or the like, where it
is not listed here; it counts as one of samples.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.errors import InputError

_WITH_NUMBERS = {"Mul", "Div"}  # whose other argument may be a number
_BESIDE_NOTHING = {"Add", "Sub", "Rsub", "Pow", *_WITH_NUMBERS}  # or may be missing from the graph
_KNOWN = _BESIDE_NOTHING | {
    "Sum", "Mean", "Abs", "Neg", "Norm", "LinalgVectorNorm", "LinalgMatrixNorm", "Sqrt", "Stack", "Cat", "View",
    "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Clone", "Mm", "Dot", "Exp", "Log", "Clamp", "ClampMin",
    "ClampMax", "Relu", "Maximum", "Minimum", "Select", "Slice", "Squeeze", "Unsqueeze", "Expand", "ToCopy", "Alias",
    "Max", "Min", "Amax", "Amin", "Tanh", "Sigmoid", "ViewAsComplex", "ViewAsReal", "Conj", "Angle", "Sgn", "_Whole",
    "_Summand", "Softmax", "LogSoftmax", "Softplus", "Reciprocal", "Rsqrt",
}  # fmt: skip
_SHAPES = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias"}
_MOST = 4000
IN_A_SUM = (
    "prepared.backward: the loss is a sum over samples plus a penalty on weights, which every rank computes: sums of "
    "ranks are added up, and the penalty would count once for each. Divide it by the number of ranks that hold "
    "samples, take the optimizer's weight_decay, or give a mean: prepared.backward(loss, mean_over=n)"
)


def name_of(node: Any) -> str:
    """Returns the operation of a node of autograd."""
    return re.sub(r"Backward\d*$", "", node.name())


def terms_of(node: Any) -> list[Any]:
    """Returns the nodes that a node adds up."""
    waiting, terms = [node], []
    while waiting:
        one = waiting.pop()
        if name_of(one) in ("Add", "Sub"):
            waiting += [child for child, _ in one.next_functions if child is not None]
        else:
            terms.append(one)
    return terms


def of_weights(node: Any) -> tuple[float, ...] | None:
    """Returns what a term of weights alone is multiplied by; None for a term of anything else."""
    waiting, seen, numbers, weights = [node], set[Any](), list[float](), 0
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        name = name_of(one)
        if hasattr(one, "variable"):
            if not isinstance(one.variable, nn.Parameter):
                return None
            weights += 1
            continue
        children = [child for child, _ in one.next_functions]
        alone = name in _KNOWN and (None not in children or name in _BESIDE_NOTHING)
        if len(seen) > _MOST or not (alone or _is_of_its_graph(one, children)):
            return None
        if None in children and name in _WITH_NUMBERS:
            number = _number(one)
            if number is None:
                return None
            numbers.append(number)
        waiting += [child for child in children if child is not None]
    return tuple(sorted(numbers)) if weights else None


def _is_of_its_graph(node: Any, children: list[Any]) -> bool:
    """Whether an operation, whichever it is, was given nothing but what has a graph: it kept no index or mask."""
    if not children or None in children or hasattr(node, "saved_tensors"):  # or a function of the script's own
        return False
    for name in dir(node):
        kept = getattr(node, name) if name.startswith("_saved_") else None
        tensors = kept if isinstance(kept, list | tuple) else [kept]
        if any(isinstance(one, torch.Tensor) and not one.requires_grad for one in tensors):
            return False
    return True


def _number(node: Any) -> float | None:
    for value in (getattr(node, "_saved_other", None), getattr(node, "_saved_self", None)):
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            return float(value) if value.numel() == 1 else None
    return None


def refuse_in_sum(loss: torch.Tensor, weight: float) -> None:
    """Raise `InputError` for a sum over samples, given with its weight, in which a penalty stands that is not
    multiplied by that weight."""
    with _disable_current_modes():  # a Python number that was saved is no tensor to them
        if _adds_weights(loss.grad_fn, weight):
            raise InputError(IN_A_SUM)


def _adds_weights(node: Any, weight: float) -> bool:
    factor = 1.0
    while node is not None and name_of(node) in _SHAPES | _WITH_NUMBERS:
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) != 1:
            return False
        if name_of(node) in _WITH_NUMBERS:
            number = _number(node)
            if not number:
                return False
            factor = factor * number if name_of(node) == "Mul" else factor / number
        node = children[0]
    if node is None or name_of(node) not in ("Add", "Sub") or abs(factor - weight) <= 1e-6 * weight:
        return False
    return any(of_weights(term) is not None for term in terms_of(node))
