"""ZeRO-1 and ZeRO-2 on equal flat pieces: optimizer state is sharded, under ZeRO-2 gradients too (engine/recipe).

Parameters lie end to end in flat buckets of N equal pieces, one for each rank; rank r updates only piece r of each.

    backward   |g of bucket| --reduce-scatter--> |g_r|          each rank gets its piece of the sum
    optimizer  |w_r| <- |w_r|, |g_r|, |state_r|                  on 1/N of the elements
    publish    |w_r| --all-gather--> |w of bucket|               each rank gets the whole bucket

    zero=1  gradients stay unsharded until the last micro-batch, then are reduced once
    zero=2  every micro-batch is reduced; only |g_r| outlives a backward

Bytes on the wire over dp_shard: (N-1)/N P for gradients (zero=2: for each micro-batch) + (N-1)/N P for parameters.
With replicas too (HYBRID_SHARD), |g_r| is then summed over dp_replicate: 2 (R-1)/R P/N.
Source: Rajbhandari et al., "ZeRO" (SC 2020), sections 5.1, 5.2 and 7.

What this does not do: run an optimizer that needs a whole tensor at once (row or column statistics, matrix products).
The engine finds that out by trying the optimizer on pieces.
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
    """The weights of one bucket, and this rank's piece of them, which is 1/N of its elements.

    bucket     its gradients
    low, high  first and last + 1 element of the bucket that are this rank's
    weights    (bucket's size,) all weights, of which the module's parameters are views
    mine       (high - low,) view of `weights`, this rank's piece
    master     (high - low,) what the optimizer updates: `mine`, or a wider copy of it in mixed precision
    gradient   (high - low,) this rank's piece of the sum over dp_shard; None until something was reduced
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
        """Copies the parameters into the bucket's memory and makes them views of it."""
        for param, view in self.views():
            view.copy_(param)
            param.data = view  # so that publishing a bucket's weights is one all-gather, without a copy out of it

    def views(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Returns (parameter, its view of `weights`, in the parameter's shape) for each parameter of the bucket."""
        pairs = zip(self.bucket.layout.entries, self.bucket.params, strict=True)
        return [(p, shaped(self.weights[e.start : e.stop], p.shape, as_complex=p.is_complex())) for e, p in pairs]

    def renew(self) -> None:
        """Allocates new memory for the bucket and copies the parameters into it, from wherever their data lie."""
        # not into the old memory: data that a script has set may be views of it (two weights exchanged)
        self.weights = torch.zeros_like(self.weights)
        self._fill()
        wide = self.master is not self.mine
        self.mine = self.weights[self.low : self.high]
        self.master = self.master if wide else self.mine


class Flat:
    """ZeRO-1 or 2 (a `DataParallel`): the optimizer sees flat pieces of parameters, the module whole parameters."""

    in_pieces = True

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], shard: Axis, replicate: Axis, precision: Precision, *,
        stage: ZeroStage, order: FixedOrder | None = None, pairs: Collection[str] = (),
    ):  # fmt: skip
        """Lays the parameters into buckets.

        named      (name, parameter) of each trainable parameter
        shard      ranks among which each bucket is cut (dp_shard);  replicate  ranks that hold the same pieces
        stage      ZeRO-1 or 2;  order  sums gradients in a fixed order, under deterministic=true; else None
        pairs      names of complex parameters that the module holds as real ones with a last dim of 2
        """
        self.axis = shard
        self.replicate = replicate
        self.precision = precision
        self.stage = stage
        self.order = order
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self.complex = [name in pairs or param.is_complex() for name, param in named]
        self._module_shapes = [param.shape for _, param in named]  # shapes in the module, with the last dim 2 of pairs
        self.shapes = [param.shape[:-1] if name in pairs else param.shape for name, param in named]
        even = shard.size * (2 if any(self.complex) else 1)  # real and imaginary part stay on one rank
        self.buckets = GradientBuckets(
            named, dtype=precision.reduce, ranks=even, summing=shard.size * replicate.size, keep=not stage.gradients,
            launch=self._reduce, order=order,
        )  # fmt: skip
        self.shards = [_Shard(bucket, shard, precision) for bucket in self.buckets.buckets]
        self.slots: list[Slot] = []
        # for each slot (its shard, index of its parameter, first and last + 1 element within the shard's piece)
        self._places: list[tuple[_Shard, int, int, int]] = []
        for part in self.shards:
            self._add_slots(part)
        self._pending: list[tuple[Pending, _Shard, torch.Tensor]] = []  # reductions under way, and their outputs
        self._arrived: Arrived | None = None
        self._summed = False  # whether this step's gradients were summed over replicas
        self._used: set[int] = set()  # as last given to `finish_step`

    def _add_slots(self, part: _Shard) -> None:
        """Adds a slot for each parameter of which elements lie in this rank's piece of a bucket."""
        for entry, first, last in part.bucket.layout.pieces(self.axis.size, self.axis.index):
            start, stop = first - part.low, last - part.low
            master = nn.Parameter(self._outside(entry.index, part.master[start:stop]))
            self.slots.append(Slot(self.names[entry.index], self.shapes[entry.index], master, whole=False))
            self._places.append((part, entry.index, start, stop))

    def _outside(self, index: int, numbers: torch.Tensor) -> torch.Tensor:
        """Returns a view of `numbers` (n,), elements of the index-th parameter; if that is complex, (n/2,) complex."""
        return torch.view_as_complex(numbers.view(-1, 2)) if self.complex[index] else numbers

    @torch.no_grad()
    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Sets this rank's piece of the index-th parameter's master from `value`, its full initial value."""
        if not self.precision.mixed:  # the masters are the module's weights, which have their values already
            return
        _, entry = self._find(index)
        for slot, (part, number, start, stop) in zip(self.slots, self._places, strict=True):
            if number == index:
                first = part.low - entry.start  # index in the parameter of the piece's first element; may be negative
                slot.master.copy_(self._outside(index, value.reshape(-1)[first + start : first + stop]))

    def start_step(self) -> None:
        """Drops the last step's gradients."""
        self._summed = False
        for part in self.shards:
            part.gradient = None
        for slot in self.slots:
            slot.master.grad = None
        self.buckets.start_step()  # last, since the gradients above may be views of the buckets' memory

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepares for a micro-batch. `last`: whether it is the step's last one; zero=1 reduces only that."""
        self.buckets.start_micro_batch(sync=last or self.stage.gradients)

    def expect_pieces(self) -> None:
        """Makes the next backward find gradients that come in several pieces, as with reentrant checkpoints."""
        self.buckets.expect_pieces()

    def finish_micro_batch(self) -> set[int]:
        """Launches the buckets that backward did not fill; returns the indices of parameters that backward reached.

        Under zero=2 also waits for the reductions and adds them to this rank's pieces.
        """
        self.buckets.finish_micro_batch()
        if self.stage.gradients and self.order is None:
            self._collect()
            for bucket in self.buckets.buckets:
                # the buffers are gone; without this, a bucket that the next backward misses would be sent unzeroed
                bucket.filled.clear()
        return self.buckets.used_now

    def _reduce(self, bucket: Bucket) -> None:
        """Starts the reduce-scatter of a full bucket over dp_shard; this rank keeps its piece of the sum."""
        part = self.shards[self.buckets.buckets.index(bucket)]
        assert bucket.buffer is not None
        if self.stage.gradients:  # zero=2: only the piece stays
            reduced = bucket.buffer.new_empty(part.high - part.low)
        else:
            reduced = bucket.buffer[part.low : part.high]  # in place: other ranks' pieces are not read again
        pending = reduce_scatter(reduced, bucket.buffer, self.axis, "gradients", wait=False)
        self._pending.append((pending, part, reduced))
        if self.stage.gradients:  # unsharded gradients do not outlive a backward
            bucket.buffer = None  # the collective keeps the memory alive until it is done
        # gradients are handed on as they are made (`use_as_made`), while the newest reduction travels
        if self._arrived is not None:
            self._collect(travelling=min(1, self.axis.size - 1))

    def use_as_made(self, arrived: Arrived) -> None:
        """Has `arrived` called within backward for each bucket's gradients once they are summed; then drops them."""
        self._arrived = arrived

    def _collect(self, travelling: int = 0) -> None:
        """Waits for the reductions over dp_shard, except the newest `travelling` of them."""
        while len(self._pending) > travelling:
            pending, part, reduced = self._pending.pop(0)
            pending.wait()
            part.gradient = reduced if part.gradient is None else part.gradient.add_(reduced)
            if self._arrived is not None:
                self._hand_over(part, self._arrived)

    def _hand_over(self, part: _Shard, arrived: Arrived) -> None:
        """Sums a bucket's gradients over replicas, calls `arrived` with them, and drops this object's references.

        Gradients of a bucket that backward did not fill stay until `finish_step`, since only that knows which
        parameters no rank used; `arrived` then gets no slots, but the flat tensor.
        """
        assert part.gradient is not None
        self._summed = True  # else `finish_step` would sum over replicas again
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
        """Waits for reductions, sums over replicas (once in a step), and sets each master's gradient.

        used   indices of parameters reached by this rank's backward, and if called again in a step, by any rank's;
               the gradients of other parameters are set to None
        """
        self._collect()
        self._used = used
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
        for part in self.shards:
            if part.gradient is not None and part.gradient.dtype != self.precision.master:
                part.gradient = part.gradient.to(self.precision.master)
        for part in self.shards:
            # handed over: the optimizer has used and freed these gradients within backward
            if not part.bucket.handed_over:
                self._set_gradients(part, used)

    def _set_gradients(self, part: _Shard, used: set[int]) -> None:
        """Sets the gradients of one bucket's masters to views of the reduced one; None for indices not in `used`."""
        for slot, (of, index, start, stop) in zip(self.slots, self._places, strict=True):
            if of is part:
                # not reached by any rank: None and not zeros, since an optimizer leaves such a parameter alone
                piece = part.gradient[start:stop] if part.gradient is not None and index in used else None
                slot.master.grad = None if piece is None else self._outside(index, piece)

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns this rank's piece (1-d, 1/N of the elements) of each bucket's gradients, if there; never None."""
        return [part.gradient for part in self.shards if part.gradient is not None]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copies into the masters what code outside the optimizer wrote into the module's weights. No collective.

        Raises `InputError` if `.data` of a weight was set to a tensor of another shape.
        """
        for param, name, shape in zip(self.params, self.names, self._module_shapes, strict=True):
            check_shape(name, param, shape)
        for part in self.shards:
            if any(is_away(param, view) for param, view in part.views()):  # `p.data = x`: the next gather would miss it
                part.renew()
            if self.precision.mixed:  # masters are copies in another dtype
                follow(part.master, part.mine)
        for slot, (part, index, start, stop) in zip(self.slots, self._places, strict=True):
            # `renew` has moved the shard to new memory, or a script has set the master's own `.data`
            if is_away(slot.master, part.master[start:stop]):
                slot.master.data = self._outside(index, part.master[start:stop])

    @torch.no_grad()
    def publish(self, *, rounded: bool = False) -> None:
        """All-gathers the updated pieces into the module's weights on all ranks of dp_shard.

        rounded   whether this rank's piece of the weights has the masters' values already
        """
        # the optimizer may have set a master's `.data`, which then lies outside of the shard
        for slot, (part, index, start, stop) in zip(self.slots, self._places, strict=True):
            if isinstance(slot.master, nn.Parameter):  # else it lies in a tier, which writes the shard itself
                bring_back(slot.master, self._outside(index, part.master[start:stop]))
        pending = []
        for part in self.shards:
            if self.precision.mixed and not rounded:
                part.mine.copy_(part.master)
            pending.append(all_gather(part.weights, part.mine, self.axis, "parameters", wait=False))
        for work in pending:
            work.wait()

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (this rank's piece of the weights, its wider master) of each bucket in mixed precision; else []."""
        return [(part.mine, part.master) for part in self.shards if part.master is not part.mine]

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns each bucket's buffer, then this rank's reduced piece of each bucket; None where there is none now.

        Under zero=1 the pieces are slices of the buffers; under zero=2 they have memory of their own.
        """
        return [bucket.buffer for bucket in self.buckets.buckets] + [part.gradient for part in self.shards]

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the index-th parameter's unsharded master weight."""
        part, entry = self._find(index)
        pieces = [slot.master for slot, place in zip(self.slots, self._places, strict=True) if place[1] == index]
        # no slot: this rank holds no element of it, so the piece is empty, but takes part in the gathering
        piece = pieces[0].detach() if pieces else self._piece(part, part.mine.to(self.precision.master), entry)
        return self.whole(index, piece)

    def full_gradient(self, index: int) -> Gathering:
        """Returns the gathering of the index-th parameter's unsharded gradient; it gives None if no rank used it."""
        part, entry = self._find(index)
        if part.gradient is None or index not in self._used:
            return ready(None)
        return self.whole(index, self._piece(part, part.gradient, entry))

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns the gathering of a tensor in the index-th parameter's shape from every rank's `piece` (1-d)."""
        return joined(self, index, self.shapes[index], piece, self.axis)

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view (1-d, may be empty) of those elements of `whole` that rank `shard_rank` of dp_shard owns.

        whole   contiguous tensor in the index-th parameter's shape
        """
        part, entry = self._find(index)
        low, high = part.bucket.layout.shard(self.axis.size, shard_rank)
        first, last = max(entry.start, low), min(entry.stop, high)
        width = 2 if self.complex[index] else 1  # numbers of the bucket for each element
        return whole.view(-1)[(first - entry.start) // width : (max(first, last) - entry.start) // width]

    def _find(self, index: int):
        """Returns (the `_Shard` that holds the index-th parameter, its entry in that bucket's layout)."""
        for part in self.shards:
            for entry in part.bucket.layout.entries:
                if entry.index == index:
                    return part, entry
        raise KeyError(index)

    def _piece(self, part: _Shard, shard: torch.Tensor, entry) -> torch.Tensor:
        """Returns the elements (1-d, may be empty) of one parameter in `shard`, a tensor laid out as `part.mine`.

        entry   the parameter's entry in the bucket's layout
        """
        first, last = max(entry.start, part.low), min(entry.stop, part.high)
        return self._outside(entry.index, shard.detach()[first - part.low : max(first, last) - part.low])
