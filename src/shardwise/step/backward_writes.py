"""Refuse, in a run's first step, buffers that backward changes (a gradient hook, or an autograd.Function's backward).

The looks before the first step run forwards only. A rank's backward sees the gradients of its own samples, and runs on
one stage, so ranks with other samples, and other stages that read the buffer, would have other values in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.comm import gather_json
from shardwise.digest import digest
from shardwise.errors import RefusedPlan
from shardwise.host import read
from shardwise.mesh import Mesh
from shardwise.part.levels import Distributed

_IN_FORWARD = "change it in the forward"
_MANY = 2**16  # elements of a buffer that are compared


class BackwardWrites:
    """Notes which of a module's buffers change in the backwards of a step.

    ahead  whether a backward came after forwards that one process runs later (pipeline); set by `noting_buffers`
    """

    def __init__(self, module: nn.Module, mesh: Mesh, norms: Collection[nn.Module]) -> None:
        """Lists the module's buffers, without those of `norms` (batch norms, whose statistics ranks join)."""
        left_out = {id(norm) for norm in norms}
        # one rank is one process; a rehearsal computes no values that could be compared
        modules = () if mesh.world.size == 1 or mesh.world.rehearsal is not None else module.named_modules()
        self._mesh = mesh
        self._buffers = [
            (f"{path}.{name}" if path else name, child, name)
            for path, child in modules
            for name, buffer in child._buffers.items()
            # a norm's statistics are joined over ranks, so that they are one process's
            if buffer is not None and id(child) not in left_out and buffer.layout is torch.strided
        ]
        self._changed: torch.Tensor | None = None
        self.ahead = False

    def few(self) -> list[torch.Tensor]:
        """Returns a flat copy of some elements of each buffer, in a fixed order (`_sample`)."""
        tensors = [child._buffers[name] for _, child, name in self._buffers]
        return [_sample(tensor) for tensor in tensors if tensor is not None]

    def note(self, before: list[torch.Tensor]) -> None:
        """Note which buffers have changed since `few` returned `before`."""
        if before:
            now = torch.stack([_differ(old, new) for old, new in zip(before, self.few(), strict=True)])
            self._changed = now if self._changed is None else self._changed | now

    def refuse(self, elsewhere: Collection[str], *, same_samples: bool) -> None:
        """Raise `RefusedPlan` if a buffer that backward changed may differ from one process's.

        elsewhere     names of the buffers that other pipeline stages use
        same_samples  whether data ranks run the model on the same samples
        Collective if buffers changed, which they do on all ranks alike.
        """
        if self._changed is None:
            return
        flags = read(self._changed, "buffers that backward changed")
        names = [name for (name, _, _), changed in zip(self._buffers, flags, strict=True) if changed]
        why = self._why(names, elsewhere, same_samples) if names else ""
        if why:
            raise RefusedPlan(
                f"backward changes the buffer '{names[0]}' ({len(names)} in all), by a hook on a gradient or the "
                f"backward of an autograd.Function, {why}"
            )

    def _why(self, names: list[str], elsewhere: Collection[str], same_samples: bool) -> str:
        """Returns why the buffers `names` would differ from one process's under this plan; "" if they do not."""
        mesh = self._mesh
        # another stage reads the buffer, and this stage's backward is over only after it did
        if used := [name for name in names if name in elsewhere]:
            return f"and other pipeline stages use '{used[0]}' too: {_IN_FORWARD}, or leave pp out"
        if self.ahead:
            return f"and this pipeline stage runs the next forwards before it: {_IN_FORWARD}, or use microbatches=1"
        # every rank runs the model on all samples, but the gradients in its backward are a part of one process's
        if same_samples and mesh.data.size > 1:
            return f"where each rank's gradient is a part of one process's: {_IN_FORWARD}"
        # no other rank has other samples
        if mesh.gradients.size == 1:
            return ""
        # a hook may write the same on every rank (a counter), so the values are compared
        by_name = {name: child._buffers[leaf] for name, child, leaf in self._buffers}
        mine = [digest(_sample(by_name[name])) for name in names]
        rows = gather_json([names, mine], mesh.gradients, mesh.device)
        alike = all(row == rows[0] for row in rows)
        return "" if alike else f'and each rank makes it of its own samples: {_IN_FORWARD}, with loss_scope="model"'


@contextmanager
def noting_buffers(writes: BackwardWrites | None, *, ahead: bool = False) -> Iterator[None]:
    """Context of a backward, after which changed buffers are noted in `writes`; None: nothing is noted.

    ahead  whether forwards of later micro-batches ran before this backward, as under a pipeline
    """
    before = writes.few() if writes is not None else []
    yield
    if writes is not None:
        writes.note(before)
        writes.ahead |= ahead


def _differ(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Returns whether any element differs, as a bool tensor (); two NaNs are equal."""
    # a stage holds NaN in the place of a buffer that another one has
    return ((old != new) & ((old == old) | (new == new))).any()


def _sample(tensor: Any) -> torch.Tensor:
    """Returns a flat copy of about `_MANY` evenly spaced elements of a tensor, or of this rank's shard of it."""
    while isinstance(tensor, Distributed):
        tensor = tensor.stored
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _MANY)].clone()
