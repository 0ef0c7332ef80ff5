"""Send hidden states and gradients between stages (step/staged). Forecast in rehearsal/rank_row and simulator/cut.

    stage s    F: hidden states ------------------------------> stage s + 1
               B: gradients of those that need one <-----------

Over gloo sends never block and receives do, so any order works in which the schedule itself can run. Messages of one
kind from one rank to another are received in the order in which they were sent, and kept until they are needed. NCCL
runs messages in the order of calls, and a large one only once its receiver is there, so all ranks issue messages in
the schedule's rounds (`Schedule.rounds`), those of one round together.

Shapes are announced once for each shape of the batch, in a small message of their own, and must then stay the same. If
they depend on values (packed sentences), they are announced for each micro-batch. If positions are cut, ranks send
their shares, and how these are cut is announced with the shapes.
Bytes on the wire, for each boundary and micro-batch: the hidden states once forward, and those that need a gradient
once backward, plus one byte for each of these if they are several. Two stages on one rank pass tensors without a
message.

Over gloo the receive of the next message of each kind is posted while a rank computes, since a transfer begins only
when both sides are ready.

What this does not do: split a message into pieces, or send it before its op is over.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.comm import Axis, Pending, RankMessage, beside, exchange, in_order_of_calls, receive, send
from shardwise.device import on_host
from shardwise.errors import RefusedPlan
from shardwise.host import read, to_device
from shardwise.layout.schedules import Schedule
from shardwise.part import Owners
from shardwise.part.crossing import Cuts, cuts_of, put_together, share_under, taken_apart

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
FORWARD, BACKWARD = "hidden states", "gradients of hidden states"
MOST_TENSORS, MOST_DIMS = 256, 8
TELLING = MOST_TENSORS - 1  # the index that tags the announcement of shapes among a boundary's tensors
MOST_CUTS = 3  # of one tensor, over axes of positions
WIDTH = 3 + MOST_DIMS + 3 * MOST_CUTS  # integers that describe one tensor
TOLD_AT_ONCE = 2  # tensors that the first announcement describes; a second one describes the others
FIRST = 1 + TOLD_AT_ONCE * WIDTH  # integers in the first announcement


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and cuts of one tensor of a message, and whether its gradient is sent back."""

    shape: tuple[int, ...]  # of this rank's share, which is sent
    dtype: torch.dtype
    needs_gradient: bool
    cuts: Cuts = ()  # by which it is a share of a cut tensor


Key = tuple[str, int, int, int]  # of a message (tag, from stage, to stage, micro-batch)
Arriving = list[tuple[Pending, torch.Tensor]]  # (what to wait for, tensor) for each tensor of a message


