"""Our collectives. A new one: also ledger, observe, recording, guard/diagnose; its time: costs/wire.

An `Axis` is this rank's group along a mesh axis. With one rank in it every collective is the identity and no
process group is touched.

`sum_over` is the differentiable one: an all-reduce whose adjoint is an all-reduce (the objective is the sum of the
ranks' local losses).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from shardwise.comm.ledger import Ledger, Overlap
from shardwise.comm.observe import tagged
from shardwise.host import has_values
from shardwise.layout.grid import AXES, CHUNKS, INNER

# torch 2.13 renamed these two; earlier versions know the old names alone
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_DEPTHS = {name: place for place, name in enumerate((*AXES, CHUNKS))}


@dataclass(frozen=True)
class Axis:
    """A group of ranks along one mesh axis: its name, its ranks, and this rank's place among them."""

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]  # global ranks, in the group's order
    sequence: bool = False  # sums over it leave every rank a share of the sequence
    early: bool = False  # sums over it are begun as soon as their summands are there, and waited for when needed
    rehearsal: Ledger | None = None  # shapes alone are looked at: nothing is sent but noted here, results mean nothing
    overlap_from: float = math.inf  # products of a convolution from which the halo it reads is on its way beside them
    halo_depth: int = 1  # convolutions that one exchange of halos serves
    copies: bool = False  # in a rehearsal: as gloo, keep what is sent, and scatter sums of a copy, until waited for

    @classmethod
    def alone(cls, name: str, rank: int = 0) -> Axis:
        """Returns an axis of one rank."""
        return cls(name, 1, 0, None, (rank,))

    @cached_property
    def depth(self) -> int:
        """Returns the place of the axis among those of a plan, outermost first."""
        return _DEPTHS[self.name]

    @cached_property
    def positions(self) -> bool:
        """Returns whether the axis cuts positions (of a sequence, of space): ranks share samples and sum gradients."""
        return self.name in INNER or self.name == CHUNKS

    @property
    def turns(self) -> bool:
        """Returns whether its "ranks" are turns of one rank (chunks), which cannot send: sums over it stay summands."""
        return self.name == CHUNKS

    @property
    def silent(self) -> bool:
        """Returns whether collectives send nothing."""
        return self.size == 1 or self.rehearsal is not None

    def note(self, tag: str, op: str, full: torch.Tensor, received: int | None = None) -> None:
        """Record in a rehearsal what would have been sent; `received` bytes from others, where they are known."""
        if self.rehearsal is not None:
            self.rehearsal.record(tag, op, self.name, full.numel() * full.element_size(), self.size, received)


