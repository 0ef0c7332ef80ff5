"""Plain data parallelism (engine/recipe): every rank holds everything; gradients are all-reduced by comm/buckets.

    rank 0   samples 0..3 -> g0 \\
                                 all-reduce -> g0 + g1 -> the same update on both
    rank 1   samples 4..7 -> g1 /

Equation: g = sum over ranks of g_r; the engine divides by the global weight.
Bytes on the wire: 2 (N-1)/N P for each optimizer step, whatever the number of micro-batches.
Bytes at rest: everything, on every rank.
Source: Li et al., "PyTorch Distributed" (VLDB 2020), sections 3.2 to 3.4: buckets, overlap, accumulation.

Why not `DistributedDataParallel` itself: it must be told beforehand that parameters may be unused, fails with a broken
connection if ranks then differ, divides by the number of ranks, and sums bf16 gradients in bf16. ZeRO-1 and 2 use the
same buckets as this module.

What this does not do: hold less than the whole model on each rank.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from shardwise.comm import Axis, Gathering, Pending, all_reduce, ready
from shardwise.comm.buckets import Bucket, GradientBuckets
from shardwise.comm.tree import FixedOrder
from shardwise.parallel.slots import Arrived, Slot, bring_back, follow, is_away
from shardwise.part.pairs import as_complex
from shardwise.precision import Precision


class Replicate:
    """Plain data parallelism (a `DataParallel`): each rank has whole parameters, gradients and optimizer state."""

    in_pieces = False

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], axis: Axis, precision: Precision, order: FixedOrder | None = None,
        pairs: Collection[str] = (),
    ):  # fmt: skip
        """Makes masters and buckets.

        named  (name, parameter) of each trainable parameter;  axis  ranks over which gradients are summed
        order  sums gradients in a fixed order, under deterministic=true; else None
        pairs  names of complex parameters that the module holds as real ones with a last dim of 2
        """
        self.axis = axis
        self.precision = precision
        self.params = [param for _, param in named]
        self._pairs = [name in pairs for name, _ in named]
        masters = [self._master(param, paired) for (_, param), paired in zip(named, self._pairs, strict=True)]
        slots = zip(named, masters, strict=True)
        self.slots = [Slot(name, master.shape, master, whole=True) for (name, _), master in slots]
        # whether each master's gradient is a view of a bucket, and not a copy in another dtype or as complex numbers
        self._in_buckets = not any(pairs) and all(m.dtype.to_real() == precision.reduce for m in masters)
        self._pending: list[tuple[Pending, Bucket]] = []
        self._arrived: Arrived | None = None
        self.order = order
        self._summed = False  # whether `order` has summed this step's gradients
        ranks = 1 if order is None else axis.size  # with `order` each rank sums an equal piece of each bucket
        self.buckets = GradientBuckets(
            named, dtype=precision.reduce, ranks=ranks, summing=axis.size, keep=True, launch=self._reduce, order=order
        )

    def _master(self, param: nn.Parameter, pairs: bool) -> nn.Parameter:
        """Returns the parameter's master: its complex view if `pairs`, a wider copy in mixed precision, or itself."""
        if pairs:
            return nn.Parameter(as_complex(param.detach()))
        if not self.precision.mixed:
            return param
        return nn.Parameter(param.detach().to(self.precision.master))

    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Sets the index-th parameter's master from `value`, its full initial value."""
        with torch.no_grad():
            self.slots[index].master.copy_(value)

    def start_step(self) -> None:
        """Drops the last step's gradients."""
        self._summed = False
        for slot, pairs in zip(self.slots, self._pairs, strict=True):
            if pairs or self.precision.mixed:  # else the master is the parameter itself, which the buckets clear
                slot.master.grad = None
        self.buckets.start_step()

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepares for a micro-batch. `last`: whether it is the step's last one, in which gradients are all-reduced."""
        self.buckets.start_micro_batch(sync=last)

    def expect_pieces(self) -> None:
        """Makes the next backward find gradients that come in several pieces, as with reentrant checkpoints."""
        self.buckets.expect_pieces()

    def finish_micro_batch(self) -> set[int]:
        """Launches the buckets that backward did not fill; returns the indices of the parameters that it reached."""
        self.buckets.finish_micro_batch()
        return self.buckets.used_now

    def _reduce(self, bucket: Bucket) -> None:
        """Starts the all-reduce of a full bucket, in place."""
        assert bucket.buffer is not None
        self._pending.append((all_reduce(bucket.buffer, self.axis, "gradients", wait=False), bucket))
        if self._arrived is not None:
            self._collect(travelling=min(1, self.axis.size - 1))

    def use_as_made(self, arrived: Arrived) -> None:
        """Has `arrived` called within backward for each bucket's gradients once they are summed; then drops them."""
        self._arrived = arrived

    def _collect(self, travelling: int = 0) -> None:
        """Waits for the all-reduces, except the newest `travelling`, and gives their gradients to `arrived`."""
        while len(self._pending) > travelling:
            pending, bucket = self._pending.pop(0)
            pending.wait()
            # without `use_as_made` gradients stay in the buckets until the step's end
            if self._arrived is None:
                continue
            flat, slots = bucket.buffer if self._in_buckets else None, []  # None: gradients are copies of the buffer
            # a bucket that backward did not fill waits for `finish_step`, which knows what other ranks reached
            if bucket.whole:
                self._set_gradients(bucket, {entry.index for entry in bucket.layout.entries})
                slots = [self.slots[entry.index] for entry in bucket.layout.entries]
                bucket.hand_over()
            self._arrived(slots, self.buckets.buckets.index(bucket), flat)

    def finish_step(self, used: set[int]) -> None:
        """Waits for reductions, and sets each master's gradient to its view of the bucket.

        used   indices of parameters that this rank used, and if called again in a step, that any rank used; the
               gradients of other parameters are set to None
        """
        self._collect()
        # deterministic: no bucket was launched; the flag is there since a step may call this more than once
        if self.order is not None and not self._summed:
            for number, bucket in enumerate(self.buckets.buckets):
                bucket.put(self.order.whole(number, bucket.ensure()))
            self._summed = True
        for bucket in self.buckets.buckets:
            if not bucket.handed_over:
                self._set_gradients(bucket, used)

    def _set_gradients(self, bucket: Bucket, used: set[int]) -> None:
        """Sets the gradients of one bucket's masters to its views; None for parameters whose index is not in `used`."""
        bucket.ensure()
        for entry, view in zip(bucket.layout.entries, bucket.views_now, strict=True):
            # not reached by any rank: None and not zeros, since an optimizer leaves such a parameter alone
            gradient = None if entry.index not in used else view
            master = self.slots[entry.index].master
            if gradient is not None and not self._in_buckets:
                gradient = self._as_master(entry.index, master, view)
            if master.grad is not gradient:
                master.grad = gradient

    def _as_master(self, index: int, master: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the index-th parameter's gradient in its master's dtype, complex if the master is."""
        if gradient.dtype.to_real() != master.dtype.to_real():
            gradient = gradient.to(master.dtype)
        return as_complex(gradient) if self._pairs[index] else gradient

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns the buckets' buffers (1-d) if each master's gradient is a view of one; else None."""
        if self.order is not None or not self._in_buckets:
            return None
        return [buffer for buffer in self.gradient_buffers() if buffer is not None]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copies into the masters what code outside the optimizer wrote into the module's weights. No collective."""
        if self.precision.mixed:
            for param, slot in zip(self.params, self.slots, strict=True):
                follow(slot.master, param.detach())
        for param, slot, pairs in zip(self.params, self.slots, self._pairs, strict=True):
            if pairs and is_away(slot.master, param.detach()):  # `p.data = x`: the master was a view of the old memory
                slot.master.data = as_complex(param.detach())

    @torch.no_grad()
    def publish(self, *, rounded: bool = False) -> None:
        """Copies the masters into the module's weights, if they are separate tensors.

        rounded   whether weights in mixed precision have the masters' rounded values already
        """
        if self.precision.mixed and not rounded:
            torch._foreach_copy_(self.params, [slot.master for slot in self.slots])
        for param, slot, pairs in zip(self.params, self.slots, self._pairs, strict=True):
            if pairs:
                bring_back(slot.master, as_complex(param.detach()))

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (weight, wider master) of each parameter in mixed precision; else []."""
        if not self.precision.mixed:
            return []
        return [(param.detach(), slot.master) for param, slot in zip(self.params, self.slots, strict=True)]

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns each bucket's flat buffer; None for a bucket without one now."""
        return [bucket.buffer for bucket in self.buckets.buckets]

    def full_parameter(self, index: int) -> Gathering:
        """Returns a gathering that gives the index-th master weight; nothing is sent, since every rank has it."""
        return ready(self.slots[index].master.detach())

    def full_gradient(self, index: int) -> Gathering:
        """Returns a gathering that gives the index-th master's gradient, None if no rank used it; nothing is sent."""
        return ready(self.slots[index].master.grad)

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns a gathering that gives `piece`, since every rank holds whole tensors; nothing is sent."""
        return ready(piece)
