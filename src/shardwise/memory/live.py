"""Count live bytes: storages that ops returned and that are not freed yet, each once, those on the host included.

What this does not do: see memory that kernels use inside themselves, or that an allocator keeps in reserve.
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

TURNS, TURN_S = 4, 0.001  # what a settled peak waits for: other threads free what they hold within microseconds


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
    """Context: every storage that Python resizes is added to `to`, for `LiveBytes(resized=to)`."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        to.append(storage)
        return torch._C.StorageBase.resize_(storage, size)

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


class _Launched(TorchDispatchMode):
    """Mode around a collective's kernel: `kept` are the storages that the kernel made and holds until it is waited for.

    The backend's threads inherit the mode; what they make is the kernel's own and gone when it is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        # what the backend's threads make is gone when the collective is done
        if threading.get_ident() == self._thread:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._made += [weakref.ref(leaf.untyped_storage()) for leaf in leaves]
        return output

    @property
    def kept(self) -> list[torch.UntypedStorage]:
        """Returns the storages that the kernel made and still holds, one perhaps more than once."""
        return [storage for storage in (made() for made in self._made) if storage is not None]


def _all_plain(values: Any) -> bool:
    """Whether tensors among the values lie on the CPU and are of no class with rules of its own."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return all(on_host(leaf.device) and type(leaf) in (torch.Tensor, torch.nn.Parameter) for leaf in tensors)


class LiveBytes(TorchDispatchMode):
    """Counts live bytes while it is active: `now`, and `peak` since the start or the last `reset_peak`.

    A storage that is resized without an op (FSDP2 gives gathered parameters their memory and takes it so) counts with
    its present size: sizes are read again whenever `now` is asked for or a new peak would be noted, and those that
    were once seen to change after every op.

    `settle=True` notes a peak only of what is still held once garbage was collected and other threads have had their
    turn: a cycle waits for Python to look, and a thread of the backend lets go of a collective's tensors a moment after
    it is complete, so that without it the peak is that of one interleaving out of many. It is slow: for tiny models.

    To read the sizes of all again whenever a peak is noted takes time that grows with the square of a forward's length.
    Where whoever resizes a storage without an op tells, by adding it to the list `resized`, no other is read again.

    A collective on CPU tensors is looked into, where no other mode was entered before this one: gloo scatters sums of a
    copy of what it is given, and keeps the copy until somebody waits. A gather makes its own in gloo's thread alone,
    where torch before 2.13 calls no operation that has inherited a mode.
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
        self._unread: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # told of, and not yet seen to change

    @property
    def now(self) -> int:
        """Returns live bytes at this moment."""
        self._read_again()
        return self._total

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are live now."""
        self.peak = self.now

    def count(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before the mode was active."""
        for tensor in tensors:
            self._meet(getattr(tensor, "_local_tensor", tensor).untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(getattr(kind, "observes_inside", False) for kind in types):
            return NotImplemented  # a share of a tensor: its rule runs next, on what is really held
        kwargs = kwargs or {}
        # inside these, gloo copies what it is given; a gather's copy is made in another thread, which no mode sees
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
        """Count the storages of an op's results."""
        for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._meet(getattr(leaf, "_local_tensor", leaf).untyped_storage())

    def _meet(self, storage: torch.UntypedStorage) -> None:
        """Count a storage's present bytes, and free them when it is gone; note a new peak."""
        key = storage._cdata
        self._read_changed()
        if key not in self._sizes:
            self._sizes[key] = 0
            self._storages[key] = weakref.ref(storage, lambda _: self._free(key))
        self._count(key, storage.nbytes())
        # read sizes again before a new peak is noted: a gathered weight may have given its memory back
        if self._total > self.peak:
            self._read_again()
            if self.settle and self._total > self.peak:  # a thread may be freeing memory: it is waited for
                self._let_go()
            self.peak = max(self.peak, self._total)

    def _let_go(self) -> None:
        """Collect garbage, and wait a little for memory that is being freed, where more than the peak is held."""
        gc.collect()
        for _ in range(TURNS):
            if self._total <= self.peak:
                return
            time.sleep(TURN_S)

    def _count(self, key: int, size: int) -> None:
        self._total += size - self._sizes[key]
        self._sizes[key] = size

    def _read_changed(self) -> None:
        """Counts the present size of storages that have changed before."""
        if self._resizes is None:  # nobody tells of them: all that ever changed are read
            self._read(self._resized)
            return
        while self._resizes:
            storage = self._resizes.pop()
            key = storage._cdata
            # one that has changed before counts at once; of others a size is read when a peak would be noted
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
        """Count storages whose size has changed."""
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
