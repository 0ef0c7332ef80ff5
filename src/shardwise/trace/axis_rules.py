"""How each operation of ATen carries labels. A rule returns whether it applied; if not, its inputs stay whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from shardwise.trace.axes import Axes, Merged, Use, base, param_of

Rule = Callable[[Axes, Any, tuple, dict, Any], bool]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


@rule(
    "_to_copy", "detach", "alias", "fill_", "zero_", "masked_fill_", "zeros_like", "ones_like", "full_like",
    "empty_like", "hardswish", "softplus", "lift_fresh", "relu_", "clamp_", "native_dropout", "bernoulli", "bernoulli_",
    "uniform_", "normal_", "rand_like", "randn_like", "_prelu_kernel", "copy_", "contiguous", "log_sigmoid_forward",
)  # fmt: skip
def elementwise(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels of all inputs meet element by element."""
    tensors = _tensors((args, kwargs))
    if len(tensors) == 1 and param_of(tensors[0]) and not func._schema.is_mutable:
        for each in _tensors(output):  # a weight made of one weight: 1 + w, exp(w), w in another dtype
            each._axes_of = tensors[0]._axes_of
        return True
    ndim = max(t.dim() for t in tensors)
    matrices = [t for t in tensors if param_of(t) and sum(n > 1 for n in t.shape) > 1]
    tensors = [t for t in tensors if not any(t is m for m in matrices)]
    labelled = [t for t in tensors if axes.labels(t) is not None]
    free = all(map(is_free, labelled)) and not matrices
    if labelled and all(map(is_free, labelled)) and any(t.numel() > 1 and not is_free(t) for t in tensors):
        for of_scale in map(axes.labels, labelled):
            assert of_scale is not None
            axes.keep_whole(of_scale, "it is applied to a whole tensor")
        tensors = []
    joint: np.ndarray | None = None
    for tensor in sorted(tensors, key=is_free):  # what comes from parameters alone last
        labels = axes.labels(tensor)
        if labels is None:
            continue
        labels = labels.reshape([1] * (ndim - labels.ndim) + list(labels.shape))
        if joint is None:
            joint = labels
        elif is_free(tensor) and np.broadcast_shapes(joint.shape, labels.shape) != labels.shape:
            axes.keep_whole(labels, "it is applied inside each of several cut indices")
        else:
            axes.unite(joint, labels)
            joint = np.broadcast_arrays(joint, labels)[0]
    for matrix in matrices:
        _meet(axes, matrix, joint, ndim)
    if joint is None:
        return True
    if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and axes.labels(args[0]) is None:
        return False  # labelled values into a whole tensor
    for each in _tensors(output):
        if each.dim() == joint.ndim:
            axes.give(each, joint)
            each._axes_free = free
    return True


def _meet(axes: Axes, matrix: torch.Tensor, joint: np.ndarray | None, ndim: int) -> None:
    """A parameter of several dims, element by element: along a dim with labels it is dealt alike, others stay whole."""
    name, dims = param_of(matrix)  # type: ignore[misc]
    for d, dim in enumerate(dims):
        if dim is None:
            continue
        place = d + ndim - matrix.dim()
        seeds = axes.vector(name, dim)
        alone = joint is not None and joint.size == joint.shape[place] == len(seeds) > 1
        if alone and name not in axes.frozen:
            axes.unite(joint.ravel(), seeds)  # type: ignore[union-attr]
        elif len(seeds) > 1:
            axes.keep_whole(seeds, "it is applied to a whole dim")


