"""Diagonals and triangles of matrices: by the place of each row and column in the whole matrix."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.dimwise import DimwiseRule, last_two
from shardwise.part.gathering import gathered_told
from shardwise.part.labels import label
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, no_rule, rule


@rule("diagonal")
def diagonal(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns `x.diagonal(offset, dim1, dim2)`; of dims that are cut the field is gathered: a copy, to read."""
    part, options = args[0], dict(zip(("offset", "dim1", "dim2"), args[1:], strict=False)) | kwargs
    dims = {options.get("dim1", 0) % part.dim(), options.get("dim2", 1) % part.dim()}
    if part.dim_cut not in dims:
        place = part.dim_cut - sum(d < part.dim_cut for d in dims)
        return part.with_local(func(part.local, *args[1:], **kwargs), place)
    if not part.axis.positions:
        raise Uncut(no_rule(func, [part]))
    whole = gathered_told(part, "a field of which a diagonal is read")
    return Sum.read_only(func(whole, *args[1:], **kwargs), part.axis)


label("tril", "triu")(DimwiseRule(last_two).labels)


@rule("tril", "triu")
def triangle(func: Any, args: tuple, kwargs: dict) -> Part:
    """Returns the matrices of the last two dims with zeros above a diagonal, or below it."""
    part, diagonal = args[0], args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    # cut among the batch dims: every matrix is whole
    if part.dim_cut < part.dim() - 2:
        return part.with_local(func(part.local, diagonal))
    rows, columns = (torch.arange(n, device=part.device) for n in part.shape[-2:])
    beyond = columns - rows[:, None] > diagonal if func._schema.name == "aten::tril" else (
        columns - rows[:, None] < diagonal)  # fmt: skip
    return part.with_local(part.local.masked_fill(part.share(beyond, part.dim_cut - part.dim() + 2), 0))
