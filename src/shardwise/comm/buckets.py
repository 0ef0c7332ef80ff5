"""Gather gradients into flat buckets as backward makes them; each bucket is sent once it is whole (zero < 3).

    backward:  g4 -> |g4|g3|  full: launch ~~~~~~~~> reduced, while backward goes on with g2, g1
                         |g2|g1|  full: launch ~~~>

Buckets are launched in their order on every rank, and what backward did not reach is launched (as zeros) when it has
ended. So ranks always meet the same collectives, whether or not they used the same parameters.

`DistributedDataParallel` has to be told beforehand that parameters may go unused, waits or breaks where ranks then
differ, divides by the ranks, which is not the global weight, and sums bf16 gradients in bf16.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from shardwise.comm.tree import FixedOrder
from shardwise.errors import RunError
from shardwise.layout.flat_buckets import FIRST_BUCKET_BYTES, BucketLayout, lay_out, most_elements

LINE_BYTES = 64  # kernels may add in another order where weights begin elsewhere in a line of the cache
_small: ContextVar[list[int] | None] = ContextVar("small buckets", default=None)


@contextmanager
def small_buckets() -> Iterator[list[int]]:
    """Context: buckets made inside have about a third of their parameters each, so a small model has several too.

    Yields a list to which the number of buckets of each `GradientBuckets` made inside is added.
    """
    made: list[int] = []
    token = _small.set(made)
    try:
        yield made
    finally:
        _small.reset(token)


def _caps(sizes: list[int], width: int, summing: int) -> tuple[int, int]:
    """Returns the most elements of a bucket, and of the first bucket."""
    if _small.get() is not None:
        third = max(1, sum(sizes) // 3)
        return third, third
    return most_elements(width, summing), FIRST_BUCKET_BYTES // width


def numbers_in(tensor: torch.Tensor) -> int:
    """Returns how many real numbers a tensor holds: two for each complex element."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def shaped(flat: torch.Tensor, shape: torch.Size, *, as_complex: bool) -> torch.Tensor:
    """Returns a view of real numbers as a tensor of this shape, pairs of them as complex elements where asked for."""
    return torch.view_as_complex(flat.view(*shape, 2)) if as_complex else flat.view(shape)


class Bucket:
    """One bucket's buffer, and which of its gradients this micro-batch has brought."""

    def __init__(self, layout: BucketLayout, params: list[nn.Parameter], dtype: torch.dtype):
        self.layout = layout
        self.dtype = dtype
        self.params = params
        self.buffer: torch.Tensor | None = None
        self.views_now: list[torch.Tensor] = []  # the buffer's parts, by entry, while there is one
        self._alone: list[int] = []  # who held them when they were made
        self.filled: set[int] = set()  # entries that hold a gradient since the buffer was made
        self.arrived = 0  # gradients of this micro-batch
        self.launched = self.handed_over = False

    @property
    def whole(self) -> bool:
        """Whether this micro-batch has brought all of its gradients."""
        return self.arrived == len(self.params)

    def hand_over(self) -> None:
        """Leave the gradients to those who hold views of the buffer."""
        self.handed_over, self.buffer = True, None
        self.forget_views()

    def ensure(self) -> torch.Tensor:
        """Returns the buffer, made when first needed."""
        if self.buffer is None:
            self.buffer = torch.empty(self.layout.size, dtype=self.dtype, device=self.params[0].device)
            for start, stop in self.layout.gaps:  # they are reduced too, and new memory may hold NaN
                self.buffer[start:stop].zero_()
            self.views_now = [
                shaped(self.buffer[entry.start : entry.stop], param.shape, as_complex=param.is_complex())
                for entry, param in zip(self.layout.entries, self.params, strict=True)
            ]
            self._alone = self._holders()
            self.filled.clear()
        return self.buffer

    def view(self, place: int) -> torch.Tensor:
        """Returns the part of the buffer that is this entry's gradient, in the parameter's shape."""
        self.ensure()
        return self.views_now[place]

    def put(self, sums: torch.Tensor) -> None:
        """Take over a buffer that was reduced elsewhere."""
        self.buffer = sums
        entries = zip(self.layout.entries, self.params, strict=True)
        self.views_now = [shaped(sums[e.start : e.stop], p.shape, as_complex=p.is_complex()) for e, p in entries]
        self._alone = self._holders()

    def start_step(self) -> None:
        """Drop the gradients; take new memory where somebody kept one, or gave one memory (`param.grad.data = x`)."""
        self.filled.clear()
        self.handed_over = False
        for param in self.params:
            param.grad = None
        # a script that kept last step's `param.grad` must not see it change (tests/scripts/test_prepare_gradients)
        if self.buffer is not None and self.views_now and self._holders() != self._alone:
            self.buffer = None
            self.forget_views()

    def _holders(self) -> list[int]:
        """Returns [uses of the buffer's memory, references to each gradient in it, ...]: more if one was kept."""
        assert self.buffer is not None
        users = torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)
        return [users, *map(sys.getrefcount, self.views_now)]

    def forget_views(self) -> None:
        """Drop the views of the buffer, which would keep its memory alive after it was taken away."""
        self.views_now = []

    def complete(self) -> torch.Tensor:
        """Returns the buffer, with zeros where no gradient came."""
        if len(self.filled) < len(self.params):  # ranks may use other parameters, and add up whole buffers
            for place in set(range(len(self.params))) - self.filled:
                self.view(place).zero_()
        return self.ensure()


