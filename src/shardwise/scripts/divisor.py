"""Read from a loss's autograd graph what it was divided by: the weight that a mean over samples hides.

    cross_entropy(...)            NllLoss, reduction mean, total weight 512        a mean over 512
    (a - b).pow(2).mean()         Mean of 4096                                     a mean over 4096
    nll.sum() / len(x)            Div(Sum of (8, 4), 8)                            a mean over 8
    nll.sum() / 37                Div(Sum of (8, 4), 37)                           unknown: no size of what is summed
    ce * 0.5 + other.mean()       Add of both                                      both
    ce + w.square().sum()         a penalty on weights beside a mean               what the mean is over
    ce * w.exp() - w              a mean that something of weights weighs          likewise
    (a - b).pow(2).sum()          Sum of (8, 4), of 8 samples                      nothing
    (a - b).pow(2).mean(0).sum()  Sum of (4,)                                      unknown: a mean lies beneath

A sum is taken for a sum over samples where its elements are theirs and nothing on the way to the model's outputs may
have divided by how many there are: no mean over them, no number that counts them. Means over
numbers in proportion to ranks' samples are averaged in that proportion; others may not be.

What this does not do: guess. A graph that ends in anything else is unknown, and the caller asks for the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.errors import InputError
from shardwise.parallel.batchnorm import NORMALISED
from shardwise.scripts.penalties import name_of, of_weights, terms_of

_MEAN, _SUM = 1, 2  # torch's numbers for `reduction`
_SHAPE_ONLY = {
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Clone",
    "ToCopy",
    "Alias",
    "_Aliased",
    "Neg",
}
_DEPTH, _MOST = 64, 2000
_NO_MULTIPLES = {  # f(x / n) is no multiple of f(x), nor of its square
    "LogSoftmax", "Softmax", "Sigmoid", "LogSigmoid", "Tanh", "Exp", "Expm1", "Softplus", "Logsumexp", "Gelu", "Silu",
    "BinaryCrossEntropyWithLogits", "Erf", "Sin", "Cos", "Log1P", "Elu", "Mish",
}  # fmt: skip
_CONTRACTS = {  # and what the first two factors are called, where they are saved
    "Mm": ("self", "mat2"), "Bmm": ("self", "mat2"), "Mv": ("self", "vec"), "Dot": ("self", "tensor"),
    "Vdot": ("self", "other"), "Addmm": ("", "mat1", "mat2"), "Addmv": ("", "mat", "vec"),
    "Addbmm": ("", "batch1", "batch2"), "Baddbmm": ("", "batch1", "batch2"), "Linear": ("input", "weight"),
    "Convolution": ("input", "weight"),
}  # fmt: skip


@dataclass(frozen=True)
class Divisor:
    """`kind` is "mean", "sum", "penalised" (a sum and a penalty on weights) or "unknown"; `numbers` are what the terms
    were divided by, the largest first; `written` are those of them that stand in the script as divisions of the whole
    loss; `sizes` may count what a sum is over: samples, their positions, all elements; `beside` are numbers in
    penalties on weights."""

    kind: str
    numbers: tuple[float, ...] = ()
    written: tuple[float, ...] = ()
    sizes: frozenset[float] = frozenset()
    beside: tuple[float, ...] = ()


UNKNOWN = Divisor("unknown")
PENALISED = Divisor("penalised")


@dataclass(frozen=True)
class Held:
    """How many samples a loss is computed from, which dim counts them, and the nodes of the model's outputs, behind
    which nothing is asked. `constants` grows: numbers that losses of other numbers of samples had too, by operation.
    `suspects` grows too: numbers beneath what no mean goes through (a softmax), which are constants unless they change
    with the number of samples; None: which cannot be tried. `behind` is filled with whole numbers that stand there.
    `others`: dims that count them in what the model gives. `known`: whether a node's number is known to come from:
    "counts", "written"."""

    samples: int
    dim: int = 0
    ends: frozenset[Any] = frozenset()
    constants: set[tuple[str, float]] = field(default_factory=set, compare=False)
    suspects: set[tuple[str, float]] | None = None
    behind: set[float] = field(default_factory=set, compare=False)
    others: frozenset[int] = frozenset()
    known: Callable[[Any, float, str], bool] = field(default=lambda node, number, origin: False, compare=False)

    @property
    def dims(self) -> frozenset[int]:
        """Returns the dims that may count samples."""
        return self.others | {0, self.dim}


def divisor_of(loss: torch.Tensor, held: Held | None = None) -> Divisor:
    """Returns what `loss`, one number, was divided by, read from its autograd graph.

    held    without it a sum is one of samples, and whatever it is divided by counts them
    """
    if loss.grad_fn is None:
        return UNKNOWN
    with _disable_current_modes():  # a Python number that was saved is no tensor to them
        found = _of(loss.grad_fn, _DEPTH, held)
        return found if held is None else replace(found, beside=(*found.beside, *sorted(held.behind)))


def refuse_division(loss: torch.Tensor, weight: float, accumulate: int) -> None:
    """Raise `InputError` for a sum, given with its weight, that was divided by the number of micro-batches too."""
    found = divisor_of(loss) if accumulate > 1 else UNKNOWN
    own = found.numbers == found.written and weight in found.written  # a sum over its weight: the mean itself
    if accumulate in found.written and not (own and found.written.count(accumulate) == 1 and accumulate == weight):
        raise InputError(
            f"prepared.backward(loss, weight): the loss was divided by {accumulate}, the micro-batches of a step, and "
            "the weights of a step's micro-batches are added up, so it would be divided twice: leave the division "
            "out, for a mean over all of the step; or prepared.backward(loss, mean_over=n), for the mean of means as "
            "the script has it"
        )


def _of(node: Any, depth: int, held: Held | None) -> Divisor:
    if node is None or depth == 0:
        return UNKNOWN
    name = name_of(node)
    children = [child for child, _ in node.next_functions if child is not None]
    if name == "Mean" and _reduces_all(node):
        return _of_mean(node, children, depth, held)
    if name == "Sum" and _reduces_all(node):
        penalty = of_weights(node)
        return _of_sum(node, held) if penalty is None else Divisor("mean", beside=penalty)
    if hasattr(node, "_saved_reduction"):
        return _of_loss(node, held)
    if name in _SHAPE_ONLY and len(children) == 1:
        return _of(children[0], depth - 1, held)
    if name == "Mul" and len(children) == 1:
        if _one_number(getattr(node, "_saved_other", None)) == 0.0:
            return Divisor("mean")  # nothing, whatever it is of
        inner = _of(children[0], depth - 1, held)
        if inner.kind == "sum" and held is not None and _counts(node, held):
            return UNKNOWN
        by = _one_number(getattr(node, "_saved_other", None))  # alike on all ranks, as one process has it
        if by is None or inner.kind != "mean":
            return inner
        if held is not None and _is_suspect(node, by, by, held):
            return UNKNOWN  # `loss.mean() * len(x)`
        return replace(inner, beside=(*inner.beside, by))
    if name == "Div" and len(children) == 1 and node.next_functions[0][0] is children[0]:
        inner, by = _of(children[0], depth - 1, held), _one_number(node._saved_other)
        if inner.kind == "sum" and held is not None and by is not None and held.known(node, by, "written"):
            return replace(inner, beside=(*inner.beside, by))  # a constant, alike on all ranks
        if inner.kind == "sum" and held is not None and by not in inner.sizes:
            return UNKNOWN  # a count of something else, or a constant
        return _divided(inner, by)
    if name in ("Add", "Sub"):
        return _of_terms(terms_of(node), depth, held)
    if name in ("Mul", "Div") and len(node.next_functions) == 2 and of_weights(node) is None:
        return _times_weights(name, children, depth, held)
    penalty = of_weights(node)
    return UNKNOWN if penalty is None else Divisor("mean", beside=penalty)


def _times_weights(name: str, factors: list[Any], depth: int, held: Held | None) -> Divisor:
    """What is multiplied by something of weights alone, or divided by it (uncertainties of a loss's terms)."""
    numbers = [of_weights(factor) for factor in factors]
    at = 0 if name == "Div" or (numbers and numbers[0] is None) else 1
    if len(factors) != 2 or numbers[1 - at] is None:
        return UNKNOWN
    inner = _of(factors[at], depth - 1, held)
    return (
        UNKNOWN
        if inner.kind == "sum" and numbers[1 - at]
        else replace(inner, beside=(*inner.beside, *(numbers[1 - at] or ())))
    )


def _of_terms(terms: list[Any], depth: int, held: Held | None) -> Divisor:
    """Terms that are added up; penalties on weights are as they are beside a mean, and too many beside a sum."""
    penalties = {term: numbers for term in terms if (numbers := of_weights(term)) is not None}
    found = _together([_of(term, depth - 1, held) for term in terms if term not in penalties] or [Divisor("mean")])
    if not penalties or found.kind == "unknown":
        return found
    beside = tuple(number for numbers in penalties.values() for number in numbers)
    return PENALISED if found.kind == "sum" else replace(found, beside=(*found.beside, *sorted(beside)))


def _of_mean(node: Any, children: list[Any], depth: int, held: Held | None) -> Divisor:
    """A mean of all elements; of losses put together, each a mean, it is one too."""
    if _is_of_one_row(node, held):
        return UNKNOWN  # of one sample, however many there are
    number = float(getattr(node, "_saved_self_sym_numel", None) or math.prod(_sizes(node)))
    if held is None:
        return Divisor("mean", (number,))
    if children and children[0].name().startswith(("StackBackward", "CatBackward")):
        terms = _together([_of(child, depth - 1, held) for child, _ in children[0].next_functions])
        return terms if terms.kind == "mean" else UNKNOWN
    over_samples = number % held.samples == 0 and not _beneath(node, held, _adds)
    return Divisor("mean", (number,)) if over_samples else UNKNOWN


def _is_of_one_row(node: Any, held: Held | None) -> bool:
    """Whether a mean is of one row of samples, as `for e in errors` takes them."""
    waiting, seen = [node], 0
    while waiting and seen < _DEPTH:
        one = waiting.pop()
        seen += 1
        if one is None or (held is not None and one in held.ends):
            continue
        if name_of(one) in ("Unbind", "Select") and _signed(getattr(one, "_saved_dim", 1)) == 0:
            return True
        if one is node or name_of(one) not in ("Sum", "Mean", "Stack", "Cat"):
            waiting += [child for child, _ in one.next_functions]
    return False


def _of_sum(node: Any, held: Held | None) -> Divisor:
    """A sum of all elements, which are those of samples and not divided by how many there are."""
    if held is None:
        return Divisor("sum")
    sizes = _sizes(node)
    fits = [dim for dim in held.dims if dim < len(sizes) and sizes[dim] % held.samples == 0]
    if not fits or _beneath(node, held, _divides):
        return UNKNOWN
    return Divisor("sum", sizes=frozenset.intersection(*(_counts_of(sizes, dim) for dim in fits)))


def _counts_of(sizes: tuple[int, ...], dim: int) -> frozenset[float]:
    """How many samples there are along `dim`, or positions or elements of them."""
    beside = [math.prod(sizes[dim + 1 : at + 1]) for at in range(dim, len(sizes))]
    return frozenset(float(sizes[dim] * more * before) for more in beside for before in (1, math.prod(sizes[:dim])))


def _sizes(node: Any) -> tuple[int, ...]:
    """Of what a reduction is over."""
    if hasattr(node, "_saved_self_sym_sizes"):
        return tuple(node._saved_self_sym_sizes)
    return tuple(node._saved_self.shape) if hasattr(node, "_saved_self") else ()


def _beneath(node: Any, held: Held, asked: Callable[[Any, Held], bool]) -> bool:
    """Whether `asked` holds of a node between this one and the model's outputs, or there are too many to tell."""
    waiting, seen = [(child, False) for child, _ in node.next_functions], set[Any]()
    while waiting:
        one, behind = waiting.pop()
        if one is None or (one, behind) in seen or one in held.ends or _normalises(one):
            continue
        if len(seen) == _MOST or (asked(one, held) if not behind else _is_asked_behind(one, held, asked)):
            return True
        seen.add((one, behind))
        behind = behind or (held.suspects is not None and name_of(one) in _NO_MULTIPLES)
        waiting += [(child, behind) for child, _ in one.next_functions]
    return False


def _is_asked_behind(node: Any, held: Held, asked: Callable[[Any, Held], bool]) -> bool:
    """The same of a node whose multiples do not come through: a number there is taken for a constant until tried."""
    if name_of(node) not in ("Mul", "Div"):
        return asked(node, held)
    assert held.suspects is not None
    for number, count in _numbers_of(node):
        if round(count) > 1 and abs(count - round(count)) < 1e-6:
            held.behind.add(number)  # which all ranks compare
        if _is_suspect(node, number, count, held):
            return True
    return False


def _is_suspect(node: Any, number: float, count: float, held: Held) -> bool:
    """Whether a number counts samples for sure; one that may is tried on parts of other sizes."""
    if not _may_count(count, held) or held.known(node, number, "written"):
        return False
    if held.suspects is not None:
        held.suspects.add((name_of(node), number))
    return held.known(node, number, "counts")


def _normalises(node: Any) -> bool:
    """Whether a node gave a batch norm's output, whose size no number of samples behind it changes."""
    return name_of(node).endswith("BatchNorm") or NORMALISED in node.metadata


def _reduces_all(node: Any) -> bool:
    """Whether a sum or mean is over all elements, by whatever dims."""
    dims = {_signed(dim) % max(1, len(_sizes(node))) for dim in getattr(node, "_saved_dim", None) or ()}
    return not dims or all(size == 1 or at in dims for at, size in enumerate(_sizes(node)))


def _reduces_samples(node: Any, held: Held) -> bool:
    """Whether a sum or mean is over the dim of samples, or over all."""
    dims = {_signed(dim) for dim in getattr(node, "_saved_dim", None) or ()}
    ndim = len(_sizes(node))
    return not dims or bool(dims & {place for dim in held.dims for place in (dim, dim - ndim)})


def _adds(node: Any, held: Held) -> bool:
    """Whether what a node gives may be a sum over samples."""
    name = name_of(node)
    return getattr(node, "_saved_reduction", 0) == _SUM or (name == "Sum" and _reduces_samples(node, held))


def _divides(node: Any, held: Held) -> bool:
    """Whether what a node gives may be divided by the number of samples."""
    name = name_of(node)
    if getattr(node, "_saved_reduction", 0) == _MEAN or (name in _CONTRACTS and _weighs(node)):
        return True
    if name == "Mean":
        return _reduces_samples(node, held)
    return name in ("Mul", "Div") and _counts(node, held)


def _weighs(node: Any) -> bool:
    """Whether a product has a constant factor that is not all ones, so that it may take a mean. Factors that have a
    graph are gone through themselves.
    """
    for name, (child, _) in zip(_CONTRACTS[name_of(node)], node.next_functions, strict=False):
        if child is None and name:
            value = getattr(node, f"_saved_{name}", None)
            if not isinstance(value, torch.Tensor) or not bool((value == 1).all()):
                return True
    return False


def _signed(dim: int) -> int:
    """A dim as it was given: torch keeps negative ones as large numbers."""
    return dim - 2**64 if dim >= 2**63 else dim


def _counts(node: Any, held: Held) -> bool:
    """Whether the constant that a Mul or Div has may be the number of samples, or of what they have."""
    for number, count in _numbers_of(node):
        if (name_of(node), number) in held.constants or held.known(node, number, "written"):
            continue
        if _may_count(count, held):
            return True
        held.constants.add((name_of(node), number))
    return False


def _numbers_of(node: Any) -> list[tuple[float, float]]:
    """The constants that a Mul or Div has, and what each would be the number of."""
    found, divides = [], node.name().startswith("Div")
    for value in (getattr(node, "_saved_other", None), None if divides else getattr(node, "_saved_self", None)):
        if not isinstance(value, torch.Tensor) or value.requires_grad or not value.numel() or value.is_complex():
            continue
        number = float(value.reshape(-1)[0])
        if number and bool((value == value.reshape(-1)[0]).all()):
            found.append((number, abs(number) if divides else abs(1 / number)))
    return found


def _may_count(count: float, held: Held) -> bool:
    if not math.isfinite(count):
        return False
    whole = round(count)
    return whole >= held.samples and abs(count - whole) < 1e-6 and whole % held.samples == 0


def _of_loss(node: Any, held: Held | None) -> Divisor:
    """A loss function of torch's: it kept its reduction, and the weight or the elements it averaged over."""
    if node._saved_reduction == _SUM:
        return _of_sum(node, held)
    if node._saved_reduction != _MEAN:
        return UNKNOWN
    if hasattr(node, "_saved_total_weight"):
        return Divisor("mean", (float(node._saved_total_weight),))
    return Divisor("mean", (float(node._saved_self.numel()),)) if hasattr(node, "_saved_self") else UNKNOWN


def _divided(inner: Divisor, by: float | None) -> Divisor:
    if by is None:
        return UNKNOWN
    if inner.kind not in ("sum", "mean"):
        return UNKNOWN
    return Divisor("mean", (*inner.numbers, by), (*inner.written, by), beside=inner.beside)


def _together(terms: list[Divisor]) -> Divisor:
    kinds = {term.kind for term in terms}
    if len(kinds) != 1 or "unknown" in kinds:
        return UNKNOWN
    numbers = sorted({number for term in terms for number in term.numbers}, reverse=True)
    sizes = frozenset[float]().union(*(term.sizes for term in terms))
    return Divisor(kinds.pop(), tuple(numbers), sizes=sizes, beside=tuple(n for term in terms for n in term.beside))


def _one_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
