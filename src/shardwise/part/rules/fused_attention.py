"""Fused attention cut along heads or samples, computed locally. Cut positions: parallel/sequence; unfused: products.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.host import to_device
from shardwise.part.cuts import Uncut, repeated
from shardwise.part.dimwise import arguments_of
from shardwise.part.labels import Axes, label
from shardwise.part.sums import reduced
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule

_FORWARD = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
)  # fmt: skip


class _Heads:
    """One call's queries (B, H, S, D), keys and values (B, H / g, S, D), cut along heads or samples; some may be whole.

    Cut along samples, any of the three may be whole (learned queries), and each rank takes its own samples. Cut along
    heads, keys and values may be whole (more ranks than key heads), and each rank picks the heads its queries read.

    func, args  the operation and its arguments;  names  argument name -> value, defaults included
    Raises `Uncut` for other cuts.
    """

    def __init__(self, func: Any, args: tuple, names: dict[str, Any]):
        self.query, self.key, self.value = names["query"], names["key"], names["value"]
        parts = parts_in([self.query, self.key, self.value])
        lead = parts[0] if parts else None
        # samples, or heads of the queries: positions are cut by rules of their own (ring, by heads)
        if lead is None or lead.dim_cut > 1 or (lead.dim_cut == 1 and lead is not self.query):
            raise Uncut(f"attention over cut positions ({no_rule(func, parts_in(args))})")
        self.func, self.part, self.dim = func, lead, lead.dim_cut
        # grouped queries: so many query heads in a row read one key head
        self.queries_per_key = self.query.shape[1] // self.key.shape[1] if self.dim == 1 else 1
        for part in parts[1:]:
            # keys and values must be dealt as the queries are, or query heads would meet the wrong ones
            if part.dim_cut != self.dim or repeated(part.owners, self.queries_per_key) != lead.owners:
                raise Uncut(f"attention of queries and keys whose heads are cut differently ({no_rule(func, parts)})")
        # key heads and value heads belong together
        if self.dim == 1 and isinstance(self.key, Part) != isinstance(self.value, Part):
            raise Uncut(f"attention of cut keys and whole values ({no_rule(func, parts)})")

    @property
    def read(self) -> torch.Tensor:
        """Returns (own query heads,) the global index of the key head that each of this rank's query heads reads."""
        mine = to_device(self.part.owners.indices(self.part.axis.index), self.part.device)
        return mine // self.queries_per_key

    def local(self, tensor: Any) -> Any:
        """Returns this rank's share of an argument; one without the cut dim, or no tensor, is returned unchanged."""
        if is_part(tensor):
            return tensor.local
        # more ranks than key heads: they are whole, and several ranks read the same one
        if self.dim == 1 and (tensor is self.key or tensor is self.value):
            return tensor.index_select(1, self.read)
        has_dim = isinstance(tensor, torch.Tensor) and tensor.dim() >= 3
        # a tensor without that dim (a mask of one head) is for all heads
        if has_dim and tensor.shape[self.dim] == self.part.shape[self.dim]:
            return self.part.share(tensor, self.dim).contiguous()
        return tensor

    def run(self, args: tuple, kwargs: dict) -> tuple:
        """Returns the kernel's results on this rank's heads; a rank without any runs a head of zeros, and drops it."""
        local = [self.local(argument) for argument in args]
        named = {name: self.local(argument) for name, argument in kwargs.items()}
        # a rank with heads runs them as they are
        if self.part.local.shape[self.dim]:
            return self.func(*local, **named)

        # kernels take no tensor without heads: a sum over none of them is a head of zeros
        def with_one_head(argument: Any) -> Any:
            empty = isinstance(argument, torch.Tensor) and argument.dim() > 2 and not argument.shape[self.dim]
            return argument.sum(self.dim, keepdim=True) if empty else argument

        def without_heads(result: Any) -> Any:
            return result.narrow(self.dim, 0, 0) if isinstance(result, torch.Tensor) and result.dim() > 2 else result

        output = self.func(*map(with_one_head, local), **{name: with_one_head(x) for name, x in named.items()})
        return tuple(map(without_heads, output))

    def output(self, local: Any) -> Any:
        """Returns a result as a part cut along heads (or samples); a result without heads is returned unchanged."""
        if not isinstance(local, torch.Tensor) or local.dim() < 3:
            return local
        return self.part.with_local(local, self.dim)

    def gradient(self, of: torch.Tensor, local: Any) -> Any:
        """Returns the gradient of input `of`, cut as it is; of whole keys and values summed over ranks. Collective.

        local  this rank's gradient, or None
        """
        if local is None:
            return None
        if is_part(of):
            return of.with_local(local, self.dim)
        # of samples no two ranks read the same ones, so a whole input's gradient is cut as the others are
        if self.dim != 1:
            return self.part.with_local(local, self.dim)
        # ranks that read the same key head each have a summand of its gradient
        whole = local.new_zeros((local.shape[0], of.shape[1], *local.shape[2:]))
        return reduced(whole.index_add_(1, self.read, local), self.part)


@rule(*_FORWARD)
def forward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (output, log-sum-exp, ...) of fused attention; tensors of three dims or more are cut as the queries."""
    names = arguments_of(func, args, kwargs)
    if names.get("dropout_p"):
        raise Uncut("dropout inside a fused attention kernel draws for a rank's heads alone: randomness='global' draws "
                    "for all, with scores that are written")  # fmt: skip
    heads = _Heads(func, args, names)
    output = heads.run(args, kwargs)
    return tuple(heads.output(each) for each in output)


@rule(*(f"{name}_backward" for name in _FORWARD))
def backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (dq, dk, dv, ...), cut as q, k and v are; of whole keys and values they are sums over ranks."""
    heads = _Heads(func, args, arguments_of(func, args, kwargs))
    output = heads.run(args, kwargs)
    inputs = (heads.query, heads.key, heads.value)
    gradients = [heads.gradient(of, each) for of, each in zip(inputs, output, strict=False)]
    # the fourth is the gradient of the bias
    if any(each is not None and each.numel() for each in output[3:]):
        raise Uncut("a trained attention bias beside cut heads inside a fused kernel")
    return (*gradients, *output[3:])


@label("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
def attention_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels the output by head, united with the keys and values that each reads; False if the queries have no labels.

    True too if none of the three has labels.
    """
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
    arguments = arguments_of(func, args, kwargs)
    of_mask = axes.labels(arguments.get("attn_mask", arguments.get("attn_bias")))
    if of_mask is not None:
        axes.keep_whole(of_mask, "it is an attention bias inside a fused kernel")
    if labelled:
        axes.give(output[0], labelled[0])
    return True
