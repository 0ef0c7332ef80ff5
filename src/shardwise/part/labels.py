"""Label the indices of weights by what must lie together, from one forward. Rules by operation: part/rules.

Every index of every weight's dims gets a label. One forward runs on tensors without values while each operation says
which labels meet: elementwise operations unite them one by one, a contraction unites an activation's labels with those
of the weight's input dim and gives fresh ones (of its output dim), reductions and norms unite all that they run over,
and what is not known unites them with label 0, *whole*. Views rearrange the label array as they rearrange the tensor.

    q = Wq x   labels q0..q7 -> view(heads=4, 2) . scores = q k^T unites q0 q1 k0 k1, q2 q3 k2 k3, ...
    Wo takes them as its input dim         -> four classes, each {2 rows of Wq, 2 of Wk, 2 of Wv, 2 columns of Wo}

Classes that touch no *whole* label can be dealt over ranks: by heads, grouped or fused, and by the width of an MLP,
in whatever order the weights hold them. Method: union-find over the equalities; the idea of following dims through a
trace is that of GSPMD (Xu et al. 2021, section 3) turned around, from constraints to cuts.

What this does not do: follow labels through views of written tensors, or data-dependent indexing (they become whole).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise.trace.elementwise import draws_each, is_elementwise
from shardwise.trace.leaves import tensors_in, written_tensors
from shardwise.trace.tape import storage_key
from shardwise.trace.without_gradient import HooksLeftOut

WHOLE = 0


@dataclass(frozen=True)
class Merged:
    """A dim of a view that merges several of a parameter's dims: the outermost, each of its indices `repeat` times."""

    dim: int
    repeat: int


def base(entry: int | Merged) -> int:
    """Returns the parameter's dim for a view's dim `entry`; of merged dims the outermost, which may be cut."""
    return entry.dim if isinstance(entry, Merged) else entry


@dataclass(frozen=True)
class Use:
    """One product, look-up or convolution with the parameter `name`, in the submodule of path `module`.

    inner  the parameter's dim that is summed over (of an embedding the one that is indexed)
    outer  the parameter's dim that the result has
    """

    name: str
    kind: str  # "product" | "rows" (an embedding) | "channels"
    inner: int
    outer: int
    module: str


@dataclass
class WeightLabels:
    """Classes of indices of weights, from one forward; indices of one class must lie on one rank.

    classes  (parameter, dim) -> (size,) the class of each index; those of class 0 must be on every rank
    """

    classes: dict[tuple[str, int], np.ndarray]
    uses: list[Use] = field(default_factory=list)
    whole_because: dict[str, str] = field(default_factory=dict)  # parameter -> the operation that keeps it whole
    written: frozenset[str] = frozenset()  # parameters that the forward writes into, or sets the `.data` of