class Pending:
    """A collective that was issued; `wait` returns when its result may be read."""

    def __init__(self, work: dist.Work | None):
        self.work = work

    def wait(self) -> None:
        """Blocks the host (or only orders the stream) until the result is there."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    @property
    def over(self) -> bool:
        """Returns whether the collective is complete, as far as known without waiting (gloo does not tell of sends)."""
        return self.work is None or self.work.is_completed()


class Rehearsed(Pending):
    """A collective of a rehearsal, with the memory that a backend keeps until somebody waits."""

    def __init__(self, memory: torch.Tensor):
        super().__init__(None)
        self.memory: torch.Tensor | None = memory

    def wait(self) -> None:
        """Frees the memory that the collective kept."""
        self.memory = None

    @property
    def over(self) -> bool:
        """Returns whether `wait` was called."""
        return self.memory is None


class _Passing(Pending):
    """A collective of a rehearsal; when it is waited for, the operations since its start are noted as overlapping."""

    def __init__(self, ledger: Ledger, op: str, axis: str, came: dict[int, int]):
        super().__init__(None)
        self.ledger, self.exchange, self.began = ledger, (op, axis, came), ledger.clock()

    def wait(self) -> None:
        """Notes the operations that ran since the collective began."""
        if self.ledger.clock() > self.began:
            self.ledger.overlaps.append(Overlap(*self.exchange, self.began, self.ledger.clock()))


class _Traced(Pending):
    """A collective in a program that is compiled, not run: its result is copied to where it belongs."""

    def __init__(self, result: torch.Tensor, goal: torch.Tensor):
        super().__init__(None)
        self.result: torch.Tensor | None = result
        self.goal = goal

    def wait(self) -> None:
        """Copy the result into place: from here on it may be read."""
        if self.result is not None:
            self.goal.copy_(_functional.wait_tensor(self.result))
            self.result = None


_functional = torch.ops._c10d_functional


def is_traced(tensor: torch.Tensor) -> bool:
    """Returns whether a compiler looks at what is done to this tensor, which has no values."""
    return isinstance(tensor, FunctionalTensor | FakeTensor)


def is_written_down(axis: Axis, *tensors: torch.Tensor) -> bool:
    """Returns whether operations on these tensors become a compiled program, which has no point-to-point messages."""
    return axis.rehearsal is None and any(map(is_traced, tensors))


def _name(axis: Axis) -> str:
    assert axis.group is not None
    return axis.group.group_name


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def stand_in(received: torch.Tensor) -> None:
    """Fills with zeros what a rehearsal does not receive; of a tensor without values nothing, as ops are counted."""
    if has_values(received):
        received.zero_()


def _waited(pending: Pending, wait: bool) -> Pending:
    if wait:
        pending.wait()
    return pending


def all_reduce(tensor: torch.Tensor, axis: Axis, tag: str, *, wait: bool = True, op: str = "sum") -> Pending:
    """Sum `tensor` over the axis (or take the "max" or "min"), in place; returns what to wait for unless `wait`."""
    # a rank alone has the sum, and a rehearsal notes what would be sent
    if axis.silent:
        axis.note(tag, "all_reduce", tensor)
        return Pending(None)
    # a compiler looks on: an op of its program, whose result is copied into place
    if is_traced(tensor):
        return _waited(_Traced(_functional.all_reduce(tensor, op, _name(axis)), tensor), wait)
    with tagged(tag):
        pending = Pending(dist.all_reduce(tensor, op=_OPS[op], group=axis.group, async_op=True))
    if wait:
        pending.wait()
    return pending


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, axis: Axis, tag: str, *, wait: bool = True) -> Pending:
    """Sum `full` (p*n,) over the axis, this rank's slice into `shard` (n,); returns what to wait for unless `wait`."""
    if axis.rehearsal is not None:
        axis.note(tag, "reduce_scatter", full)
        stand_in(shard)
        # gloo scatters sums of a copy, which takes memory until it is waited for
        return _waited(Rehearsed(full.clone()) if axis.copies else Pending(None), wait)
    if axis.size == 1:
        shard.copy_(full)
        return Pending(None)
    # a compiler looks on: an op of its program, whose result is copied into place
    if is_traced(full):
        return _waited(_Traced(_functional.reduce_scatter_tensor(full, "sum", axis.size, _name(axis)), shard), wait)
    with tagged(tag):
        pending = Pending(_reduce_scatter(shard, full, group=axis.group, async_op=True))
    if wait:
        pending.wait()
    return pending


def all_gather(full: torch.Tensor, shard: torch.Tensor, axis: Axis, tag: str, *, wait: bool = True) -> Pending:
    """Put every rank's `shard` (n,) side by side into `full` (p*n,); returns what to wait for unless `wait`."""
    if axis.rehearsal is not None:
        axis.note(tag, "all_gather", full)
        if has_values(full):
            full.view(axis.size, -1).copy_(shard.view(1, -1))  # values like a rank's own, where code reads them
        return Pending(None)
    if axis.size == 1:
        if full.data_ptr() != shard.data_ptr():  # a shard may be a part of `full` already
            full.copy_(shard)
        return Pending(None)
    # a compiler looks on: an op of its program, whose result is copied into place
    if is_traced(shard):
        return _waited(_Traced(_functional.all_gather_into_tensor(shard, axis.size, _name(axis)), full), wait)
    with tagged(tag):
        pending = Pending(_all_gather(full, shard, group=axis.group, async_op=True))
    if wait:
        pending.wait()
    return pending


