"""Replicas (DDP; made in engine/recipe): every rank holds everything, gradients are summed, by buckets (comm/buckets).

    rank 0   samples 0..3 -> g0 \\
                                 all-reduce -> g0 + g1 -> the same update on both
    rank 1   samples 4..7 -> g1 /

Equation: g = sum over ranks of g_r; the engine divides by the global weight.
Bytes on the wire: 2 (N-1)/N P for each optimizer step, whatever the number of micro-batches.
Bytes at rest: everything, on every rank.
Source: Li et al., "PyTorch Distributed" (VLDB 2020), sections 3.2 to 3.4: buckets, overlap, accumulation.

Why not `DistributedDataParallel` itself: it must be told beforehand that parameters may go unused, ends in a broken
connection when ranks then differ, divides by the number of ranks, and sums bf16 gradients in bf16. The buckets here
are also those of ZeRO-1 and 2.

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
    """Plain data parallelism: each rank has whole parameters, gradients and optimizer state."""

    in_pieces = False

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], axis: Axis, precision: Precision, order: FixedOrder | None = None,
        pairs: Collection[str] = (),
    ):  # fmt: skip
        """pairs  names of parameters that are complex outside of the module, and real in it"""
        self.axis = axis
        self.precision = precision
        self.params = [param for _, param in named]
        self._pairs = [name in pairs for name, _ in named]
        masters = [self._master(param, paired) for (_, param), paired in zip(named, self._pairs, strict=True)]
        slots = zip(named, masters, strict=True)
        self.slots = [Slot(name, master.shape, master, whole=True) for (name, _), master in slots]
        # whether each master's gradient is a part of a bucket, not a copy of one in another dtype
        self._in_buckets = not any(pairs) and all(m.dtype.to_real() == precision.reduce for m in masters)
        self._pending: list[tuple[Pending, Bucket]] = []
        self._arrived: Arrived | None = None
        self.order = order
        self._summed = False  # in order, in this step
        ranks = 1 if order is None else axis.size  # sums in a fixed order are shared out: each rank takes its N-th
        self.buckets = GradientBuckets(
            named, dtype=precision.reduce, ranks=ranks, summing=axis.size, keep=True, launch=self._reduce, order=order
        )

    def _master(self, param: nn.Parameter, pairs: bool) -> nn.Parameter:
        """Returns a parameter's master: complex, or wider, where the module's own is not; else itself."""
        if pairs:
            return nn.Parameter(as_complex(param.detach()))
        if not self.precision.mixed:
            return param
        return nn.Parameter(param.detach().to(self.precision.master))

    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Set a master weight from its full initial value."""
        with torch.no_grad():
            self.slots[index].master.copy_(value)

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        self._summed = False
        for slot, pairs in zip(self.slots, self._pairs, strict=True):
            if pairs or self.precision.mixed:  # else the master is the buckets' parameter
                slot.master.grad = None
        self.buckets.start_step()

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch: gradients are summed over ranks once, with the last one."""
        self.buckets.start_micro_batch(sync=last)

    def expect_pieces(self) -> None:
        """Watches the next backward for gradients that come in several pieces, as by reentrant checkpoints."""
        self.buckets.expect_pieces()

    def finish_micro_batch(self) -> set[int]:
        """Launch the buckets that backward did not complete; returns the indices of the parameters that it reached."""
        self.buckets.finish_micro_batch()
        return self.buckets.used_now

    def _reduce(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        self._pending.append((all_reduce(bucket.buffer, self.axis, "gradients", wait=False), bucket))
        if self._arrived is not None:
            self._collect(travelling=min(1, self.axis.size - 1))

    def use_as_made(self, arrived: Arrived) -> None:
        """Call a function for the gradients of each bucket that is summed, and keep none of them."""
        self._arrived = arrived

    def _collect(self, travelling: int = 0) -> None:
        """Wait for reductions, but for so many of the last."""
        # the newest reduction goes on while the step uses what came before it
        while len(self._pending) > travelling:
            pending, bucket = self._pending.pop(0)
            pending.wait()
            # without `use_as_made` gradients stay in the buckets until the step's end
            if self._arrived is None:
                continue
            flat, slots = bucket.buffer if self._in_buckets else None, []  # else they are copies, of other dtypes
            # one that backward did not fill waits for `finish_step`, which knows whom any rank reached
            if bucket.whole:
                self._set_gradients(bucket, {entry.index for entry in bucket.layout.entries})
                slots = [self.slots[entry.index] for entry in bucket.layout.entries]
                bucket.hand_over()
            self._arrived(slots, self.buckets.buckets.index(bucket), flat)

    def finish_step(self, used: set[int]) -> None:
        """Wait, then point each master's gradient at its place in the bucket; of indices not in `used`, at None."""
        self._collect()
        # deterministic: no bucket was launched; `_summed` since a step may call this more than once
        if self.order is not None and not self._summed:
            for number, bucket in enumerate(self.buckets.buckets):
                bucket.put(self.order.whole(number, bucket.ensure()))
            self._summed = True
        for bucket in self.buckets.buckets:
            if not bucket.handed_over:
                self._set_gradients(bucket, used)

    def _set_gradients(self, bucket: Bucket, used: set[int]) -> None:
        """Point the masters of one bucket at its parts, those that any rank `used`; the others at None."""
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
        """Returns a gradient in the dtype of its master."""
        if gradient.dtype.to_real() != master.dtype.to_real():
            gradient = gradient.to(master.dtype)
        return as_complex(gradient) if self._pairs[index] else gradient

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns the buckets' buffers (1-d), where each master's gradient is a part of one; else None."""
        if self.order is not None or not self._in_buckets:
            return None
        return [buffer for buffer in self.gradient_buffers() if buffer is not None]

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copy into the masters what was written into the weights by hand."""
        if self.precision.mixed:
            for param, slot in zip(self.params, self.slots, strict=True):
                follow(slot.master, param.detach())
        for param, slot, pairs in zip(self.params, self.slots, self._pairs, strict=True):
            if pairs and is_away(slot.master, param.detach()):  # `p.data = x`: the master was a view of the old memory
                slot.master.data = as_complex(param.detach())

    @torch.no_grad()
    def publish(self, *, rounded: bool = False) -> None:
        """Round the masters into the module's weights, where they differ and are not `rounded` already."""
        if self.precision.mixed and not rounded:
            torch._foreach_copy_(self.params, [slot.master for slot in self.slots])
        for param, slot, pairs in zip(self.params, self.slots, self._pairs, strict=True):
            if pairs:
                bring_back(slot.master, as_complex(param.detach()))

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (weight, wider master) of each parameter in mixed precision."""
        if not self.precision.mixed:
            return []
        return [(param.detach(), slot.master) for param, slot in zip(self.params, self.slots, strict=True)]

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns the buckets' buffers."""
        return [bucket.buffer for bucket in self.buckets.buckets]

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the master weight, which every rank has: nothing is sent."""
        return ready(self.slots[index].master.detach())

    def full_gradient(self, index: int) -> Gathering:
        """Returns the gathering of the gradient, which every rank has; of None where no rank used the parameter."""
        return ready(self.slots[index].master.grad)

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns the gathering of the piece itself: every rank holds all of it."""
        return ready(piece)