class Mail:
    """Sends and receives the messages of one rank. `owner`: the rank on `axis` of each stage.

    inner    axes that cut positions; ranks with the same indices on them exchange messages
    lasting  whether announced shapes hold for all steps; else until the next `flush`
    """

    def __init__(
        self, axis: Axis, owner: Sequence[int], device: torch.device, inner: Sequence[Axis] = (), *,
        lasting: bool = True,
    ):  # fmt: skip
        self.axis, self.inner, self.lasting = axis, inner, lasting
        self.owner = tuple(owner)
        self.device = device
        # (tag, rank) -> (source stage, goal stage, micro-batch) of its messages, in the order in which it sends them
        self._coming: dict[tuple[str, int], deque[tuple[int, int, int]]] = {}
        # (tag, goal stage, micro-batch) -> tensors that were received before they were needed
        self._early: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self._asked: dict[tuple[str, int, int], Arriving] = {}  # the same, messages of rounds that are being received
        self._begun: dict[tuple[str, int], Arriving] = {}  # (tag, rank) -> its next message, being received
        self.in_rounds = in_order_of_calls(device, axis)
        self.ahead = axis.group is not None and not self.in_rounds
        self._rounds: deque[list[Key]] = deque()  # rounds that have not begun
        self._due: set[Key] = set()  # messages of these rounds
        self._outbox: dict[Key, tuple[list[RankMessage], list[TensorSpec] | None]] = {}  # to send in a later round
        self._key_of: Callable[[int], Hashable] = lambda batch: None
        self._specs: dict[tuple[int, Hashable], list[TensorSpec]] = {}  # (stage before the boundary, key) -> specs
        self._under_way: list[tuple[Pending, torch.Tensor]] = []  # being sent; the tensor must live until then
        # (tag, goal stage, micro-batch) -> tensors from another stage of this rank
        self._at_home: dict[tuple[str, int, int], list[torch.Tensor]] = {}

    def expect(self, schedule: Schedule, first: int, key_of: Callable[[int], Hashable]) -> None:
        """Prepares for a schedule's messages. `first`: index of its micro-batch 0; `key_of`: index -> key of shapes."""
        self._key_of = key_of
        self._coming = {
            (FORWARD if kind == "F" else BACKWARD, rank): deque((a, b, first + batch) for a, b, batch in messages)
            for (kind, rank), messages in schedule.brought[self.axis.index].items()
        }
        if self.in_rounds:
            self._coming = {}
            self._rounds = deque(
                [(FORWARD if kind == "F" else BACKWARD, a, b, first + batch) for kind, a, b, batch in messages]
                for messages in schedule.rounds[self.axis.index]
            )
            self._due = {message for messages in self._rounds for message in messages}
        # receives are posted ahead, so that sends need not wait
        for tag, rank in self._coming:
            if tag == FORWARD:  # `send_forward` posts the receives of gradients
                self._begin(tag, rank)

    def send_forward(self, stage: int, batch: int, key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Sends the hidden states that stage `stage` computed to the next stage.

        key  of the batch's shape; tensors with one key must be alike (else `RefusedPlan`), and are announced once
        """
        specs = [TensorSpec(tuple(taken_apart(t).shape), t.dtype, t.requires_grad, cuts_of(t)) for t in tensors]
        before = self._specs.setdefault((stage, key), specs)
        if before != specs:
            raise RefusedPlan(
                f"stage {stage} sends {_listed(specs)} where it sent {_listed(before)} for a batch of the same shape: "
                "a forward whose shapes depend on values cannot be cut there; name other places with stages="
            )
        self._send(FORWARD, stage, stage + 1, batch, tensors, specs if before is specs else None)
        self._begin(BACKWARD, self.owner[stage + 1])

    def receive_forward(self, stage: int, batch: int, key: Hashable) -> list[tuple[torch.Tensor, bool]]:
        """Returns (tensor, whether it needs a gradient) for each tensor that the stage before sent. Waits."""
        boundary = stage - 1
        tensors = self._fetch(FORWARD, boundary, stage, batch, key)
        return [
            (put_together(tensor, spec.cuts, self.inner), spec.needs_gradient)
            for tensor, spec in zip(tensors, self._specs[boundary, key], strict=True)
        ]

    def send_backward(self, stage: int, batch: int, inputs: Sequence[torch.Tensor]) -> None:
        """Sends `.grad` of `inputs`, the leaves that stage `stage` received and that need one, to the stage before.

        If they are several, a byte for each says whether backward reached it. If not, it has no gradient in one process
        and the optimizer skips it, unlike for zeros. Raises `RefusedPlan` if a single one was not reached.
        """
        # sharded as the hidden states are, which is what the stage before expects
        gradients = [
            taken_apart(share_under(torch.zeros_like(leaf), cuts_of(leaf), self.inner)) if leaf.grad is None
            else share_under(leaf.grad, cuts_of(leaf), self.inner) for leaf in inputs
        ]  # fmt: skip
        if len(inputs) > 1:
            reached = [leaf.grad is not None for leaf in inputs]
            gradients.append(to_device(torch.tensor(reached, dtype=torch.uint8), self.device))
        elif inputs and inputs[0].grad is None:
            raise RefusedPlan(
                f"nothing that stage {stage} is sent leads to the loss, so that no stage before it is trained: use pp=1"
            )
        self._send(BACKWARD, stage, stage - 1, batch, gradients)

    def receive_backward(self, stage: int, batch: int, key: Hashable) -> list[torch.Tensor | None]:
        """Returns the gradient of each tensor that stage `stage` sent; None if not needed or not reached. Waits."""
        tensors = self._fetch(BACKWARD, stage + 1, stage, batch, key)
        specs = self._specs[stage, key]
        several = sum(spec.needs_gradient for spec in specs) > 1  # then the last tensor says which were reached
        reached = iter(read(tensors[-1], "gradients reached") if several else [True])
        gradients = iter(tensors)
        return [
            put_together(gradient, spec.cuts, self.inner) if gradient is not None else None
            for spec in specs
            for gradient in [_next(gradients, next(reached)) if spec.needs_gradient else None]
        ]

    def flush(self) -> None:
        """Waits until everything has been sent; drops announced shapes unless they last."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way.clear()
        self._key_of = lambda batch: None  # the caller's function would keep the step's batches alive
        if not self.lasting:
            self._specs.clear()

    def _number(self, source: int, goal: int, batch: int, place: int) -> int:
        """Returns the backend's tag for the tensor at index `place` of a message, the same on both ranks."""
        boundary = 2 * min(source, goal) + (goal < source)
        return (batch * 2 * len(self.owner) + boundary) * MOST_TENSORS + place

    def _send(
        self, tag: str, source: int, goal: int, batch: int, tensors: Sequence[torch.Tensor],
        specs: list[TensorSpec] | None = None,
    ) -> None:  # fmt: skip
        """Sends the tensors of one message; `specs`: to be announced first, None if the receiver knows them."""
        if len(tensors) >= TELLING:  # that index tags the announcement
            raise RefusedPlan(f"stage {source} would send {len(tensors)} tensors at once; {TELLING - 1} are the most")
        if self.owner[source] == self.owner[goal]:  # detached, since each stage's backward runs by itself
            self._at_home[tag, goal, batch] = [taken_apart(tensor.detach()) for tensor in tensors]
            return
        self._under_way = [(p, t) for p, t in self._under_way if not p.over]
        going = [
            RankMessage(_bytes(taken_apart(t.detach()).contiguous()), self.owner[goal],
                    self._number(source, goal, batch, place), tag)
            for place, t in enumerate(tensors)
        ]  # fmt: skip
        key = (tag, source, goal, batch)
        if key in self._due:  # it is sent with its round
            self._outbox[key] = going, specs
            self._go_on_to(key)
        else:
            self._tell(source, batch, specs)
            self._exchange(going, [])

    def _exchange(self, going: list[RankMessage], coming: list[RankMessage]) -> list[Pending]:
        """Begins to send `going` and to receive `coming` together; returns a `Pending` for each of `coming`."""
        sent, received = exchange(going, coming, self.axis)
        self._under_way += [(pending, message.tensor) for pending, message in zip(sent, going, strict=True)]
        return received

    def _go_on_to(self, key: Key) -> None:
        """Begins all rounds up to the one with this message. What this rank sends in them is in the outbox by now."""
        while key in self._due:
            going: list[RankMessage] = []
            made: list[tuple[Key, list[torch.Tensor]]] = []  # messages to receive, and tensors for them
            for message in self._rounds.popleft():
                self._due.remove(message)
                tag, source, goal, batch = message
                if self.owner[source] == self.axis.index:
                    messages, specs = self._outbox.pop(message)
                    self._tell(source, batch, specs)
                    going += messages
                else:
                    made.append((message, self._like(tag, source, goal, batch, self._key_of(batch))))
            coming = [m for (tag, source, goal, batch), tensors in made
                      for m in self._messages(tag, source, goal, batch, tensors)]  # fmt: skip
            pending = iter(self._exchange(going, coming))
            for (tag, _, goal, batch), tensors in made:
                self._asked[tag, goal, batch] = [(next(pending), tensor) for tensor in tensors]

    def _fetch(self, tag: str, source: int, goal: int, batch: int, key: Hashable) -> list[torch.Tensor]:
        """Returns the tensors of one message; receives, and keeps, those that the same rank sends before it. Waits."""
        if self.owner[source] == self.owner[goal]:
            return self._at_home.pop((tag, goal, batch))
        self._go_on_to((tag, source, goal, batch))
        if (tag, goal, batch) in self._asked:
            return _arrived(self._asked.pop((tag, goal, batch)))
        rank = self.owner[source]
        coming = self._coming.get((tag, rank))
        # messages of one rank arrive in the order in which they were sent, so earlier ones are received first
        while coming and (tag, goal, batch) not in self._early:
            start, end, number = coming.popleft()
            key_then = self._key_of(number)
            arriving = self._begun.pop((tag, rank), None) or self._receive(tag, start, end, number, key_then)
            self._begin(tag, rank)  # so that the next one arrives while this rank computes
            self._early[tag, end, number] = _arrived(arriving)
        if (tag, goal, batch) in self._early:
            return self._early.pop((tag, goal, batch))
        return _arrived(self._receive(tag, source, goal, batch, key))  # a message that no schedule announced

    def _begin(self, tag: str, rank: int) -> None:
        """Posts the receive of the next message of a rank, over gloo and if its shapes are known.

        With NCCL the device would wait for the message beside the step's kernels.
        """
        coming = self._coming.get((tag, rank))
        if not coming or (tag, rank) in self._begun or not self.ahead:
            return
        source, goal, batch = coming[0]
        key = self._key_of(batch)
        if (min(source, goal), key) in self._specs:  # else the announcement of shapes arrives first
            self._begun[tag, rank] = self._receive(tag, source, goal, batch, key)

    def _receive(self, tag: str, source: int, goal: int, batch: int, key: Hashable) -> Arriving:
        """Posts the receive of one message. Waits for its shapes if they are not known."""
        tensors = self._like(tag, source, goal, batch, key)
        pending = self._exchange([], self._messages(tag, source, goal, batch, tensors))
        return list(zip(pending, tensors, strict=True))

    def _messages(self, tag: str, source: int, goal: int, batch: int, tensors: list[torch.Tensor]) -> list[RankMessage]:
        """Returns a `RankMessage` for each of `tensors`, into which the message will be received."""
        return [
            RankMessage(_bytes(tensor), self.owner[source], self._number(source, goal, batch, place), tag)
            for place, tensor in enumerate(tensors)
        ]

    def _like(self, tag: str, source: int, goal: int, batch: int, key: Hashable) -> list[torch.Tensor]:
        """Returns uninitialised tensors for a message; receives its shapes and dtypes first if they are not known."""
        boundary = min(source, goal)
        if (boundary, key) not in self._specs:
            self._specs[boundary, key] = self._hear(boundary, batch)
        specs = [spec for spec in self._specs[boundary, key] if tag == FORWARD or spec.needs_gradient]
        if tag == BACKWARD and len(specs) > 1:  # the bytes that say which were reached (`send_backward`)
            specs.append(TensorSpec((len(specs),), torch.uint8, False))
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]

    def _tell(self, stage: int, batch: int, specs: list[TensorSpec] | None) -> None:
        """Announces the tensors that stage `stage` sends, as integers, their count and then WIDTH for each.

        If some are cut, another message has (stops of runs, owners of runs) of each cut dim. Does nothing for None.
        """
        if specs is None:
            return
        row = torch.zeros(1 + max(TOLD_AT_ONCE, len(specs)) * WIDTH, dtype=torch.int64)
        row[0] = len(specs)
        for place, spec in enumerate(specs):
            if spec.dtype not in DTYPES or len(spec.shape) > MOST_DIMS:
                raise RefusedPlan(f"stage {stage} would send {_listed([spec])}, which messages cannot describe")
            numbers = [DTYPES.index(spec.dtype), int(spec.needs_gradient), len(spec.shape), *spec.shape]
            start = 1 + place * WIDTH
            row[start : start + len(numbers)] = torch.tensor(numbers)
            for cut, (name, dim, owners) in enumerate(spec.cuts):
                at = start + 3 + MOST_DIMS + 3 * cut
                row[at : at + 3] = torch.tensor([1 + self._place(name), dim, len(owners.stops)])  # 0 means no cut
        # in two messages, since the receiver knows the size of the second from the count in the first
        for part in row.split([FIRST, len(row) - FIRST]):
            if len(part):
                self._control(part.clone(), stage, batch)
        runs = [torch.from_numpy(part).long() for spec in specs for _, _, owners in spec.cuts
                for part in (owners.stops, owners.who)]  # fmt: skip
        if runs:
            self._control(torch.cat(runs), stage, batch)

    def _control(self, row: torch.Tensor, stage: int, batch: int) -> None:
        """Sends a row of integers to the stage after `stage`."""
        ready = to_device(row, self.device)
        number = self._number(stage, stage + 1, batch, TELLING)
        self._under_way.append((send(ready, self.axis, self.owner[stage + 1], "control", number), ready))

    def _place(self, name: str) -> int:
        """Returns the index in `inner` of an axis."""
        return next(place for place, axis in enumerate(self.inner) if axis.name == name)

    def _hear(self, boundary: int, batch: int) -> list[TensorSpec]:
        """Returns the specs that `_tell` of stage `boundary` announces. Waits."""
        numbers = self._heard(FIRST, boundary, batch)
        if (more := numbers[0] - TOLD_AT_ONCE) > 0:
            numbers += self._heard(more * WIDTH, boundary, batch)
        rows = [numbers[1 + place * WIDTH :][:WIDTH] for place in range(numbers[0])]
        cuts = [[row[at : at + 3] for at in range(3 + MOST_DIMS, WIDTH, 3) if row[at]] for row in rows]
        total = 2 * sum(count for of_tensor in cuts for _, _, count in of_tensor)  # a stop and an owner for each run
        runs = iter(self._heard(total, boundary, batch) if total else [])
        return [
            TensorSpec(tuple(row[3 : 3 + row[2]]), DTYPES[row[0]], bool(row[1]),
                 tuple(self._read_cut(cut, runs) for cut in of_tensor))
            for row, of_tensor in zip(rows, cuts, strict=True)
        ]  # fmt: skip

    def _read_cut(self, cut: list[int], numbers: Iterator[int]) -> tuple[str, int, Owners]:
        """Returns a cut from `cut` (1 + index of its axis, dim, number of runs) and its runs, next in `numbers`."""
        axis, (_, dim, runs) = self.inner[cut[0] - 1], cut
        stops, who = (np.array([next(numbers) for _ in range(runs)], dtype=np.int64) for _ in range(2))
        return axis.name, dim, Owners(stops, who, axis.size)

    def _heard(self, count: int, boundary: int, batch: int) -> list[int]:
        """Returns the next `count` integers that stage `boundary` sends by `_control`. Waits."""
        row = torch.zeros(count, dtype=torch.int64, device=self.device)
        number = self._number(boundary, boundary + 1, batch, TELLING)
        receive(row, self.axis, self.owner[boundary], "control", number).wait()
        return read(row, "shapes of messages")


