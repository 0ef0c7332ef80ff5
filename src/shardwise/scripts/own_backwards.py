"""Tries whether a backward of the model's own code gives other gradients for a part of the samples.

An `autograd.Function` or a hook on a gradient may take a norm over the batch, which shows in no output. If the model's
code has one, rank 0 keeps a float64 copy of the model from before it is spread, and a few samples of the first batch
go through the copy together and one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.comm import Axis, gather_json, of_first
from shardwise.look.in_float64 import DOUBLE, differs
from shardwise.look.one_process import MOST_ELEMENTS, Untried
from shardwise.step.loss import Loss
from shardwise.trace.outside_state import Reached


class OwnBackwards:
    """The names of a model's own backwards and gradient hooks (`told`), and a float64 copy to try them on.

    The copy exists on rank 0 alone, and only if there is such a backward and the model is small enough.
    """

    def __init__(self, model: nn.Module, world: Axis, device: torch.device) -> None:
        self._world, self._device = world, device
        self.told = Reached(model).own_backwards
        self._copy: nn.Module | None = None
        self._paths = {child: path for path, child in model.named_modules()}
        if self.told and world.index == 0 and sum(param.numel() for param in model.parameters()) <= MOST_ELEMENTS:
            self._copy = _in_double(model)

    def differ(
        self, entry: nn.Module, evaluate: Callable[[nn.Module, Any], Loss], whole: Any, parts: list[Any], asked: bool
    ) -> str | None:
        """Returns a text on how gradients of `whole` and of its `parts` differ, else None.

        Collective; raises `Untried`.

        entry       the module that the script calls
        evaluate    (module, batch) -> the loss that stands for the script's
        asked       Whether this rank needs the answer; if any rank does, all take part, else all return None
        """

        def tried() -> tuple[str | None, str | None]:
            # only rank 0 keeps a copy and runs this; why not is returned, as `of_first` sends no `Untried` to other
            # ranks
            if self._copy is None:
                return None, "the model is too large to be copied, or cannot be"
            module = self._copy.get_submodule(self._paths[entry])
            on_cpu = [tree_map_only(torch.Tensor, _double, batch) for batch in (whole, *parts)]
            try:
                return differs(module, lambda batch: evaluate(module, batch), on_cpu[0], on_cpu[1:]), None
            except Untried as why:
                return None, str(why)

        # `told` follows from the model's code, alike on all ranks, so all come to the gathering or none
        if not self.told or not any(gather_json(asked, self._world, self._device)):
            return None
        text, untried = of_first(tried, self._world, self._device)
        if untried is not None:
            raise Untried(untried)
        return text


def _in_double(model: nn.Module) -> nn.Module | None:
    """Returns a copy of the model in float64 on the CPU; None if it cannot be copied."""
    try:
        twin = copy.deepcopy(model)
    except Exception:  # it holds a lock, a generator, or a non-leaf tensor
        return None
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            tensor.data = tensor.data.to("cpu", DOUBLE.dtype_of(tensor))
    return twin.train()


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached CPU copy, float64 if floating-point, that requires a gradient if `tensor` does."""
    plain = tensor.detach().cpu()
    wide = plain.double() if plain.is_floating_point() else plain
    return wide.requires_grad_(tensor.requires_grad)
