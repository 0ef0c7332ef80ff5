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
    """Told of modules' forwards and of operations; `paths` are those of the modules that write into their arguments."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._given: list[tuple[nn.Module, str, set[int]]] = []  # of those that run, the memory of arguments

    def watch(self, model: nn.Module) -> None:
        """Follow the forwards of all modules inside a model."""
        for path, child in model.named_modules():
            if path:
                child.register_forward_pre_hook(
                    lambda m, args, kwargs, path=path: self.enter(m, path, args, kwargs), with_kwargs=True
                )
                child.register_forward_hook(lambda m, a, o: self.leave(m), always_call=True)

    def enter(self, child: nn.Module, path: str, args: tuple, kwargs: dict) -> None:
        """Note which memory a module is given as its forward begins."""
        self._given.append((child, path, _memory(tensors_in((args, kwargs)))))

    def leave(self, child: nn.Module) -> None:
        """Forget what a module was given, since its forward is over."""
        if self._given and self._given[-1][0] is child:
            self._given.pop()

    def clear(self) -> None:
        """Forget every module that was running, since a new forward of the model begins."""
        self._given.clear()

    def note(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Add to `paths` the running modules that were given memory into which this operation writes."""
        if self._given:
            memory = _memory(written_tensors(func, args, kwargs))
            self.paths |= {path for _, path, given in self._given if memory & given}


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages that these tensors lie in; those of sparse and nested layouts have several, and are left out."""
    plain = (innermost(each._local_tensor if isinstance(each, DTensor) else each) for each in tensors)
    return {storage_key(each) for each in plain if each.layout is torch.strided}
