"""What kernels keep from forward to backward and tensors without values do not tell: the workspace of recurrent layers.

torch's own shape rule says that it is empty. Its size is asked of the kernel itself, run once on zeros: as long as it
is quick on the layer's own shape, else on fewer steps and sequences, from which it grows in proportion.

What this does not do: see memory that a kernel frees before it returns; know another device's kernels (the recurrent
layers of a GPU keep about as much, in another form).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

LAYER = torch.ops.aten.mkldnn_rnn_layer
QUICK_FLOPS = 2e9  # of a layer that is run on its own shape: some tens of milliseconds
FEW_STEPS = 8


def workspace_bytes(args: tuple) -> int:
    """Bytes that one call of `mkldnn_rnn_layer`, one direction of one layer, leaves for its backward."""
    inputs, weight, state_weight = args[:3]
    if not (args[15] and torch.is_grad_enabled()):  # nothing is kept where nothing is trained
        return 0
    steps, batch = inputs.shape[:2]
    of_cell = 2 * (weight.numel() + state_weight.numel())
    options = (inputs.shape[2], args[10], weight.shape[0], args[9], args[12], inputs.dtype)
    few_steps, few = steps, batch
    while few_steps > FEW_STEPS and few_steps * few * of_cell > QUICK_FLOPS:
        few_steps = max(FEW_STEPS, few_steps // 2)
    while few > 1 and few_steps * few * of_cell > QUICK_FLOPS:
        few //= 2
    size = _run(few_steps, few, *options)
    if few_steps < steps:
        slope = (size - _run(few_steps // 2, few, *options)) / (few_steps - few_steps // 2)
        size += slope * (steps - few_steps)
    return round(size * batch / few)


@lru_cache(maxsize=256)
def _run(
    steps: int, batch: int, wide: int, hidden: int, gates: int, mode: int, biases: bool, dtype: torch.dtype
) -> float:
    """Bytes of the workspace that the kernel makes for zeros of these shapes."""
    with _disable_current_modes(), torch.enable_grad():  # without, the kernel keeps nothing
        made = {"dtype": dtype, "device": "cpu"}
        weights = [torch.zeros(gates, wide, **made), torch.zeros(gates, hidden, **made)]
        weights += [torch.zeros(gates, **made), torch.zeros(gates, **made)]
        inputs, state = torch.zeros(steps, batch, wide, **made), torch.zeros(batch, hidden, **made)
        found = LAYER(inputs, *weights, state, state, False, [], mode, hidden, 1, biases, False, False, True)
        return float(found[3].untyped_storage().nbytes())
