"""Softmax, along a cut dim by two small all-reduces, and gated units (`glu`), if both halves have equal owners.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.part.cuts import Owners, Uncut
from shardwise.part.labels import Axes, label
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_as
from shardwise.part.rules.reductions import _wide, of_nothing
from shardwise.part.sums import reduced
from shardwise.part.tensor import Part, is_part, no_rule, rule
from shardwise.part.tiles.entire import whole_without_rule


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the (log-)softmax as a part; along the cut dim by two all-reduces (maximum, sum), nothing is gathered."""
    part, dim = args[0], args[1] % args[0].dim()
    if dim != part.dim_cut:
        return part.with_local(func(part.local, *args[1:], **kwargs))
    # the third argument asks for float32 of a half input
    x = part.local.float() if len(args) > 2 and args[2] is True else part.local
    logarithm = func._schema.name == "aten::_log_softmax"
    top = x.amax(dim, True) if x.shape[dim] else of_nothing(x, [dim], True, -torch.inf)
    top = reduced(top, part, "max")
    # a fully masked row has -inf as its maximum, and -inf minus -inf would be NaN
    # 16-bit inputs are computed in float32, as torch does, since a sum over a vocabulary may overflow
    shifted = x - torch.where(top == -torch.inf, torch.zeros_like(top), top).to(_wide(x.dtype))
    if logarithm:  # written over `shifted`: over a vocabulary it is among the largest tensors of a step
        total = reduced(shifted.exp().sum(dim, True), part)
        return part.with_local(_reusing(shifted, "sub", total.log()).to(x.dtype))
    exponents = _reusing(shifted, "exp")
    total = reduced(exponents.sum(dim, True), part)
    output = _reusing(exponents, "div", total)
    # `_safe_softmax` returns zeros for a fully masked row
    if func._schema.name == "aten::_safe_softmax":
        output = output.masked_fill(total == 0, 0.0)
    return part.with_local(output.to(x.dtype))


def _reusing(own: torch.Tensor, name: str, *args: torch.Tensor) -> torch.Tensor:
    """Returns `own.NAME(*args)`, written over `own`, a temporary; in new memory where `own` is itself a part."""
    return getattr(own, name if isinstance(own, Distributed) else f"{name}_")(*args)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of (log-)softmax: dx = y (dy - sum y dy), or dy - exp(y) sum dy; the sum is over ranks."""
    gradient, output, dim = args[:3]
    part = output if is_part(output) else gradient
    dim %= part.dim()
    dy, y = (share_as(each, part, part.dim_cut, func) for each in (gradient, output))
    if dim != part.dim_cut:
        return part.with_local(func(dy, y, *args[2:], **kwargs))
    if func._schema.name.endswith("_log_softmax_backward_data"):
        total = reduced(dy.sum(dim, True, dtype=_wide(dy.dtype)), part)
        dx = _reusing(_reusing(_reusing(y.to(_wide(y.dtype)).exp(), "mul", total), "neg"), "add", dy)
    else:
        dy = dy.to(_wide(dy.dtype))
        dx = y * (dy - reduced((dy * y).sum(dim, True), part))
    return part.with_local(dx if len(args) < 4 else dx.to(args[3]))


@rule("glu")
def glu(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `a * sigmoid(b)` of the halves a, b of x along `dim`; along the cut dim these need equal owners."""
    part = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % part.dim()
    owners = _half(func, part, dim)  # before the kernel, which a share of odd length would stop on one rank alone
    return part.with_local(func(part.local, dim), owners=owners)


@rule("glu_backward")
def glu_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of `glu(x, dim)`, cut like x."""
    gradient, x, dim = args
    part = x if is_part(x) else gradient
    dim %= part.dim()
    if dim != part.dim_cut:
        gradient, x = (share_as(each, part, part.dim_cut, func) for each in (gradient, x))
        return part.with_local(func(gradient, x, dim))
    if not is_part(x):
        raise Uncut(no_rule(func, [part]))
    # along the cut dim: the gradient has the size of a half, and is dealt as one
    lead = x.with_local(x.local.narrow(dim, 0, x.local.shape[dim] // 2), owners=_half(func, x, dim))
    return x.with_local(func(share_as(gradient, lead, lead.dim_cut, func), x.local, dim))


def _half(func: Any, x: Part, dim: int) -> Owners | None:
    """Returns the owners of a half of x's cut dim; None if `dim` is another; raises `Uncut` if the halves differ."""
    if dim != x.dim_cut:
        return None
    first, second = (x.owners.sliced(low, low + x.owners.size // 2) for low in (0, x.owners.size // 2))
    if first != second:
        raise Uncut(no_rule(func, [x]))
    return first


@label("_softmax", "_log_softmax", "_safe_softmax")
def softmax_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels a softmax as its input; classes of a loss may be cut, since two small all-reduces suffice. Always True.

    For a softmax inside the model (routing, attention over labelled keys) the labels that it runs over are united.
    """
    labels = axes.labels(args[0])
    if labels is not None:
        dim = args[1] % args[0].dim()
        is_loss = axes.in_loss or func._schema.name == "aten::_log_softmax"
        if not is_loss and labels.shape[dim] > 1:
            axes.unite_along(labels, [dim])
        axes.give(output, labels)
    return True


@label("glu")
def glu_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels `glu`; labels of each index and of the one that gates it, in the other half, are united. Always True."""
    labels = axes.labels(args[0])
    if labels is not None:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % args[0].dim()
        if labels.shape[dim] > 1:
            values, gates = np.split(labels, 2, dim)
            axes.unite(values, gates)
            labels = values
        axes.give(output, labels)
    return True


whole_without_rule("glu")
