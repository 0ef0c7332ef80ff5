"""Our collectives over an `Axis`. A new one: also ledger, observe, recording, guard/diagnose; its time: costs/wire.

An `Axis` is this rank's group along a mesh axis. With one rank in it every collective is the identity, and no
process group is used.

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
    """A group of ranks along one mesh axis.

    name          of the axis, such as "tp";  size  number of ranks;  index  this rank's place among them
    group         process group; None if nothing is ever sent (a single rank, a rehearsal without processes)
    ranks         global ranks, in the group's order
    sequence      sequence parallelism: sums over the axis are reduce-scattered along the sequence
    early         whether sums over it are issued as soon as their summands are there, and waited for when needed
    rehearsal     if set, nothing is sent: collectives are recorded in this ledger, and their results mean nothing
    overlap_from  multiplications of a convolution from which it runs while its halo is exchanged
    halo_depth    number of convolutions for which one halo exchange fetches the borders
    copies        in a rehearsal: whether to hold memory as gloo does, for what is sent and for reduce-scatters
    """

    name: str
    size: int
    index: int
    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    sequence: bool = False
    early: bool = False
    rehearsal: Ledger | None = None
    overlap_from: float = math.inf
    halo_depth: int = 1
    copies: bool = False

    @classmethod
    def alone(cls, name: str, rank: int = 0) -> Axis:
        """Returns an axis whose only rank is the global `rank`."""
        return cls(name, 1, 0, None, (rank,))

    @cached_property
    def depth(self) -> int:
        """Returns the place of the axis in the fixed order of a plan's axes, outermost first."""
        return _DEPTHS[self.name]

    @cached_property
    def positions(self) -> bool:
        """Whether the axis shards positions (of a sequence, of space), so that its ranks have the same samples."""
        return self.name in INNER or self.name == CHUNKS

    @property
    def turns(self) -> bool:
        """Whether its "ranks" are turns of one rank (`position_chunks`), which cannot communicate."""
        return self.name == CHUNKS

    @property
    def silent(self) -> bool:
        """Whether collectives over it send nothing: it has one rank, or is rehearsed."""
        return self.size == 1 or self.rehearsal is not None

    def note(self, tag: str, op: str, full: torch.Tensor, received: int | None = None) -> None:
        """Records a collective in the rehearsal's ledger, if there is one.

        tag       of the collective, such as "gradients";  op  a key of `ledger.FACTORS`;  full  its full tensor
        received  bytes from other ranks; None: follow from op and size
        """
        if self.rehearsal is not None:
            self.rehearsal.record(tag, op, self.name, full.numel() * full.element_size(), self.size, received)


class Pending:
    """A collective that was issued; after `wait` its result may be read. `work`: torch's handle; None: complete."""

    def __init__(self, work: dist.Work | None):
        self.work = work

    def wait(self) -> None:
        """Waits for the result: blocks the host, or on an accelerator only the current stream."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    @property
    def over(self) -> bool:
        """Whether the collective is known to be complete, without waiting (of sends gloo does not report it)."""
        return self.work is None or self.work.is_completed()


class Rehearsed(Pending):
    """A collective of a rehearsal; holds memory as a backend does until `wait`."""

    def __init__(self, memory: torch.Tensor):
        super().__init__(None)
        self.memory: torch.Tensor | None = memory

    def wait(self) -> None:
        """Frees the memory that the collective kept."""
        self.memory = None

    @property
    def over(self) -> bool:
        """Whether `wait` was called."""
        return self.memory is None


class _Passing(Pending):
    """A collective of a rehearsal; `wait` records in the ledger that the operations since its start ran beside it.

    came  index of a sending rank on the axis -> bytes
    """

    def __init__(self, ledger: Ledger, op: str, axis: str, came: dict[int, int]):
        super().__init__(None)
        self.ledger, self.exchange, self.began = ledger, (op, axis, came), ledger.clock()

    def wait(self) -> None:
        """Adds an `Overlap` to the ledger, unless no operation ran since the collective began."""
        if self.ledger.clock() > self.began:
            self.ledger.overlaps.append(Overlap(*self.exchange, self.began, self.ledger.clock()))


class _Traced(Pending):
    """A collective while a compiler records the program; `wait` records a wait, and a copy of `result` to `goal`."""

    def __init__(self, result: torch.Tensor, goal: torch.Tensor):
        super().__init__(None)
        self.result: torch.Tensor | None = result
        self.goal = goal

    def wait(self) -> None:
        """Records the wait and the copy into the output tensor."""
        if self.result is not None:
            self.goal.copy_(_functional.wait_tensor(self.result))
            self.result = None


_functional = torch.ops._c10d_functional


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a compiler is recording operations on this tensor, which has no values."""
    return isinstance(tensor, FunctionalTensor | FakeTensor)


def is_written_down(axis: Axis, *tensors: torch.Tensor) -> bool:
    """Whether operations on these tensors are being compiled; a compiled program has no point-to-point messages."""
    return axis.rehearsal is None and any(map(is_traced, tensors))


def _name(axis: Axis) -> str:
    """Returns torch's name of the axis's process group."""
    assert axis.group is not None
    return axis.group.group_name


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def stand_in(received: torch.Tensor) -> None:
    """Fills a tensor that a rehearsal does not receive with zeros; a fake tensor stays, since ops are counted."""
    if has_values(received):
        received.zero_()


def _waited(pending: Pending, wait: bool) -> Pending:
    """Returns `pending`, after waiting for it if `wait`."""
    if wait:
        pending.wait()
    return pending


