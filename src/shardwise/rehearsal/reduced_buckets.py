"""ZeRO-2's gradient buckets of one rank (`Flat`) on fake tensors, reduced after every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shardwise.comm import Axis, Ledger
from shardwise.layout.zero_stages import PER_MICROBATCH
from shardwise.parallel.flat import Flat
from shardwise.parallel.slots import Slot
from shardwise.precision import Precision
from shardwise.rehearsal.cut_module import Cuts


def rehearsed_buckets(
    named: dict[str, nn.Parameter],
    ranks: int,
    cuts: Cuts,
    precision: Precision,
    aside: Callable[[], AbstractContextManager[None]],
) -> Flat:
    """Returns a `Flat` that reduces gradients of the parameters `named` over `ranks` ranks, sending nothing.

    aside  makes a context in which operations do not count as work of the module (copies into buckets)
    """
    shard = Axis("dp_shard", ranks, 0, None, tuple(range(ranks)), rehearsal=Ledger(), copies=cuts.gloo)
    flat = Flat([*named.items()], shard, Axis.alone("dp_replicate"), precision, stage=PER_MICROBATCH)
    # copies into buckets are the technique's, and must not count as work of the module
    into_bucket = flat.buckets._on_gradient

    def on_gradient(*of_bucket: Any) -> None:
        with aside():
            into_bucket(*of_bucket)

    vars(flat.buckets)["_on_gradient"] = on_gradient
    if cuts.gradients == "as_made":
        flat.use_as_made(_used)
    return flat


def _used(slots: list[Slot], number: int, flat: torch.Tensor | None) -> None:
    """Drops the gradients of these slots, as an update within backward does."""
    for slot in slots:
        slot.master.grad = None
