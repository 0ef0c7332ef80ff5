"""Labels of reductions, sorts, losses, norms, scans: an op not listed keeps weights whole. Shares: part/reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.trace.axes import Axes, param_of
from shardwise.trace.axis_rules.registry import rule
from shardwise.trace.leaves import tensors_in

# reductions whose result over a cut dim is one small collective
_SMALL = frozenset({"sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "logsumexp"})
_MOMENTS = frozenset({"linalg_vector_norm", "norm", "var", "std", "var_mean"})


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.dim()))
    return sorted({d % x.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])})


@rule("sum", "mean", "amax", "amin", "max", "min", "any", "all", "linalg_vector_norm", "logsumexp", "argmax", "argmin",
      "var", "std", "var_mean", "prod", "norm", "topk", "sort", "cumsum", "cumprod", "tril", "triu", "flip",
      "constant_pad_nd", "cummax", "cummin", "logcumsumexp")  # fmt: skip
def reduce(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of reductions: what they run over lies together; in the loss it may be summed over ranks."""
    x = args[0]
    names = [argument.name for argument in func._schema.arguments]
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound |= dict(zip(names, args, strict=False)) | kwargs
    if "other" in bound:  # max or min of two tensors, element by element: no reduction
        return False
    short = func._schema.name.partition("::")[2]
    if short in ("tril", "triu"):
        dims = [x.dim() - 2, x.dim() - 1]
    elif short == "constant_pad_nd":
        # widths come in pairs, the last dim's first; a dim that is not padded keeps its indices apart
        dims = sorted({x.dim() - 1 - place // 2 for place, width in enumerate(args[1]) if width})
    else:
        dims = _dims(x, bound.get("dims", bound.get("dim")))
    if _of_weight(axes, x, dims, short, output):
        return True
    labels = axes.labels(x)
    if labels is None:
        return True
    over = [d for d in dims if labels.shape[d] > 1]
    statistic = short in ("sum", "mean") and len(dims) == 1 and bool(bound.get("keepdim"))  # of a norm, over all
    summable = (axes.in_loss and short in _SMALL) or statistic
    if summable and over and len(over) == sum(n > 1 for n in labels.shape):
        return True  # one small collective gives the whole result
    labels = axes.unite_along(labels, over)
    for result in tensors_in(output):
        if result.dim() == x.dim():
            axes.give(result, labels)
        elif result.dim() == x.dim() - len(dims):
            axes.give(result, labels.squeeze(tuple(dims)))
    return True


def _of_weight(axes: Axes, x: torch.Tensor, dims: list[int], short: str, output: Any) -> bool:
    """Labels a statistic of a weight (the norm of its rows, say): it is cut along the dims that are left."""
    param = param_of(x)
    if param is None or short not in _SMALL | _MOMENTS or sum(n > 1 for n in x.shape) < 2:
        return False
    name, of_dims = param
    for result in tensors_in(output):
        if result.dim() == x.dim():
            result._axes_of = name, tuple(None if d in dims else entry for d, entry in enumerate(of_dims))
        else:
            result._axes_of = name, tuple(entry for d, entry in enumerate(of_dims) if d not in dims)
    return True


@rule("glu")
def glu(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of `glu`: each index lies together with the one of the other half that gates it."""
    labels = axes.labels(args[0])
    if labels is not None:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % args[0].dim()
        if labels.shape[dim] > 1:
            values, gates = np.split(labels, 2, dim)
            axes.unite(values, gates)
            labels = values
        axes.give(output, labels)
    return True


@rule("gather")
def gather(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of `gather`: done along the one dim that has labels, since an entry is found on its rank."""
    labels = axes.labels(args[0])
    if labels is None or axes.labels(args[2]) is not None:
        return labels is None
    return all(n == 1 for d, n in enumerate(labels.shape) if d != args[1] % args[0].dim())


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of softmax: classes of a loss may be cut, since two small reductions over ranks do the rest.

    A softmax inside the model that is no loss (routing, attention over labelled keys) keeps what it runs over together.
    """
    labels = axes.labels(args[0])
    if labels is not None:
        dim = args[1] % args[0].dim()
        is_loss = axes.in_loss or func._schema.name == "aten::_log_softmax"
        if not is_loss and labels.shape[dim] > 1:
            axes.unite_along(labels, [dim])
        axes.give(output, labels)
    return True


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of the loss by class: classes may be cut, since one rank has the target's entry."""
    labels = axes.labels(args[0])
    classes = 0 if args[0].dim() == 1 else 1
    return labels is None or all(n == 1 for d, n in enumerate(labels.shape) if d != classes)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of layer norms: statistics run over the last dims; weight and bias are met element by element."""
    x, shape = args[0], args[1]
    labels = axes.labels(x)
    last = list(range(x.dim() - len(shape), x.dim()))
    for weight in tensors_in(args[2:]):
        of_weight = axes.labels(weight)
        if of_weight is not None:  # replicated wherever the norm's input is cut along other dims
            axes.keep_whole(of_weight, "a norm's statistics run over it")
    if labels is not None:
        if any(labels.shape[d] > 1 for d in last):
            over = axes.unite_along(labels, [d for d in last if labels.shape[d] > 1])
            if all(n == 1 for d, n in enumerate(over.shape)):
                axes.keep_whole(over, "a norm's statistics run over it")
            labels = over
        axes.give(tensors_in(output)[0], labels)
    return True


@rule("native_group_norm")
def group_norm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of group norms: channels of a group lie together."""
    x, w, b, _, channels, _, groups, _ = args
    labels = axes.labels(x)
    if labels is None or any(n > 1 for d, n in enumerate(labels.shape) if d != 1):
        return False
    grouped = labels.reshape(groups, channels // groups)
    axes.unite_along(grouped, [1])
    for weight in (w, b):
        of_weight = axes.labels(weight)
        if of_weight is not None:
            axes.unite(labels.ravel(), of_weight)
    axes.give(output[0], labels)
    return True


@rule("native_batch_norm")
def batch_norm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of batch norms: each channel has statistics of its own, over samples and positions."""
    labels = axes.labels(args[0])
    if labels is None or any(n > 1 for d, n in enumerate(labels.shape) if d != 1):
        return False
    for weight in args[1:3]:
        of_weight = axes.labels(weight)
        if of_weight is not None:
            axes.unite(labels.ravel(), of_weight)
    axes.give(output[0], labels)
    return True
