"""A ring and its backward as single operations of a compiled program, `shardwise::ring` and `shardwise::ring_backward`.

A compiler has no operations for messages between two ranks, and may drop or reorder operations that it knows. As one
opaque operation a ring is the same on all ranks, and runs as it does without a compiler. Which blocks a mask leaves to
compute is read when it runs, once for each operation.

What this does not do: cache what a mask leaves from layer to layer, since each operation is given other tensor objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.parallel.sequence.block_attention import wide
from shardwise.parallel.sequence.pair_mask import Bare, PairMask
from shardwise.parallel.sequence.ring_plan import kinds_of
from shardwise.parallel.sequence.rounds import Rounds, backward_around, forward_around
from shardwise.part.plain_shares import by_number, number_of

_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")
_LIBRARY.define("ring(Tensor q, Tensor k, Tensor v, Tensor[] mask, int named) -> (Tensor, Tensor)")
_LIBRARY.define("ring_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor output, "
                "Tensor lse, int named, bool wants_mask) -> (Tensor, Tensor, Tensor, Tensor)")  # fmt: skip


@dataclass(frozen=True)
class _Named:
    """What an operation's argument `named` stands for.

    ring  the ring, without its tensors
    mask  a mask given as a function, without its tensors; None if it is a tensor or there is none
    """

    ring: Rounds
    mask: Bare | None


def _taken(ring: Rounds, mask: torch.Tensor | None) -> tuple[list[torch.Tensor], int]:
    """Returns arguments of the custom operator: (the mask's tensors, id under which ring and mask are registered).

    An operator takes no Python objects; [] without a mask.
    """
    bare, tensors = Bare.of(mask) if isinstance(mask, PairMask) else (None, [] if mask is None else [mask])
    return tensors, number_of(_Named(ring, bare))


def _named_ring(number: int, tensors: Sequence[torch.Tensor]) -> tuple[Rounds, torch.Tensor | None]:
    """Returns (ring, mask or None) from the arguments that `_taken` made."""
    named: _Named = by_number(number)
    mask = named.mask.filled(tensors) if named.mask is not None else tensors[0] if tensors else None
    ring, call = named.ring, named.ring.call
    if tensors:  # without values when the program was traced, and other values in each step
        kinds = kinds_of(mask, mask, call.queries, call.keys, call.key_count, call.is_causal)
        ring = replace(ring, call=replace(call, kinds=kinds))
    return ring, mask


def forward_written(
    ring: Rounds, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns what `forward_around` does, (output, log-sum-exp), as one operation of the program being traced."""
    return torch.ops.shardwise.ring(q, k, v, *_taken(ring, mask))


def backward_written(
    ring: Rounds, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    output: torch.Tensor, lse: torch.Tensor, wants_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns what `backward_around` does, as one operation of the program being traced."""
    tensors, number = _taken(ring, mask)
    *of_qkv, of_mask = torch.ops.shardwise.ring_backward(gradient, q, k, v, tensors, output, lse, number, wants_mask)
    return *of_qkv, of_mask if wants_mask else None  # operations return tensors only, here an empty one


@torch.library.impl(_LIBRARY, "ring", "CompositeExplicitAutograd")
def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: list[torch.Tensor], named: int) -> tuple:
    """Runs the operation `ring`; returns (output, log-sum-exp). `mask`, `named`: as from `_taken`. Collective."""
    ring, whole = _named_ring(named, mask)
    return forward_around(ring, q.contiguous(), k.contiguous(), v.contiguous(), whole)


@torch.library.impl(_LIBRARY, "ring_backward", "CompositeExplicitAutograd")
def _run_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: list[torch.Tensor],
    output: torch.Tensor, lse: torch.Tensor, named: int, wants_mask: bool,
) -> tuple:  # fmt: skip
    """Runs `ring_backward`; returns gradients of q, k, v and mask (empty unless `wants_mask`). Collective."""
    ring, whole = _named_ring(named, mask)
    # contiguous as from `from_axis` without a compiler, which may have chosen other strides
    gradient, q, k, v = (tensor.contiguous() for tensor in (gradient, q, k, v))
    *of_qkv, of_mask = backward_around(ring, gradient, q, k, v, whole, output, lse, wants_mask)
    return *of_qkv, q.new_empty(0) if of_mask is None else of_mask


@torch.library.impl(_LIBRARY, "ring", "Meta")
def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: list[torch.Tensor], named: int) -> tuple:
    """Returns empty tensors like the results of `_run`."""
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


@torch.library.impl(_LIBRARY, "ring_backward", "Meta")
def _shapes_of_gradients(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: list[torch.Tensor],
    output: torch.Tensor, lse: torch.Tensor, named: int, wants_mask: bool,
) -> tuple:  # fmt: skip
    """Returns empty tensors like the results of `_run_backward`."""
    of_mask = mask[0].new_empty(mask[0].shape) if wants_mask else q.new_empty(0)
    return *(tensor.new_empty(tensor.shape) for tensor in (q, k, v)), of_mask
