"""Infer, on the meta device, shape and dtype ("form") of operations on stacked weights, and which dim counts experts.

The operation runs on meta tensors with E and with E + 1 experts. The one dim of the result that grows counts experts.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise.parallel.expert.expert_tensor import ExpertTensor, NotedResult, empty_form, noted_of
from shardwise.parallel.expert.ways import AllExperts, OneExpert
from shardwise.trace.leaves import replaced, tensors_in

Forms = list[torch.Tensor]  # meta tensors: [form], and for all experts at once [form, form with one expert more]


class KnownForms:
    """Cache of forms of results, since experts run the same operations on different numbers of rows.

    An entry is a key from `_key_of` -> for each result (sizes behind the dim of rows, dtype).
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[tuple[int, ...], torch.dtype]]] = {}

    def of_rows(self, func: Callable, args: tuple, kwargs: dict) -> list[Forms] | None:
        """Returns [form] for each result of an operation on one expert's rows; None if a result is no tensor.

        func, args, kwargs   the call, with `ExpertTensor`s among its arguments
        """
        rows, key = _key_of(func, args, kwargs)
        if key in self._known:
            made = (empty_form((rows, *dims), dtype) for dims, dtype in self._known[key])
            return [[form] for form in made]
        forms = _on_forms(func, args, kwargs, 0)
        if forms is None:
            return None
        # not cached if another dim has the same size, since it might be a dim of rows too
        if key is not None and all(f.dim() and f.shape[0] == rows and rows not in f.shape[1:] for f in forms):
            self._known[key] = [(tuple(form.shape[1:]), form.dtype) for form in forms]
        return [[form] for form in forms]


def _key_of(func: Callable, args: tuple, kwargs: dict) -> tuple[int, Any]:
    """Returns (number of rows, key of all else that decides the form of a call's results).

    The number is -1 if no operand has rows. The key is None if the call cannot be cached, as operands differ in their
    number of rows, an argument is of another kind, or some other size equals that number.
    """
    rows = -1
    parts: list[Any] = [func, torch.is_autocast_enabled("cpu")]
    for name, leaf in (*enumerate(args), *kwargs.items()):
        if isinstance(leaf, torch.Tensor):
            form = leaf.noted.forms[0] if isinstance(leaf, ExpertTensor) else leaf
            of_weights = isinstance(leaf, ExpertTensor) and leaf.noted.of_weights
            dims = form.shape if of_weights else form.shape[1:]
            if not of_weights:
                if not form.dim() or rows not in (-1, form.shape[0]):
                    return rows, None
                rows = form.shape[0]
            parts.append((name, of_weights, form.dim(), *dims, form.dtype))
        elif leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype):
            parts.append((name, type(leaf), leaf))
        else:
            return rows, None
    sizes = [part for entry in parts[2:] for part in entry[1:] if isinstance(part, int)]
    return rows, None if rows < 0 or rows in sizes else tuple(parts)


def forms_of_all(func: Callable, args: tuple, kwargs: dict, experts: int) -> list[tuple[OneExpert, Forms]] | None:
    """Returns (`AllExperts`, [form, form with one expert more]) of each result of an operation on all experts at once.

    None if the operation mixes experts or a result is no tensor. `experts`: their number E.
    """
    if func is torch.einsum and (not _labels(args)[0] or keeping_experts(args) is not None):
        return None

    def grown(leaf: Any) -> Any:
        """Returns a tensor with rows of each expert as `_Grown`, so that it too has one expert more; else the leaf."""
        if isinstance(leaf, ExpertTensor):
            return leaf
        dim = dim_of_experts(func, args, kwargs, leaf, experts)
        return leaf if dim is None or leaf.shape[dim] != experts else _Grown(leaf, dim)

    grown_args, grown_kwargs = replaced(torch.Tensor, grown, (args, kwargs))
    now, more = (_on_forms(func, grown_args, grown_kwargs, place) for place in (0, 1))
    if now is None or more is None:
        return None
    results: list[tuple[OneExpert, Forms]] = []
    for form, larger in zip(now, more, strict=True):
        if form.dim() != larger.dim():
            return None
        dims = [dim for dim in range(form.dim()) if form.shape[dim] != larger.shape[dim]]
        if len(dims) != 1 or (form.shape[dims[0]], larger.shape[dims[0]]) != (experts, experts + 1):
            return None
        results.append((AllExperts(made_dim=dims[0], dim=dims[0]), [form, larger]))
    return results


