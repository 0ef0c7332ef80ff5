"""Streams and events of the mock accelerator, which delay copies to the host and count bytes and waits.

    stream.send(goal)        `goal`, a CPU tensor, becomes NaN until the copy arrives, as pinned memory may be on a GPU
    event.record(stream)     the event covers the copies that the stream has begun or waits for
    event.synchronize()      those copies arrive; likewise a stream's if it is waited for or a value is read in it

All other work on this device is done when its call returns.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


def unreadable(tensor: torch.Tensor) -> None:
    """Fills a tensor with NaN, True, or 127 or 255 (integers), so that a read before the result arrives shows."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else min(255, torch.iinfo(tensor.dtype).max))


def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Returns a copy of a CPU tensor that counts as pinned, or the tensor if it does. Replaces `Tensor.pin_memory`."""
    if is_pinned(tensor):
        return tensor
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    copy.untyped_storage().pinned = True  # torch keeps a storage's object as long as its memory
    return copy


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Whether a tensor's storage counts as pinned; replaces `Tensor.is_pinned`."""
    return getattr(tensor.untyped_storage(), "pinned", False)


class _Copy:
    """A copy to the host that is under way: `goal` is unreadable until `arrive` writes `values` into it."""

    def __init__(self, goal: torch.Tensor) -> None:
        self.goal, self.values = goal, goal.clone()
        self.under_way = True
        unreadable(goal)

    def arrive(self) -> None:
        self.goal.copy_(self.values)
        self.under_way = False
        del self.goal, self.values


def _arrived(copies: list[_Copy]) -> bool:
    """Completes the copies and empties the list; returns whether one was still under way."""
    waiting = [copy for copy in copies if copy.under_way]
    copies.clear()
    with torch.no_grad():
        for copy in waiting:
            copy.arrive()
    return bool(waiting)


class MockEvent:
    """A point in a stream, reached when the copies to the host that precede it have arrived."""

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        """Takes the arguments of torch's events, and ignores them."""
        self._copies: list[_Copy] = []

    def record(self, stream: MockStream | None = None) -> None:
        """Makes this event cover all copies that the stream has begun or waits for; None: the current stream."""
        self._copies = list((stream or TRAFFIC.current).copies)

    def wait(self, stream: MockStream | None = None) -> None:
        """Makes a stream wait for this event; None: the current stream."""
        (stream or TRAFFIC.current).wait_event(self)

    def synchronize(self) -> None:
        """Completes the copies before this event, as a wait of the host; counts it if one was under way."""
        TRAFFIC.waits += _arrived(self._copies)

    def query(self) -> bool:
        """Whether all work before this event is done."""
        return not any(copy.under_way for copy in self._copies)

    def elapsed_time(self, other: MockEvent) -> float:
        """Returns 0.0 milliseconds: work on this device takes no time."""
        return 0.0


class MockStream:
    """A queue of copies to the host that are pending; all other work is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        """Takes the arguments of torch's streams, and ignores them."""
        self.copies: list[_Copy] = []

    @property
    def device(self) -> torch.device:
        """Returns the mock device."""
        return torch.device("mock", 0)

    def send(self, goal: torch.Tensor) -> None:
        """Begins a copy into the CPU tensor `goal`: its present values arrive when they are waited for, NaN before."""
        copy = _Copy(goal)
        self._know([copy])
        TRAFFIC.pending.append(copy)

    def _know(self, copies: list[_Copy]) -> None:
        self.copies = [copy for copy in dict.fromkeys([*self.copies, *copies]) if copy.under_way]

    def wait_event(self, event: MockEvent) -> None:
        """Makes later work of this stream wait for the event."""
        self._know(event._copies)

    def wait_stream(self, stream: MockStream) -> None:
        """Makes later work of this stream wait for another stream."""
        self._know(stream.copies)

    def record_event(self, event: MockEvent | None = None) -> MockEvent:
        """Records an event (a new one for None) on this stream and returns it."""
        event = event or MockEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Completes all copies of this stream, as a wait of the host."""
        _arrived(self.copies)

    def query(self) -> bool:
        """Whether all work of this stream is done."""
        return not any(copy.under_way for copy in self.copies)


class Traffic:
    """Counts of what was copied between host and device.

    bytes     direction ("to device", "to host") -> bytes
    waits     how often the host waited: for an event with a copy under way, or in a blocking copy
    beside    bytes to the device that were copied in a stream other than the default one
    pending   copies that were begun; `own`: the default stream; `current`: the current one
    """

    def __init__(self) -> None:
        self.bytes = Counter[str]()
        self.waits = self.beside = 0
        self.pending: list[_Copy] = []
        self.own = self.current = MockStream()

    def copied(self, way: str, source: torch.Tensor, *, waits: bool) -> None:
        """Counts a copy of `source`; `way`: "to device" or "to host"; `waits`: whether the host waits for it."""
        size = source.numel() * source.element_size()
        self.bytes[way] += size
        self.beside += size if way == "to device" and self.current is not self.own else 0
        self.waits += waits

    def arrive(self) -> None:
        """Completes all copies."""
        _arrived(self.pending)

    def clear(self) -> None:
        """Sets all counts to zero."""
        self.bytes.clear()
        self.waits = self.beside = 0


TRAFFIC = Traffic()  # of this process
