"""Fused attention of one block of a ring, by those of torch's kernels that return log-sum-exps.

    kernel       on    computes in         its log-sum-exp, float32
    for the CPU  CPU   float32 or float64  (B, H, s)
    flash        GPU   16 bits             (B, H, s)
    efficient    GPU   16 or 32 bits       (B, H, s rounded up to 32), padded with inf
    cuDNN        GPU   16 bits             (B, H, s, 1)

On a GPU the kernel is the one that `scaled_dot_product_attention` would choose for these tensors, under the switches of
`torch.backends.cuda`. Each backward takes output and log-sum-exp of whole rows, which another kernel may have computed,
so blocks of one row, and their gradients, may use different kernels.

What this does not do: blocks with a mask or a bias, values of another width than keys, float64 on a GPU, and kernels of
other accelerators. For these the scores are materialised (`block_attention`). Source of the signatures: torch's
`native_functions.yaml`; of the shapes: `torch/_meta_registrations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from shardwise.device import on_host, rounds_lse_up

_ATEN = torch.ops.aten
_LSE_ROWS = 32  # the memory-efficient kernel pads the rows of its log-sum-exp to a multiple of this
_FLASH_WIDTH = 8  # the flash kernel takes head widths that are multiples of this (torch pads others outside of it)


@dataclass(frozen=True)
class Kernel:
    """A fused attention kernel.

    forward   (q, k, v, causal, scale) -> (output (B, H, s, D), log-sum-exp (B, H, s))
    backward  (gradient, q, k, v, output, log-sum-exp, causal, scale) -> gradients of (q, k, v)
    widens    whether its inputs must be converted to the dtype in which blocks are merged; else they keep their own
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    widens: bool = False


def kernel_for(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Kernel | None:
    """Returns the kernel for a block of queries (B, H, s, D), keys and values (B, H, t, D) without mask; None if none.

    causal  whether row i reads columns up to i only
    """
    # kernels need values as wide as keys, and at least one head
    if q.shape[-1] != v.shape[-1] or not q.shape[1]:
        return None
    if on_host(q.device):
        return FOR_CPU
    # in a block that is not square kernels place the diagonal differently
    if not q.numel() or not k.numel() or (causal and q.shape[-2] != k.shape[-2]):
        return None
    return KERNELS.get(torchs_choice(q, k, v, causal, scale))


def torchs_choice(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> SDPBackend:
    """Returns the kernel that torch would choose for attention of these tensors with gradients; MATH if none fits."""
    key = torch._C._dispatch_key_for_device(q.device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_sdp_choice", key):  # most accelerators lack it
        return SDPBackend.MATH
    asked = [tensor.detach().requires_grad_() for tensor in (q, k, v)]  # since some have no backward for wide heads
    choice = SDPBackend(torch._fused_sdp_choice(*asked, None, 0.0, causal, scale=scale))
    return SDPBackend.MATH if choice == SDPBackend.FLASH_ATTENTION and q.shape[-1] % _FLASH_WIDTH else choice


def _seeds(like: Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns zeros (seed of shape `sizes`, offset ()) for kernels' dropout arguments, which are not read here."""
    return torch.zeros(sizes, dtype=dtype, device=like.device), torch.zeros((), dtype=dtype, device=like.device)


# Each pair of functions below is the `forward` and `backward` of a `Kernel`.


def _for_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _for_cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, q, k, v, output, lse, 0.0, causal, scale=scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values by FlashAttention."""
    rows, drawn = (q.shape[-2], k.shape[-2]), _seeds(q, (2,), torch.uint64)
    backward = _ATEN._scaled_dot_product_flash_attention_backward
    return backward(gradient, q, k, v, output, lse, None, None, *rows, 0.0, causal, *drawn, scale=scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return output, lse[..., : q.shape[-2]]


def _efficient_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values by the memory-efficient kernel."""
    filled = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf) if rounds_lse_up() else lse
    backward, drawn = _ATEN._scaled_dot_product_efficient_attention_backward, _seeds(q, (), torch.int64)
    wanted = [True, True, True, False]  # no gradient of a bias
    return backward(gradient, q, k, v, None, output, filled, *drawn, 0.0, wanted, causal, scale=scale)[:3]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, lse, *_ = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return output, lse.view(q.shape[:-1])


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys and values by cuDNN."""
    rows, drawn = (q.shape[-2], k.shape[-2]), _seeds(q, (), torch.int64)
    backward, lse = _ATEN._scaled_dot_product_cudnn_attention_backward, lse.unsqueeze(-1)
    return backward(gradient, q, k, v, output, lse, *drawn, None, None, None, *rows, 0.0, causal, scale=scale)


FOR_CPU = Kernel(_for_cpu, _for_cpu_backward, widens=True)
KERNELS = {
    SDPBackend.FLASH_ATTENTION: Kernel(_flash, _flash_backward),
    SDPBackend.EFFICIENT_ATTENTION: Kernel(_efficient, _efficient_backward),
    SDPBackend.CUDNN_ATTENTION: Kernel(_cudnn, _cudnn_backward),
}
