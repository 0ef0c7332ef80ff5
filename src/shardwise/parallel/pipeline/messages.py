"""Hidden states to the next stage and their gradients back, between the ranks that hold the stages.

    stage s    F: hidden states ------------------------------> stage s + 1
               B: gradients of those that need one <-----------

Sends never wait, receives do, so that ranks meet in any order in which the schedule itself can run. Messages of one
kind from one rank to another are received in the order in which they were sent, whatever the order in which they are
needed, since a backend may know no tags; each kind and direction has a process group of its own where the backend
works through a group's messages one by one (NCCL). What shapes arrive is told once for each shape of the batch, in a
small message of its own; after that, shapes must stay.
Bytes on the wire, for each boundary and micro-batch: the hidden states once forward, and those that need a gradient
once backward, with a byte for each where there are several. Two stages on one rank hand tensors over without a message.

What this does not do: cut a message into pieces, or send it before its op is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm import Axis, Pending, copies_of, receive, send
from shardwise.errors import RefusedPlan
from shardwise.host import read
from shardwise.layout.schedules import Schedule
from shardwise.part import plain

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
FORWARD, BACKWARD = "hidden states", "gradients of hidden states"
MOST_TENSORS, MOST_DIMS = 24, 8
TELLING = MOST_TENSORS - 1  # the place of the small message among a boundary's tensors


@dataclass(frozen=True)
class Told:
    """What one tensor of a message is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


