"""Views of cut tensors that are gathered to be read (`sums`): read anew when the part has changed, written through.

view = logits[:, 0]      (N, V) cut along V: gathered, and a copy
logits.add_(1)           the copy is made anew when it is read
view.fill_(0)            the part is gathered, written through the view, and each rank takes its share again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shardwise.part.gathering import gathered, share_of
from shardwise.part.levels import ViewOf
from shardwise.part.tensor import Part
from shardwise.trace.leaves import tensors_in

if TYPE_CHECKING:
    from shardwise.part.sums import Sum


class GatheredView:
    """A view of a gathered part: the part, the view as a function, and the part's version when it was gathered."""

    def __init__(self, part: Part, view: Callable[[torch.Tensor], torch.Tensor]):
        self.part, self.view, self.version = part, view, part._version

    @property
    def moved(self) -> bool:
        """Whether the part was written into since it was gathered last."""
        return self.part._version != self.version

    def through(self, view: Callable[[torch.Tensor], torch.Tensor]) -> GatheredView:
        """Returns the same of a view of the copy."""
        return GatheredView(self.part, lambda whole: view(self.view(whole)))

    def whole(self) -> torch.Tensor:
        """Returns the part as it is now, gathered into memory of its own. Collective."""
        self.version = self.part._version
        return gathered(self.part)


def opened_anew(copy: Sum, args: tuple) -> bool:
    """Returns whether a copy may be written into; from then on the part it is a view of gets its share back.

    It may not be where a gradient is needed: autograd goes another way there, by the strides of the whole.
    """
    seen = copy.seen
    if seen is None or seen.part.requires_grad or any(tensor.requires_grad for tensor in tensors_in(args)):
        return False
    part, whole = seen.part, seen.whole()
    copy.total = seen.view(whole)
    # the copy's memory is that of `whole`: after a write into it each rank takes its share of all of it
    copy.source = ViewOf(part, lambda _: part.local.copy_(share_of(whole, part.dim_cut, part.owners, part.axis)))
    return True
