"""Check that ranks that should hold equal weights and saved buffers do, by checksums of a few elements of each.

Ranks with other samples keep equal weights and buffers, since gradients and joined statistics are summed over ranks.
What a forward itself writes, computed from its own samples, is not summed; it may begin after any number of steps (a
codebook after a warm-up, statistics at every hundredth step). So a few elements are compared, bit by bit, after steps
1, 2, 4, 8 and so on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm import gather_json, gather_rows
from shardwise.errors import RefusedPlan, RunError
from shardwise.host import put
from shardwise.mesh import Mesh
from shardwise.part.levels import Distributed

_FEW = 16  # elements compared of each weight
_MANY = 2**16  # of each buffer, since a step may change a few rows of one


class HeldAlike:
    """Compares this rank's weights and buffers with those of other ranks that should hold the same.

    Every rank makes one and calls it after the same steps.

    module  whose parameters and saved buffers are compared
    remedy  text with which the message on a buffer that differs ends
    """

    def __init__(self, module: nn.Module, mesh: Mesh, remedy: str) -> None:
        plan = mesh.plan
        self._module, self._mesh, self._remedy = module, mesh, remedy
        # Ranks of one place must hold equal tensors. Stages and shares of tp always differ; ranks of dp_shard differ
        # only if weights are sharded (zero=3) or experts are distributed (ep).
        place = mesh.pp.index * mesh.tp.size * mesh.shard.size + mesh.tp.index * mesh.shard.size
        self._weights_place = place + (mesh.shard.index if plan.sharded.weights or plan.ep > 1 else 0)
        self._buffers_place = place + (mesh.shard.index if plan.ep > 1 else 0)

    @staticmethod
    def is_due(step: int) -> bool:
        """Whether ranks are compared after `step` steps."""
        return step > 0 and step & (step - 1) == 0

    def __call__(self, step: int) -> None:
        """Raises, as `check` does, if ranks that should hold equal tensors differ after `step` steps. Collective."""
        if self._mesh.world.size > 1:
            self.check(gather_rows(put(self.row(), self._mesh.device), self._mesh.world).cpu(), step)

    def row(self) -> list[float]:
        """Returns this rank's row of the table for `check`: [place, checksum] of weights, then of buffers."""
        weights, buffers = _checksum(self._weights()), _checksum(self._buffers())
        return [float(number) for number in (self._weights_place, weights, self._buffers_place, buffers)]

    def check(self, table: torch.Tensor, step: int) -> None:
        """Raises `RunError` for weights that should be equal and are not, `RefusedPlan` for buffers. Collective.

        table  (ranks, 4), the `row` of each rank
        step   number of steps done, for the message
        """
        if _differ(table[:, :2]):
            self._refuse(self._weights_place, self._weights(), _weights_apart, step)
        if _differ(table[:, 2:]):
            self._refuse(self._buffers_place, self._buffers(), _buffer_apart, step)

    def _refuse(self, place: int, mine: dict[str, int], error: Callable[..., Exception], step: int) -> None:
        # The table shows that some tensor differs but not which, so names are exchanged in this case alone.
        apart = self._first_apart(place, mine)
        if apart is not None:
            raise error(step, *apart, self._remedy)

    def _first_apart(self, place: int, mine: dict[str, Any]) -> tuple[list[str], int, int] | None:
        """Returns (names that differ, a rank, the first rank that should equal it); None if all agree. Collective.

        place, mine  of this rank: its place, and name -> checksum
        """
        by_rank = gather_json([place, mine], self._mesh.world, self._mesh.device)
        for rank, (where, theirs) in enumerate(by_rank):
            first, (_, expected) = next((n, row) for n, row in enumerate(by_rank) if row[0] == where)
            apart = [name for name in expected if theirs.get(name) != expected[name]]
            if apart:
                return apart, rank, first
        return None

    def _weights(self) -> dict[str, int]:
        """Returns name -> checksum of a few elements, for this rank's weights."""
        return {name: zlib.crc32(_few(param, _FEW)) for name, param in self._module.named_parameters()}

    def _buffers(self) -> dict[str, int]:
        """Returns name -> checksum, for this rank's buffers that are saved with the weights."""
        return {name: zlib.crc32(_few(buffer, _MANY)) for name, buffer in self._saved_buffers()}

    def _saved_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if _is_saved(module, name, buffer):
                    yield f"{path}.{name}" if path else name, buffer


def elements(tensor: Any) -> torch.Tensor:
    """Returns this rank's elements of a tensor as a 1-d tensor."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(-1)


def _weights_apart(step: int, apart: list[str], rank: int, first: int, remedy: str) -> RunError:
    """Returns the error for weights that differ between ranks which should hold the same."""
    return RunError(
        f"after step {step} the weights of '{apart[0]}' ({len(apart)} in all) are others on rank "
        f"{rank} than on rank {first}, which hold the same: they are changed, or the optimizer's "
        "settings or state are, on one rank alone, or by a forward, of its own samples"
    )


def _buffer_apart(step: int, apart: list[str], rank: int, first: int, remedy: str) -> RefusedPlan:
    """Returns the error for a buffer that ranks compute from their own samples."""
    return RefusedPlan(
        f"after step {step} the buffer '{apart[0]}' ({len(apart)} in all) is another on rank {rank} "
        f"than on rank {first}: the model's forward makes it of the samples that it is given, of which "
        "each rank has a part, where one process makes it of all (a codebook, a queue, a running mean): " + remedy
    )


def _differ(pairs: torch.Tensor) -> bool:
    """Whether two rows (place, checksum) with the same place have different checksums."""
    return len(pairs.unique(dim=0)) > len(pairs[:, 0].unique())


def _is_saved(module: nn.Module, name: str, buffer: Any) -> bool:
    # A share of a sharded tensor differs by rank; a sparse one has no plain sequence of elements.
    dense = buffer is not None and buffer.layout is torch.strided and not isinstance(buffer, Distributed)
    return dense and name not in module._non_persistent_buffers_set


def _checksum(numbers: dict[str, int]) -> int:
    return zlib.crc32(repr(sorted(numbers.items())).encode())


def _few(tensor: torch.Tensor, most: int) -> bytes:
    flat = elements(tensor)
    # evenly spaced, compared as bytes, so that a NaN equals itself and -0.0 differs from 0.0
    few = flat[:: max(1, flat.numel() // most)][:most].cpu().clone()  # numpy would hold the memory that zero=3 frees
    return few.view(torch.uint8).numpy().tobytes() if few.numel() else b""
