"""Bytes that CPU kernels keep but fake tensors do not show: workspaces of recurrent layers, terms of a loss.

torch's shape rule says that a recurrent layer's workspace is empty. The kernel is run once on zeros to find its size:
on the layer's own shape if that is quick, else on fewer time steps and sequences, from which the size is extrapolated.

Some losses (mse_loss, smooth_l1_loss, binary_cross_entropy) sum into a tensor that was made for all terms, so their
scalar result holds the memory of all terms as long as it lives. Small tensors are tried to find which losses do.

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

FEW = 4  # size of each dim of the tensors on which a loss is tried
LAYER = torch.ops.aten.mkldnn_rnn_layer
QUICK_FLOPS = 2e9  # a layer of at most so many FLOPs is run on its own shape, in some tens of milliseconds
FEW_STEPS = 8  # fewest time steps on which a larger layer is run, besides half of them for the slope


class TracedValues(Values):
    """`Values` for a trace, in which a fake result also holds the bytes that its real kernel would keep."""

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns an op's fake result, with storages as large as those that the real kernel returns."""
        out = super().answer(func, args, kwargs)
        if func._overloadpacket is LAYER:
            out = (*out[:3], torch.empty(workspace_bytes(args), dtype=torch.uint8, device=args[0].device))
        if type(out) is FakeTensor and not out.dim() and func._schema.returns[0].alias_info is None:
            # a scalar loss may hold the memory of all its terms
            # (test_the_one_number_of_a_loss_holds_what_its_kernel_leaves_behind_it)
            elements = behind_one_number(func, args, kwargs)
            out = torch.empty(elements, dtype=out.dtype, device=out.device).as_strided((), ()) if elements > 1 else out
        return out

    def tell(self, trace: StepTrace) -> None:
        """Sets the flags of `trace` for values that it assumed: `balanced`, `chose`, `by_batch` and `drawn`."""
        trace.balanced, trace.chose, trace.by_batch = self.assumed, self.chose, BATCH in self.asked
        trace.drawn = self.drawn


def workspace_bytes(args: tuple) -> int:
    """Returns the workspace bytes that `mkldnn_rnn_layer` (one layer, one direction) keeps for its backward.

    args  its arguments, among them mode 9, hidden size 10, has_biases 12, train 15; without training it keeps 0
    """
    inputs, weight, state_weight = args[:3]
    if not (args[15] and torch.is_grad_enabled()):
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
    # bytes are linear in the steps, with an offset, and proportional to the number of sequences
    if few_steps < steps:
        slope = (size - _run(few_steps // 2, few, *options)) / (few_steps - few_steps // 2)
        size += slope * (steps - few_steps)
    return round(size * batch / few)


def behind_one_number(func: Any, args: tuple, kwargs: dict) -> int:
    """Returns the elements in the storage of an op's scalar result: 1, or the number of terms that it sums."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    # a loss has two tensors or more; any other sum has a storage of its own
    if len(tensors) < 2 or kwargs or not all(arg.is_floating_point() for arg in tensors):
        return 1
    if not all(arg is None or isinstance(arg, torch.Tensor | int | float) for arg in args):
        return 1
    described = tuple((arg.dim(), arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)
    # `_holds_all` caches by dims and dtypes, so each kind of call is tried once
    return math.prod(torch.broadcast_shapes(*(arg.shape for arg in tensors))) if _holds_all(func, described) else 1


@lru_cache(maxsize=256)
def _holds_all(func: Any, described: tuple) -> bool:
    """Whether the scalar result of `func` has a storage for all terms, tried on small tensors.

    described  its arguments, each tensor as (dims, dtype)
    """
    with _disable_current_modes(), torch.no_grad():
        args = [torch.full((FEW,) * arg[0], 0.5, dtype=arg[1]) if isinstance(arg, tuple) else arg for arg in described]
        dims = max(arg[0] for arg in described if isinstance(arg, tuple))
        try:
            result = func(*args)
        except (RuntimeError, NotImplementedError):
            return False  # the op does not take such shapes or this dtype
    return result.untyped_storage().nbytes() >= FEW**dims * result.element_size() > result.element_size()


@lru_cache(maxsize=256)
def _run(
    steps: int, batch: int, wide: int, hidden: int, gates: int, mode: int, biases: bool, dtype: torch.dtype
) -> float:
    """Runs `mkldnn_rnn_layer` on zeros (steps, batch, wide) and returns the bytes of its workspace.

    gates  number of gates times `hidden`; `mode`: torch's number for the kind of layer
    """
    with _disable_current_modes(), torch.enable_grad():  # without gradients the kernel keeps nothing
        made = {"dtype": dtype, "device": "cpu"}
        weights = [torch.zeros(gates, wide, **made), torch.zeros(gates, hidden, **made)]
        weights += [torch.zeros(gates, **made), torch.zeros(gates, **made)]
        inputs, state = torch.zeros(steps, batch, wide, **made), torch.zeros(batch, hidden, **made)
        results = LAYER(inputs, *weights, state, state, False, [], mode, hidden, 1, biases, False, False, True)
        return float(results[3].untyped_storage().nbytes())
