"""Distributed tensors, `Part` (each rank holds a share) and `Sum` (a summand); their operations are in `part/rules`."""

from shardwise.part import assigned, dispatch, rules  # noqa: F401 - they register
from shardwise.part.cuts import Owners, Uncut
from shardwise.part.gathering import gather
from shardwise.part.moves import to_part
from shardwise.part.sums import Sum, plain, summand, whole, whole_gradient, with_summed_gradient
from shardwise.part.tensor import Part, forget

__all__ = [
    "Owners", "Part", "Sum", "Uncut", "forget", "gather", "plain", "summand", "to_part", "whole", "whole_gradient",
    "with_summed_gradient",
]  # fmt: skip
