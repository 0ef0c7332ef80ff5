"""Bytes that kernels keep and tensors without values do not show: of recurrent layers, of a loss's terms.

torch's own shape rule says that the workspace is empty. Its size is asked of the kernel itself, run once on zeros: as
long as it is quick on the layer's own shape, else on fewer steps and sequences, from which it grows in proportion.

Some losses (mse_loss, smooth_l1_loss, binary_cross_entropy) sum into a tensor that was made for all terms: the one
number that they give holds the memory of all as long as it lives. Which do is asked of the kernel too.

What this does not do: see memory that a kernel frees before it returns; know another device's kernels.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.simulator.counted import StepTrace
from shardwise.trace.known_values import BATCH, Values

FEW = 4  # indices of a dim, of what a kernel is run on to see what it keeps
LAYER = torch.ops.aten.mkldnn_rnn_layer
QUICK_FLOPS = 2e9  # of a layer that is run on its own shape: some tens of milliseconds
FEW_STEPS = 8


class TracedValues(Values):
    """`Values` of a trace: results without values hold the bytes that their kernels keep."""

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns an op's result without values, on as much memory as the kernel's has."""
        out = super().answer(func, args, kwargs)
        if func._overloadpacket is LAYER:
            out = (*out[:3], torch.empty(workspace_bytes(args), dtype=torch.uint8, device=args[0].device))
        if type(out) is FakeTensor and not out.dim() and func._schema.returns[0].alias_info is None:
            # the one number of a loss may hold the memory of all its terms
            # (test_the_one_number_of_a_loss_holds_what_its_kernel_leaves_behind_it)
            elements = behind_one_number(func, args, kwargs)
            out = torch.empty(elements, dtype=out.dtype, device=out.device).as_strided((), ()) if elements > 1 else out
        return out

    def tell(self, trace: StepTrace) -> None:
        """Set a trace's flags of values that it depended on: balanced routing, integers of the batch, draws."""
        trace.balanced, trace.chose, trace.by_batch = self.assumed, self.chose, BATCH in self.asked
        trace.drawn = self.drawn


def workspace_bytes(args: tuple) -> int:
    """Returns the bytes that one call of `mkldnn_rnn_layer`, a direction of a layer, leaves for its backward."""
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
    # bytes grow with steps on a line, though not through zero; with sequences in proportion
    if few_steps < steps:
        slope = (size - _run(few_steps // 2, few, *options)) / (few_steps - few_steps // 2)
        size += slope * (steps - few_steps)
    return round(size * batch / few)


def behind_one_number(func: Any, args: tuple, kwargs: dict) -> int:
    """Returns the elements in the storage behind an op's scalar: 1, or as many as the terms that it sums."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    # a sum of one tensor, or with options, is not asked about: its storage is its own
    if len(tensors) < 2 or kwargs or not all(arg.is_floating_point() for arg in tensors):
        return 1
    if not all(arg is None or isinstance(arg, torch.Tensor | int | float) for arg in args):
        return 1
    described = tuple((arg.dim(), arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)
    # tried once for each kind of call, on small tensors
    return math.prod(torch.broadcast_shapes(*(arg.shape for arg in tensors))) if _holds_all(func, described) else 1


@lru_cache(maxsize=256)
def _holds_all(func: Any, described: tuple) -> bool:
    """Whether the kernel's result holds the memory of as many numbers as it was given."""
    with _disable_current_modes(), torch.no_grad():
        args = [torch.full((FEW,) * arg[0], 0.5, dtype=arg[1]) if isinstance(arg, tuple) else arg for arg in described]
        dims = max(arg[0] for arg in described if isinstance(arg, tuple))
        try:
            result = func(*args)
        except (RuntimeError, NotImplementedError):
            return False  # not for these shapes or this dtype: nothing is known
    return result.untyped_storage().nbytes() >= FEW**dims * result.element_size() > result.element_size()


@lru_cache(maxsize=256)
def _run(
    steps: int, batch: int, wide: int, hidden: int, gates: int, mode: int, biases: bool, dtype: torch.dtype
) -> float:
    """Returns the bytes of the workspace that the kernel makes for zeros of these shapes."""
    with _disable_current_modes(), torch.enable_grad():  # without, the kernel keeps nothing
        made = {"dtype": dtype, "device": "cpu"}
        weights = [torch.zeros(gates, wide, **made), torch.zeros(gates, hidden, **made)]
        weights += [torch.zeros(gates, **made), torch.zeros(gates, **made)]
        inputs, state = torch.zeros(steps, batch, wide, **made), torch.zeros(batch, hidden, **made)
        results = LAYER(inputs, *weights, state, state, False, [], mode, hidden, 1, biases, False, False, True)
        return float(results[3].untyped_storage().nbytes())
