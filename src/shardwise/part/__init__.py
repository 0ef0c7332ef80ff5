"""Tensors of which each rank holds a share: `part/` has a rule for each operation; for labels: trace/axis_rules."""

from shardwise.part import (  # noqa: F401 - the rules
    aligned,
    assigned,
    attention,
    bins,
    channels,
    creation,
    distances,
    loss,
    pointwise,
    products,
    rearrange,
    recurrent,
    reductions,
    replacing,
    slices,
    views,
)
from shardwise.part.cuts import Owners, Uncut
from shardwise.part.gathering import gather, to_part
from shardwise.part.summands import summand, with_summed_gradient
from shardwise.part.sums import Sum, plain, whole, whole_gradient
from shardwise.part.tensor import Part, forget

__all__ = [
    "Owners", "Part", "Sum", "Uncut", "forget", "gather", "plain", "summand", "to_part", "whole", "whole_gradient",
    "with_summed_gradient",
]  # fmt: skip
