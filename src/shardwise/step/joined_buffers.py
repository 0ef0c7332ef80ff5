"""Join buffers that a forward makes of its samples so that parts' add up: counts, sums, means over samples.

    one process    b' = b + what all samples add        here    b' = b + sum over ranks of (b'_r - b)

Each data rank has a part of a micro-batch, so its forward leaves `b'_r` of that part. After every forward in training
the ranks gather theirs, and each writes the same joined one. Which way of joining gives one process's is tried before
the first step, not recognised (part/buffer_ways): rows that each expert was given, a centre of outputs that moves. The
largest of parts is no way: of a few samples the last one's may be the largest too.

Bytes on the wire: the buffers of all ranks, once a forward.

What this does not do: buffers that the same forward reads after it has written them (batch norm has a room of its
own, parallel/batchnorm; of others the look sees that losses do not add up), or that follow otherwise from a batch.
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
    """Join buffers over the axis after each forward of the module in training.

    joined  name of a buffer -> how, one of `WAYS`
    phase   while it is `looked_at`, or the `same` samples are every rank's, nothing is joined
    """
    if joined and axis.size > 1:
        joins = _Joins(module, joined, axis, phase)
        module.register_forward_pre_hook(lambda m, args: joins.begin())
        module.register_forward_hook(lambda m, args, output: joins.end())


class _Joins:
    """The buffers of a module that are joined, as they were before the forward that runs."""

    def __init__(self, module: nn.Module, joined: Mapping[str, str], axis: Axis, phase: Phase) -> None:
        self._module, self._joined, self._axis, self._phase = module, dict(joined), axis, phase
        self.begin()  # a script's look is taken, and this made, within the first forward

    def begin(self) -> None:
        """Note the buffers before a forward."""
        self._before = {name: (tensor, tensor._version, tensor.clone()) for name, tensor in self._buffers()}

    def end(self) -> None:
        """Write what all ranks' forwards have left. Collective in training, whatever this rank's forward wrote."""
        if not self._module.training or self._phase.same or self._phase.looked_at:
            return
        with torch.no_grad():
            buffers = self._buffers()
            rows = [self._row(name, tensor) for name, tensor in buffers]
            table = gather_rows(torch.cat(rows), self._axis, _TAG)
            for (name, tensor), part in zip(buffers, table.split([len(row) for row in rows], 1), strict=True):
                samples, before = part[:, :1], numbers(self._before[name][2])
                new = WAYS[self._joined[name]](before, part[:, 1:], samples)
                # no rank's forward wrote it: a stage that runs other modules, a branch that was not taken
                place = as_pairs(tensor)
                place.copy_(torch.where(samples.sum() > 0, new, before).view(place.shape))

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, buffer); one that a forward has left in shares is made whole, as it is read after a step."""
        named = []
        for name in self._joined:
            path, _, leaf = name.rpartition(".")
            owner = self._module.get_submodule(path)
            if isinstance(owner._buffers[leaf], Distributed):
                owner._buffers[leaf] = plain(owner.get_buffer(leaf).detach())
            named.append((name, owner.get_buffer(leaf)))
        return named

    def _row(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's row of the table: of how many samples its forward made the buffer, and its elements."""
        kept, version, _ = self._before[name]
        written = kept is not tensor or tensor._version != version
        samples = put([float(self._phase.samples if written else 0)], tensor.device)
        return torch.cat([samples, numbers(tensor)])