class Axes(TorchDispatchMode):
    """Mode that labels each index of weights and unites the labels that an operation needs on one rank, by `LABELS`.

    named    name -> parameter;  whole  names of those that the plan keeps whole; activations beside them may be cut
    in_loss  whether the model has returned, so that the loss runs
    """

    def __init__(self, named: dict[str, torch.Tensor], whole: Collection[str] = ()):
        super().__init__()
        self.count = 1  # labels so far: 0 is WHOLE
        self.edges: list[tuple[np.ndarray, np.ndarray]] = []
        self.seeds: dict[tuple[str, int], np.ndarray] = {}  # (parameter, dim) -> (size,) its own labels
        self.uses: list[Use] = []
        self.because: dict[int, str] = {}  # label -> the operation that united it with WHOLE
        self.in_loss = False
        self.modules: list[str] = []  # paths of the modules that run, the innermost last
        self.frozen = whole
        self.named = [(name, tensor, storage_key(tensor)) for name, tensor in named.items()]
        self.written: set[str] = set()
        for name, tensor in named.items():
            tensor._axes_of = (name, tuple(range(tensor.dim())))  # rules hand it on to views
            for dim, size in enumerate(tensor.shape):
                self.seeds[name, dim] = np.arange(self.count, self.count + size)
                self.count += size
            if name in whole:
                for dim in range(tensor.dim()):
                    self.keep_whole(self.seeds[name, dim], "asked for")

    # --- what rules use ---

    def unite(self, a: np.ndarray, b: np.ndarray) -> None:
        """Records that labels at the same position of `a` and `b`, broadcast to one shape, must lie on one rank."""
        a, b = np.broadcast_arrays(a, b)
        a, b = a.ravel(), b.ravel()
        # most labels that meet are equal already, and an edge between these would say nothing
        differ = a != b
        if differ.any():
            self.edges.append((a[differ], b[differ]))

    def vector(self, name: str, entry: int | Merged) -> np.ndarray:
        """Returns (size,) the labels along dim `entry` of parameter `name`, or along the merged dim of a view."""
        labels = self.seeds[name, base(entry)]
        return np.repeat(labels, entry.repeat) if isinstance(entry, Merged) else labels

    def unite_along(self, labels: np.ndarray, dims: Any) -> np.ndarray:
        """Records that all labels along these dims must lie on one rank; returns the labels with size one there."""
        for dim in dims:
            first = np.take(labels, [0], axis=dim)
            self.unite(first, labels)
            labels = first
        return labels

    def keep_whole(self, labels: np.ndarray, reason: str) -> None:
        """Records that every rank must hold all indices with these labels; `reason` is part of a message."""
        where = f" in '{self.modules[-1]}'" if self.modules and self.modules[-1] else ""
        # one of them is enough: they are united below, and `result` looks the reason up for the whole class
        for label in np.unique(labels)[:1]:
            self.because.setdefault(int(label), reason + where)
        self.unite(np.array([WHOLE]), labels)

    def labels(self, tensor: Any) -> np.ndarray | None:
        """Returns an array of labels that broadcasts to the tensor's shape; None if it has none.

        A weight with several dims longer than one, which no label rule handles as a weight, is kept whole (None).
        """
        if not isinstance(tensor, torch.Tensor):
            return None
        labels = getattr(tensor, "_axis_labels", None)
        if labels is not None:
            return labels
        # a tensor that is made of no weight has no labels
        param = param_of(tensor)
        if param is None:
            return None
        name, dims = param
        if name in self.frozen:  # the plan keeps it whole: what it meets may be cut all the same
            return None
        long = [d for d, size in enumerate(tensor.shape) if size > 1]
        if len(long) == 1 and dims[long[0]] is not None:
            shape = [-1 if d == long[0] else 1 for d in range(tensor.dim())]
            return self.vector(name, dims[long[0]]).reshape(shape)
        # a weight that is read as a whole matrix, not along one dim: no product tells which of its indices belong
        # together
        for dim in dims:
            if dim is not None:
                self.keep_whole(self.seeds[name, base(dim)], "its weight is used outside a product")
        return None

    def chosen(self, labels: np.ndarray, dim: int) -> None:
        """Keeps whole the labels of a tensor of which one index of `dim` was selected, if they vary along it alone."""
        if all(size == 1 for d, size in enumerate(labels.shape) if d != dim):
            self.keep_whole(labels, "one of its indices is taken alone")

    def give(self, tensor: Any, labels: np.ndarray | None) -> None:
        """Sets the labels of an operation's result `tensor`; None, or an array of one label, sets none."""
        if isinstance(tensor, torch.Tensor) and labels is not None and labels.size > 1:
            tensor._axis_labels = labels

    # --- the mode ---

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        # weights that the forward writes into are neither cut nor kept in shares (`barred` in parallel/tensor/trial)
        if func._schema.is_mutable:
            storages = {storage_key(tensor) for tensor in written_tensors(func, args, kwargs)}
            self.written |= {name for name, _, storage in self.named if storage in storages}
        # rules are of ATen's operations; others are met when the cuts are rehearsed
        if func.namespace == "aten":
            tensors = tensors_in((args, kwargs))
            # most operations read nothing that is labelled
            if any(hasattr(t, "_axis_labels") or hasattr(t, "_axes_of") for t in tensors):
                self._follow(func, args, kwargs, tensors, output)
        return output

    def _follow(self, func: Any, args: tuple, kwargs: dict, tensors: list, output: Any) -> None:
        """Labels an operation's output by its label rule; without one, or if that returns False, keeps inputs whole."""
        name = func._schema.name.partition("::")[2]
        rule = LABELS.get(name)
        by_tag = torch.Tag.pointwise in func.tags or draws_each(func)
        # the tag is asked first: without it the operation is tried on small tensors
        if rule is None and (by_tag or is_elementwise(func, args, kwargs)):
            rule = LABELS["add"]
        # a rule that returns False has not labelled the result: the inputs are kept whole instead
        if rule is None or not rule(self, func, args, kwargs, output):
            for tensor in tensors:
                labels = self.labels(tensor)
                if labels is not None:
                    self.keep_whole(labels, f"{name} does not keep indices apart")

    @contextmanager
    def watching(self, module: nn.Module, *, gradients: bool = False) -> Iterator[None]:
        """Context that carries labels through a forward of `module` and its loss; `gradients`: with autograd on."""
        handles = []
        self.in_loss = False
        for path, child in module.named_modules():
            handles.append(child.register_forward_pre_hook(lambda m, a, p=path: self.modules.append(p)))
            # called too where the forward raises, so that reasons go on naming the right module
            handles.append(child.register_forward_hook(lambda m, a, o: self._leave(m is module), always_call=True))
        try:
            # without gradients a forward's own `x.register_hook` would raise, hence HooksLeftOut
            with torch.set_grad_enabled(gradients), HooksLeftOut(), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, root: bool) -> None:
        self.modules.pop()
        if root:
            self.in_loss = True

    def result(self) -> WeightLabels:
        """Returns, once the forward is over, the class of each index of a parameter, and why some stay whole."""
        root = components(self.count, self.edges)
        classes = {key: np.where(root[labels] == root[WHOLE], 0, root[labels]) for key, labels in self.seeds.items()}
        reasons: dict[str, str] = {}
        by_root: dict[int, str] = {}
        for label, reason in self.because.items():
            by_root.setdefault(int(root[label]), reason)
        for (name, _), labels in self.seeds.items():
            # one index tells for all: `keep_whole` unites whole classes
            for label in labels[:1]:
                if root[label] == root[WHOLE]:
                    # its own reason if it has one; else that of what it is joined with
                    own = self.because.get(int(label))
                    reasons.setdefault(name, own or by_root.get(int(root[label]), ""))
        # `param.data = value` is no operation: it shows by the parameter's storage alone
        assigned = {name for name, tensor, storage in self.named if storage_key(tensor) != storage}
        return WeightLabels(classes, self.uses, reasons, frozenset(self.written | assigned))