def _next(gradients: Iterator[torch.Tensor], reached: int) -> torch.Tensor | None:
    """Consumes the next gradient, and returns it if it was reached; else None."""
    gradient = next(gradients)
    return gradient if reached else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view in a dtype that every backend sends, for booleans bytes, for complex numbers real pairs."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.dtype} {list(spec.shape)}" for spec in specs)


def _arrived(arriving: Arriving) -> list[torch.Tensor]:
    """Waits for a message, and returns its tensors."""
    for pending, _ in arriving:
        pending.wait()
    return [tensor for _, tensor in arriving]


FIRST_SAID, ROUND = 2**28, 2**20  # tags of `Talk`: the first, beyond those of `Mail`, and after how many they repeat
BY_NAME = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16,
                                          torch.complex64, torch.complex128)}  # fmt: skip


class Talk:
    """Sends dicts (as JSON) and tensors between neighbouring stages. `owner`: each stage's rank on the axis."""

    def __init__(self, axis: Axis, owner: Sequence[int], device: torch.device):
        self.owner, self.device = owner, device
        self.axis = beside(axis, device)  # a group of its own, since these pass messages of `Mail` that wait
        self._numbers: dict[tuple[int, int], int] = defaultdict(int)  # of messages so far, by (source, goal)
        self._under_way: list[tuple[Pending, torch.Tensor]] = []

    def say(self, source: int, goal: int, words: dict[str, Any], tensors: Sequence[torch.Tensor | None] = ()) -> None:
        """Sends `words` (as JSON) and tensors from stage `source` to stage `goal`, without waiting."""
        self._under_way = [(pending, kept) for pending, kept in self._under_way if not pending.over]
        plain = [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]
        specs = [None if tensor is None else [str(tensor.dtype), list(tensor.shape)] for tensor in plain]
        text = json.dumps([words, specs]).encode()
        self._send(torch.tensor([len(text)]), source, goal)
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), source, goal)
        for tensor in plain:
            if tensor is not None and tensor.numel():  # the shape of an empty one is in the text
                self._send(torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor, source, goal)

    def hear(self, source: int, goal: int) -> tuple[dict[str, Any], list[torch.Tensor | None]]:
        """Returns the next (words, tensors) that stage `source` says to stage `goal`. Waits."""
        (length,) = read(self._receive(torch.zeros(1, dtype=torch.int64), source, goal), "length of a message")
        text = self._receive(torch.zeros(length, dtype=torch.uint8), source, goal)
        words, specs = json.loads(bytes(read(text, "words of a message")))
        tensors: list[torch.Tensor | None] = []
        for spec in specs:
            made = None if spec is None else torch.empty(spec[1], dtype=BY_NAME[spec[0]])
            if made is not None and made.numel():
                arrived = self._receive(torch.view_as_real(made) if made.is_complex() else made, source, goal)
                made = torch.view_as_complex(arrived) if made.is_complex() else arrived
            tensors.append(made if made is None else to_device(made, self.device))
        return words, tensors

    def flush(self) -> None:
        """Waits until everything that was said has been sent."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way.clear()

    def _next(self, source: int, goal: int) -> int:
        """Returns the tag of the next message from stage `source` to stage `goal`."""
        number = self._numbers[source, goal]
        self._numbers[source, goal] = (number + 1) % ROUND
        return FIRST_SAID + number * 2 + (goal < source)

    def _send(self, tensor: torch.Tensor, source: int, goal: int) -> None:
        """Begins to send one tensor."""
        ready = tensor if on_host(self.device) else to_device(tensor, self.device)
        pending = send(ready, self.axis, self.owner[goal], "inner gradients", self._next(source, goal))
        self._under_way.append((pending, ready))

    def _receive(self, tensor: torch.Tensor, source: int, goal: int) -> torch.Tensor:
        """Receives into `tensor`, or into a copy on the device, and returns it. Waits."""
        into = tensor if on_host(self.device) else tensor.to(self.device)
        receive(into, self.axis, self.owner[source], "inner gradients", self._next(source, goal)).wait()
        return into
