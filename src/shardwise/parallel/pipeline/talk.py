"""Messages between two neighbouring stages that say themselves what they are: a few words as text, then tensors.

For what no schedule foresees: a stage that takes a gradient through the stage before it asks that one, as often as its
forward does. Both say and hear in order, so that a backend needs no tags.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Axis, Pending, beside, receive, send
from shardwise.device import on_host
from shardwise.host import read, to_device

FIRST, ROUND = 2**28, 2**20  # numbers of these messages, beyond those of hidden states
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16,
                                          torch.complex64, torch.complex128)}  # fmt: skip


class Talk:
    """What the stages of one rank say to those of its neighbours. `owner` gives each stage's rank on the axis."""

    def __init__(self, axis: Axis, owner: Sequence[int], device: torch.device):
        self.owner, self.device = owner, device
        self.axis = beside(axis, device)  # said while hidden states wait for a stage that asks first
        self._numbers: dict[tuple[int, int], int] = defaultdict(int)  # of messages so far, by (source, goal)
        self._under_way: list[tuple[Pending, torch.Tensor]] = []

    def say(self, source: int, goal: int, words: dict[str, Any], tensors: Sequence[torch.Tensor | None] = ()) -> None:
        """Send from stage `source` to stage `goal`; waits for nobody."""
        self._under_way = [(pending, kept) for pending, kept in self._under_way if not pending.over]
        plain = [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]
        specs = [None if tensor is None else [str(tensor.dtype), list(tensor.shape)] for tensor in plain]
        text = json.dumps([words, specs]).encode()
        self._send(torch.tensor([len(text)]), source, goal)
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), source, goal)
        for tensor in plain:
            if tensor is not None and tensor.numel():  # of an empty one the text says all
                self._send(torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor, source, goal)

    def hear(self, source: int, goal: int) -> tuple[dict[str, Any], list[torch.Tensor | None]]:
        """Receive at stage `goal` what stage `source` said next. Waits."""
        (length,) = read(self._receive(torch.zeros(1, dtype=torch.int64), source, goal), "length of a message")
        text = self._receive(torch.zeros(length, dtype=torch.uint8), source, goal)
        words, specs = json.loads(bytes(read(text, "words of a message")))
        tensors: list[torch.Tensor | None] = []
        for spec in specs:
            made = None if spec is None else torch.empty(spec[1], dtype=DTYPES[spec[0]])
            if made is not None and made.numel():
                arrived = self._receive(torch.view_as_real(made) if made.is_complex() else made, source, goal)
                made = torch.view_as_complex(arrived) if made.is_complex() else arrived
            tensors.append(made if made is None else to_device(made, self.device))
        return words, tensors

    def flush(self) -> None:
        """Wait until everything that was said has left."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way.clear()

    def _next(self, source: int, goal: int) -> int:
        number = self._numbers[source, goal]
        self._numbers[source, goal] = (number + 1) % ROUND
        return FIRST + number * 2 + (goal < source)

    def _send(self, tensor: torch.Tensor, source: int, goal: int) -> None:
        ready = tensor if on_host(self.device) else to_device(tensor, self.device)
        pending = send(ready, self.axis, self.owner[goal], "inner gradients", self._next(source, goal))
        self._under_way.append((pending, ready))

    def _receive(self, tensor: torch.Tensor, source: int, goal: int) -> torch.Tensor:
        into = tensor if on_host(self.device) else tensor.to(self.device)
        receive(into, self.axis, self.owner[source], "inner gradients", self._next(source, goal)).wait()
        return into
