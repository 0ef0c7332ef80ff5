"""Axis labels of products, convolutions, pooling, embeddings, attention. On shares: part/products, loss, channels"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.trace.axes import Axes, Use, base, param_of
from shardwise.trace.axis_rules.registry import rule, slim


def _product(axes: Axes, a: torch.Tensor, b: torch.Tensor, output: torch.Tensor) -> bool:
    """Labels a (..., m, k) @ b (..., k, n); returns whether it could."""
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
    """Returns (name, dims) of a tensor whose last two dims are a parameter's, else None."""
    param = param_of(tensor)
    if param is None or tensor.dim() < 2 or None in param[1][-2:]:
        return None
    return param


def _weighted(axes: Axes, x: torch.Tensor, w: torch.Tensor, output: torch.Tensor, *, k_of_x: int, k_of_w: int) -> bool:
    """Labels a weight's product: the activation's meet those of its inner dim, the result has those of its outer."""
    name, dims = param_of(w)  # type: ignore[misc]
    if name in axes.frozen:
        return _by_whole_weight(axes, x, output, k_of_x)
    inner, outer = dims[k_of_w], dims[-1 if k_of_w == -2 else -2]
    out_place = output.dim() - (1 if k_of_x == -1 else 2)
    # one matrix for each index of a batch dim: all ranks multiply by all of them
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
    axes.uses.append(Use(name, "product", base(inner), base(outer), axes.modules[-1] if axes.modules else ""))
    return True


def _by_whole_weight(axes: Axes, x: torch.Tensor, output: torch.Tensor, k_of_x: int) -> bool:
    """Whether a product with a whole weight stays whole: the activation has no labels but along the summed dim."""
    labels = axes.labels(x)
    k = x.dim() + k_of_x
    return labels is None or all(n == 1 for d, n in enumerate(labels.shape) if d != k)


@rule("mm", "bmm")
def mm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of matrix products: of one by a weight, the labels of the activation meet those of its inner dim."""
    return _product(axes, args[0], args[1], output)


@rule("addmm", "baddbmm")
def addmm(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of a product with a bias, whose labels are united with the product's."""
    done = _product(axes, args[1], args[2], output)
    bias, product = axes.labels(args[0]), getattr(output, "_axis_labels", None)
    if bias is not None and product is not None:
        axes.unite(bias.reshape([1] * (output.dim() - bias.ndim) + list(bias.shape)), product)
    elif bias is not None:
        axes.keep_whole(bias, "it is added to a whole tensor")
    return done


@rule("_grouped_mm")
def grouped(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of grouped products, rows by the matrix of their group: x (T, K) @ w (G, K, N)."""
    x, w = args[:2]
    if _weight(w) is None or w.dim() != 3 or x.dim() != 2:
        return False
    return _weighted(axes, x, w, output, k_of_x=-1, k_of_w=-2)


@rule("embedding")
def embedding(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of table lookups: rows may lie on different ranks; the columns' labels go to the result's last dim."""
    param = _weight(args[0])
    # an index with labels may be cut as well: a rank would look up its part of the rows alone
    if param is None or getattr(args[1], "_axis_labels", None) is not None:
        return False
    name, (rows, columns) = param
    if name in axes.frozen:
        return True
    axes.give(output, axes.seeds[name, columns].reshape([1] * (output.dim() - 1) + [-1]))
    axes.uses.append(Use(name, "rows", rows, columns, axes.modules[-1] if axes.modules else ""))
    return True


@rule("convolution")
def convolution(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of convolutions: channels are summed over as in a product, or one by one where each is its own group."""
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
        axes.uses.append(Use(name, "channels", inner, outer, place))
    # depthwise: output channels follow their one input channel, and nothing is contracted
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
    """Rule of operations over space: applies only where the input has no labels, else the input stays whole."""
    return axes.labels(args[0]) is None


@rule("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
def attention(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of attention: a head lies together, with the keys and values that it reads; heads are independent."""
    heads = []
    for x in args[:3]:
        labels = axes.labels(x)
        if labels is not None:
            labels = axes.unite_along(labels, [d for d in (0, 2, 3) if labels.shape[d] > 1])
            queries_per_key = args[0].shape[1] // x.shape[1]
            # grouped queries: each key head has the labels of all the query heads that read it
            labels = np.repeat(labels, queries_per_key, axis=1) if labels.shape[1] > 1 else labels
        heads.append(labels)
    labelled = [h for h in heads if h is not None]
    # queries without labels are whole on every rank, and so have to be the keys and values of their heads
    if heads[0] is None and labelled:
        return False
    for other in labelled[1:]:
        axes.unite(labelled[0], other)
    arguments = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    of_mask = axes.labels(arguments.get("attn_mask", arguments.get("attn_bias")))
    if of_mask is not None:
        axes.keep_whole(of_mask, "it is an attention bias inside a fused kernel")
    if labelled:
        axes.give(output[0], labelled[0])
    return True
