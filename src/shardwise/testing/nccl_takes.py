"""Checks that NCCL would accept a collective's tensors, for the mock accelerator, which runs collectives with gloo.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: `ncclDataType`, `check_gpu_single_tensor`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_leaves

# dtypes that NCCL can send; booleans are sent as bytes
_NCCL_SENDS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32,
               torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}  # fmt: skip
# operation -> indices of its arguments (full tensor, shard)
_BASES = {torch.ops.c10d._allgather_base_: (0, 1), torch.ops.c10d._reduce_scatter_base_: (1, 0)}


def refuse_as_nccl(func: Any, bare_args: tuple) -> None:
    """Raises `RuntimeError` for a collective whose tensors NCCL refuses but gloo accepts: dtype, strides, sizes.

    func   an operation of c10d; `bare_args`: its arguments, with CPU tensors
    """
    for tensor in tree_leaves(bare_args):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.dtype not in _NCCL_SENDS:
            raise RuntimeError(f"{func}: NCCL has no type for {tensor.dtype}")
        # channels_last counts as contiguous, since NCCL sends a dense block of memory in any order
        if not tensor.is_contiguous(memory_format=suggest_memory_format(tensor)):
            raise RuntimeError(f"{func}: NCCL takes contiguous tensors, and this one has strides {tensor.stride()}")
    # NCCL checks sizes of these two alone; gloo checks none
    if func.overloadpacket in _BASES:
        full, shard = (bare_args[place] for place in _BASES[func.overloadpacket])
        ranks = next(dist.ProcessGroup.unbox(arg) for arg in bare_args if isinstance(arg, torch.ScriptObject)).size()
        if full.numel() != ranks * shard.numel() or full.dtype != shard.dtype:
            raise RuntimeError(
                f"{func}: of {ranks} ranks with {shard.numel()} {shard.dtype} each, NCCL makes as many, not "
                f"{full.numel()} {full.dtype}"
            )
