"""Live bytes: storages that ops returned in this process and that are not freed yet, each counted once.

What this does not do: see memory that kernels use inside themselves, or that an allocator keeps in reserve.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the tensors' storages, each once; sharded tensors count with what this rank holds."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


class LiveBytes(TorchDispatchMode):
    """Counts live bytes while it is active: `now`, and `peak` since the start or the last `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Let the peak begin again at what is live now."""
        self.peak = self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, torch.Tensor):
                self._meet(getattr(leaf, "_local_tensor", leaf).untyped_storage())
        return output

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._free, key)
        self._sizes[key] = size
        self.now += size - (known or 0)
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
