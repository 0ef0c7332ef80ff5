"""From shares to whole tensors, from summands to sums, and back to this rank's share. Collective.

Part (2, 2) of (4, 2)  --gather-->  (4, 2) on every rank               all-gather
(4, 2) on every rank   --share_of, to_part-->  Part (2, 2) of (4, 2)   nothing is sent
(4, 2) summands        --all_sum-->  (4, 2)                            all-reduce
(4, 2) summands        --scatter_sum-->  share (2, 2) of the sum       reduce-scatter
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._prims_common import make_contiguous_strides_for as strides_in_order

from shardwise.comm import Axis, all_gather, reduce_scatter
from shardwise.host import to_device
from shardwise.part.cuts import Owners
from shardwise.part.levels import Distributed
from shardwise.part.position_tables import whole_table
from shardwise.part.tensor import UNSENT, LastGathered, Part, tell


def gather(part: Part) -> torch.Tensor:
    """Returns the whole tensor, which must not be written; the last result is cached if `may_gather`. Collective."""
    # remembered for soft parts alone, which several products read in turn: queries, keys, values. Tables cost no
    # message, and the key below does not tell how a part is cut over axes further in
    if not part.may_gather or part.recipe is not None or isinstance(part.local, Distributed):
        return gathered(part)
    values, turned = part.values
    if turned and part.dim() == 2:  # the transpose of what others gather
        matrix = Part(part.local.t(), 1 - part.dim_cut, part.owners, part.axis, True, part.origin)
        matrix.values = values, False
        return gather(matrix).t()
    key = (values, turned, part.shape, part.dim_cut, part.owners)
    if LastGathered.key != key or LastGathered.whole is None:
        LastGathered.key, LastGathered.whole = key, gathered(part)
    return LastGathered.whole


def gathered(part: Part) -> torch.Tensor:
    """Returns a new tensor, whole over the part's axis; it may still be cut over axes further in. Collective."""
    if (table := whole_table(part)) is not None:
        return table
    # a rehearsal on values sends nothing, and knows what one process has
    if part.whole_values is not None:
        whole_values, part = part.whole_values, part.with_local(part.local)
        gathered(part)  # what would be sent
        return whole_values.clone(memory_format=torch.contiguous_format)
    dim, owners, axis = part.dim_cut, part.owners, part.axis
    if part.dtype in UNSENT:  # no backend sends it
        return gathered(part.with_local(part.local.to(UNSENT[part.dtype]))).to(part.dtype)
    inner = part.local
    if isinstance(inner, Distributed):
        inner = inner.settled()
        # of another dim: ranks further in gather their own indices each, and the result stays cut over theirs
        if isinstance(inner, Part) and inner.dim_cut != dim:
            return inner.with_local(gathered(Part(inner.local, dim, owners, axis)))
        # of the same dim: inwards first, since owners of this axis count indices that are whole over that one
        whole_inside = gathered(inner) if isinstance(inner, Part) else inner
        return gathered(Part(whole_inside, dim, owners, axis))
    # each rank sends as many rows as the longest has; `whole_of` drops what was added
    front = rows_of(part.local, dim, owners, repeat=axis.rehearsal is not None)
    kind = front.dtype
    # bools are sent as bytes
    flat = front.view(torch.uint8) if kind is torch.bool else front
    table = flat.new_empty((axis.size * len(front), *front.shape[1:]))
    all_gather(table.view(-1), flat.view(-1), axis, "activations")
    return whole_of(table.view(kind) if kind is torch.bool else table, dim, owners)


def gathered_told(part: Part, what: str) -> torch.Tensor:
    """Reports to the listeners in `tensor.GATHERS` that `what` is gathered; returns `gathered(part)`. Collective."""
    tell(what, part)
    return gathered(part)


def rows_of(share: torch.Tensor, dim: int, owners: Owners, *, repeat: bool = False) -> torch.Tensor:
    """Returns a share contiguous, with `dim` as its first dim, padded to the length of the longest share.

    repeat  Whether to pad with its last index, not zeros, so that in a rehearsal values stand for other ranks'
    """
    most, front = max(owners.counts), share.movedim(dim, 0)
    if front.shape[0] == most:
        return front.contiguous()
    padded = front.new_zeros((most, *front.shape[1:]))
    padded[: front.shape[0]] = front
    if repeat and len(front):
        padded[front.shape[0] :] = front[-1:]
    return padded


def whole_of(table: torch.Tensor, dim: int, owners: Owners) -> torch.Tensor:
    """Returns the tensor whole along `dim` from `table`, the concatenation of all ranks' `rows_of`."""
    most = max(owners.counts)
    if any(count != most for count in owners.counts):  # rows that `rows_of` added
        table = torch.cat([table[r * most : r * most + n] for r, n in enumerate(owners.counts)])
    if owners.order is not None:
        table = table.index_select(0, to_device(owners.order, table.device))
    return packed(table.movedim(0, dim))


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor contiguous, with the standard strides even along dims of size one.

    `contiguous` leaves the stride of such a dim as it is, and operations choose by strides whether to view or copy, so
    ranks with one index would run other operations than ranks with several.
    """
    tensor, strides = tensor.contiguous(), strides_in_order(tensor.shape)
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def scatter_sum(local: torch.Tensor, dim: int, owners: Owners, axis: Axis) -> torch.Tensor:
    """Returns this rank's share, along `dim`, of the sum of all ranks' tensors. Collective."""
    return Scatter(local, dim, owners, axis).wait()


class Scatter:
    """A reduce-scatter under way of `local`, whose sum each rank keeps its share of along `dim`. Collective."""

    def __init__(self, local: torch.Tensor, dim: int, owners: Owners, axis: Axis):
        self.dim, self.owners, self.axis = dim, owners, axis
        self.sent = _in_blocks(local.movedim(dim, 0), owners, axis)  # kept until it is over
        self.share = self.sent.new_empty((max(owners.counts), *self.sent.shape[1:]))
        self.pending = reduce_scatter(self.share.view(-1), self.sent.view(-1), axis, "activations", wait=False)

    def wait(self) -> torch.Tensor:
        """Returns this rank's share of the sum, once the messages are over."""
        self.pending.wait()
        return packed(self.share[: self.owners.counts[self.axis.index]].movedim(0, self.dim))


def _in_blocks(front: torch.Tensor, owners: Owners, axis: Axis) -> torch.Tensor:
    """Returns `front` (n, ...) as one block for each rank, in rank order, padded with zeros to the longest one."""
    most = max(owners.counts)
    if owners.order is None and all(count == most for count in owners.counts):
        return front.contiguous()
    # a reduce-scatter takes blocks of one size, in the order of ranks
    padded = front.new_zeros((axis.size * most, *front.shape[1:]))
    for rank, count in enumerate(owners.counts):
        padded[rank * most : rank * most + count] = owners.take(front, 0, rank)
    return padded


class GatheredView:
    """A view of a gathered part: the part, the view as a function, and the part's version when it was gathered."""

    def __init__(self, part: Part, view: Callable[[torch.Tensor], torch.Tensor]):
        self.part, self.view, self.version = part, view, part._version

    @property
    def moved(self) -> bool:
        """Whether the part was written since it was last gathered."""
        return self.part._version != self.version

    def through(self, view: Callable[[torch.Tensor], torch.Tensor]) -> GatheredView:
        """Returns the `GatheredView` of the same part that applies `view` to this view."""
        return GatheredView(self.part, lambda whole: view(self.view(whole)))

    def whole(self) -> torch.Tensor:
        """Returns the part as it is now, gathered into memory of its own. Collective."""
        self.version = self.part._version
        return gathered(self.part)