def param_of(tensor: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Returns (name, dims) of a parameter or a view of one, else None.

    dims  for each of the tensor's dims the parameter's dim, a `Merged`, or None if it is no dim of the parameter
    """
    return getattr(tensor, "_axes_of", None)


def components(count: int, edges: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Returns (count,) the smallest label that each label is connected with by `edges`, pairs of label arrays."""
    root = np.arange(count)
    if not edges:
        return root
    a = np.concatenate([pair[0] for pair in edges])
    b = np.concatenate([pair[1] for pair in edges])
    while True:
        # hang the larger root of each edge below the smaller one; `minimum.at`, since a root may be at several edges
        low = np.minimum(root[a], root[b])
        np.minimum.at(root, root[a], low)
        np.minimum.at(root, root[b], low)
        while True:  # point straight at the root
            shorter = root[root]
            if (shorter == root).all():
                break
            root = shorter
        if (root[a] == root[b]).all():
            return root


# (axes, operation, args, kwargs, output) -> whether the results have their labels; if not, the inputs are kept whole
LabelRule = Callable[[Axes, Any, tuple, dict, Any], bool]
LABELS: dict[str, LabelRule] = {}  # name of an ATen operation -> how it carries labels


def label(*names: str) -> Callable[[LabelRule], LabelRule]:
    """Returns a decorator that registers a function as the label rule of these ATen operations.

    The function labels the operation's results and returns True. If it cannot, it returns False; then every rank has
    to hold the labelled inputs whole (`keep_whole`), and no weight is cut along the indices that have these labels.
    """

    def register(function: LabelRule) -> LabelRule:
        for name in names:
            LABELS[name] = function
        return function

    return register


def is_free(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or computed of parameters alone, so that it may be whole beside cut ones."""
    return param_of(tensor) is not None or getattr(tensor, "_axes_free", False)


def slim(labels: np.ndarray) -> np.ndarray:
    """Returns the labels with size one along dims where they are all the same."""
    for dim in range(labels.ndim):
        if labels.shape[dim] > 1:
            first = np.take(labels, [0], axis=dim)
            if (labels == first).all():
                labels = first
    return labels


def rearranged(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels views that move, drop or select indices of a tensor, by the same view of its labels. Always True."""
    x, results = args[0], tensors_in(output)
    # a matrix of a weight stays known as such while the view keeps its dims; a vector goes by its labels, as others do
    if param_of(x) is not None and x.dim() > 1 and (orders := _dims_after(func, args, kwargs)) is not None:
        name, dims = x._axes_of
        for result, order in zip(results, orders, strict=True):
            result._axes_of = name, tuple(dims[d] for d in order)
        return True
    labels = axes.labels(x)
    if labels is not None:
        with _disable_current_modes():  # labels have values, whatever the forward runs on
            # repeated, without memory of its own; of no samples (an expert without tokens) labels are those of one
            wide = torch.from_numpy(np.array(labels)).expand([max(n, 1) for n in x.shape])
            for result, view in zip(results, tensors_in(func(wide, *args[1:], **kwargs)), strict=True):
                # of dims that were expanded (stride 0) one label is kept, which broadcasts
                for dim in range(view.dim()):
                    view = view.narrow(dim, 0, 1) if view.shape[dim] > 1 and not view.stride(dim) else view
                axes.give(result, slim(view.numpy()))
    return True


def _dims_after(func: Any, args: tuple, kwargs: dict) -> list[list[int]] | None:
    """Returns, for each result of the view `func`, the input dim of each of its dims.

    None if a result has a dim that was merged, split or shortened.
    """
    shape = args[0].shape
    strides = [math.prod(max(n, 2) for n in shape[d + 1 :]) for d in range(len(shape))]  # by which a dim is known again
    with _disable_current_modes():
        views = tensors_in(func(torch.empty_strided(shape, strides, device="meta"), *args[1:], **kwargs))
    orders = [[strides.index(s) if s in strides else -1 for s in view.stride()] for view in views]
    for view, order in zip(views, orders, strict=True):
        # a dim that the view merged or took a part of has no index of its own in the input
        if any(d < 0 or view.shape[place] != shape[d] for place, d in enumerate(order)):
            return None
    return orders