class Mail:
    """The messages of one rank. `owner` gives the rank (on the axis) of each stage."""

    def __init__(self, axis: Axis, owner: Sequence[int], device: torch.device):
        self.axis = axis
        self.owner = tuple(owner)
        self.device = device
        self._axes = _directions(axis)
        self._coming: dict[tuple[str, int], deque[tuple[int, int, int]]] = {}
        self._early: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self._key_of: Callable[[int], Hashable] = lambda batch: None
        self._known: dict[tuple[int, Hashable], list[Told]] = {}
        self._under_way: list[tuple[Pending, torch.Tensor]] = []
        self._at_home: dict[tuple[str, int, int], list[torch.Tensor]] = {}

    def expect(self, schedule: Schedule, first: int, key_of: Callable[[int], Hashable]) -> None:
        """Before a schedule runs: `first` is the number of its micro-batch 0, `key_of` gives a micro-batch's key."""
        me = self.axis.index
        self._key_of = key_of
        self._coming = {}
        for rank, row in enumerate(schedule.rows):
            for op in row:
                goal = op.stage + 1 if op.kind == "F" else op.stage - 1
                if op.kind == "W" or rank == me or not 0 <= goal < len(self.owner) or self.owner[goal] != me:
                    continue
                tag = FORWARD if op.kind == "F" else BACKWARD
                self._coming.setdefault((tag, rank), deque()).append((op.stage, goal, first + op.microbatch))

    def send_forward(self, stage: int, batch: int, key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Hidden states that stage `stage` made, to the next."""
        told = [Told(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        before = self._known.setdefault((stage, key), told)
        if before != told:
            raise RefusedPlan(
                f"stage {stage} sends {_listed(told)} where it sent {_listed(before)} for a batch of the same shape: "
                "a forward whose shapes depend on values cannot be cut there; name other places with stages="
            )
        if before is told and self.owner[stage] != self.owner[stage + 1]:
            self._tell(stage, batch, told)
        self._send(FORWARD, stage, stage + 1, batch, tensors)

    def receive_forward(self, stage: int, batch: int, key: Hashable) -> list[tuple[torch.Tensor, bool]]:
        """What the stage before made, and whether each needs a gradient."""
        boundary = stage - 1
        tensors = self._fetch(FORWARD, boundary, stage, batch, key)
        told = self._known[boundary, key]
        return [(tensor, one.needs_gradient) for tensor, one in zip(tensors, told, strict=True)]

    def send_backward(self, stage: int, batch: int, inputs: Sequence[torch.Tensor]) -> None:
        """Gradients (`.grad`) of what stage `stage` was sent and that needs one, to the stage before.

        Which of several backward came to goes with them: what it did not reach has no gradient in one process, and an
        optimizer leaves it alone, which it would not do for zeros.
        """
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else plain(leaf.grad) for leaf in inputs]
        if len(inputs) > 1:
            reached = [leaf.grad is not None for leaf in inputs]
            gradients.append(torch.tensor(reached, dtype=torch.uint8, device=self.device))
        elif inputs and inputs[0].grad is None:
            raise RefusedPlan(
                f"nothing that stage {stage} is sent leads to the loss, so that no stage before it is trained: use pp=1"
            )
        self._send(BACKWARD, stage, stage - 1, batch, gradients)

    def receive_backward(self, stage: int, batch: int, key: Hashable) -> list[torch.Tensor | None]:
        """Gradients of what stage `stage` sent, None for what needs none and for what backward did not reach."""
        found = self._fetch(BACKWARD, stage + 1, stage, batch, key)
        known = self._known[stage, key]
        reached = iter(found[-1].tolist() if sum(one.needs_gradient for one in known) > 1 else [True])
        gradients = iter(found)
        return [_next(gradients, next(reached)) if one.needs_gradient else None for one in known]

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way.clear()
        self._key_of = lambda batch: None  # what it was given holds the step's batches

    def _number(self, source: int, goal: int, batch: int, place: int) -> int:
        boundary = 2 * min(source, goal) + (goal < source)
        return (batch * 2 * len(self.owner) + boundary) * MOST_TENSORS + place

    def _send(self, tag: str, source: int, goal: int, batch: int, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) >= TELLING:
            raise RefusedPlan(f"stage {source} would send {len(tensors)} tensors at once; {TELLING - 1} are the most")
        if self.owner[source] == self.owner[goal]:
            self._at_home[tag, goal, batch] = [tensor.detach() for tensor in tensors]
            return
        self._under_way = [(p, t) for p, t in self._under_way if p.work is not None and not p.work.is_completed()]
        axis = self._axes[tag, self.owner[source] < self.owner[goal]]
        for place, tensor in enumerate(tensors):
            ready = _bytes(tensor.detach().contiguous())
            number = self._number(source, goal, batch, place)
            self._under_way.append((send(ready, axis, self.owner[goal], tag, number), ready))

    def _fetch(self, tag: str, source: int, goal: int, batch: int, key: Hashable) -> list[torch.Tensor]:
        """The tensors of one message, those that were sent before it by the way."""
        if self.owner[source] == self.owner[goal]:
            return self._at_home.pop((tag, goal, batch))
        coming = self._coming.get((tag, self.owner[source]))
        while coming and (tag, goal, batch) not in self._early:
            start, end, number = coming.popleft()
            self._early[tag, end, number] = self._receive(tag, start, end, number, self._key_of(number))
        if (tag, goal, batch) in self._early:
            return self._early.pop((tag, goal, batch))
        return self._receive(tag, source, goal, batch, key)  # outside a schedule

    def _receive(self, tag: str, source: int, goal: int, batch: int, key: Hashable) -> list[torch.Tensor]:
        boundary = min(source, goal)
        if (boundary, key) not in self._known:
            self._known[boundary, key] = self._hear(boundary, batch)
        told = [one for one in self._known[boundary, key] if tag == FORWARD or one.needs_gradient]
        if tag == BACKWARD and len(told) > 1:
            told.append(Told((len(told),), torch.uint8, False))
        axis = self._axes[tag, self.owner[source] < self.owner[goal]]
        arriving = []
        for place, one in enumerate(told):
            tensor = torch.empty(one.shape, dtype=one.dtype, device=self.device)
            number = self._number(source, goal, batch, place)
            arriving.append((receive(_bytes(tensor), axis, self.owner[source], tag, number), tensor))
        for pending, _ in arriving:
            pending.wait()
        return [tensor for _, tensor in arriving]

    def _tell(self, stage: int, batch: int, told: list[Told]) -> None:
        row = torch.zeros(1 + MOST_TENSORS * (3 + MOST_DIMS), dtype=torch.int64)
        row[0] = len(told)
        for place, one in enumerate(told[:MOST_TENSORS]):
            if one.dtype not in DTYPES or len(one.shape) > MOST_DIMS:
                raise RefusedPlan(f"stage {stage} would send {_listed([one])}, which messages cannot describe")
            numbers = [DTYPES.index(one.dtype), int(one.needs_gradient), len(one.shape), *one.shape]
            start = 1 + place * (3 + MOST_DIMS)
            row[start : start + len(numbers)] = torch.tensor(numbers)
        ready = row.to(self.device)
        number = self._number(stage, stage + 1, batch, TELLING)
        axis = self._axes[FORWARD, self.owner[stage] < self.owner[stage + 1]]
        self._under_way.append((send(ready, axis, self.owner[stage + 1], "control", number), ready))

    def _hear(self, boundary: int, batch: int) -> list[Told]:
        row = torch.zeros(1 + MOST_TENSORS * (3 + MOST_DIMS), dtype=torch.int64, device=self.device)
        number = self._number(boundary, boundary + 1, batch, TELLING)
        axis = self._axes[FORWARD, self.owner[boundary] < self.owner[boundary + 1]]
        receive(row, axis, self.owner[boundary], "control", number).wait()
        numbers = read(row, "shapes of messages")
        told = []
        for place in range(numbers[0]):
            kind, needs, dims, *shape = numbers[1 + place * (3 + MOST_DIMS) :][: 3 + MOST_DIMS]
            told.append(Told(tuple(shape[:dims]), DTYPES[kind], bool(needs)))
        return told


def _directions(axis: Axis) -> dict[tuple[str, bool], Axis]:
    """The axis for each kind of message and each direction over ranks."""
    ways = [(tag, down) for tag in (FORWARD, BACKWARD) for down in (True, False)]
    return dict(zip(ways, copies_of(axis, len(ways)), strict=True))


def _next(gradients: Iterator[torch.Tensor], reached: int) -> torch.Tensor | None:
    gradient = next(gradients)
    return gradient if reached else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Booleans as bytes, which every backend carries."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _listed(told: Sequence[Told]) -> str:
    return ", ".join(f"{one.dtype} {list(one.shape)}" for one in told)
