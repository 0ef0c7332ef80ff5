"""Rules of batch norms whose channels tp cuts (pooling has none). Cut samples: parallel/batchnorm; tiles: domain/norms

    x (N, C, ...) cut along C, weight and bias alike    ->    y cut alike; nothing is sent for it
    running statistics, whole on every rank             ->    this rank's channels renewed, then gathered: 2 C numbers

What this does not do: statistics over cut samples or positions (`parallel.batchnorm`, and Uncut here), or kernels of
other names than torch's own.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gathered
from shardwise.part.reductions import as_weights, beside
from shardwise.part.tensor import Part, is_part, no_rule, parts_in, rule


def _of_channels(x: Any, t: torch.Tensor | None) -> torch.Tensor | None:
    """Returns this rank's channels of a weight or a statistic (C,); None for None."""
    return None if t is None else t.local if is_part(t) else x.share(t, 0).contiguous()


def _lead(func: Any, x: Any, args: tuple) -> Part:
    """Returns x where it is cut along channels alone and every rank has some; else raises `Uncut`."""
    plain = not isinstance(x.local, Part) if is_part(x) else False
    vectors = [part for part in parts_in(args) if part.dim() == 1]
    if plain and x.dim_cut == 1 and all(x.owners.counts) and all(part.dim_cut == 0 for part in vectors):
        return x
    raise Uncut(f"a batch norm's statistics run over a cut dim ({no_rule(func, parts_in(args))})")


@rule("native_batch_norm")
def batch_norm(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns (output cut like x, mean and inverse deviation cut along channels), and renews running statistics."""
    x, weight, bias, mean, var, training, momentum, eps = args
    x = _lead(func, as_weights(x, weight, bias), args)
    own = [_of_channels(x, tensor) for tensor in (weight, bias)]
    kept = [None if tensor is None else _of_channels(x, tensor) for tensor in (mean, var)]
    # the kernel renews them in place: in copies, which are put into the whole buffers below
    kept = [tensor.clone() if training and tensor is not None else tensor for tensor in kept]
    y, *statistics = func(x.local, *own, *kept, training, momentum, eps)
    if training:
        for whole, mine in zip((mean, var), kept, strict=True):
            if whole is not None and mine is not None:
                whole.copy_(gathered(x.with_local(mine, 0)))
    of_channels = [x.with_local(tensor, 0) if tensor.numel() else tensor for tensor in statistics]
    return (x.with_local(y), *of_channels)


@rule("native_batch_norm_backward")
def batch_norm_backward(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Returns gradients of a batch norm's input, weight and bias, cut along channels."""
    dy, x, weight, mean, var, save_mean, save_inverse, training, eps, mask = args
    x = _lead(func, as_weights(x, weight), args)
    statistics = [_of_channels(x, tensor) for tensor in (weight, mean, var)]
    # in evaluation nothing was saved: tensors without elements, or None
    saved = [_of_channels(x, kept) if kept is not None and kept.numel() else kept for kept in (save_mean, save_inverse)]
    gradients = func(beside(func, dy, x), x.local, *statistics, *saved, training, eps, mask)
    dims = (1, 0, 0)  # of channels in (N, C, ...), (C,) and (C,)
    return tuple(None if grad is None else x.with_local(grad, d) for grad, d in zip(gradients, dims, strict=True))
