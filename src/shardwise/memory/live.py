"""Count live bytes: storages of ops' results that are not freed yet, each once, on any device.

What this does not do: count memory that kernels use internally, or that an allocator keeps in reserve.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from shardwise.device import on_host

# how often, and for how many seconds, `settle` waits for other threads to free memory, which takes them microseconds
TURNS, TURN_S = 4, 0.001


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Returns the bytes of the tensors' storages, each once; of a sharded tensor those of this rank's shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


@contextmanager
def resizes_told(to: list[torch.UntypedStorage]) -> Iterator[None]:
    """Context: every storage that Python code resizes is appended to `to`, for `LiveBytes(resized=to)`."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        to.append(storage)
        return torch._C.StorageBase.resize_(storage, size)

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


class _Launched(TorchDispatchMode):
    """Mode around a collective's kernel; `kept` are storages that it allocated and holds until somebody waits for it.

    The backend's threads inherit the mode; what they allocate is freed when the collective is done, so not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        # not of the backend's threads, whose memory is freed when the collective is done
        if threading.get_ident() == self._thread:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._made += [weakref.ref(leaf.untyped_storage()) for leaf in leaves]
        return output

    @property
    def kept(self) -> list[torch.UntypedStorage]:
        """Returns the storages allocated here that still exist, perhaps some more than once."""
        return [storage for storage in (made() for made in self._made) if storage is not None]


def _all_plain(values: Any) -> bool:
    """Whether all tensors in a pytree are on the CPU and of no subclass but `Parameter`."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return all(on_host(leaf.device) and type(leaf) in (torch.Tensor, torch.nn.Parameter) for leaf in tensors)


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts live bytes: `now`, and `peak` since the start or the last `reset_peak`.

    settle   whether a peak counts only memory that is still held after a garbage collection and a short wait for other
             threads. Without it the peak depends on when cycles are collected, and when a backend's thread frees a
             collective's tensors. It is slow, so for tiny models only
    resized  list to which storages that are resized without an op are appended (`resizes_told`); None: not known

    FSDP2 resizes the storages of gathered parameters without an op. With `resized` None, all sizes are read again for
    `now` and before a new peak is noted, and sizes that changed once are read after each op; that takes time quadratic
    in the length of a forward. With the list only its storages are read again.

    If no other mode was entered before, the kernels of collectives on CPU tensors are observed too, since gloo copies
    the input of a reduce-scatter and keeps the copy until somebody waits. All-gathers are not, since gloo copies in a
    thread of its own, in which torch before 2.13 calls no op under this mode.
    """

    def __init__(self, settle: bool = False, resized: list[torch.UntypedStorage] | None = None) -> None:
        super().__init__()
        self.peak = 0
        self.settle = settle
        self._total = 0
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resized: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._resizes = resized
        self._unread: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # from the list, size not read again yet

    @property
    def now(self) -> int:
        """Returns the live bytes at this moment."""
        self._read_again()
        return self._total

    def reset_peak(self) -> None:
        """Sets the peak to the bytes that are live now."""
        self.peak = self.now

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that were made before the mode was entered."""
        for tensor in tensors:
            self._meet(getattr(tensor, "_local_tensor", tensor).untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(getattr(kind, "observes_inside", False) for kind in types):
            return NotImplemented  # a sharded tensor, whose own rule runs next, on its local tensor
        kwargs = kwargs or {}
        # gloo copies inputs inside these; the copy of a gather is made in another thread, which no mode sees
        looked_into = func.namespace == "c10d" and "gather" not in str(func) and not _get_current_dispatch_mode_stack()
        if looked_into and _all_plain((args, kwargs)):
            with _Launched() as launched:  # around the kernel alone
                output = func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
            self.note(output)
            for storage in launched.kept:
                self._meet(storage)
            return output
        output = func(*args, **kwargs)
        self.note(output)
        return output

    def note(self, output: object) -> None:
        """Counts the storages of an op's results."""
        for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._meet(getattr(leaf, "_local_tensor", leaf).untyped_storage())

    def _meet(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage with its present size until it is freed; updates the peak."""
        key = storage._cdata
        self._read_changed()
        if key not in self._sizes:
            self._sizes[key] = 0
            self._storages[key] = weakref.ref(storage, lambda _: self._free(key))
        self._count(key, storage.nbytes())
        # read sizes again before a new peak is noted, since a gathered weight may have been freed
        if self._total > self.peak:
            self._read_again()
            if self.settle and self._total > self.peak:
                self._let_go()
            self.peak = max(self.peak, self._total)

    def _let_go(self) -> None:
        """Collects garbage, and waits a little for other threads while more than the peak is live."""
        gc.collect()
        for _ in range(TURNS):
            if self._total <= self.peak:
                return
            time.sleep(TURN_S)

    def _count(self, key: int, size: int) -> None:
        self._total += size - self._sizes[key]
        self._sizes[key] = size

    def _read_changed(self) -> None:
        """Counts the present size of storages whose size has changed before."""
        if self._resizes is None:  # resizes are not reported
            self._read(self._resized)
            return
        while self._resizes:
            storage = self._resizes.pop()
            key = storage._cdata
            # others are read when a new peak would be noted
            if key in self._resized:
                self._count(key, storage.nbytes())
            elif key in self._sizes:
                self._unread[key] = self._storages[key]

    def _read_again(self) -> None:
        """Counts the present size of every storage that may have changed."""
        if self._resizes is None:
            self._read(self._storages)
            return
        self._read_changed()
        self._read(self._unread)
        self._unread.clear()

    def _read(self, storages: dict[int, weakref.ref[torch.UntypedStorage]]) -> None:
        """Counts those of `storages` whose size has changed with their present size."""
        for key, reference in list(storages.items()):
            storage = reference()
            if storage is not None and (size := storage.nbytes()) != self._sizes[key]:
                self._resized[key] = reference
                self._count(key, size)

    def _free(self, key: int) -> None:
        self._total -= self._sizes.pop(key, 0)
        self._storages.pop(key, None)
        self._resized.pop(key, None)
        self._unread.pop(key, None)
