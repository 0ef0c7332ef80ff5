"""What a step changes beside the halves of a disk's file, copied before it does so, that it may be taken back.

    update of a sub-group   |weights| ── copied ──> file of one rank        optimizer.step over them
    taken back              |weights| <── copied ── file                    its state: the half that was only read

State that rests in the disk's file needs no copy: a step reads one half and writes the other. Weights, which lie in
memory, go to a second file through the page cache, so that what is held of them is the kernel's to take back. What an
optimizer keeps elsewhere, numbers mostly (how many steps there were), and attributes of its own, are copied in memory.

Bytes on the disk in a step: the weights that a rank updates, written once; read where the step is taken back.
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
    """The file of one rank. A sub-group is named by its number among all of the rank's."""

    def __init__(self, sizes: Sequence[int], rank: int, folder: Path | None = None):
        """sizes: bytes to be copied of each sub-group. Raises `RefusedPlan` for a disk without room for them."""
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
        """Note what an optimizer holds beside its state, and in its groups' options, before a step."""
        beside = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
        options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
        self._beside = PassedState(beside, options, written=True)

    def forget(self) -> None:
        """Forget the copies of the step that is done."""
        self._puts.clear()
        self._beside = PassedState()

    def keep(
        self, number: int, weights: Sequence[torch.Tensor], state: dict[Any, Any], params: Sequence[nn.Parameter],
        rests: Callable[[torch.Tensor], bool],
    ) -> None:  # fmt: skip
        """Copy a sub-group's weights, and the state of its parameters but for tensors that rest on the disk."""
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
        """Let what an optimizer holds beside its state have the contents that it had."""
        self._beside.restore()

    @torch.no_grad()
    def put_back(self, number: int) -> None:
        """Let a sub-group's weights and state be what was copied."""
        for put in self._puts.pop(number):
            put()

    def _read_back(self, tensor: torch.Tensor, memory: torch.Tensor, at: int) -> None:
        content = torch.empty(memory.nbytes, dtype=torch.uint8)
        self.file.read(memoryview(content.numpy()), at)
        _put(tensor, memory, content.view(memory.dtype).view(memory.shape))


def _put(tensor: torch.Tensor, memory: torch.Tensor, values: torch.Tensor) -> None:
    memory.copy_(values)
    tensor.data = memory  # an optimizer may have set it to other memory


def _of_state(value: Any, rests: Callable[[torch.Tensor], bool]) -> Iterator[Callable[[], Any]]:
    """Yields functions that put back what a state holds, in the objects that hold it; not tensors that rest."""
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
    entries.clear()
    entries.update(before)
