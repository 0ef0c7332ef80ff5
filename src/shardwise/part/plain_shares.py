"""Convert distributed tensors to this rank's plain shares and back, around a program that computes on shares.

    Part (B, S, H) cut along H  --unwrapped-->  share (B, S, H/p)  -- program -->  share  --wrapped-->  Part

Both ways are differentiable: the gradient of a share is a part of the gradient. A sum is taken on the way. What is cut
over several axes becomes the share of a share.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Axis
from shardwise.part.cuts import Owners
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_of
from shardwise.part.sums import Sum, linear, plain, whole_gradient, whole_over_axis
from shardwise.part.tensor import Part

# class of an argument that a compiled program cannot take -> function that takes it apart into (the object without its
# tensors, whose method `filled(tensors)` puts tensors in, its tensors)
APART: dict[type, Callable[[Any], tuple[Any, list[torch.Tensor]]]] = {}


@dataclass(frozen=True)
class PartLayout:
    """The cut of a part without its values; fields as of `Part`. `inside`: the layout of its share, None if plain."""

    dim: int
    owners: Owners
    axis: Axis
    may_gather: bool
    origin: str
    inside: PartLayout | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PartLayout | None:
        """Returns the layout of a part, or of a sum's value (collective the first time); None for a plain tensor."""
        value = tensor.value() if isinstance(tensor, Sum) else tensor
        if not isinstance(value, Part):
            return None
        return cls(value.dim_cut, value.owners, value.axis, value.may_gather, value.origin, cls.of(value.local))

    @property
    def key(self) -> tuple:
        """Returns a tuple that is equal for equal layouts, by which compiled programs are cached."""
        return self.dim, self.owners, id(self.axis), self.may_gather, self.inside and self.inside.key

    @property
    def uneven_weights(self) -> bool:
        """Whether an axis that cuts weights deals the part unevenly, at any level; the same answer on all ranks."""
        # shares of positions may be uneven; where weights cut what is inside them, each rank divides its own
        uneven = not self.axis.positions and len(set(self.owners.counts)) > 1
        if self.axis.positions and self.inside is not None and not self.inside.axis.positions:
            within = self.inside.axis.size  # shares of positions, in blocks on each rank: even here, and not there
            uneven = self.inside.dim == self.dim and any(count % within for count in self.owners.counts)
        return uneven or (self.inside is not None and self.inside.uneven_weights)

    def part(self, local: torch.Tensor) -> Part:
        """Returns the part of which `local` is this rank's share."""
        local = local if self.inside is None else self.inside.part(local)
        return Part(local, self.dim, self.owners, self.axis, self.may_gather, self.origin)

    def share(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's plain share of a gradient in this layout. Collective if it is a sum or cut otherwise."""
        # over axes further out than the layout's nothing was cut, so the gradient is whole there
        while isinstance(gradient, Distributed) and gradient.axis.depth < self.axis.depth:
            gradient = whole_over_axis(gradient, gradient.axis)
        share = share_of(gradient, self.dim, self.owners, self.axis)
        return plain(share) if self.inside is None else self.inside.share(share)


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    while isinstance(tensor, Distributed):
        value = tensor.settled()
        tensor = value.local if isinstance(value, Part) else value
    return tensor.detach()


def unwrapped(tensor: torch.Tensor) -> tuple[torch.Tensor, PartLayout | None]:
    """Returns (this rank's share of a part or of a sum's total, its layout); of a plain tensor (itself, None)."""
    layout = PartLayout.of(tensor)
    # a sum has no layout where its total is plain, and is taken all the same
    if layout is None and not isinstance(tensor, Sum):
        return tensor, None
    return linear(tensor, _innermost, layout.part if layout is not None else lambda gradient: gradient), layout


def wrapped(local: torch.Tensor, layout: PartLayout | None) -> torch.Tensor:
    """Returns the part of which `local` is a share; for layout None `local` itself, its gradient gathered."""
    if layout is None:
        return whole_gradient(local)
    return linear(local, layout.part, lambda gradient: layout.share(gradient).contiguous())


_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_KEEPERS: list[list[Any]] = []
_NUMBERS = itertools.count()


@contextmanager
def keeping(kept: list[Any]) -> Iterator[None]:
    """Context in which objects that get an id by `number_of` are appended to `kept`, which keeps the id valid."""
    _KEEPERS.append(kept)
    try:
        yield
    finally:
        _KEEPERS.pop()


def number_of(thing: Any) -> int:
    """Gives `thing` a new id, by which the program being compiled refers to it, and returns it.

    Raises `TypeError` outside of `keeping`, where no program is being compiled.
    """
    if not _KEEPERS:
        raise TypeError(f"{type(thing).__name__} is named by a program, and none is being written down")
    number = next(_NUMBERS)
    _OBJECTS[number] = thing
    _KEEPERS[-1].append(thing)
    return number


def by_number(number: int) -> Any:
    """Returns the object with this id (`number_of`); raises `KeyError` once the program that holds it is gone."""
    return _OBJECTS[number]