class GradientBuckets:
    """Buckets that hooks on the parameters fill; `launch(bucket)` is called for each, in order, when it may be reduced.

    ranks   each bucket's size is a multiple of it
    summing ranks that sum a gradient: more of them are sent larger buckets, where these are there anyway (`keep`)
    keep    buffers outlive the reduction and are the parameters' gradients (accumulation happens in them);
            otherwise `launch` takes the buffer away and each micro-batch makes a new one
    order   sums are taken over pieces in it: buckets are given to it, and none is launched
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype,
        ranks: int,
        summing: int,
        keep: bool,
        launch: Callable[[Bucket], None],
        order: FixedOrder | None = None,
    ):
        self.names = [name for name, _ in named]
        params = [param for _, param in named]
        width = torch.empty((), dtype=dtype).element_size()
        sizes = [numbers_in(param) for param in params]
        cap, first_cap = _caps(sizes, width, summing if keep else 1)
        layouts = lay_out(sizes, cap, ranks, first_cap, align=2 if order is None else LINE_BYTES // width)
        made = _small.get()
        if made is not None:
            made.append(len(layouts))
        self.buckets = [Bucket(layout, [params[e.index] for e in layout.entries], dtype) for layout in layouts]
        self.keep = keep and order is None
        self.launch = launch
        self.order = order
        self.sync = False
        self.asleep = False  # gradients that arrive belong to nobody's step
        self.strays: Callable[[nn.Parameter], None] = lambda param: None  # told of those
        self.used: set[int] = set()  # parameters that got a gradient in this step
        self.used_now: set[int] = set()  # and in this micro-batch
        self.in_pieces: set[int] = set()  # buckets with a parameter whose gradient came more than once in a backward
        self._learning = False  # which those are: until the end of this backward nothing is launched
        self._next = 0
        for number, bucket in enumerate(self.buckets):
            for place, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self._hook(number, place))

    def expect_pieces(self) -> None:
        """Watch in the next backward which gradients come in several pieces; nothing is launched before its end."""
        self._learning = True

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        self.used.clear()
        if self.order is not None:
            self.order.start_step()
        for bucket in self.buckets:
            bucket.start_step()

    def start_micro_batch(self, *, sync: bool) -> None:
        """Begin a micro-batch, before its forward; `sync`: its backward launches reductions."""
        self.sync = sync or self.order is not None
        self.used_now = set()
        self._next = 0
        for bucket in self.buckets:
            bucket.arrived = 0
            bucket.launched = False

    def finish_micro_batch(self) -> None:
        """Called after a backward: launches the buckets that it did not fill, with zeros for missing gradients."""
        self.used |= self.used_now
        self._learning = False
        if self.sync:
            while self._next < len(self.buckets):
                self._launch_next()

    def _hook(self, number: int, place: int) -> Callable[[nn.Parameter], None]:
        """Returns the hook that takes a parameter's gradient into its bucket."""
        # no strong reference: a parameter keeps its hooks where Python's collector does not look, so that buckets, and
        # the process groups they reduce over, would outlive the run
        owner = weakref.ref(self)
        # looked up once, since a hook runs for every weight of every micro-batch
        bucket = self.buckets[number]
        index = bucket.layout.entries[place].index
        kept = self.keep and bucket.dtype == bucket.params[place].dtype.to_real()

        def on_gradient(param: nn.Parameter) -> None:
            buckets = owner()
            # the run is over, and the parameter goes on without it
            if buckets is None:
                return
            # a backward that belongs to no step: told, and not summed
            if buckets.asleep:
                buckets.strays(param)
                return
            bucket_now, used = buckets.buckets[number], buckets.used_now
            views = bucket_now.views_now
            if views and param.grad is views[place] and index not in used and not (buckets.sync or bucket_now.launched):
                used.add(index)  # autograd has accumulated in the bucket itself, of which nothing is due yet
                bucket_now.arrived += 1
            else:
                buckets._on_gradient(param, number, place, index, kept)

        return on_gradient

    def _on_gradient(self, param: nn.Parameter, number: int, place: int, index: int, kept: bool) -> None:
        """Take a micro-batch's gradient into its bucket; `RunError` once that is sent. Per parameter, so kept lean."""
        bucket = self.buckets[number]
        if bucket.launched:
            raise RunError(
                f"the gradient of '{self.names[index]}' came in several pieces, as it did not in the first backward: a "
                "reentrant checkpoint that the look at a few samples did not meet, or a second backward; use "
                "torch.utils.checkpoint(use_reentrant=False)"
            )
        if bucket.buffer is None:
            bucket.ensure()
        view, gradient = bucket.views_now[place], param.grad
        if gradient is None:  # a compiled block hands on all its parameters, those that it does not use too
            return
        if gradient is not view:  # else autograd has accumulated in the bucket itself
            if place not in bucket.filled:
                view.copy_(gradient)
                bucket.filled.add(place)
            elif gradient.data_ptr() != view.data_ptr():  # the same memory under another tensor is there already
                view.add_(gradient)
            # the next micro-batch is accumulated in the bucket, where the dtype allows
            param.grad = view if kept else None
            gradient = None  # its own memory is free for what a launch begins
        if index in self.used_now:  # a reentrant checkpoint brings a weight's gradient apart from its other uses'
            self.in_pieces.add(number)
            return
        self.used_now.add(index)
        bucket.arrived += 1
        # in other micro-batches gradients only add up
        if self.sync and bucket.whole:
            self._launch_whole()

    def _launch_whole(self) -> None:
        """Launch buckets in their order, as far as they are whole."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            # in their order, whatever backward's: ranks that launched others first would wait for each other
            if self._learning or bucket.arrived < len(bucket.params) or self._next in self.in_pieces:
                return
            self._launch_next()

    def _launch_next(self) -> None:
        """Launches the next bucket in order, zeros where no gradient came; in a fixed order, gives it to that."""
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.complete()
        bucket.launched = True
        if self.order is None:
            self.launch(bucket)
        else:
            self.order.add(self._next - 1, bucket.ensure())
            bucket.buffer = None  # the order's from here on: it adds other pieces into it
        # whoever reduces it took the memory, which views would keep alive
        if bucket.buffer is None:
            bucket.forget_views()
