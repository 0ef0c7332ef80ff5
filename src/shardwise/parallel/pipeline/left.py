"""What a stage's forward writes into weights and buffers, which later ones do before its backward has run.

    one process    F0 B0 F1 B1      backward 0 meets what forward 0 left
    a stage        F0 F1 B0 B1      forward 1 has normalised the weight anew by then

Autograd saves such a tensor itself, not its values: without this torch would raise, or where the write is by `.data`
go on with the later values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.part.levels import Distributed
from shardwise.trace.flow import Flow, ModuleCall


@dataclass
class _Saved:
    """A saved tensor on the memory of one that the forward writes; a copy takes its place when the forward is over."""

    tensor: torch.Tensor


def _unpacked(kept: torch.Tensor | _Saved) -> torch.Tensor:
    return kept.tensor if isinstance(kept, _Saved) else kept


@contextmanager
def as_left(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context around one forward: its backward gets these parameters and buffers as they are when the forward ends.

    names  of parameters and buffers into which the forward writes
    """
    if not names or not torch.is_grad_enabled():
        yield
        return
    saved_here: list[_Saved] = []

    def pack(saved: torch.Tensor) -> torch.Tensor | _Saved:
        if isinstance(saved, Distributed) or saved.layout is not torch.strided:
            return saved
        memory = saved.untyped_storage()._cdata
        for name in names:  # looked up anew: an assignment to .data or to the attribute gives it other memory
            path, _, leaf = name.rpartition(".")
            child = module.get_submodule(path)
            state = child._parameters.get(leaf, child._buffers.get(leaf))
            if state is not None and state.untyped_storage()._cdata == memory:
                saved_here.append(_Saved(saved))
                return saved_here[-1]
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        yield
    for saved in saved_here:  # at the end: one process meets in backward what its whole forward has written
        saved.tensor = saved.tensor.detach().clone()


def told_written(flow: Flow, module: nn.Module, call: ModuleCall) -> str:
    """Returns why no stage may begin at a call between two uses of what the forward writes into, or ""."""
    state, named = flow.written_around(call.enter), (*module.named_parameters(), *module.named_buffers())
    names = [name for name, tensor in named if id(tensor) == state]
    reason = "the forward writes into '{}' what depends on parameters, and all that uses it belongs into one stage"
    return reason.format(names[0]) if names else ""
