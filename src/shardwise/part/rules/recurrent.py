"""Recurrent layers on shares of an accelerator: torch's own products and elementwise operations, which have rules.

cuDNN's kernel for a whole layer has none. The CPU runs a layer as such operations by itself. Masks of dropout between
levels are dealt by the operations that torch's own code draws by, so a layer that draws is left to it.

What this does not do: cut a layer's state; its gates are gathered or summed as the operations ask.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.device import on_host
from shardwise.part.tensor import FUNCTIONS

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _in_operations(name: str) -> Any:
    """Returns a function that runs a recurrent layer by torch's decomposition; arguments as of `torch._VF.lstm` etc."""
    own, packet = getattr(torch, name), getattr(torch.ops.aten, name)

    def run(*args: Any) -> Any:
        packed = isinstance(args[3], list | tuple)  # (data, sizes of batches, state, weights, ...)
        dropout, trains = args[6:8] if packed else args[5:7]
        if on_host(args[0].device) or (dropout and trains):
            return own(*args)
        return (packet.data if packed else packet.input).decompose(*args)

    return run


for _name in _LAYERS:
    FUNCTIONS[getattr(torch, _name)] = _in_operations(_name)
