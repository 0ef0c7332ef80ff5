"""Streams and events of the mock accelerator, which know of copies to the host alone: what waits for them, and bytes.

    stream.send(goal)        `goal`, a tensor of the host's, is NaN from here on, as pinned memory may be on a GPU
    event.record(stream)     knows of the copies that the stream has begun, or waits for
    event.synchronize()      those have arrived; so have a stream's, where it is waited for or a value is read in it

All else on this device is done when its call returns.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


def unreadable(tensor: torch.Tensor) -> None:
    """Fill a tensor with what nobody computes: NaN, True, or an integer of 127 or 255."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else min(255, torch.iinfo(tensor.dtype).max))


def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Returns a copy of a tensor of the host's that counts as pinned; in place of `Tensor.pin_memory`."""
    if is_pinned(tensor):
        return tensor
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    copy.untyped_storage().pinned = True  # torch keeps a storage's object as long as its memory
    return copy


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Whether a tensor's memory counts as pinned; in place of `Tensor.is_pinned`."""
    return getattr(tensor.untyped_storage(), "pinned", False)


class _Copy:
    """A copy to the host that is under way."""

    def __init__(self, goal: torch.Tensor) -> None:
        self.goal, self.values = goal, goal.clone()
        self.under_way = True
        unreadable(goal)

    def arrive(self) -> None:
        self.goal.copy_(self.values)
        self.under_way = False
        del self.goal, self.values


def _arrived(copies: list[_Copy]) -> bool:
    """Complete the copies, and empty the list; returns whether one was under way."""
    waiting = [copy for copy in copies if copy.under_way]
    copies.clear()
    with torch.no_grad():
        for copy in waiting:
            copy.arrive()
    return bool(waiting)


class MockEvent:
    """A point in a stream: reached when the copies to the host before it have arrived."""

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        """Takes the arguments of torch's events, and ignores them."""
        self._copies: list[_Copy] = []

    def record(self, stream: MockStream | None = None) -> None:
        """Make this event follow all that the stream has begun."""
        self._copies = list((stream or TRAFFIC.current).copies)

    def wait(self, stream: MockStream | None = None) -> None:
        """Let a stream wait for this event."""
        (stream or TRAFFIC.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for this event."""
        TRAFFIC.waits += _arrived(self._copies)

    def query(self) -> bool:
        """Whether all work before this event is done."""
        return not any(copy.under_way for copy in self._copies)

    def elapsed_time(self, other: MockEvent) -> float:
        """Returns 0.0 milliseconds: work on this device takes no time."""
        return 0.0


class MockStream:
    """A queue of work in which copies to the host are pending; all other work is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        """Takes what torch's streams take."""
        self.copies: list[_Copy] = []

    @property
    def device(self) -> torch.device:
        """Returns the mock device."""
        return torch.device("mock", 0)

    def send(self, goal: torch.Tensor) -> None:
        """Begin a copy into a tensor of the host's, which has the values already."""
        copy = _Copy(goal)
        self._know([copy])
        TRAFFIC.pending.append(copy)

    def _know(self, copies: list[_Copy]) -> None:
        self.copies = [copy for copy in dict.fromkeys([*self.copies, *copies]) if copy.under_way]

    def wait_event(self, event: MockEvent) -> None:
        """Let later work of this stream wait for the event."""
        self._know(event._copies)

    def wait_stream(self, stream: MockStream) -> None:
        """Let later work of this stream wait for another stream."""
        self._know(stream.copies)

    def record_event(self, event: MockEvent | None = None) -> MockEvent:
        """Returns an event that follows all that this stream has begun."""
        event = event or MockEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all work of this stream."""
        _arrived(self.copies)

    def query(self) -> bool:
        """Whether all work of this stream is done."""
        return not any(copy.under_way for copy in self.copies)


class Traffic:
    """What has crossed the link: bytes by way ("to device", "to host"), and how often the host waited.

    waits     waits of the host that found a copy under way, or were a copy's own
    beside    bytes to the device that were copied in another stream than the device's own
    current   the stream that work goes to
    """

    def __init__(self) -> None:
        self.bytes = Counter[str]()
        self.waits = self.beside = 0
        self.pending: list[_Copy] = []
        self.own = self.current = MockStream()

    def copied(self, way: str, source: torch.Tensor, *, waits: bool) -> None:
        """Count a copy over the link; `way` is "to device" or "to host"."""
        size = source.numel() * source.element_size()
        self.bytes[way] += size
        self.beside += size if way == "to device" and self.current is not self.own else 0
        self.waits += waits

    def arrive(self) -> None:
        """Let all copies arrive."""
        _arrived(self.pending)

    def clear(self) -> None:
        """Set all counts to zero."""
        self.bytes.clear()
        self.waits = self.beside = 0


TRAFFIC = Traffic()  # of this process, whose device a mock is for good