def dim_of_experts(func: Callable | None, args: tuple, kwargs: dict, leaf: Any, experts: int) -> int | None:
    """Returns the dim of the argument `leaf` that counts experts; None if it has none.

    func, args, kwargs   a call with operands of all experts, `ExpertTensor`s or `NotedResult`s
    experts              their number E; a dim of size 1, which is broadcast over experts, counts them too
    """
    shape = leaf.forms[0].shape if isinstance(leaf, NotedResult) else leaf.shape
    if func is torch.einsum:
        labels, _, tensors = _labels(args)
        ways = ((names, _way_of(tensor)) for names, tensor in zip(labels, tensors, strict=False))
        label = next((names[way.dim] for names, way in ways if way is not None), None)
        names = next((names for names, tensor in zip(labels, tensors, strict=False) if tensor is leaf), "")
        return names.index(label) if label is not None and label in names else None
    # broadcasting and batched products align dims from the last one
    for other in tensors_in((args, kwargs), (ExpertTensor, NotedResult)):
        way = _way_of(other)
        if way is not None:
            dim = len(shape) - (noted_of(other).forms[0].dim() - way.dim)
            return dim if dim >= 0 and shape[dim] in (experts, 1) else None
    return None


class _Grown:
    """A plain tensor whose dim `dim` counts experts, as its form and its form with one expert more."""

    def __init__(self, tensor: torch.Tensor, dim: int):
        shape = list(tensor.shape)
        shape[dim] += 1
        self.forms = [empty_form(size, tensor.dtype) for size in (tensor.shape, shape)]


def _form(leaf: Any, place: int) -> torch.Tensor:
    """Returns a meta tensor of the leaf's form. `place`: 0 as it is, 1 with one expert more."""
    if isinstance(leaf, _Grown):
        return leaf.forms[place]
    if isinstance(leaf, ExpertTensor):
        return leaf.noted.forms[place]
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _on_forms(func: Callable, args: tuple, kwargs: dict, place: int) -> tuple[torch.Tensor, ...] | None:
    """Returns the function's results on meta tensors; None if it fails, draws random numbers, or returns no tensors.

    place   0: with E experts; 1: with E + 1
    """
    with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunction(), _Draws() as draws:
        call = replaced((torch.Tensor, _Grown), lambda leaf: _form(leaf, place), (args, kwargs))
        # under autocast operands may differ in dtype, which the meta device refuses; then all are tried in float32
        for of_dtypes in (lambda: call, lambda: replaced(torch.Tensor, _in_float32, call)):
            try:
                plain_args, plain_kwargs = of_dtypes()
                results = func(*plain_args, **plain_kwargs)
            except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
                continue
            if draws.drew:  # random numbers must be drawn by this rank's forward, not by the rank that holds the expert
                return None
            # named tuples and lists of one are rare, and are computed on values instead
            several = list(results) if type(results) in (tuple, list) and len(results) > 1 else [results]
            return tuple(several) if all(isinstance(result, torch.Tensor) for result in several) else None
    return None


class _Draws(TorchDispatchMode):
    """Mode that records in `drew` whether an operation used random numbers."""

    drew = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.drew |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _in_float32(form: torch.Tensor) -> torch.Tensor:
    """Returns a float tensor in float32; others unchanged."""
    return form.to(torch.float32) if form.is_floating_point() else form


def _way_of(leaf: Any) -> AllExperts | None:
    """Returns the way of a noted operand of all experts; None for any other leaf."""
    noted = noted_of(leaf)
    return noted.way if isinstance(noted, NotedResult) and isinstance(noted.way, AllExperts) else None


def _labels(args: tuple) -> tuple[list[str], str, list[Any]]:
    """Returns (labels of each operand of an einsum, labels of its result, operands), "..." replaced by unused letters.

    args   the arguments of `torch.einsum`. Returns ([], "", []) for forms without a string or without "->".
    """
    if not args or not isinstance(args[0], str) or "->" not in args[0]:
        return [], "", []
    tensors = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    operands, result = args[0].replace(" ", "").split("->")
    unused = "".join(letter for letter in string.ascii_letters if letter not in args[0])
    # "..." aligns at the right, so an operand with fewer dims there gets the last of the letters
    counts = [
        _form_of(tensor).dim() - len(names) + 3 if "..." in names else 0
        for names, tensor in zip(operands.split(","), tensors, strict=False)
    ]
    most = max(counts, default=0)
    labels = [
        names.replace("...", unused[most - count : most])
        for names, count in zip(operands.split(","), counts, strict=False)
    ]
    return labels, result.replace("...", unused[:most]), tensors


def _form_of(operand: Any) -> torch.Tensor:
    """Returns the meta tensor of a noted operand; a plain tensor unchanged."""
    noted = noted_of(operand)
    return noted.forms[0] if isinstance(noted, NotedResult) else noted


def keeping_experts(args: tuple) -> tuple | None:
    """Returns the arguments of an einsum changed so that it does not sum over experts, which become the first dim.

    None if the einsum does not sum over experts.
    """
    labels, result, tensors = _labels(args)
    ways = [(names, _way_of(tensor)) for names, tensor in zip(labels, tensors, strict=False)]
    summed = next((names[way.dim] for names, way in ways if way is not None and names[way.dim] not in result), None)
    return None if summed is None else (f"{','.join(labels)}->{summed}{result}", *tensors)
