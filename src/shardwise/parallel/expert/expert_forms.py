"""Which form operations on stacked weights give, and which dim of it counts experts: asked on the meta device.

With one expert more, exactly one dim of a result of all experts is larger by one: that counts experts.
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

Forms = list[torch.Tensor]


class KnownForms:
    """Forms of results that were asked before: experts run the same operations on different numbers of rows."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[tuple[int, ...], torch.dtype]]] = {}

    def of_rows(self, func: Callable, args: tuple, kwargs: dict) -> list[Forms] | None:
        """Returns the form of each result of an operation, in a list of one; None where it gives other than tensors."""
        rows, key = _key_of(func, args, kwargs)
        if key in self._known:
            made = (empty_form((rows, *dims), dtype) for dims, dtype in self._known[key])
            return [[form] for form in made]
        forms = _on_forms(func, args, kwargs, 0)
        if forms is None:
            return None
        # a dim that has as many indices as there are rows may be one that counts them
        if key is not None and all(f.dim() and f.shape[0] == rows and rows not in f.shape[1:] for f in forms):
            self._known[key] = [(tuple(form.shape[1:]), form.dtype) for form in forms]
        return [[form] for form in forms]


def _key_of(func: Callable, args: tuple, kwargs: dict) -> tuple[int, Any]:
    """Returns (rows, what a call's results hang on beside their number); None for that where they may hang on it."""
    rows = -1  # of the first operand that has any
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
    """Returns (way, [form, form with one expert more]) of each result of an operation on all experts at once.

    None where the operation mixes experts, or gives other than tensors.
    """
    if func is torch.einsum and (not _labels(args)[0] or keeping_experts(args) is not None):
        return None

    def grown(leaf: Any) -> Any:
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
    """Returns which dim of an argument beside `ExpertTensor`s (or `NotedResult`s) of all experts counts these.

    One of size 1, that is broadcast over them, as well; None where there is no such dim.
    """
    shape = leaf.forms[0].shape if isinstance(leaf, NotedResult) else leaf.shape
    if func is torch.einsum:
        labels, _, tensors = _labels(args)
        ways = ((names, _way_of(tensor)) for names, tensor in zip(labels, tensors, strict=False))
        label = next((names[way.dim] for names, way in ways if way is not None), None)
        names = next((names for names, tensor in zip(labels, tensors, strict=False) if tensor is leaf), "")
        return names.index(label) if label is not None and label in names else None
    # broadcasting and batched products pair dims from the last one on
    for other in tensors_in((args, kwargs), (ExpertTensor, NotedResult)):
        way = _way_of(other)
        if way is not None:
            dim = len(shape) - (noted_of(other).forms[0].dim() - way.dim)
            return dim if dim >= 0 and shape[dim] in (experts, 1) else None
    return None


class _Grown:
    """A tensor of rows of each expert: its form, and that with one expert more."""

    def __init__(self, tensor: torch.Tensor, dim: int):
        shape = list(tensor.shape)
        shape[dim] += 1
        self.forms = [empty_form(size, tensor.dtype) for size in (tensor.shape, shape)]


def _form(leaf: Any, place: int) -> torch.Tensor:
    if isinstance(leaf, _Grown):
        return leaf.forms[place]
    if isinstance(leaf, ExpertTensor):
        return leaf.noted.forms[place]
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _on_forms(func: Callable, args: tuple, kwargs: dict, place: int) -> tuple[torch.Tensor, ...] | None:
    """Returns the function's results on the meta device; None where it gives other than tensors, or fails."""
    with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunction(), _Draws() as draws:
        call = replaced((torch.Tensor, _Grown), lambda leaf: _form(leaf, place), (args, kwargs))
        # under autocast operands have dtypes that meet on other devices alone: then all in one
        for of_dtypes in (lambda: call, lambda: replaced(torch.Tensor, _in_float32, call)):
            try:
                plain_args, plain_kwargs = of_dtypes()
                results = func(*plain_args, **plain_kwargs)
            except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
                continue
            if draws.drew:  # what is drawn is drawn where the forward says so, and for its rows
                return None
            # named results, and a list of one, are rare enough to want values
            several = list(results) if type(results) in (tuple, list) and len(results) > 1 else [results]
            return tuple(several) if all(isinstance(result, torch.Tensor) for result in several) else None
    return None


class _Draws(TorchDispatchMode):
    """Mode that notes whether anything was drawn."""

    drew = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.drew |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _in_float32(form: torch.Tensor) -> torch.Tensor:
    return form.to(torch.float32) if form.is_floating_point() else form


def _way_of(leaf: Any) -> AllExperts | None:
    noted = noted_of(leaf)
    return noted.way if isinstance(noted, NotedResult) and isinstance(noted.way, AllExperts) else None


def _labels(args: tuple) -> tuple[list[str], str, list[Any]]:
    """Returns (labels of each operand of an einsum, of its result, the operands), dots written out as letters.

    None of them where they are given otherwise, without "->", say.
    """
    if not args or not isinstance(args[0], str) or "->" not in args[0]:
        return [], "", []
    tensors = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    operands, result = args[0].replace(" ", "").split("->")
    unused = "".join(letter for letter in string.ascii_letters if letter not in args[0])
    # dots stand for the last of as many letters as any operand has dims there
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
    noted = noted_of(operand)
    return noted.forms[0] if isinstance(noted, NotedResult) else noted


def keeping_experts(args: tuple) -> tuple | None:
    """Returns an einsum's arguments such that the result keeps the experts, over which it sums, as its first dim.

    None where it sums none.
    """
    labels, result, tensors = _labels(args)
    ways = [(names, _way_of(tensor)) for names, tensor in zip(labels, tensors, strict=False)]
    summed = next((names[way.dim] for names, way in ways if way is not None and names[way.dim] not in result), None)
    return None if summed is None else (f"{','.join(labels)}->{summed}{result}", *tensors)
