"""Collect gradients in flat buckets within backward; each bucket is reduced once it is full (zero < 3).

    backward:  g4 -> |g4|g3|  full: launch ~~~~~~~~> reduced, while backward goes on with g2, g1
                         |g2|g1|  full: launch ~~~>

Buckets are launched in their order on every rank. After backward the remaining buckets are launched, with zeros for
gradients that it did not reach. So ranks always issue the same collectives, also if they used different parameters.

`DistributedDataParallel` must be told beforehand that parameters may be unused, hangs or fails if ranks then differ,
divides by the number of ranks, which is not the global weight, and sums bf16 gradients in bf16.
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

LINE_BYTES = 64  # of a cache line; a kernel's order of additions may depend on where in a line a weight begins
_small: ContextVar[list[int] | None] = ContextVar("small buckets", default=None)


@contextmanager
def small_buckets() -> Iterator[list[int]]:
    """Context: each `GradientBuckets` made inside has about three buckets, so that a small model has several too.

    Yields a list, to which each of them appends its number of buckets.
    """
    made: list[int] = []
    token = _small.set(made)
    try:
        yield made
    finally:
        _small.reset(token)


def _caps(sizes: list[int], width: int, summing: int) -> tuple[int, int]:
    """Returns (largest number of elements in a bucket, the same for the first bucket).

    sizes  elements of each parameter;  width  bytes of an element;  summing  ranks that sum a gradient
    """
    if _small.get() is not None:
        third = max(1, sum(sizes) // 3)
        return third, third
    return most_elements(width, summing), FIRST_BUCKET_BYTES // width


def numbers_in(tensor: torch.Tensor) -> int:
    """Returns the number of real numbers in a tensor; a complex element counts as two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def shaped(flat: torch.Tensor, shape: torch.Size, *, as_complex: bool) -> torch.Tensor:
    """Returns a view of `flat`, real numbers, in this shape; `as_complex`: whether pairs become complex elements."""
    return torch.view_as_complex(flat.view(*shape, 2)) if as_complex else flat.view(shape)


class Bucket:
    """One bucket: its flat buffer, and the state of its gradients.

    layout       which elements of the buffer belong to which parameter (`entries`), and the gaps between them
    params       the parameters, in the order of `layout.entries`; an index into either is a "place"
    buffer       flat gradients; None until `ensure`, and after it was taken away
    handed_over  whether views of the buffer have been left to others (`hand_over`)
    launched     whether it was given to its reduction in this micro-batch
    """

    def __init__(self, layout: BucketLayout, params: list[nn.Parameter], dtype: torch.dtype):
        self.layout = layout
        self.dtype = dtype
        self.params = params
        self.buffer: torch.Tensor | None = None
        self.views_now: list[torch.Tensor] = []  # view of the buffer for each place; [] without a buffer
        self._alone: list[int] = []  # reference counts (`_holders`) when the views were made
        self.filled: set[int] = set()  # places that have got a gradient since the buffer was made
        self.arrived = 0  # number of gradients that this micro-batch has brought
        self.launched = self.handed_over = False

    @property
    def whole(self) -> bool:
        """Whether this micro-batch has brought all gradients of the bucket."""
        return self.arrived == len(self.params)

    def hand_over(self) -> None:
        """Drops this object's reference to the buffer, which lives on as long as somebody holds a view of it."""
        self.handed_over, self.buffer = True, None
        self.forget_views()

    def ensure(self) -> torch.Tensor:
        """Returns the buffer; allocates it, with its views, if there is none."""
        if self.buffer is None:
            self.buffer = torch.empty(self.layout.size, dtype=self.dtype, device=self.params[0].device)
            for start, stop in self.layout.gaps:  # gaps are reduced too, and new memory may hold NaN
                self.buffer[start:stop].zero_()
            self.views_now = [
                shaped(self.buffer[entry.start : entry.stop], param.shape, as_complex=param.is_complex())
                for entry, param in zip(self.layout.entries, self.params, strict=True)
            ]
            self._alone = self._holders()
            self.filled.clear()
        return self.buffer

    def view(self, place: int) -> torch.Tensor:
        """Returns the view of the buffer that is the gradient at this place, in the parameter's shape."""
        self.ensure()
        return self.views_now[place]

    def put(self, sums: torch.Tensor) -> None:
        """Sets the buffer to `sums`, flat reduced gradients of the same layout."""
        self.buffer = sums
        entries = zip(self.layout.entries, self.params, strict=True)
        self.views_now = [shaped(sums[e.start : e.stop], p.shape, as_complex=p.is_complex()) for e, p in entries]
        self._alone = self._holders()

    def start_step(self) -> None:
        """Drops the last step's gradients.

        The buffer is dropped too if somebody still refers to one of them, or gave it other memory (`grad.data = x`).
        """
        self.filled.clear()
        self.handed_over = False
        for param in self.params:
            param.grad = None
        # a script that kept last step's `param.grad` must not see it change (tests/scripts/test_prepare_gradients)
        if self.buffer is not None and self.views_now and self._holders() != self._alone:
            self.buffer = None
            self.forget_views()

    def _holders(self) -> list[int]:
        """Returns [reference count of the buffer's storage, of each view, ...], larger if somebody kept a gradient."""
        assert self.buffer is not None
        users = torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)
        return [users, *map(sys.getrefcount, self.views_now)]

    def forget_views(self) -> None:
        """Drops the views, which would keep the buffer's memory alive after it was taken away."""
        self.views_now = []

    def complete(self) -> torch.Tensor:
        """Returns the buffer, with zeros at places that got no gradient."""
        if len(self.filled) < len(self.params):  # other ranks may have these gradients, and whole buffers are summed
            for place in set(range(len(self.params))) - self.filled:
                self.view(place).zero_()
        return self.ensure()


