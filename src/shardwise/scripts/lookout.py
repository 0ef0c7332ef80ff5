"""The look at a script's model on its first batch: is each sample's output a function of that sample alone?

The engine's own look needs a loss. Here a fixed weighted sum of the outputs that have a batch dim stands for it, so
that a module that mixes samples shows as it would in a task's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from shardwise.comm import gather_rows
from shardwise.engine.check import look
from shardwise.engine.engine import Engine
from shardwise.engine.samples import SAMPLES
from shardwise.errors import InputError
from shardwise.parallel.batchnorm import batch_norm_modules
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.loss import Loss


def look_at_model(engine: Engine, args: tuple, kwargs: dict) -> tuple[list[nn.Module], list[str]]:
    """(modules whose batch norm is to be joined, notices). Collective; raises what mixes samples."""
    batch = (args, kwargs)
    try:
        rows = samples_in(batch, name="the model's arguments")
    except InputError:
        rows = 0  # no tensor, or tensors of several lengths: nothing that could be halved
    told = torch.tensor([float(rows)], dtype=torch.float64, device=engine.device)
    n = min(int(gather_rows(told, engine.mesh.data).min()), SAMPLES)  # every rank must run as many forwards
    if n < 2:
        reason = "its arguments have no common batch dim" if rows == 0 else "a rank's part has one sample"
        return batch_norm_modules(engine.module), [
            f"that the model treats samples one by one was not checked: {reason} in the first batch"
        ]
    whole = slice_samples(batch, 0, n)
    parts = (slice_samples(batch, 0, 1), slice_samples(batch, 1, n))

    def evaluate(given: tuple) -> Loss:
        given_args, given_kwargs = given
        count = samples_in(given)
        output = engine.module(*given_args, **given_kwargs)
        return Loss(_weighted_sum(output, count, engine.device), float(count))

    findings = look(
        engine.module, evaluate, whole, parts, (n, 1, n - 1), joined=None, dtype=engine.state.precision.compute,
        strict=True, masks=False,
    )  # fmt: skip
    return findings.batch_norms, findings.notices


def _weighted_sum(output: Any, count: int, device: torch.device) -> torch.Tensor:
    """Sum over samples of a fixed functional of each sample's outputs."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for leaf in tree_flatten(dict(output) if isinstance(output, Mapping) else output)[0]:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.shape[:1] != (count,):
            continue
        rows = leaf.reshape(count, -1).double()
        signs = torch.cos(torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device))
        each = (rows * signs).sum(dim=1)  # (count,)
        total = total + (each + each.square()).sum()  # not linear: a mean that is taken off would cancel in a sum
    return total
