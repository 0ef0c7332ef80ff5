"""Losses by class (NLL) over cut classes or samples, elementwise losses (`added_up`), and CTC.

nll_loss   cut along classes: one rank has a target's entry      along samples: the sum comes first, then the mean
ctc_loss   (T, B, C) gathered in forward and again in backward; each rank keeps its positions of the gradient

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.done_whole import on_whole_positions
from shardwise.part.labels import Axes, label
from shardwise.part.moves import reowned
from shardwise.part.rules.indexing import check_range, owned_alone, place_of
from shardwise.part.rules.reductions import arguments_of
from shardwise.part.sums import reduced
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule
from shardwise.trace.elementwise import fit, is_elementwise


def _without(dim: int, gone: int) -> int:
    """Returns the index of dim `dim` once dim `gone` is removed."""
    return dim - (dim > gone)


def _beside(x: Part, tensor: torch.Tensor, classes: int) -> torch.Tensor:
    """Returns this rank's share of a tensor that has the dims of `x` except `classes`, cut as x is along another dim.

    Raises `Uncut` if it is cut along another dim than x.
    """
    place = _without(x.dim_cut, classes)
    if is_part(tensor):
        if tensor.dim_cut != place:
            raise Uncut(f"a loss of tensors that are cut differently ({x!r}, {tensor!r})")
        return reowned(tensor, x.owners).local
    return x.share(tensor, place)


def _weight_of(x: Part, target: torch.Tensor, weight: Any, classes: int) -> torch.Tensor:
    """Returns the weight of each target's class, ones if `weight` is None; of an ignored target that of any class."""
    if weight is None:
        return torch.ones(target.shape, dtype=x.dtype, device=x.device)
    return weight[target.clamp(0, x.shape[classes] - 1)]


def _total_weight(x: Part, target: torch.Tensor, weight: Any, ignored: int, classes: int) -> torch.Tensor:
    """Returns the sum of the weights of all ranks' targets, by which a mean is divided. Collective if they are cut.

    ignored  the target value that does not count;  classes  the dim of classes in x
    """
    # ranks that have all targets count them all, without a message
    mine = _beside(x, target, classes) if is_part(target) else target
    counted = (mine != ignored).to(x.dtype)
    if weight is not None:
        counted = counted * _weight_of(x, mine, weight, classes)
    return reduced(counted.sum(), x) if is_part(target) else counted.sum()


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(func: Any, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, total weight) of x (N, C, ...) log-probabilities, cut along C or another dim.

    The loss is whole on every rank, without a reduction and with another dim than C cut a part.
    """
    x, target, weight, reduction, ignored = args
    # reduction 0: a loss for each target; 1: their mean; 2: their sum
    classes = 0 if x.dim() == 1 else 1
    if is_part(x) and x.dim_cut != classes and not parts_in([weight]):
        # cut along samples or positions, all classes here; a mean is over all ranks' targets, so the sum comes first
        value, total = func(x.local, _beside(x, target, classes), weight, 0 if reduction == 0 else 2, ignored)
        if reduction == 0:
            return x.with_local(value, _without(x.dim_cut, classes)), total
        if reduction == 2:  # whose backward reads no total
            return reduced(value, x), torch.zeros((), dtype=x.dtype, device=x.device)
        total = _total_weight(x, target, weight, ignored, classes)
        return reduced(value / total, x), total
    if not is_part(x) or parts_in([target, weight]):
        raise Uncut(no_rule(func, parts_in(args)))
    counts = target != ignored
    check_range(target, x.shape[classes], "target", ignored)
    # cut along classes: one rank has the log-probability of a target, and the others add zero to it
    owned, place = place_of(x, target)
    # a rank without classes has nothing to read, and adds zeros
    row = x.local.gather(classes, place.unsqueeze(classes)).squeeze(classes) if x.local.shape[classes] else None
    mine = (
        torch.zeros(target.shape, dtype=x.dtype, device=x.device) if row is None else owned_alone(row, owned & counts)
    )
    target_weight = _weight_of(x, target, weight, classes)
    target_weight = target_weight * counts
    losses = -reduced(mine, x) * target_weight
    total = target_weight.sum()
    if reduction == 0:
        return losses, total.new_zeros(())
    return (losses.sum() / total if reduction == 1 else losses.sum()), total


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the gradient of the log-probabilities, cut as they are.

    Minus the weight of the target's class at that class, times the incoming gradient; zero elsewhere.
    """
    gradient, x, target, weight, reduction, ignored, total = args
    classes = 0 if x.dim() == 1 else 1
    # cut along samples: without a reduction the gradient has a number for each target, else it is one number
    if is_part(x) and x.dim_cut != classes:
        local = _beside(x, gradient, classes) if reduction == 0 else gradient
        return x.with_local(func(local, x.local, _beside(x, target, classes), weight, reduction, ignored, total))
    if not is_part(x) or is_part(gradient):
        raise Uncut(no_rule(func, parts_in(args)))
    owned, place = place_of(x, target)
    owned = owned & (target != ignored)
    target_weight = _weight_of(x, target, weight, classes)
    scale = -(gradient * target_weight) / (total if reduction == 1 else 1)
    dx = torch.zeros_like(x.local)
    if dx.shape[classes]:  # a rank without classes has no place to write to
        dx.scatter_add_(classes, place.unsqueeze(classes), owned_alone(scale, owned).to(dx.dtype).unsqueeze(classes))
    return x.with_local(dx)


def added_up(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns an elementwise loss (`mse_loss`) or its backward, computed without a reduction and then reduced.

    Raises `Uncut` for any other operation.
    """
    bound = arguments_of(func, args, kwargs)
    how, backward = bound.get("reduction"), func._schema.name.endswith("_backward")
    pair = [tensor for name in ("self", "target") if isinstance(tensor := bound.get(name), torch.Tensor)]
    # a reduction that is none, or tensors that do not meet element by element, is another rule's
    if how not in (1, 2) or len(pair) < 2 or not fit(pair) or (backward and isinstance(bound["grad_output"], Part)):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    # 1 is the mean, 2 the sum, 0 each element's own: that one is elementwise, the rest is a reduction with a rule
    unreduced = bound | {"reduction": 0}
    if backward:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in pair))
        gradient = bound["grad_output"] / (math.prod(shape) if how == 1 else 1)
        unreduced["grad_output"] = gradient.expand(shape)
    arguments = tuple(unreduced[argument.name] for argument in func._schema.arguments)
    # not elementwise without its reduction: the loss has weights or classes
    if not is_elementwise(func, arguments, {}):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    output = func(*arguments)
    # backward has its gradient already
    if backward or how == 2:
        return output if backward else output.sum()
    return output.mean()


@rule("_ctc_loss", "_pack_padded_sequence")
def whole_sequences(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the operation computed on gathered positions, on every rank; raises `Uncut` for a cut over weights."""
    return func(*on_whole_positions(func, args), **kwargs)


@rule("_ctc_loss_backward")
def ctc_loss_backward(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the gradient of the log-probabilities, cut as they are."""
    scores = args[1]
    gradient = func(*on_whole_positions(func, args), **kwargs)
    return scores.with_local(scores.share(gradient, scores.dim_cut)) if is_part(scores) else gradient


@label("nll_loss_forward", "nll_loss2d_forward")
def nll_loss_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Whether x of a loss by class may be cut: it has no labels, or along the dim of classes alone."""
    labels = axes.labels(args[0])
    classes = 0 if args[0].dim() == 1 else 1
    return labels is None or all(n == 1 for d, n in enumerate(labels.shape) if d != classes)