def all_to_all(
    received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int], axis: Axis, tag: str,
    *, wait: bool = True,
) -> Pending:  # fmt: skip
    """Send `sent_sizes[j]` rows of `sent` to the axis's j-th rank, receive likewise; returns what to wait for.

    `wait`: it is over when this returns.
    """
    if axis.rehearsal is not None:
        row_bytes = received.numel() * received.element_size() // max(received.shape[0], 1)
        # what a rank sends itself crosses no link
        came = {rank: row_bytes * size for rank, size in enumerate(received_sizes) if size and rank != axis.index}
        axis.note(tag, "all_to_all", sent, sum(came.values()))
        axis.rehearsal.arrivals.update({("all_to_all", axis.name, rank): size for rank, size in came.items()})
        stand_in(received)
        return _waited(_Passing(axis.rehearsal, "all_to_all", axis.name, came), wait)
    if axis.size == 1:
        received.copy_(sent)
        return Pending(None)
    # a compiler looks on: an op of its program, whose result is copied into place
    if is_traced(sent):
        result = _functional.all_to_all_single(sent, received_sizes, sent_sizes, _name(axis))
        return _waited(_Traced(result, received), wait)
    with tagged(tag):
        work = dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=axis.group, async_op=True)
    return _waited(Pending(work), wait)


def broadcast(tensor: torch.Tensor, axis: Axis, source_index: int, tag: str) -> None:
    """Copy the tensor of the axis's `source_index`-th rank to all of them."""
    if not axis.silent:
        with tagged(tag):
            dist.broadcast(tensor, src=axis.ranks[source_index], group=axis.group)


def gather_rows(row: torch.Tensor, axis: Axis, tag: str = "control") -> torch.Tensor:
    """Returns every rank's `row` (k,) as a table (p, k), the same on all ranks."""
    table = row.new_empty((axis.size, row.numel()))
    all_gather(table.view(-1), row.contiguous(), axis, tag)
    return table


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if not axis.silent:
        with tagged("control"):
            dist.barrier(group=axis.group)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor, axis: Axis, tag: str) -> torch.Tensor:
        ctx.axis, ctx.tag = axis, tag
        total = tensor.clone(memory_format=torch.contiguous_format)  # an all-reduce is in place, and the input stays
        all_reduce(total, axis, tag)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _SumOver.apply(gradient, ctx.axis, ctx.tag), None, None


def sum_over(tensor: torch.Tensor, axis: Axis, tag: str) -> torch.Tensor:
    """Returns the differentiable sum over the axis; the adjoint of an all-reduce is an all-reduce."""
    return tensor if axis.size == 1 else _SumOver.apply(tensor, axis, tag)


class _GatherSamples(torch.autograd.Function):
    """Gathers all ranks' samples along dim 0, ranks having unequal numbers; backward keeps this rank's rows.

    Every rank computes the same objective from the gathered rows, so its gradient for this rank's rows is already
    complete: nothing is summed, and the caller counts the objective once.
    """

    @staticmethod
    def forward(ctx, local: torch.Tensor, counts: tuple[int, ...], axis: Axis, tag: str) -> torch.Tensor:
        ctx.axis, ctx.tag = axis, tag
        ctx.start, ctx.count = sum(counts[: axis.index]), counts[axis.index]
        ctx.rows = local.shape[0]
        # an all-gather takes rows of one size: each rank fills up to the largest, and the filling is cut away
        most = max(counts)
        padded = local.new_zeros((most, *local.shape[1:]))
        padded[: ctx.count] = local[: ctx.count]
        table = local.new_empty((axis.size * most, *local.shape[1:]))
        all_gather(table.view(-1), padded.view(-1), axis, tag)
        parts = [table[i * most : i * most + n] for i, n in enumerate(counts)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        mine = gradient.new_zeros((ctx.rows, *gradient.shape[1:]))
        mine[: ctx.count] = gradient[ctx.start : ctx.start + ctx.count]
        return mine, None, None, None


class _GatherSummands(_GatherSamples):
    """Gathers samples for what each rank goes on with for its own rows alone: backward sums the ranks' gradients."""

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _GatherSamples.backward(ctx, sum_over(gradient, ctx.axis, ctx.tag))


def gather_samples(
    local: torch.Tensor, counts: tuple[int, ...], axis: Axis, tag: str, *, summed: bool = False
) -> torch.Tensor:
    """Returns the rows of every rank along dim 0: (count_r, ...) on rank r -> (sum of counts, ...) on all.

    summed  a rank's gradient of the gathered rows is its summand; else it is complete on each
    """
    return (_GatherSummands if summed else _GatherSamples).apply(local, counts, axis, tag)
