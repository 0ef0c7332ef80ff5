"""`cat` and `stack`: owners are concatenated as the indices are; a whole tensor goes to the rank of its cut neighbour.

A rule raises `Uncut` for what it cannot do; a label rule returns False where inputs are to stay whole (`part/labels`).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from shardwise.part.cuts import Owners, Uncut, joined
from shardwise.part.labels import Axes, label, slim
from shardwise.part.moves import reowned
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule


@rule("cat", "stack")
def cat(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns `cat` or `stack` of tensors as a part; owners are concatenated if `dim` is the cut dim, else kept."""
    # torch passes over empty tensors of one dim, whatever shape the others have
    tensors = [t for t in args[0] if not (t.dim() == 1 and t.numel() == 0)]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if func._schema.name == "aten::stack":
        tensors = [t.unsqueeze(dim) for t in tensors]
    dim %= tensors[0].dim()
    parts = parts_in(tensors)
    lead = parts[0]
    if lead.dim_cut != dim:  # shares are joined; a whole tensor gives this rank's share of it
        along = all(p.dim_cut == lead.dim_cut for p in parts)
        # positions are dealt anew; other cuts have to lie beside each other as they are
        if along and lead.axis.positions:
            tensors = [reowned(t, lead.owners) if is_part(t) else t for t in tensors]
        elif not along or any(not p.beside(lead) for p in parts):
            raise Uncut(f"tensors that are cut differently are put together ({no_rule(func, parts)})")
        local = [t.local if is_part(t) else lead.share(t, lead.dim_cut) for t in tensors]
        return lead.with_local(torch.cat(local, dim))
    if len(parts) != len(tensors) or any(p.dim_cut != dim for p in parts):
        # zeros for a split's undefined gradient, as long as their cut neighbour, and so dealt like it
        if all(p.dim_cut == dim for p in parts) and _like_its_neighbour(tensors, lead, dim):
            tensors = [t if is_part(t) else lead.with_local(lead.share(t, dim)) for t in tensors]
        # positions: a whole tensor goes to the rank that owns what it stands beside
        elif all(p.dim_cut == dim for p in parts) and lead.axis.positions:
            tensors = _with_their_neighbours(tensors, lead, dim)
        else:
            raise Uncut(f"cut and whole tensors are put together along the cut dim ({no_rule(func, parts)})")
    return lead.with_local(torch.cat([p.local for p in tensors], dim), dim, joined(tuple(p.owners for p in tensors)))


def _with_their_neighbours(tensors: list[torch.Tensor], lead: Part, dim: int) -> list[torch.Tensor]:
    """Returns the tensors with whole ones (a class token) as parts that the first or the last rank owns entirely.

    lead  the first part among them;  dim  along which they are concatenated, the cut dim
    """
    dealt: list[torch.Tensor] = []
    for place, tensor in enumerate(tensors):
        if not is_part(tensor):
            # behind a cut tensor it is the last rank's, in front of it the first one's
            rank = lead.axis.size - 1 if any(map(is_part, tensors[:place])) else 0
            n = tensor.shape[dim]
            owners = Owners(np.array([n]), np.array([rank]), lead.axis.size)
            tensor = lead.with_local(owners.take(tensor, dim, lead.axis.index), dim, owners)
        dealt.append(tensor)
    return dealt


def _like_its_neighbour(tensors: list[torch.Tensor], lead: Part, dim: int) -> bool:
    """Whether each whole tensor is as long along `dim` as `lead`, like the zeros for a split's undefined gradients."""
    return all(is_part(t) or t.shape[dim] == lead.shape[dim] for t in tensors)


@label("cat", "stack")
def cat_labels(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Labels `cat` and `stack` by the concatenated labels.

    False if labels vary along the concatenated dim and a tensor has none.
    """
    # torch passes over empty tensors of one dim, whatever shape the others have
    tensors = [t for t in args[0] if not (t.dim() == 1 and t.numel() == 0)]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % output.dim()
    every = [axes.labels(t) for t in tensors]
    if func._schema.name == "aten::stack":
        every = [None if e is None else np.expand_dims(e, dim) for e in every]
        sizes = [1] * len(tensors)
    else:
        sizes = [t.shape[dim] for t in tensors]
    labelled = [e for e in every if e is not None]
    if not labelled:
        return True
    shape = list(np.broadcast_shapes(*(tuple(1 if d == dim else n for d, n in enumerate(e.shape)) for e in labelled)))
    if not any(e.shape[dim] > 1 for e in labelled):  # pieces side by side along another dim than the labels'
        for a, b in itertools.pairwise(labelled):
            axes.unite(a, b)
        axes.give(output, labelled[0])
        return True
    # beside a tensor without labels: there are none for its part of the dim
    if len(labelled) < len(every):
        return False
    full = []
    for labels, size in zip(labelled, sizes, strict=True):
        shape[dim] = size
        full.append(np.broadcast_to(labels, shape))
    axes.give(output, slim(np.concatenate(full, axis=dim)))
    return True
