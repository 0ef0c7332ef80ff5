"""`Handed`: this rank's part of a batch that the loader yielded, with every tensor that the script made of it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from shardwise.scripts.dealt import Dealt
from shardwise.scripts.tape import tensors_in


class Handed:
    """One rank's part of a batch.

    number  of the batch, in the order in which they are handed out
    dim     of its tensors that counts samples, None where it is not known
    inputs  its tensors, and what was made of them before a model was given something of it
    traced  it has tensors, by which a forward is known to be of it
    met     a model was given something of it
    spent   a backward of it is over
    again   forwards of it since
    """

    def __init__(self, number: int, batch: Any, dealt: Dealt, checksum: int, dim: int | None) -> None:
        self.number, self.dealt, self.checksum, self.dim = number, dealt, checksum, dim
        leaves = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)[0]
        self.tensors_alone = all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
        found = tensors_in(batch)
        self.shapes = [list(one.shape) for one in found]
        self.traced = bool(found)
        self.inputs = [weakref.ref(one) for one in found]
        self.leaves = list(self.inputs)
        self.met = self.spent = False
        self.again = 0

    @property
    def lives(self) -> bool:
        """Returns whether the script, or anything else, holds something of it."""
        self.inputs = [one for one in self.inputs if one() is not None]
        return bool(self.inputs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Returns its own tensors that are there."""
        return [tensor for one in self.leaves if (tensor := one()) is not None]
