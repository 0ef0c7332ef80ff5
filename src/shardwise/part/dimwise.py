"""Rules and label rules of operations that run over some dims and treat the indices of every other dim independently.

One call of `over` registers such an operation, with the dims that it runs over and what is done if the cut dim is among
them. If it is not, each rank computes its own result. Weights may be cut along the other dims, so the labels of the
dims that are run over are united (`part/labels`).

    sort(x, dim=1)     cut along 0: each rank sorts its rows          cut along 1: `along` is None, so `Uncut`
    sum(x, dim=1)      cut along 0: each rank sums its rows           cut along 1: an all-reduce of the ranks' sums
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.labels import LABELS, Axes, is_free
from shardwise.part.tensor import RULES, Part, is_part, no_rule, parts_in
from shardwise.trace.leaves import tensors_in

Dims = Callable[[torch.Tensor, dict[str, Any]], Iterable[int]]  # (x, arguments by name) -> the dims that are run over
Along = Callable[[Any, Part, set[int], bool, dict[str, Any]], Any]  # (operation, x, dims, keepdim, arguments) -> result


def arguments_of(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Returns an operation's arguments by name, defaults included."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def named(x: torch.Tensor, arguments: dict[str, Any]) -> Iterable[int]:
    """Returns the dims in the argument `dims` or `dim` (may be negative); every dim if that is None or empty."""
    dims = arguments.get("dims", arguments.get("dim"))
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return range(x.dim())
    return dims if isinstance(dims, list | tuple) else [dims]


def last_two(x: torch.Tensor, arguments: dict[str, Any]) -> Iterable[int]:
    """Returns the last two dims, those of matrices."""
    return -2, -1


@dataclass(frozen=True)
class DimwiseRule:
    """The rule and label rule of an operation that runs over some dims and treats the others' indices independently.

    dims   (x, arguments by name) -> the dims that it runs over
    along  computes the result if the cut dim is among these; None: `Uncut` is raised
    """

    dims: Dims
    along: Along | None = None

    def run_over(self, x: torch.Tensor, arguments: dict[str, Any]) -> set[int]:
        """Returns the dims that the operation runs over, counted from the front."""
        return {d % x.dim() for d in self.dims(x, arguments)}

    def on_shares(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the operation's results: parts if it does not run over the cut dim, else what `along` returns."""
        part, arguments = args[0], arguments_of(func, args, kwargs)
        # `max(x, other)` has the name of a reduction and is an elementwise operation
        if not is_part(part) or "other" in arguments:
            raise Uncut(no_rule(func, parts_in((args, kwargs))))
        dims = self.run_over(part, arguments)
        if part.dim_cut in dims:
            if self.along is None:  # a firm cut is never gathered without a word
                raise Uncut(no_rule(func, [part]))
            return self.along(func, part, dims, bool(arguments.get("keepdim", False)), arguments)
        output = func(part.local, *args[1:], **kwargs)
        if isinstance(output, tuple):
            return tuple(_behind(part, each, dims) for each in output)
        return _behind(part, output, dims)

    def labels(self, axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
        """Labels the results, with the labels along the dims that it runs over united; False if there is an `other`."""
        x, arguments = args[0], arguments_of(func, args, kwargs)
        # a second tensor makes it elementwise (`max(x, other)`)
        if "other" in arguments:
            return False
        labels = axes.labels(x)
        # what it reads has no labels, so its result needs none
        if labels is None:
            return True
        # a dim of label size 1 is on one rank already
        dims = sorted(self.run_over(x, arguments))
        labels = axes.unite_along(labels, [d for d in dims if labels.shape[d] > 1])
        for result in tensors_in(output):
            # kept dims of size 1; else they are gone from the result
            if result.dim() == x.dim():
                axes.give(result, labels)
            elif result.dim() == x.dim() - len(dims):
                axes.give(result, labels.squeeze(tuple(dims)))
            result._axes_free = is_free(x)
        return True


def _behind(part: Part, local: torch.Tensor, dims: set[int]) -> Part:
    """Returns a local result as a part; its cut dim moves forward by the `dims` in front that a reduction dropped."""
    gone = local.dim() < part.dim()
    return part.with_local(local, part.dim_cut - gone * sum(d < part.dim_cut for d in dims))


def over(*names: str, dims: Dims = named, along: Along | None = None) -> DimwiseRule:
    """Registers a `DimwiseRule` as rule and label rule of the ATen operations `names`, and returns it."""
    dimwise = DimwiseRule(dims, along)
    for name in names:
        RULES[name], LABELS[name] = dimwise.on_shares, dimwise.labels
    return dimwise