class GradientBuckets:
    """Buckets that hooks on the parameters fill within backward.

    named   (name, parameter) of each
    dtype   of the buffers
    ranks   each bucket's size is a multiple of it
    summing number of ranks that sum a gradient; under `keep` buckets are larger for more of them
    keep    whether buffers outlive the reduction and are the parameters' `.grad`, in which micro-batches accumulate;
            else `launch` takes the buffer away, and each micro-batch allocates a new one
    launch  called with each bucket, in order, when it may be reduced
    order   under `deterministic`, gets the buckets instead of `launch`, and sums them in a fixed order; else None
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
        self.sync = False  # whether this micro-batch's backward launches reductions
        self.asleep = False  # if set, a gradient is not summed but its parameter given to `strays` (scripts)
        self.strays: Callable[[nn.Parameter], None] = lambda param: None
        self.used: set[int] = set()  # indices of parameters that got a gradient in this step
        self.used_now: set[int] = set()  # the same in this micro-batch
        self.in_pieces: set[int] = set()  # indices of buckets of which a gradient came more than once in a backward
        self._learning = False  # `in_pieces` is being found, so nothing is launched before the end of this backward
        self._next = 0  # index of the bucket to launch next
        for number, bucket in enumerate(self.buckets):
            for place, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self._hook(number, place))

    def expect_pieces(self) -> None:
        """Makes the next backward find gradients that come in several pieces; it launches nothing before its end."""
        self._learning = True

    def start_step(self) -> None:
        """Drops the last step's gradients."""
        self.used.clear()
        if self.order is not None:
            self.order.start_step()
        for bucket in self.buckets:
            bucket.start_step()

    def start_micro_batch(self, *, sync: bool) -> None:
        """Called before a micro-batch's forward. `sync`: whether its backward launches reductions."""
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
        """Returns the hook that puts a parameter's gradient into bucket `number`, at `place`."""
        # no strong reference: a parameter keeps its hooks where Python's collector does not look, so that buckets, and
        # the process groups they reduce over, would outlive the run
        owner = weakref.ref(self)
        # looked up once, since a hook runs for every weight of every micro-batch
        bucket = self.buckets[number]
        index = bucket.layout.entries[place].index
        kept = self.keep and bucket.dtype == bucket.params[place].dtype.to_real()

        def on_gradient(param: nn.Parameter) -> None:
            buckets = owner()
            # the run is over, but the parameter still exists
            if buckets is None:
                return
            # a backward outside of a step is not summed
            if buckets.asleep:
                buckets.strays(param)
                return
            bucket_now, used = buckets.buckets[number], buckets.used_now
            views = bucket_now.views_now
            if views and param.grad is views[place] and index not in used and not (buckets.sync or bucket_now.launched):
                used.add(index)  # autograd has accumulated in the bucket itself, and nothing is to be launched yet
                bucket_now.arrived += 1
            else:
                buckets._on_gradient(param, number, place, index, kept)

        return on_gradient

    def _on_gradient(self, param: nn.Parameter, number: int, place: int, index: int, kept: bool) -> None:
        """Puts a micro-batch's gradient into its bucket; `RunError` if that was launched. Runs for each parameter.

        number  of the bucket;  place, index  of the parameter in the bucket, and among all
        kept    whether the buffer's view becomes `param.grad`
        """
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
        if gradient is None:  # a compiled block calls the hooks of parameters that it does not use, too
            return
        if gradient is not view:  # else autograd has accumulated in the bucket itself
            if place not in bucket.filled:
                view.copy_(gradient)
                bucket.filled.add(place)
            elif gradient.data_ptr() != view.data_ptr():  # else another tensor on the same memory, so already there
                view.add_(gradient)
            # the next micro-batch is accumulated in the bucket, where the dtype allows
            param.grad = view if kept else None
            gradient = None  # frees its memory before a launch allocates some
        if index in self.used_now:  # a second piece: a reentrant checkpoint runs a backward of its own
            self.in_pieces.add(number)
            return
        self.used_now.add(index)
        bucket.arrived += 1
        # in other micro-batches gradients only add up
        if self.sync and bucket.whole:
            self._launch_whole()

    def _launch_whole(self) -> None:
        """Launches the next buckets in order, up to the first that is not full."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            # in a fixed order, whatever backward's, since ranks with different orders would wait for each other
            if self._learning or bucket.arrived < len(bucket.params) or self._next in self.in_pieces:
                return
            self._launch_next()

    def _launch_next(self) -> None:
        """Launches the next bucket, with zeros for missing gradients; under `order` hands it to that instead."""
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.complete()
        bucket.launched = True
        if self.order is None:
            self.launch(bucket)
        else:
            self.order.add(self._next - 1, bucket.ensure())
            bucket.buffer = None  # owned by `order` from here on, which adds other pieces into it
        # `launch` may have taken the buffer, whose memory the views would keep alive
        if bucket.buffer is None:
            bucket.forget_views()
