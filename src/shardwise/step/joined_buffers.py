"""Combine over data ranks the buffers that a forward computes from its samples: counts, sums, means over samples.

    one process    b' = b + what all samples add        here    b' = b + sum over ranks of (b'_r - b)

Each data rank has a part of a micro-batch, so its forward computes `b'_r` from that part. After every forward in
training ranks gather these, and each writes the same combined value. Which formula gives one process's value is found
by a trial before the first step (part/buffer_ways). Examples are counts of tokens for each expert, and a running mean
of outputs. A maximum over parts is not tried, since on few samples it cannot be told from the last sample's value.

Bytes on the wire: the buffers of all ranks, once a forward.

What this does not do: buffers that the same forward reads after it has written them (batch norm is in
parallel/batchnorm; for others the look finds that losses do not add up), or that depend on a batch in another way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.comm import Axis, gather_rows
from shardwise.host import put
from shardwise.parallel.slots import Phase
from shardwise.part import plain
from shardwise.part.buffer_ways import WAYS, numbers
from shardwise.part.levels import Distributed
from shardwise.part.pairs import as_pairs

_TAG = "buffers"


def install(module: nn.Module, joined: Mapping[str, str], axis: Axis, phase: Phase) -> None:
    """Registers hooks that combine buffers over the axis after each forward of the module in training.

    joined  name of a buffer -> key of the formula in `WAYS`
    phase   of the run; while its `looked_at` or `same` is set (every rank has the same samples) nothing is combined
    """
    if joined and axis.size > 1:
        joins = _Joins(module, joined, axis, phase)
        module.register_forward_pre_hook(lambda m, args: joins.begin())
        module.register_forward_hook(lambda m, args, output: joins.end())


class _Joins:
    """Combines a module's buffers over ranks; holds their values from before the running forward."""

    def __init__(self, module: nn.Module, joined: Mapping[str, str], axis: Axis, phase: Phase) -> None:
        self._module, self._joined, self._axis, self._phase = module, dict(joined), axis, phase
        self.begin()  # for a script this object is made within its first forward

    def begin(self) -> None:
        """Copies the buffers; called before a forward."""
        self._before = {name: (tensor, tensor._version, tensor.clone()) for name, tensor in self._buffers()}

    def end(self) -> None:
        """Writes the combined buffers; called after a forward. Collective in training, also if nothing was written."""
        if not self._module.training or self._phase.same or self._phase.looked_at:
            return
        with torch.no_grad():
            buffers = self._buffers()
            rows = [self._row(name, tensor) for name, tensor in buffers]
            table = gather_rows(torch.cat(rows), self._axis, _TAG)
            for (name, tensor), part in zip(buffers, table.split([len(row) for row in rows], 1), strict=True):
                samples, before = part[:, :1], numbers(self._before[name][2])
                new = WAYS[self._joined[name]](before, part[:, 1:], samples)
                # unchanged if no rank's forward wrote it (another stage's module, a branch that was not taken)
                place = as_pairs(tensor)
                place.copy_(torch.where(samples.sum() > 0, new, before).view(place.shape))

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, buffer) of each; replaces a buffer that a forward has left sharded by the unsharded one."""
        named = []
        for name in self._joined:
            path, _, leaf = name.rpartition(".")
            owner = self._module.get_submodule(path)
            if isinstance(owner._buffers[leaf], Distributed):
                owner._buffers[leaf] = plain(owner.get_buffer(leaf).detach())
            named.append((name, owner.get_buffer(leaf)))
        return named

    def _row(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's row: [samples its forward computed the buffer from, 0 if not written; its elements]."""
        kept, version, _ = self._before[name]
        written = kept is not tensor or tensor._version != version
        samples = put([float(self._phase.samples if written else 0)], tensor.device)
        return torch.cat([samples, numbers(tensor)])
