"""Recompute in backward (activation checkpointing), block by block.

    full        keep each block's inputs; its forward runs again in backward
    selective   keep the results of matrix products, convolutions and attention too; recompute the rest

Bytes kept for each block: full, its inputs; selective, inputs plus the products' outputs. FLOPs added: full, one
forward; selective, that of norms, activations and elementwise ops.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); selective: Korthikanti et al. (2022),
section 5. The mechanism is `torch.utils.checkpoint`, non-reentrant.

What this does not do: recompute what lies outside the blocks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_block(block: nn.Module, policy: str) -> None:
    """Make the block's forward run again in backward instead of keeping its intermediate results.

    The block object and its names stay as they are. `policy` is "full" or "selective".
    """
    options = {} if policy == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    forward = block.forward

    def recomputed(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    block.forward = recomputed