def is_free(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or made of parameters alone: it can be whole beside anything."""
    return param_of(tensor) is not None or getattr(tensor, "_axes_free", False)


# --- views ---


def relabel(labels: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]) -> np.ndarray:
    """A view of the labels, with dims that have none left at size one."""
    from shardwise.layout.views import groups

    out = labels
    place = 0
    for run, to in groups(before, after):
        sizes = out.shape[place : place + len(run)]
        width = len(to)
        if all(size == 1 for size in sizes):
            shape = (*out.shape[:place], *([1] * width), *out.shape[place + len(run) :])
        else:
            full = tuple(before[d] for d in run)
            out = np.broadcast_to(out, (*out.shape[:place], *full, *out.shape[place + len(run) :]))
            shape = (*out.shape[:place], *(after[d] for d in to), *out.shape[place + len(run) :])
        out = out.reshape(shape)
        place += width
    return slim(out)


def slim(labels: np.ndarray) -> np.ndarray:
    """Dims along which labels are the same, at size one."""
    for dim in range(labels.ndim):
        if labels.shape[dim] > 1:
            first = np.take(labels, [0], axis=dim)
            if (labels == first).all():
                labels = first
    return labels


@rule(
    "view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy", "squeeze", "unsqueeze", "squeeze_", "unsqueeze_"
)
def view(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """By shapes: a view keeps the order of elements."""
    x = args[0]
    if param_of(x) is not None:
        kept = _param_view(axes, x, output)
        if kept is not None:
            output._axes_of = kept
            return True
    labels = axes.labels(x)
    if labels is not None and x.numel():
        axes.give(output, relabel(labels, tuple(x.shape), tuple(output.shape)))
    return True


def _param_view(axes: Axes, x: torch.Tensor, output: torch.Tensor) -> Any:
    """A parameter's view that adds or drops dims of size one, or merges dims: then the outermost may be cut."""
    from shardwise.layout.views import groups

    name, dims = param_of(x)  # type: ignore[misc]
    held: list[Any] = []
    merged: list[Any] = []
    for run, to in groups(tuple(x.shape), tuple(output.shape)):
        long = [d for d in run if x.shape[d] > 1]
        outs = [d for d in to if output.shape[d] > 1]
        if len(outs) > 1 or (len(long) > 1 and any(dims[d] is None for d in long)):
            return None
        entry: Any = dims[long[0]] if long else None
        if len(long) > 1:
            inner = math.prod(x.shape[d] for d in long[1:])
            entry = Merged(base(entry), (entry.repeat if isinstance(entry, Merged) else 1) * inner)
            merged += [dims[d] for d in long[1:]]
        held += [entry if output.shape[d] > 1 else None for d in to]
    for entry in merged:
        axes.keep_whole(axes.vector(name, entry), "a view merges it into an outer dim")
    return name, tuple(held)


def _permuted(axes: Axes, x: Any, output: Any, dims: list[int]) -> bool:
    if param_of(x) is not None:
        name, held = param_of(x)  # type: ignore[misc]
        output._axes_of = (name, tuple(held[d] for d in dims))
        return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, labels.transpose(dims))
    return True


