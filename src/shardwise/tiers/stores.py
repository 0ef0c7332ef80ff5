"""Stores for offloaded activations: the host's memory, a file of extents, or nowhere (in a rehearsal).

A store copies the bytes of a whole storage, given as a flat tensor, and returns them in new memory:

    put ──> written()    the source may be freed
    fetch ──> bytes()    the same bytes, in new memory
    release()            the store's room is free again

`Nowhere` is for fake tensors. It frees and allocates memory as in a run, and counts the bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.device import on_host, pinned
from shardwise.tiers.scratch import ScratchFile
from shardwise.tiers.subgroups import PAGE

REQUEST_BYTES = 4 << 20  # of one read or write
THREADS = 4  # number of requests in flight
GROWTH_BYTES = 64 << 20  # smallest growth of a file of extents
LOST = "Weights and the optimizer's state are those before this step."


class Token:
    """Handle of one storage's bytes in a store; these defaults are for a store without copies to wait for."""

    def written(self) -> None:
        """Waits until the source may be freed."""

    def fetch(self) -> None:
        """Starts to copy the bytes back."""

    def bytes(self) -> torch.Tensor:
        """Returns the bytes in new memory on the device, flat; waits for `fetch`, or does it."""
        raise NotImplementedError

    def release(self) -> None:
        """Frees the store's room; no other method is called afterwards."""


