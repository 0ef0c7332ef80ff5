"""Find modules whose forward writes into a tensor that they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.trace.functional import innermost
from shardwise.trace.leaves import written_tensors
from shardwise.trace.tape import storage_key, tensors_in


class ArgumentWrites:
    """Collects in `paths` the modules whose forward writes into a tensor among its own arguments."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._running: list[tuple[nn.Module, str, set[int]]] = []  # module, path, storages of its arguments

    def watch(self, model: nn.Module) -> None:
        """Follow the forwards of all modules inside a model."""
        for path, child in model.named_modules():
            if path:
                child.register_forward_pre_hook(
                    lambda m, args, kwargs, path=path: self.enter(m, path, args, kwargs), with_kwargs=True
                )
                # called too where the forward raises: else the module would count as running from then on
                child.register_forward_hook(lambda m, a, o: self.leave(m), always_call=True)

    def enter(self, child: nn.Module, path: str, args: tuple, kwargs: dict) -> None:
        """Note the storages of a module's arguments as its forward begins."""
        self._running.append((child, path, _memory(tensors_in((args, kwargs)))))

    def leave(self, child: nn.Module) -> None:
        """Forget a module's arguments, since its forward is over."""
        if self._running and self._running[-1][0] is child:  # `clear` may have dropped it since
            self._running.pop()

    def clear(self) -> None:
        """Forget every module that was running, since a new forward of the model begins."""
        self._running.clear()

    def note(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Add to `paths` the running modules into whose arguments this operation writes."""
        if self._running:
            written_memory = _memory(written_tensors(func, args, kwargs))
            self.paths |= {path for _, path, argument_memory in self._running if written_memory & argument_memory}


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns the storage keys of strided tensors; sparse and nested ones have several storages and are left out."""
    # of a DTensor the local shard is written; a wrapper of `torch.func` has no storage of its own
    plain = (innermost(tensor._local_tensor if isinstance(tensor, DTensor) else tensor) for tensor in tensors)
    return {storage_key(tensor) for tensor in plain if tensor.layout is torch.strided}
