"""Recurrent layers on shares: torch's own products and elementwise operations, each of which has a rule.

A kernel for whole layers (cuDNN's, oneDNN's) has no rule, and would be taken for what a share claims to be.

What this does not do: cut a layer's state; its gates are gathered or summed as the operations ask.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.tensor import FUNCTIONS

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _in_operations(name: str) -> Any:
    """Returns the function that runs such layers as torch decomposes them; arguments as `torch._VF` is given them."""
    packet = getattr(torch.ops.aten, name)

    def run(*args: Any) -> Any:
        packed = isinstance(args[3], list | tuple)  # (data, sizes of batches, state, weights, ...)
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)  # directly: torch's context sets more, and warns of it
        try:
            return (packet.data if packed else packet.input).decompose(*args)
        finally:
            torch._C._set_mkldnn_enabled(before)

    return run


for _name in _LAYERS:
    FUNCTIONS[getattr(torch, _name)] = _in_operations(_name)
