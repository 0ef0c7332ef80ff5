"""ZeRO-1 and ZeRO-2 (made in engine/recipe): optimizer state, and gradients, sharded as equal flat pieces.

Parameters lie end to end in flat buckets; rank r owns the r-th N-th of each bucket and updates only that.

    backward   |g of bucket| --reduce-scatter--> |g_r|          each rank: its N-th of the sum
    optimizer  |w_r| <- |w_r|, |g_r|, |state_r|                  on 1/N of the elements
    publish    |w_r| --all-gather--> |w of bucket|               everybody: the whole

    zero=1  gradients stay whole until the last micro-batch, then are reduced once
    zero=2  every micro-batch is reduced; only |g_r| outlives a backward

Bytes on the wire over dp_shard: (N-1)/N P for gradients (zero=2: for each micro-batch) + (N-1)/N P for parameters.
With replicas too (HYBRID_SHARD), |g_r| is then summed over dp_replicate: 2 (R-1)/R P/N.
Source: Rajbhandari et al., "ZeRO" (SC 2020), sections 5.1, 5.2 and 7.

What this does not do: update what needs a whole tensor at once (row or column statistics, matrix products). The
engine finds that out by trying the optimizer on pieces.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from shardwise.comm import Axis, Gathering, Pending, all_gather, all_reduce, ready, reduce_scatter
from shardwise.comm.buckets import Bucket, GradientBuckets, shaped
from shardwise.comm.tree import FixedOrder
from shardwise.layout.zero_stages import ZeroStage
from shardwise.parallel.slots import Arrived, Slot, bring_back, check_shape, follow, is_away, joined
from shardwise.precision import Precision


class _Shard:
    """One bucket, and this rank's piece of it: 1/N of its elements.

    weights   the whole bucket, in which the module's parameters are views
    mine      this rank's N-th of it
    master    what the optimizer updates: `mine`, or a wider copy of it in mixed precision
    gradient  the sum over dp_shard, of the same length; None until something was reduced
    """

    def __init__(self, bucket: Bucket, axis: Axis, precision: Precision):
        self.bucket = bucket
        layout = bucket.layout
        device = bucket.params[0].device
        self.low, self.high = layout.shard(axis.size, axis.index)
        self.weights = torch.zeros(layout.size, dtype=precision.compute, device=device)
        self.mine = self.weights[self.low : self.high]
        self.master = self.mine
        if precision.mixed:
            self.master = torch.zeros(self.high - self.low, dtype=precision.master, device=device)
        self.gradient: torch.Tensor | None = None
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        for param, view in self.views():
            view.copy_(param)
            param.data = view  # so that publishing a bucket's weights is one all-gather, without a copy out of it

    def views(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Returns for each parameter of the bucket (parameter, the view of the bucket where its values lie)."""
        pairs = zip(self.bucket.layout.entries, self.bucket.params, strict=True)
        return [(p, shaped(self.weights[e.start : e.stop], p.shape, as_complex=p.is_complex())) for e, p in pairs]

    def renew(self) -> None:
        """Copy the parameters from wherever they are into new memory of the bucket."""
        # not in place: what a script put there may be a view of the old memory (two weights exchanged)
        self.weights = torch.zeros_like(self.weights)
        self._fill()
        wide = self.master is not self.mine
        self.mine = self.weights[self.low : self.high]
        self.master = self.master if wide else self.mine


