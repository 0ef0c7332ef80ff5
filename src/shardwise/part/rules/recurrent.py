"""Recurrent layers on shares on an accelerator, decomposed into products and elementwise operations, which have rules.

cuDNN's kernel for a whole layer has no rule. On the CPU torch decomposes a layer by itself. A layer with dropout in
training is left to torch, whose code draws the masks between its levels by operations with rules of their own.

What this does not do: cut a layer's state; its gates are gathered or summed as the operations ask.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.device import on_host
from shardwise.part.tensor import FUNCTIONS

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _in_operations(name: str) -> Any:
    """Returns the override of `torch.NAME` (`lstm`, ...) that runs its decomposition; arguments as of `torch.NAME`."""
    own, packet = getattr(torch, name), getattr(torch.ops.aten, name)

    def run(*args: Any) -> Any:
        # packed: (data, batch sizes, state, weights, has bias, layers, dropout, train, ...); else without batch sizes
        packed = isinstance(args[3], list | tuple)
        dropout, trains = args[6:8] if packed else args[5:7]
        if on_host(args[0].device) or (dropout and trains):
            return own(*args)
        return (packet.data if packed else packet.input).decompose(*args)

    return run


for _name in _LAYERS:
    FUNCTIONS[getattr(torch, _name)] = _in_operations(_name)
