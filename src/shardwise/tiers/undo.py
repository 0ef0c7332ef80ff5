"""Copies of what a step changes, made before it does so, from which the step can be undone.

    update of a sub-group   |weights| ── copied ──> file of one rank        optimizer.step over them
    undo                    |weights| <── copied ── file                    its state: the half that was only read

State in the disk's file needs no copy, since a step reads one half and writes the other. Weights, which are in memory,
are copied to a second file through the page cache, so that the kernel can free that memory. State that stays in memory,
mostly numbers such as the count of steps, and the optimizer's attributes are copied in memory.

Bytes on the disk in a step: the weights that a rank updates, written once, and read if the step is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import RefusedPlan
from shardwise.tiers.scratch import ELSEWHERE, ScratchFile
from shardwise.trace.module_state import PassedState

LOST = "Weights and the optimizer's state belong to different steps: nothing is saved of this run from here on."


class Undo:
    """Copies of one rank; a sub-group's `number` is its index among all of the rank's.

    size  bytes of the file
    """

    def __init__(self, sizes: Sequence[int], rank: int, folder: Path | None = None):
        """Makes the file. sizes: bytes of weights of each sub-group; folder: None for that of temporary files.

        Raises `RefusedPlan` if the disk has no room for them.
        """
        self.file = ScratchFile(rank, "before", LOST, folder, direct=False)
        self.size = sum(sizes)
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._puts: dict[int, list[Callable[[], Any]]] = {}
        self._beside = PassedState()
        try:
            self.file.reserve(0, max(1, self.size))
        except OSError as error:
            self.file.close()
            raise RefusedPlan(
                f"gradients=as_made with clipping: {self.file.folder} has no room for {self.size / 1e9:.3g} GB, a copy "
                f"of this rank's weights ({error.strerror}): {ELSEWHERE}"
            ) from error

    def begin(self, optimizer: Optimizer) -> None:
        """Called before a step; copies the optimizer's attributes and its groups' options."""
        beside = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
        options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
        self._beside = PassedState(beside, options, written=True)

    def forget(self) -> None:
        """Drops the copies, when the step is valid."""
        self._puts.clear()
        self._beside = PassedState()

    def keep(
        self, number: int, weights: Sequence[torch.Tensor], state: dict[Any, Any], params: Sequence[nn.Parameter],
        rests: Callable[[torch.Tensor], bool],
    ) -> None:  # fmt: skip
        """Copies a sub-group's weights, and the state of its parameters but for tensors stored on the disk.

        weights  tensors in memory that the step changes;  params  the sub-group's
        state    the optimizer's `state`;  rests  whether a tensor is stored on the disk
        """
        puts: list[Callable[[], Any]] = []
        for param in params:
            if param in state:
                puts += [partial(state.__setitem__, param, state[param]), *_of_state(state[param], rests)]
            else:
                puts.append(partial(state.pop, param, None))
        at = self._starts[number]
        for tensor in weights:
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            self.file.write(memoryview(content.numpy()), at)
            puts.append(partial(self._read_back, tensor, tensor.detach(), at))
            at += len(content)
        self._puts[number] = puts

    @torch.no_grad()
    def put_back_beside(self) -> None:
        """Restores the optimizer's attributes and its groups' options."""
        self._beside.restore()

    @torch.no_grad()
    def put_back(self, number: int) -> None:
        """Restores a sub-group's weights and state."""
        for put in self._puts.pop(number):
            put()

    def _read_back(self, tensor: torch.Tensor, memory: torch.Tensor, at: int) -> None:
        """Reads a tensor's values from byte `at` of the file. `memory`: alias of the memory that it had."""
        content = torch.empty(memory.nbytes, dtype=torch.uint8)
        self.file.read(memoryview(content.numpy()), at)
        _put(tensor, memory, content.view(memory.dtype).view(memory.shape))


def _put(tensor: torch.Tensor, memory: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` into `memory` and makes that the tensor's data."""
    memory.copy_(values)
    tensor.data = memory  # the optimizer may have set `.data` to other memory


def _of_state(value: Any, rests: Callable[[torch.Tensor], bool]) -> Iterator[Callable[[], Any]]:
    """Yields functions that restore a nested state in its own dicts, lists and tensors, but tensors that `rests`."""
    if isinstance(value, dict):
        yield partial(_refill, value, dict(value))
    elif isinstance(value, list):
        yield partial(value.__setitem__, slice(None), list(value))
    elif isinstance(value, torch.Tensor) and not rests(value):
        yield partial(_put, value, value.detach(), value.detach().clone())
    if isinstance(value, dict | list | tuple):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _of_state(item, rests)


def _refill(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Gives the dict `entries` the contents of `before`."""
    entries.clear()
    entries.update(before)
