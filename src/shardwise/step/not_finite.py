"""Find the first NaN or infinity in a batch, for the message of a step whose loss is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from shardwise.comm import gather_json
from shardwise.host import read
from shardwise.layout.dealing import Share
from shardwise.step.batching import path_of
from shardwise.step.normalise import SKIP, NotFinite
from shardwise.step.state import RankState


def name_bad_input(state: RankState, parts: list[Share], error: NotFinite) -> NotFinite:
    """Returns `error`, or one that names the first sample with a NaN or infinity on any rank. Collective.

    parts  this rank's parts of the step's batch
    """
    bad = [entry for entry in gather_json(_first_bad(parts), state.mesh.world, state.device) if entry is not None]
    if not bad:
        return error
    sample, name, value = min(bad)
    where = f": {name} holds {value} in sample {sample} of that step's batch"
    return NotFinite(error.what, where, f"Repair or leave out such samples where the data are read, {SKIP}")


def _first_bad(parts: list[Share]) -> tuple[int, str, str] | None:
    """Returns (index of the sample in the global batch, leaf's name, "NaN" or "an infinite value"), or None.

    It is the first sample of this rank with a value that is not finite.
    """
    before, bad = 0, []  # `before`: samples in earlier micro-batches
    for part in parts:
        for index, leaf in enumerate(tree_flatten(part.batch)[0]):
            row_and_value = _bad_row(leaf) if part.count else None  # a stand-in is another rank's sample
            if row_and_value is not None:
                row, value = row_and_value
                bad.append((before + part.start + row, path_of(part.batch, index), value))
        before += part.total
    return min(bad, default=None)


def _bad_row(leaf: Any) -> tuple[int, str] | None:
    """Returns (index along dim 0, "NaN" or "an infinite value") of the first non-finite row of a leaf, or None.

    None also for a leaf that is no floating-point tensor or array with a batch dim.
    """
    leaf = torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc" else leaf
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or not (leaf.is_floating_point() or leaf.is_complex()):
        return None
    wrong = ~torch.isfinite(leaf).reshape(leaf.shape[0], -1)
    rows = wrong.any(1).nonzero()
    # this leaf is clean; the caller looks at the next
    if not len(rows):
        return None
    row = int(read(rows[0, 0], "a row of the batch"))
    values = leaf.reshape(leaf.shape[0], -1)[row]
    return row, "NaN" if bool(torch.isnan(values).any()) else "an infinite value"