@rule("transpose", "t", "numpy_T")
def transpose(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Two dims change places."""
    x = args[0]
    dims = list(range(x.dim()))
    a, b = (d % x.dim() for d in args[1:3]) if len(args) > 2 else (0, x.dim() - 1)
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(axes, x, output, dims)


@rule("permute")
def permute(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Dims change places."""
    return _permuted(axes, args[0], output, [d % args[0].dim() for d in args[1]])


@rule("expand", "expand_copy")
def expand(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Repeated elements have the labels of the one."""
    x = args[0]
    if param_of(x) is not None and x.dim() > 1:
        name, held = param_of(x)  # type: ignore[misc]
        if all(a == b for a, b in zip(x.shape, output.shape[output.dim() - x.dim() :], strict=True)):
            output._axes_of = (name, (*([None] * (output.dim() - x.dim())), *held))
            return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, labels.reshape([1] * (output.dim() - labels.ndim) + list(labels.shape)))
    return True


@rule("select")
def select(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """One index of a dim."""
    x, dim, index = args
    dim %= x.dim()
    if param_of(x) is not None and x.dim() > 1:
        name, held = param_of(x)  # type: ignore[misc]
        output._axes_of = (name, (*held[:dim], *held[dim + 1 :]))
        return True
    return _take(axes, x, output, dim, index % x.shape[dim])


def _take(axes: Axes, x: torch.Tensor, output: torch.Tensor, dim: int, index: int) -> bool:
    labels = axes.labels(x)
    if labels is None:
        return True
    if labels.shape[dim] > 1:
        picked = np.take(labels, index, axis=dim)
        axes.chosen(labels, dim)
        axes.give(output, picked)
    else:
        axes.give(output, labels.squeeze(dim))
    return True


@rule("unbind")
def unbind(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Every index of a dim."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    return all(select(axes, func, (x, dim, i), {}, each) for i, each in enumerate(output))


@rule("slice")
def slice_(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """A range of a dim."""
    x = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % x.dim()
    start, end = (args[2] if len(args) > 2 else None), (args[3] if len(args) > 3 else None)
    step = args[4] if len(args) > 4 else kwargs.get("step", 1)
    return _ranged(axes, x, output, dim, slice(start, end, step))


def _ranged(axes: Axes, x: torch.Tensor, output: torch.Tensor, dim: int, which: slice) -> bool:
    if param_of(x) is not None and x.dim() > 1 and output.shape == x.shape:
        output._axes_of = x._axes_of
        return True
    labels = axes.labels(x)
    if labels is not None:
        if labels.shape[dim] > 1:
            labels = labels[tuple(which if d == dim else slice(None) for d in range(labels.ndim))]
        axes.give(output, slim(labels))
    return True


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def split(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Ranges of a dim."""
    x = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.dim()
    low = 0
    for each in output:
        _ranged(axes, x, each, dim, slice(low, low + each.shape[dim]))
        low += each.shape[dim]
    return True


@rule("cat", "stack")
def cat(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Side by side. Beside a tensor without labels, the others' must not vary along the dim."""
    tensors = [t for t in args[0] if not (t.dim() == 1 and t.numel() == 0)]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % output.dim()
    every = [axes.labels(t) for t in tensors]
    if func._schema.name == "aten::stack":
        every = [None if e is None else np.expand_dims(e, dim) for e in every]
        sizes = [1] * len(tensors)
    else:
        sizes = [t.shape[dim] for t in tensors]
    known = [e for e in every if e is not None]
    if not known:
        return True
    shape = list(np.broadcast_shapes(*(tuple(1 if d == dim else n for d, n in enumerate(e.shape)) for e in known)))
    if not any(e.shape[dim] > 1 for e in known):  # pieces side by side along another dim than the labels'
        for a, b in itertools.pairwise(known):
            axes.unite(a, b)
        axes.give(output, known[0])
        return True
    if len(known) < len(every):
        return False
    full = []
    for labels, size in zip(known, sizes, strict=True):
        shape[dim] = size
        full.append(np.broadcast_to(labels, shape))
    axes.give(output, slim(np.concatenate(full, axis=dim)))
    return True


@rule("repeat")
def repeat(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Copies behind each other."""
    x, times = args[0], list(args[1])
    labels = axes.labels(x)
    if labels is not None:
        labels = labels.reshape([1] * (len(times) - labels.ndim) + list(labels.shape))
        axes.give(output, np.tile(labels, [n if labels.shape[d] > 1 else 1 for d, n in enumerate(times)]))
    return True


# --- reductions, norms ---

# reductions whose result over a cut dim is one small collective
_SMALL = frozenset({"sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "logsumexp"})


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.dim()))
    return sorted({d % x.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])})


@rule("sum", "mean", "amax", "amin", "max", "min", "any", "all", "linalg_vector_norm", "logsumexp", "argmax", "argmin",
      "var", "std", "var_mean", "prod", "norm", "topk", "sort", "cumsum", "cumprod", "tril", "triu", "flip",
      "constant_pad_nd", "cummax", "logcumsumexp")  # fmt: skip
def reduce(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """What a reduction runs over lies together; in the loss it may be summed over ranks."""
    x = args[0]
    names = [argument.name for argument in func._schema.arguments]
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound |= dict(zip(names, args, strict=False)) | kwargs
    if "other" in bound:
        return False
    short = func._schema.name.partition("::")[2]
    if short in ("tril", "triu"):
        dims = [x.dim() - 2, x.dim() - 1]
    elif short == "constant_pad_nd":
        dims = sorted({x.dim() - 1 - place // 2 for place, width in enumerate(args[1]) if width})
    else:
        dims = _dims(x, bound.get("dims", bound.get("dim")))
    labels = axes.labels(x)
    if labels is None:
        return True
    over = [d for d in dims if labels.shape[d] > 1]
    summable = axes.in_loss and short in _SMALL
    if summable and over and len(over) == sum(n > 1 for n in labels.shape):
        return True  # one small collective gives the whole result
    labels = axes.unite_along(labels, over)
    for each in _tensors(output):
        if each.dim() == x.dim():
            axes.give(each, labels)
        elif each.dim() == x.dim() - len(dims):
            axes.give(each, labels.squeeze(tuple(dims)))
    return True


@rule("gather")
def gather(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Entries along the one dim that has labels are found on their rank (a target's logit)."""
    labels = axes.labels(args[0])
    if labels is None or axes.labels(args[2]) is not None:
        return labels is None
    return all(n == 1 for d, n in enumerate(labels.shape) if d != args[1] % args[0].dim())


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Along cut classes, two small reductions: nothing has to lie together.

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
    """The target's entry is found on its rank."""
    labels = axes.labels(args[0])
    classes = 0 if args[0].dim() == 1 else 1
    return labels is None or all(n == 1 for d, n in enumerate(labels.shape) if d != classes)


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Statistics run over the last dims; weight and bias are met element by element."""
    x, shape = args[0], args[1]
    labels = axes.labels(x)
    last = list(range(x.dim() - len(shape), x.dim()))
    for weight in _tensors(args[2:]):
        of_weight = axes.labels(weight)
        if of_weight is not None:  # replicated wherever the norm's input is cut along other dims
            axes.keep_whole(of_weight, "a norm's statistics run over it")
    if labels is not None:
        if any(labels.shape[d] > 1 for d in last):
            over = axes.unite_along(labels, [d for d in last if labels.shape[d] > 1])
            if all(n == 1 for d, n in enumerate(over.shape)):
                axes.keep_whole(over, "a norm's statistics run over it")
            labels = over
        axes.give(_tensors(output)[0], labels)
    return True


@rule("native_group_norm")
def group_norm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Channels of a group lie together."""
    x, w, b, _, channels, _, groups, _ = args
    labels = axes.labels(x)
    if labels is None or any(n > 1 for d, n in enumerate(labels.shape) if d != 1):
        return False
    grouped = labels.reshape(groups, channels // groups)
    axes.unite_along(grouped, [1])
    for each in (w, b):
        of_weight = axes.labels(each)
        if of_weight is not None:
            axes.unite(labels.ravel(), of_weight)
    axes.give(output[0], labels)
    return True


# --- contractions ---


def _product(axes: Axes, a: torch.Tensor, b: torch.Tensor, output: torch.Tensor) -> bool:
    """a (..., m, k) @ b (..., k, n)."""
    pa, pb = _weight(a), _weight(b)
    if pa is not None and pb is None:
        return _weighted(axes, b, a, output, k_of_x=-2, k_of_w=-1)
    if pb is not None and pa is None:
        return _weighted(axes, a, b, output, k_of_x=-1, k_of_w=-2)
    la, lb = axes.labels(a), axes.labels(b)
    if la is not None:
        la = axes.unite_along(la, [la.ndim - 1] if la.shape[-1] > 1 else [])
    if lb is not None:
        lb = axes.unite_along(lb, [lb.ndim - 2] if lb.shape[-2] > 1 else [])
    if la is not None and lb is not None:
        axes.unite(la, lb)
        axes.give(output, slim(np.broadcast_arrays(la, lb)[0]))
    elif la is not None or lb is not None:
        axes.give(output, la if la is not None else lb)
    return True


def _weight(tensor: torch.Tensor) -> tuple[str, tuple[Any, ...]] | None:
    """A parameter that is a matrix here."""
    param = param_of(tensor)
    if param is None or tensor.dim() < 2 or None in param[1][-2:]:
        return None
    return param


def _weighted(axes: Axes, x: torch.Tensor, w: torch.Tensor, output: torch.Tensor, *, k_of_x: int, k_of_w: int) -> bool:
    """An activation times a weight: its labels are the weight's inner dim's, the result's the outer dim's."""
    name, dims = param_of(w)  # type: ignore[misc]
    if name in axes.frozen:
        return _by_whole_weight(axes, x, output, k_of_x)
    inner, outer = dims[k_of_w], dims[-1 if k_of_w == -2 else -2]
    out_place = output.dim() - (1 if k_of_x == -1 else 2)
    if any(n > 1 for n in w.shape[:-2]):
        for dim in dims[:-2]:
            if dim is not None:
                axes.keep_whole(axes.vector(name, dim), "a batched product runs over it")
    labels = axes.labels(x)
    k = x.dim() + k_of_x
    seeds = axes.vector(name, inner), axes.vector(name, outer)
    if labels is not None and any(n > 1 for d, n in enumerate(labels.shape) if d != k):
        # the same weight for each of many labels (a projection inside every head): it is whole
        rest = axes.unite_along(labels, [k] if labels.shape[k] > 1 else [])
        for seed in seeds:
            axes.keep_whole(seed, "it is applied inside each of several cut indices")
        axes.give(output, np.moveaxis(rest, k, out_place) if k != out_place else rest)
        return True
    if labels is not None:
        axes.unite(labels.ravel(), seeds[0])
    else:
        axes.keep_whole(seeds[0], "its input is whole")
    shape = [1] * output.dim()
    shape[out_place] = -1
    axes.give(output, seeds[1].reshape(shape))
    axes.uses.append(
        Use(name, "product", base(inner), base(outer), axes.modules[-1] if axes.modules else "", tuple(output.shape))
    )
    return True


def _by_whole_weight(axes: Axes, x: torch.Tensor, output: torch.Tensor, k_of_x: int) -> bool:
    """A weight that stays whole: its product is whole where the input is, or cut along the input's last dim."""
    labels = axes.labels(x)
    k = x.dim() + k_of_x
    return labels is None or all(n == 1 for d, n in enumerate(labels.shape) if d != k)


@rule("mm", "bmm")
def mm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Matrix products."""
    return _product(axes, args[0], args[1], output)


@rule("addmm", "baddbmm")
def addmm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """A product and a bias."""
    done = _product(axes, args[1], args[2], output)
    bias, product = axes.labels(args[0]), getattr(output, "_axis_labels", None)
    if bias is not None and product is not None:
        axes.unite(bias.reshape([1] * (output.dim() - bias.ndim) + list(bias.shape)), product)
    elif bias is not None:
        axes.keep_whole(bias, "it is added to a whole tensor")
    return done


@rule("_grouped_mm")
def grouped(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rows times the matrix of their group: x (T, K) @ w (G, K, N)."""
    x, w = args[:2]
    if _weight(w) is None or w.dim() != 3 or x.dim() != 2:
        return False
    return _weighted(axes, x, w, output, k_of_x=-1, k_of_w=-2)


@rule("embedding")
def embedding(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rows are found on their rank; columns are the result's last dim."""
    param = _weight(args[0])
    if param is None or getattr(args[1], "_axis_labels", None) is not None:
        return False
    name, (rows, columns) = param
    if name in axes.frozen:
        return True
    axes.give(output, axes.seeds[name, columns].reshape([1] * (output.dim() - 1) + [-1]))
    axes.uses.append(Use(name, "rows", rows, columns, axes.modules[-1] if axes.modules else "", tuple(output.shape)))
    return True


@rule("convolution")
def convolution(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Channels: contracted like a product's, or one by one where every channel is its own group."""
    x, w, b = args[:3]
    transposed, groups = args[6], args[8]
    labels, param = axes.labels(x), param_of(w)
    if param is None or param[1][0] is None or (param[1][1] is None and groups == 1) or (transposed and groups > 1):
        return False
    if labels is not None and any(n > 1 for d, n in enumerate(labels.shape) if d != 1):
        return False
    name, dims = param
    if name in axes.frozen:
        return labels is None
    outer, inner = (dims[1], dims[0]) if transposed else (dims[0], dims[1] or 0)
    seeds = axes.seeds[name, outer], axes.seeds[name, inner]
    of_bias = axes.labels(b)
    if groups == 1:
        if labels is not None:
            axes.unite(labels.ravel(), seeds[1])
        else:
            axes.keep_whole(seeds[1], "its input is whole")
        place = axes.modules[-1] if axes.modules else ""
        axes.uses.append(Use(name, "channels", inner, outer, place, tuple(output.shape)))
    elif groups == x.shape[1] and labels is not None:
        axes.unite(np.repeat(labels.ravel(), w.shape[0] // groups), seeds[0])
    else:
        return False
    if of_bias is not None:
        axes.unite(of_bias.ravel(), seeds[0])
    axes.give(output, seeds[0].reshape([1, -1, *([1] * (output.dim() - 2))]))
    return True


@rule("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
      "upsample_nearest1d", "max_pool3d_with_indices", "avg_pool3d", "reflection_pad2d")  # fmt: skip
def spatial(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Operations over space keep channels apart, once parts have rules for them."""
    return axes.labels(args[0]) is None


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
def attention(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Heads are independent; all of a head lies together, with the keys and values that it reads."""
    heads = []
    for x in args[:3]:
        labels = axes.labels(x)
        if labels is not None:
            labels = axes.unite_along(labels, [d for d in (0, 2, 3) if labels.shape[d] > 1])
            each = args[0].shape[1] // x.shape[1]
            labels = np.repeat(labels, each, axis=1) if labels.shape[1] > 1 else labels
        heads.append(labels)
    known = [h for h in heads if h is not None]
    if heads[0] is None and known:
        return False
    for other in known[1:]:
        axes.unite(known[0], other)
    names = [argument.name for argument in func._schema.arguments]
    mask = dict(zip(names, args, strict=False)).get("attn_mask", kwargs.get("attn_mask"))
    of_mask = axes.labels(mask)
    if of_mask is not None:
        axes.keep_whole(of_mask, "it is an attention bias inside a fused kernel")
    if known:
        axes.give(output[0], known[0])
    return True