class Store:
    """A store. name: of its tier; bytes_put: copied to it so far; held_bytes: allocated; notices: lines for users."""

    name: str
    bytes_put = 0
    held_bytes = 0
    notices: Sequence[str] = ()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` can be put here."""
        return type(tensor) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)

    def put(self, memory: torch.Tensor) -> Token:
        """Starts to copy `memory`, flat uint8; returns its token."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends threads and closes files."""


# --- without values


class Nowhere(Store):
    """The store of a rehearsal, which keeps nothing; `name`: of the tier that it stands for."""

    def __init__(self, name: str):
        self.name = name

    def takes(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def put(self, memory: torch.Tensor) -> Token:
        self.bytes_put += memory.numel()
        return _Unwritten(memory.numel())


class _Unwritten(Token):
    def __init__(self, size: int):
        self._size = size
        self._back: torch.Tensor | None = None

    def fetch(self) -> None:
        self._back = torch.empty(self._size, dtype=torch.uint8)

    def bytes(self) -> torch.Tensor:
        if self._back is None:
            self.fetch()
        back, self._back = self._back, None
        assert back is not None
        return back


# --- the host's memory


class HostCopies(Store):
    """Copies in the host's memory; for an accelerator pinned, and copied on a stream of their own."""

    name = "host"

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = None if on_host(device) else torch.get_device_module(device).Stream()
        self._free: dict[int, list[torch.Tensor]] = {}

    def put(self, memory: torch.Tensor) -> Token:
        self.bytes_put += memory.numel()
        return _HostCopy(self, memory)

    def room(self, size: int) -> torch.Tensor:
        """Returns host memory for `size` bytes, reused if some of that size is free."""
        if self._free.get(size):
            return self._free[size].pop()
        self.held_bytes += size
        return pinned(torch.empty(size, dtype=torch.uint8), self.device)

    def give_back(self, room: torch.Tensor) -> None:
        """Makes memory from `room` free for reuse."""
        # a copy out of it may still run; it ends before one into it begins, as both are on one stream
        self._free.setdefault(room.numel(), []).append(room)

    def copied(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Starts to copy `source` into `to` on the copy stream; returns the event of its end, None if it is done."""
        if self.stream is None:
            to.copy_(source)
            return None
        module = torch.get_device_module(self.device)
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            to.copy_(source, non_blocking=True)
        event = module.Event()
        event.record(self.stream)
        return event

    def wait_for(self, event: Any) -> None:
        """Makes the current stream wait for the event of a copy; None: nothing to wait for."""
        if event is not None:
            torch.get_device_module(self.device).current_stream().wait_event(event)


class _HostCopy(Token):
    """Token of a copy in the host's memory."""

    def __init__(self, store: HostCopies, memory: torch.Tensor):
        self._store, self._room = store, store.room(memory.numel())
        self._put = store.copied(self._room, memory)
        self._back: torch.Tensor | None = None
        self._fetched: Any = None

    def written(self) -> None:
        self._store.wait_for(self._put)

    def fetch(self) -> None:
        self._back = torch.empty(self._room.numel(), dtype=torch.uint8, device=self._store.device)
        self._fetched = self._store.copied(self._back, self._room)
        if self._store.stream is not None:  # it may be freed before anybody waits for the copy
            self._back.record_stream(self._store.stream)

    def bytes(self) -> torch.Tensor:
        if self._back is None:
            self.fetch()
        back, self._back = self._back, None
        assert back is not None
        self._store.wait_for(self._fetched)
        return back

    def release(self) -> None:
        self._store.give_back(self._room)


# --- a file


class ExtentFile(Store):
    """Extents of one file, which grows to the most bytes held at once; a pool of threads moves the bytes.

    Each thread copies through a page-aligned buffer of its own. An accelerator's memory is first copied to the host
    (`staging`; None on a CPU).
    """

    name = "disk"

    def __init__(self, device: torch.device, rank: int):
        self.file = ScratchFile(rank, "activations", LOST)
        self.notices = self.file.notices
        self.staging = None if on_host(device) else HostCopies(device)
        self.device = device
        self._free: list[tuple[int, int]] = []  # free extents (start, size), in order, adjacent ones merged
        self._released: deque[tuple[int, int]] = deque()  # extents to be added to `_free`
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="shardwise-tier")
        self._own = threading.local()

    def put(self, memory: torch.Tensor) -> Token:
        self.bytes_put += memory.numel()
        return _Extent(self, memory)

    def room(self, size: int) -> int:
        """Returns the start of a free extent of `size` bytes, whole pages; `RunError` if the disk is full."""
        # garbage collection may release extents at any time, in any thread, so they are merged here
        while self._released:
            self._take_back(*self._released.popleft())
        for place, (start, free) in enumerate(self._free):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._free[place : place + 1] = rest
                return start
        start, grown = self.held_bytes, max(size, GROWTH_BYTES)
        try:
            self.file.reserve(start, grown)
        except OSError as error:
            why = f"{error.strerror} ({self.file.folder} has no room for what this rank's blocks keep for backward)"
            raise self.file.error("make room for", grown, start, why) from error
        self.held_bytes += grown
        if grown > size:  # the file grows by more than was asked for
            self._take_back(start + size, grown - size)
        return start

    def give_back(self, start: int, size: int) -> None:
        """Frees an extent; may be called from any thread."""
        self._released.append((start, size))

    def _take_back(self, start: int, size: int) -> None:
        """Adds an extent to the free ones."""
        insort(self._free, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, free in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + free)
            else:
                joined.append((begin, free))
        self._free = joined

    def start(self, move: Callable[..., None], memory: torch.Tensor, offset: int) -> list[Future[None]]:
        """Starts `move` (`read` or `write`) of all of `memory` at byte `offset` of the file; returns its futures."""
        size = memory.numel()
        return [
            self._pool.submit(move, memory, at, min(REQUEST_BYTES, size - at), offset + at)
            for at in range(0, size, REQUEST_BYTES)
        ]

    def write(self, memory: torch.Tensor, at: int, size: int, offset: int) -> None:
        """Writes bytes [at, at + size) of `memory` to byte `offset` of the file, page-aligned."""
        buffer = self._buffer()
        np.frombuffer(buffer, np.uint8)[:size] = _values(memory, at, size)
        self.file.write(memoryview(buffer)[: whole_pages(size)], offset)

    def read(self, memory: torch.Tensor, at: int, size: int, offset: int) -> None:
        """Reads `size` bytes at byte `offset` of the file, page-aligned, into `memory` from its byte `at` on."""
        buffer = self._buffer()
        self.file.read(memoryview(buffer)[: whole_pages(size)], offset)
        _values(memory, at, size)[:] = np.frombuffer(buffer, np.uint8)[:size]

    def _buffer(self) -> mmap.mmap:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = mmap.mmap(-1, REQUEST_BYTES)
        return self._own.buffer

    def close(self) -> None:
        self._pool.shutdown()
        self.file.close()


class _Extent(Token):
    """Token of an extent of the file."""

    def __init__(self, store: ExtentFile, memory: torch.Tensor):
        self._store, self._size = store, memory.numel()
        self._start = store.room(whole_pages(self._size))
        self._back: torch.Tensor | None = None
        self._copied: Any = None
        self._room: torch.Tensor | None = None  # of the host's, between another device and the disk
        write = store.write
        if store.staging is not None:
            self._room = store.staging.room(self._size)
            self._copied = store.staging.copied(self._room, memory)
            memory, write = self._room, partial(self._write_copied, self._copied)
        self._started = store.start(write, memory, self._start)

    def _write_copied(self, copied: Any, *what: Any) -> None:
        copied.synchronize()
        self._store.write(*what)

    def written(self) -> None:
        if self._store.staging is not None:
            self._store.staging.wait_for(self._copied)
        self._finish()
        self._free_room()

    def _finish(self) -> None:
        while self._started:
            self._started.pop(0).result()

    def _free_room(self) -> None:
        if self._room is not None and self._store.staging is not None:
            self._store.staging.give_back(self._room)
            self._room = None

    def fetch(self) -> None:
        self._finish()
        if self._store.staging is None:
            self._back = torch.empty(self._size, dtype=torch.uint8)
            self._started = self._store.start(self._store.read, self._back, self._start)
            return
        self._room = self._room if self._room is not None else self._store.staging.room(self._size)
        self._started = self._store.start(self._store.read, self._room, self._start)

    def bytes(self) -> torch.Tensor:
        """Returns the storage's bytes, on its device; waits for the read, or starts it."""
        if self._back is None and self._room is None:  # not fetched ahead
            self.fetch()
        self._finish()
        back, self._back = self._back, None
        if self._store.staging is not None and self._room is not None:  # through the host's memory, to the device
            back = torch.empty(self._size, dtype=torch.uint8, device=self._store.device)
            self._store.staging.wait_for(self._store.staging.copied(back, self._room))
            self._free_room()
        assert back is not None
        return back

    def release(self) -> None:
        # the extent must not be reused while it is still written to
        wait([future for future in self._started if not future.cancel()])
        self._free_room()
        self._store.give_back(self._start, whole_pages(self._size))


def whole_pages(size: int) -> int:
    """Returns a size in bytes rounded up to whole pages, the unit of direct reads and writes."""
    return -(-size // PAGE) * PAGE


def _values(memory: torch.Tensor, at: int, size: int) -> np.ndarray:
    """Returns bytes [at, at + size) of a CPU tensor as an array view, without an op that a dispatch mode would see."""
    here = (ctypes.c_char * size).from_address(memory.data_ptr() + at)
    return np.frombuffer(memoryview(here).cast("B"), np.uint8)