def all_reduce(tensor: torch.Tensor, axis: Axis, tag: str, *, wait: bool = True, op: str = "sum") -> Pending:
    """Reduces `tensor` over the axis in place; returns the `Pending`.

    tag   purpose, for the ledger, such as "gradients";  op  "sum", "max" or "min"
    wait  whether to wait here; else the caller must, before it reads `tensor`
    """
    # a single rank has the sum, and a rehearsal only records
    if axis.silent:
        axis.note(tag, "all_reduce", tensor)
        return Pending(None)
    # a compiler records: a functional op, whose result is copied into place
    if is_traced(tensor):
        return _waited(_Traced(_functional.all_reduce(tensor, op, _name(axis)), tensor), wait)
    with tagged(tag):
        pending = Pending(dist.all_reduce(tensor, op=_OPS[op], group=axis.group, async_op=True))
    if wait:
        pending.wait()
    return pending


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, axis: Axis, tag: str, *, wait: bool = True) -> Pending:
    """Sums `full` (p*n,) over the p ranks of the axis, and writes this rank's slice into `shard` (n,).

    Returns the `Pending`; tag and wait as of `all_reduce`.
    """
    if axis.rehearsal is not None:
        axis.note(tag, "reduce_scatter", full)
        stand_in(shard)
        # gloo makes a copy and keeps it until somebody waits
        return _waited(Rehearsed(full.clone()) if axis.copies else Pending(None), wait)
    if axis.size == 1:
        shard.copy_(full)
        return Pending(None)
    # a compiler records: a functional op, whose result is copied into place
    if is_traced(full):
        return _waited(_Traced(_functional.reduce_scatter_tensor(full, "sum", axis.size, _name(axis)), shard), wait)
    with tagged(tag):
        pending = Pending(_reduce_scatter(shard, full, group=axis.group, async_op=True))
    if wait:
        pending.wait()
    return pending


def all_gather(full: torch.Tensor, shard: torch.Tensor, axis: Axis, tag: str, *, wait: bool = True) -> Pending:
    """Concatenates the p ranks' `shard`s (n,) into `full` (p*n,).

    Returns the `Pending`; tag and wait as of `all_reduce`.
    """
    if axis.rehearsal is not None:
        axis.note(tag, "all_gather", full)
        if has_values(full):
            full.view(axis.size, -1).copy_(shard.view(1, -1))  # this rank's own values, in case code reads them
        return Pending(None)
    if axis.size == 1:
        if full.data_ptr() != shard.data_ptr():  # `shard` may be a view of `full`
            full.copy_(shard)
        return Pending(None)
    # a compiler records: a functional op, whose result is copied into place
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
    """Sends the next `sent_sizes[j]` rows (dim 0) of `sent` to the axis's j-th rank, for each j; returns the `Pending`.

    received, received_sizes  rows that arrive, in rank order
    tag, wait                 as of `all_reduce`
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
    # a compiler records: a functional op, whose result is copied into place
    if is_traced(sent):
        result = _functional.all_to_all_single(sent, received_sizes, sent_sizes, _name(axis))
        return _waited(_Traced(result, received), wait)
    with tagged(tag):
        work = dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=axis.group, async_op=True)
    return _waited(Pending(work), wait)


def broadcast(tensor: torch.Tensor, axis: Axis, source_index: int, tag: str) -> None:
    """Overwrites `tensor`, on all ranks of the axis, with that of its `source_index`-th rank; waits."""
    if not axis.silent:
        with tagged(tag):
            dist.broadcast(tensor, src=axis.ranks[source_index], group=axis.group)


def gather_rows(row: torch.Tensor, axis: Axis, tag: str = "control") -> torch.Tensor:
    """Returns every rank's `row` (k,) as a table (p, k), the same on all ranks."""
    table = row.new_empty((axis.size, row.numel()))
    all_gather(table.view(-1), row.contiguous(), axis, tag)
    return table


def barrier(axis: Axis) -> None:
    """Waits until every rank of the axis has called it."""
    if not axis.silent:
        with tagged("control"):
            dist.barrier(group=axis.group)


class _SumOver(torch.autograd.Function):
    """All-reduce into a new tensor, whose backward is an all-reduce of the gradient."""

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
    """Returns the sum of `tensor` over the axis as a new tensor; differentiable, backward all-reduces the gradient."""
    return tensor if axis.size == 1 else _SumOver.apply(tensor, axis, tag)


class _GatherSamples(torch.autograd.Function):
    """Gathers all ranks' samples along dim 0, in unequal numbers; backward takes this rank's slice of the gradient.

    Every rank computes the same objective from the gathered samples, so its gradient for this rank's samples is already
    complete. Nothing is summed, and the caller must count the objective once.
    """

    @staticmethod
    def forward(ctx, local: torch.Tensor, counts: tuple[int, ...], axis: Axis, tag: str) -> torch.Tensor:
        ctx.axis, ctx.tag = axis, tag
        ctx.start, ctx.count = sum(counts[: axis.index]), counts[axis.index]
        ctx.rows = local.shape[0]
        # an all-gather needs one size, so each rank pads to the largest, and the padding is dropped afterwards
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
    """The same, for ranks that compute different objectives from the gathered samples; backward sums gradients."""

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return _GatherSamples.backward(ctx, sum_over(gradient, ctx.axis, ctx.tag))


def gather_samples(
    local: torch.Tensor, counts: tuple[int, ...], axis: Axis, tag: str, *, summed: bool = False
) -> torch.Tensor:
    """Returns the samples of all ranks, concatenated: (counts[r], ...) on rank r -> (sum of counts, ...) on all.

    counts  samples of each rank; `local` may have more, which are left out
    summed  whether backward sums the gradient over ranks; False if each rank's gradient is already complete
    Differentiable.
    """
    return (_GatherSummands if summed else _GatherSamples).apply(local, counts, axis, tag)
