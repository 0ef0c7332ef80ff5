"""Weights of modules whose products cannot be shared: kept in shares, and gathered whenever they are read.

    rank 0   W_0 \\
                  all-gather -> W -> the module's own code, on every rank -> dW -> this rank's rows
    rank 1   W_1 /

Each rank computes all that the module does, so that no gradient needs a sum. What is spared is memory: 1/N of each
weight, of its gradient and of its optimizer state. Bytes on the wire: each weight once for each time that it is read.

What this does not do: keep weights in shares that a module reads past its attributes, or writes into; where any
product can be cut, `derive` cuts it, and what is left stays whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.parallel.tensor.derive import SHARE, Derived, WeightCut
from shardwise.part import Owners
from shardwise.part.pairs import pairs_in
from shardwise.part.parameters import FLAT, KEPT


def kept_shares(
    module: nn.Module, ranks: int, whole: dict[str, str], barred: Collection[str], role: str = KEPT
) -> Derived:
    """Returns cuts of all weights that `ranks` can hold in shares, but for the `barred`; none where that spares little.

    whole  why no parameter's products can be shared
    role   KEPT: gathered whenever it is read; ONCE: once in a forward
    """
    named = dict(module.named_parameters())
    hidden, pairs = set(_beside_attributes(module)), pairs_in(module)
    derived = Derived(whole=dict(whole))
    for number, (name, param) in enumerate(named.items()):
        sizes = param.shape[:-1] if name in pairs else param.shape  # both parts of a complex number on one rank
        dim = next((d for d, size in enumerate(sizes) if size >= ranks), None)
        # `hidden`: read past its attribute, the module would meet a share of it
        if dim is None or name in barred or id(param) in hidden or not param.is_floating_point():
            continue
        derived.cuts[name] = WeightCut(name, dim, Owners.blocks(param.shape[dim], ranks), role, number)
        derived.whole.pop(name, None)
    spared = sum(named[name].numel() for name in derived.cuts)
    if spared < SHARE * sum(param.numel() for param in named.values()):
        return Derived(whole=dict(whole))
    return derived


def _beside_attributes(module: nn.Module) -> Iterator[int]:
    """Yields ids of parameters that a module holds in a list or dict of its own too: read there, past attributes."""
    for child in module.modules():
        # a recurrent layer's list of its flat weights is made anew from its attributes (`see_parts`)
        own = {"_parameters", "_modules", FLAT if isinstance(child, nn.RNNBase) else ""}
        for key, value in vars(child).items():
            if key not in own and isinstance(value, list | tuple | dict):
                yield from (id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
