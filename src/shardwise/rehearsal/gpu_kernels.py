"""Makes a trace on the CPU keep for backward what the GPU kernels of attention, dropout and recurrences would keep.

    attention   with dropout, or with values of another width than the keys', the CPU writes the (S, S) scores, but a
                GPU has a fused kernel: FlashAttention without a mask, else the memory-efficient one. Scores stay
                written, as in torch, in float64 and with dropout under randomness=global
    cut         attention over cut positions is in parallel/sequence; a ring's GPU kernels take 16 bits unconverted
    dropout     the CPU keeps a mask in the dtype of its input, a GPU one byte for each element
    recurrence  the CPU runs an op for each time step, a GPU one call for each layer (rehearsal/cudnn_layers)

Source: which kernel torch takes, `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`.

*What this does not do*: cuDNN's kernels for attention.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.parallel.sequence import block_attention
from shardwise.parallel.sequence.fused_kernels import Kernel
from shardwise.part.levels import has_cut_positions
from shardwise.rehearsal.cudnn_layers import RECURRENT, as_one_call

_ATEN = torch.ops.aten
_ATTENTION = functional.scaled_dot_product_attention
_DROPOUT = functional.dropout
_KERNEL_FOR = block_attention.kernel_for
_HALF = (torch.bfloat16, torch.float16)
MOST_WIDTH = 256  # largest head width of FlashAttention


class Fused(TorchFunctionMode):
    """Mode under which functions of `torch.nn.functional` run the ops that they run on a GPU.

    torch turns modes off inside its own functions, such as backward, which runs recomputed blocks. So attention and
    dropout are replaced in `torch.nn.functional` as well; the mode itself catches code that imported them by name.

    scores        whether dropout masks are those of one process (drawn by global index, or for all heads under tp),
                  which no fused kernel draws, so that attention with dropout writes its scores
    wrote_scores  whether that has happened
    """

    def __init__(self, scores: bool = False) -> None:
        super().__init__()
        self.scores, self.wrote_scores = scores, False

    def __enter__(self) -> Fused:
        functional.scaled_dot_product_attention = self._attend
        functional.dropout = partial(_dropout, _DROPOUT)
        block_attention.kernel_for = _kernel_for
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        functional.scaled_dot_product_attention, functional.dropout = _ATTENTION, _DROPOUT
        block_attention.kernel_for = _KERNEL_FOR
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # replaced in `functional` too, since a mode is off inside torch's own functions
        if func is _ATTENTION:
            return self._attend(*args, **kwargs)
        if func is _DROPOUT or func is torch.dropout:
            return _dropout(func, *args, **kwargs)
        # one call of cuDNN on a GPU; None where it has none for these arguments
        if func in RECURRENT:
            result = as_one_call(func, args, kwargs, partial(_dropout, _DROPOUT))
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Returns attention by a GPU's kernel, or by torch's function if `scores` or cut positions need that."""
        if self.scores and dropout_p:
            self.wrote_scores = True
            return _ATTENTION(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        if has_cut_positions(query) or has_cut_positions(key):
            return _ATTENTION(query, key, value, attn_mask, dropout_p, *args, **kwargs)
        return _attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)


def _kernel_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Kernel | None:
    """Returns the kernel for a block of ring attention on a GPU, which converts no dtype; None if a GPU has none."""
    kernel = None if q.dtype == torch.float64 else _KERNEL_FOR(q, k, v, causal, scale)
    return kernel and replace(kernel, widens=False)


def like_gpu(yes: bool, scores: bool = False) -> Fused | nullcontext:
    """Returns a context for forward and backward: `Fused(scores)` if `yes`, else one that changes nothing."""
    return Fused(scores) if yes else nullcontext()


def _dropout(func: Any, input: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns dropout of `input` by `native_dropout`, whose mask takes one byte for each element; `func`: torch's."""
    training = kwargs.get("training", kwargs.get("train", args[0] if args else True))
    inplace = kwargs.get("inplace", len(args) > 1 and args[1])
    # without random numbers, or in place, no mask is kept, so torch's own function does
    if not training or inplace or not 0 < p < 1:
        return func(input, p, *args, **kwargs)
    return _ATEN.native_dropout(input, p, True)[0]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Returns attention by the fused op that torch would choose on a GPU, or by torch's function if it has none."""
    words: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if query.dim() != 4 or query.dtype not in (*_HALF, torch.float32):  # no fused kernel takes it
        return _ATTENTION(query, key, value, attn_mask, enable_gqa=enable_gqa, **words)
    width = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    same = query.shape[-1] == width <= MOST_WIDTH
    # FlashAttention takes 16 bits without a mask; the memory-efficient kernel below takes all other cases
    if attn_mask is None and query.dtype in _HALF and same:
        # the kernel takes widths that are multiples of 8; torch pads others in the same way
        q, k, v = (_padded(tensor, 8) for tensor in (query, key, value))
        out = _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if out.shape[-1] != width else out
    if query.shape[1] != key.shape[1]:  # the kernel has no groups of queries
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    return _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a mask as a bias (B, H, queries, keys) with rows padded in memory to a multiple of 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=query.dtype, device=query.device))
    keys = key.shape[2]
    mask = _padded(mask, 16)[..., :keys] if keys % 16 else mask
    return mask.expand(*query.shape[:2], query.shape[2], keys)


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """Returns the tensor with its last dim padded by zeros to the next multiple of `multiple`."""
    beyond = -tensor.shape[-1] % multiple
    return functional.pad(tensor, (0, beyond)) if beyond else tensor