class Flat:
    """ZeRO-1 or 2: flat pieces of parameters for the optimizer, whole parameters for the module."""

    in_pieces = True

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], shard: Axis, replicate: Axis, precision: Precision, *,
        stage: ZeroStage, order: FixedOrder | None = None, pairs: Collection[str] = (),
    ):  # fmt: skip
        """pairs  names of parameters that are complex outside of the module, and real in it"""
        self.axis = shard
        self.replicate = replicate
        self.precision = precision
        self.stage = stage
        self.order = order
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.complex = [name in pairs or param.is_complex() for name, param in named]
        self._module_shapes = [param.shape for _, param in named]  # as the module has them: pairs with their dim of 2
        self.shapes = [param.shape[:-1] if name in pairs else param.shape for name, param in named]
        even = shard.size * (2 if any(self.complex) else 1)  # both parts of a number lie on one rank
        self.buckets = GradientBuckets(
            named, dtype=precision.reduce, ranks=even, summing=shard.size * replicate.size, keep=not stage.gradients,
            launch=self._reduce, order=order,
        )  # fmt: skip
        self.shards = [_Shard(bucket, shard, precision) for bucket in self.buckets.buckets]
        self.slots: list[Slot] = []
        self._places: list[tuple[_Shard, int, int, int]] = []  # for each slot: shard, index, [first, last) within it
        for part in self.shards:
            self._add_slots(part)
        self._pending: list[tuple[Pending, _Shard, torch.Tensor]] = []  # reductions under way, into which tensor
        self._arrived: Arrived | None = None
        self._summed = False  # over replicas, in this step
        self._used: set[int] = set()

    def _add_slots(self, part: _Shard) -> None:
        """Add a slot for each parameter of which this rank has elements in one bucket."""
        for entry, first, last in part.bucket.layout.pieces(self.axis.size, self.axis.index):
            start, stop = first - part.low, last - part.low
            master = nn.Parameter(self._outside(entry.index, part.master[start:stop]))
            self.slots.append(Slot(self.names[entry.index], self.shapes[entry.index], master, whole=False))
            self._places.append((part, entry.index, start, stop))

    def _outside(self, index: int, numbers: torch.Tensor) -> torch.Tensor:
        """Returns elements of the index-th parameter (1-d), pairs as complex numbers where it is complex."""
        return torch.view_as_complex(numbers.view(-1, 2)) if self.complex[index] else numbers

    @torch.no_grad()
    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Set this rank's piece of a master weight from its full initial value."""
        if not self.precision.mixed:  # the masters are the module's weights, which have their values
            return
        _, entry = self._find(index)
        for slot, (part, number, start, stop) in zip(self.slots, self._places, strict=True):
            if number == index:
                first = part.low - entry.start
                slot.master.copy_(self._outside(index, value.reshape(-1)[first + start : first + stop]))

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        self._summed = False
        for part in self.shards:
            part.gradient = None
        for slot in self.slots:
            slot.master.grad = None
        self.buckets.start_step()  # behind them, which may lie in the buckets' memory

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch, whose gradients are reduced under zero=2, under zero=1 only if it is the last."""
        self.buckets.start_micro_batch(sync=last or self.stage.gradients)

    def expect_pieces(self) -> None:
        """Watches the next backward for gradients that come in several pieces, as by reentrant checkpoints."""
        self.buckets.expect_pieces()

    def finish_micro_batch(self) -> set[int]:
        """Launch what backward did not complete (zero=2 adds up shards); returns the indices of parameters reached."""
        self.buckets.finish_micro_batch()
        if self.stage.gradients and self.order is None:
            self._collect()
            for bucket in self.buckets.buckets:
                bucket.filled.clear()  # else a bucket that the next backward misses would be sent without its zeros
        return self.buckets.used_now

    def _reduce(self, bucket: Bucket) -> None:
        """Starts the reduction of a whole bucket over dp_shard, of which this rank keeps its piece."""
        part = self.shards[self.buckets.buckets.index(bucket)]
        assert bucket.buffer is not None
        if self.stage.gradients:  # zero=2: only the piece stays
            reduced = bucket.buffer.new_empty(part.high - part.low)
        else:
            reduced = bucket.buffer[part.low : part.high]  # in place: the rest of the bucket is not read again
        pending = reduce_scatter(reduced, bucket.buffer, self.axis, "gradients", wait=False)
        self._pending.append((pending, part, reduced))
        if self.stage.gradients:  # whole gradients do not outlive a backward
            bucket.buffer = None  # the collective keeps it alive until it is done
        # gradients are handed on as they are made (`use_as_made`), while the newest reduction travels
        if self._arrived is not None:
            self._collect(travelling=min(1, self.axis.size - 1))

    def use_as_made(self, arrived: Arrived) -> None:
        """Call a function for the gradients of each bucket that is summed, and keep none of them."""
        self._arrived = arrived

    def _collect(self, travelling: int = 0) -> None:
        """Wait for reductions over dp_shard, but for so many of the last."""
        while len(self._pending) > travelling:
            pending, part, reduced = self._pending.pop(0)
            pending.wait()
            part.gradient = reduced if part.gradient is None else part.gradient.add_(reduced)
            if self._arrived is not None:
                self._hand_over(part, self._arrived)

    def _hand_over(self, part: _Shard, arrived: Arrived) -> None:
        """Sum a bucket's gradients over replicas, which otherwise comes after the last bucket, and give them away."""
        assert part.gradient is not None
        self._summed = True
        all_reduce(part.gradient, self.replicate, "gradients")
        flat = part.gradient = part.gradient.to(self.precision.master)
        slots = []
        if part.bucket.whole:
            self._set_gradients(part, set(range(len(self.params))))
            slots = [slot for slot, place in zip(self.slots, self._places, strict=True) if place[0] is part]
            part.gradient = None
            part.bucket.hand_over()
            for param in part.bucket.params:
                param.grad = None
        arrived(slots, self.shards.index(part), flat)

    def finish_step(self, used: set[int]) -> None:
        """Wait, sum over replicas (once, however often it is called), and give each piece its gradient.

        used   indices of parameters that this rank's backward reached (called again: any rank's); others get None
        """
        self._collect()
        self._used = used
        # summed once in a step, however often it is finished
        if not self._summed:
            self._summed = True
            if self.order is not None:  # deterministic: no bucket was reduced on the way, the tree of sums does it now
                for number, part in enumerate(self.shards):
                    part.gradient = self.order.shard(number, part.bucket.ensure())
                    part.bucket.buffer = None
            over_replicas = [
                all_reduce(part.gradient, self.replicate, "gradients", wait=False)
                for part in self.shards
                # buckets are launched alike on all ranks, so a shard without a gradient is so on all
                if part.gradient is not None
            ]
            for pending in over_replicas:
                pending.wait()
        # gradients in the reduced dtype become those of the masters
        for part in self.shards:
            if part.gradient is not None and part.gradient.dtype != self.precision.master:
                part.gradient = part.gradient.to(self.precision.master)
        for part in self.shards:
            # handed over: a sub-group has used and freed it
            if not part.bucket.handed_over:
                self._set_gradients(part, used)

    def _set_gradients(self, part: _Shard, used: set[int]) -> None:
        """Point the masters of one shard at their gradients, those that any rank `used`; the others at None."""
        for slot, (of, index, start, stop) in zip(self.slots, self._places, strict=True):
            if of is part:
                # not reached by any rank: None and not zeros, since an optimizer leaves such a parameter alone
                piece = part.gradient[start:stop] if part.gradient is not None and index in used else None
                slot.master.grad = None if piece is None else self._outside(index, piece)

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns this rank's piece (1/N of the elements, 1-d) of each bucket's gradients, if there; never None."""
        return [part.gradient for part in self.shards if part.gradient is not None]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy into the masters what was written into the weights by hand. Nothing is sent."""
        for param, name, shape in zip(self.params, self.names, self._module_shapes, strict=True):
            check_shape(name, param, shape)
        for part in self.shards:
            if any(is_away(param, view) for param, view in part.views()):  # `p.data = x`: the next gather would miss it
                part.renew()
            if self.precision.mixed:  # masters are copies in another dtype
                follow(part.master, part.mine)
        for slot, (part, index, start, stop) in zip(self.slots, self._places, strict=True):
            # a script may have put other data into the module's weight: the master's place follows it
            if is_away(slot.master, part.master[start:stop]):
                slot.master.data = self._outside(index, part.master[start:stop])

    @torch.no_grad()
    def publish(self, *, rounded: bool = False) -> None:
        """All-gather the updated shards into everybody's weights; `rounded`: masters are in this rank's already."""
        # the update may have set a master's `.data`, which lies elsewhere then: back into the shard first
        for slot, (part, index, start, stop) in zip(self.slots, self._places, strict=True):
            if isinstance(slot.master, nn.Parameter):  # else it rests in a tier, which has gathered it
                bring_back(slot.master, self._outside(index, part.master[start:stop]))
        pending = []
        for part in self.shards:
            if self.precision.mixed and not rounded:  # else what is gathered has the masters' values
                part.mine.copy_(part.master)
            pending.append(all_gather(part.weights, part.mine, self.axis, "parameters", wait=False))
        for work in pending:
            work.wait()

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (this rank's piece, its wider master) of each bucket in mixed precision; else []."""
        return [(part.mine, part.master) for part in self.shards if part.master is not part.mine]

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns buckets (zero=1, whose slices the shards are) and this rank's shards (zero=2)."""
        return [bucket.buffer for bucket in self.buckets.buckets] + [part.gradient for part in self.shards]

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the whole master weight."""
        part, entry = self._find(index)
        pieces = [slot.master for slot, place in zip(self.slots, self._places, strict=True) if place[1] == index]
        # no slot: none of it is here
        piece = pieces[0].detach() if pieces else self._piece(part, part.mine.to(self.precision.master), entry)
        return self.whole(index, piece)

    def full_gradient(self, index: int) -> Gathering:
        """Returns the gathering of the whole gradient; its result is None where no rank used the parameter."""
        part, entry = self._find(index)
        if part.gradient is None or index not in self._used:
            return ready(None)
        return self.whole(index, self._piece(part, part.gradient, entry))

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns the `Gathering`, to be driven, of a whole tensor of the index-th parameter from all ranks' pieces."""
        return joined(self, index, self.shapes[index], piece, self.axis)

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view (1-d, may be empty) of a whole parameter that is the piece of rank `shard_rank`."""
        part, entry = self._find(index)
        low, high = part.bucket.layout.shard(self.axis.size, shard_rank)
        first, last = max(entry.start, low), min(entry.stop, high)
        width = 2 if self.complex[index] else 1  # numbers of the bucket for each element
        return whole.view(-1)[(first - entry.start) // width : (max(first, last) - entry.start) // width]

    def _find(self, index: int):
        """Returns (shard, entry of its bucket) of the index-th parameter."""
        for part in self.shards:
            for entry in part.bucket.layout.entries:
                if entry.index == index:
                    return part, entry
        raise KeyError(index)

    def _piece(self, part: _Shard, shard: torch.Tensor, entry) -> torch.Tensor:
        first, last = max(entry.start, part.low), min(entry.stop, part.high)
        return self._outside(entry.index, shard.detach()[first - part.low : max(first, last) - part.low])
