"""Send hidden states and gradients between stages (made: step/staged). Forecasts: rank_row, simulator/cut.

    stage s    F: hidden states ------------------------------> stage s + 1
               B: gradients of those that need one <-----------

Over gloo sends never wait, receives do, so that ranks meet in any order in which the schedule itself can run. Messages
of one kind from one rank to another are received in the order in which they were sent, whatever the order in which
they are needed. Where a backend works through messages in the order of calls (NCCL), and a large one is sent only once
its receiver is there, all ranks come to them in the schedule's rounds (`Schedule.rounds`), what is of one round begun
together: a rank sends as soon as it has computed, and asks for what others have by then. What shapes arrive is told
once for each shape of the batch, in a small message of its own; after that, shapes must stay. Where they follow from
values (packed sentences), they are told for each micro-batch.
Bytes on the wire, for each boundary and micro-batch: the hidden states once forward, and those that need a gradient
once backward, with a byte for each where there are several. Two stages on one rank hand tensors over without a message.

Of tensors whose positions are cut, ranks send their shares, and how these lie in the whole is told with the shapes.

Over gloo the next message of each kind is awaited while a rank computes, in memory of its own: a send begins when both
sides are ready, and one that is awaited late arrives late.

What this does not do: cut a message into pieces, or send it before its op is over.
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
TELLING = MOST_TENSORS - 1  # the place of the small message among a boundary's tensors
MOST_CUTS = 3  # of one tensor, over axes of positions
WIDTH = 3 + MOST_DIMS + 3 * MOST_CUTS  # numbers that tell of one tensor
TOLD_AT_ONCE = 2  # tensors that the first small message tells of; another one tells of more
FIRST = 1 + TOLD_AT_ONCE * WIDTH


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and cuts of one tensor of a message, and whether its gradient is sent back."""

    shape: tuple[int, ...]  # of what is sent: this rank's share
    dtype: torch.dtype
    needs_gradient: bool
    cuts: Cuts = ()  # how it lies in the whole


Key = tuple[str, int, int, int]  # of a message: its tag, from stage, to stage, micro-batch
Arriving = list[tuple[Pending, torch.Tensor]]  # the tensors of a message, and what to wait for before they are there


class Mail:
    """Sends and receives the messages of one rank. `owner` gives the rank (on the axis) of each stage.

    inner    axes that cut positions: ranks of one place on them talk to each other
    lasting  shapes that were told hold until the end, not until the next `flush`
    """

    def __init__(
        self, axis: Axis, owner: Sequence[int], device: torch.device, inner: Sequence[Axis] = (), *,
        lasting: bool = True,
    ):  # fmt: skip
        self.axis, self.inner, self.lasting = axis, inner, lasting
        self.owner = tuple(owner)
        self.device = device
        # by (tag, rank): messages (source stage, goal stage, micro-batch) in the order in which that rank sends them
        self._coming: dict[tuple[str, int], deque[tuple[int, int, int]]] = {}
        # by (tag, goal stage, micro-batch): tensors that were received before they were asked for
        self._early: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self._asked: dict[tuple[str, int, int], Arriving] = {}  # by the same, of rounds: being received
        self._begun: dict[tuple[str, int], Arriving] = {}  # by (tag, rank): the next message, being received
        self.in_rounds = in_order_of_calls(device, axis)
        self.ahead = axis.group is not None and not self.in_rounds
        self._rounds: deque[list[Key]] = deque()  # not begun yet
        self._due: set[Key] = set()  # their messages
        self._outbox: dict[Key, tuple[list[RankMessage], list[TensorSpec] | None]] = {}  # made, in a round to come
        self._key_of: Callable[[int], Hashable] = lambda batch: None
        self._specs: dict[tuple[int, Hashable], list[TensorSpec]] = {}  # by (boundary, key)
        self._under_way: list[tuple[Pending, torch.Tensor]] = []  # sent; the tensor must live until it has left
        # by (tag, goal stage, micro-batch): from one stage of this rank to another one
        self._at_home: dict[tuple[str, int, int], list[torch.Tensor]] = {}

    def expect(self, schedule: Schedule, first: int, key_of: Callable[[int], Hashable]) -> None:
        """Note which messages a schedule brings; `first` numbers its micro-batch 0, `key_of` gives shapes' key."""
        self._key_of = key_of
        self._coming = {
            (FORWARD if kind == "F" else BACKWARD, rank): deque((a, b, first + batch) for a, b, batch in messages)
            for (kind, rank), messages in schedule.brought[self.axis.index].items()
        }
        # messages in rounds are begun together, in an order that all stages have
        if self.in_rounds:
            self._coming = {}
            self._rounds = deque(
                [(FORWARD if kind == "F" else BACKWARD, a, b, first + batch) for kind, a, b, batch in messages]
                for messages in schedule.rounds[self.axis.index]
            )
            self._due = {message for messages in self._rounds for message in messages}
        # what is received is asked for ahead, so that sends need not wait
        for tag, rank in self._coming:
            if tag == FORWARD:  # gradients are the answers to what is sent: `send_forward` begins with them
                self._begin(tag, rank)

    def send_forward(self, stage: int, batch: int, key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Send the hidden states that stage `stage` made to the next stage.

        key  of the batch's shape: tensors of one key are alike (else `RefusedPlan`), and described once
        """
        specs = [TensorSpec(tuple(taken_apart(t).shape), t.dtype, t.requires_grad, cuts_of(t)) for t in tensors]
        before = self._specs.setdefault((stage, key), specs)
        if before != specs:
            raise RefusedPlan(
                f"stage {stage} sends {_listed(specs)} where it sent {_listed(before)} for a batch of the same shape: "
                "a forward whose shapes depend on values cannot be cut there; name other places with stages="
            )
        # the first of its key tells of its shapes
        self._send(FORWARD, stage, stage + 1, batch, tensors, specs if before is specs else None)
        self._begin(BACKWARD, self.owner[stage + 1])

    def receive_forward(self, stage: int, batch: int, key: Hashable) -> list[tuple[torch.Tensor, bool]]:
        """Returns (tensor, whether it needs a gradient) of all that the stage before made. Waits."""
        boundary = stage - 1
        tensors = self._fetch(FORWARD, boundary, stage, batch, key)
        return [
            (put_together(tensor, spec.cuts, self.inner), spec.needs_gradient)
            for tensor, spec in zip(tensors, self._specs[boundary, key], strict=True)
        ]

    def send_backward(self, stage: int, batch: int, inputs: Sequence[torch.Tensor]) -> None:
        """Send the gradients (`.grad`) of the tensors that stage `stage` received, where needed, to the stage before.

        Of several, a byte each says whether backward reached it: what it did not reach has no gradient in one process,
        and an optimizer leaves that alone, which it would not do for zeros. `RefusedPlan` if a single one has none.
        """
        # cut as the hidden states are, since that is what the stage before was told to expect
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
        """Returns gradients of what stage `stage` sent; None where none is needed or backward did not reach. Waits."""
        tensors = self._fetch(BACKWARD, stage + 1, stage, batch, key)
        specs = self._specs[stage, key]
        several = sum(spec.needs_gradient for spec in specs) > 1  # then the last tensor says which were reached
        reached = iter(read(tensors[-1], "gradients reached") if several else [True])
        gradients = iter(tensors)
        return [
            # specs are those of what was sent, in that order; the answers have the same
            put_together(gradient, spec.cuts, self.inner) if gradient is not None else None
            for spec in specs
            for gradient in [_next(gradients, next(reached)) if spec.needs_gradient else None]
        ]

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way.clear()
        self._key_of = lambda batch: None  # what it was given holds the step's batches
        if not self.lasting:
            self._specs.clear()

    def _number(self, source: int, goal: int, batch: int, place: int) -> int:
        """Returns one tensor's number within a message, the same on both ranks (the tag, where a backend has tags)."""
        boundary = 2 * min(source, goal) + (goal < source)
        return (batch * 2 * len(self.owner) + boundary) * MOST_TENSORS + place

    def _send(
        self, tag: str, source: int, goal: int, batch: int, tensors: Sequence[torch.Tensor],
        specs: list[TensorSpec] | None = None,
    ) -> None:  # fmt: skip
        """Sends the tensors of one message; `specs`: theirs, where the receiver does not know them yet."""
        if len(tensors) >= TELLING:  # that place numbers the small message which tells of the tensors
            raise RefusedPlan(f"stage {source} would send {len(tensors)} tensors at once; {TELLING - 1} are the most")
        if self.owner[source] == self.owner[goal]:  # without its graph: each stage's backward is run by itself
            self._at_home[tag, goal, batch] = [taken_apart(tensor.detach()) for tensor in tensors]
            return
        self._under_way = [(p, t) for p, t in self._under_way if not p.over]
        going = [
            RankMessage(_bytes(taken_apart(t.detach()).contiguous()), self.owner[goal],
                    self._number(source, goal, batch, place), tag)
            for place, t in enumerate(tensors)
        ]  # fmt: skip
        key = (tag, source, goal, batch)
        if key in self._due:  # in rounds, each begun in an order that all stages have: it leaves with its round
            self._outbox[key] = going, specs
            self._go_on_to(key)
        else:  # sends need not wait for the receiver, and leave at once
            self._tell(source, batch, specs)
            self._exchange(going, [])

    def _exchange(self, going: list[RankMessage], coming: list[RankMessage]) -> list[Pending]:
        """Begin messages together; returns a `Pending` for each that comes, in order."""
        sent, received = exchange(going, coming, self.axis)
        self._under_way += [(pending, message.tensor) for pending, message in zip(sent, going, strict=True)]
        return received

    def _go_on_to(self, key: Key) -> None:
        """Begin all rounds up to the one with this message. What this rank sends in them is made."""
        # rounds come in one order on all ranks: those before this message's are begun as well
        while key in self._due:
            going: list[RankMessage] = []
            made: list[tuple[Key, list[torch.Tensor]]] = []
            for message in self._rounds.popleft():
                self._due.remove(message)
                tag, source, goal, batch = message
                # what this rank sends is made, and its shapes are told first
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
        """Returns the tensors of one message. Those that the same rank sent before it are received too, and kept."""
        if self.owner[source] == self.owner[goal]:  # both stages are this rank's
            return self._at_home.pop((tag, goal, batch))
        self._go_on_to((tag, source, goal, batch))
        if (tag, goal, batch) in self._asked:  # of a round: being received
            return _arrived(self._asked.pop((tag, goal, batch)))
        rank = self.owner[source]
        coming = self._coming.get((tag, rank))
        # messages of one pair arrive in the order in which they were sent: those in front are kept for their turn
        while coming and (tag, goal, batch) not in self._early:
            start, end, number = coming.popleft()
            key_then = self._key_of(number)
            arriving = self._begun.pop((tag, rank), None) or self._receive(tag, start, end, number, key_then)
            self._begin(tag, rank)  # the next one comes while this rank computes with this one
            self._early[tag, end, number] = _arrived(arriving)
        if (tag, goal, batch) in self._early:
            return self._early.pop((tag, goal, batch))
        return _arrived(self._receive(tag, source, goal, batch, key))  # outside a schedule

    def _begin(self, tag: str, rank: int) -> None:
        """Begin to receive the next message of a rank, which arrives while this one computes.

        Over gloo, and where its shapes are known. NCCL would have the device wait for it beside the step's kernels.
        """
        coming = self._coming.get((tag, rank))
        if not coming or (tag, rank) in self._begun or not self.ahead:
            return
        source, goal, batch = coming[0]
        key = self._key_of(batch)
        if (min(source, goal), key) in self._specs:  # else a message that tells the shapes comes first
            self._begun[tag, rank] = self._receive(tag, source, goal, batch, key)

    def _receive(self, tag: str, source: int, goal: int, batch: int, key: Hashable) -> Arriving:
        tensors = self._like(tag, source, goal, batch, key)
        pending = self._exchange([], self._messages(tag, source, goal, batch, tensors))
        return list(zip(pending, tensors, strict=True))

    def _messages(self, tag: str, source: int, goal: int, batch: int, tensors: list[torch.Tensor]) -> list[RankMessage]:
        """Returns the messages that bring these tensors."""
        return [
            RankMessage(_bytes(tensor), self.owner[source], self._number(source, goal, batch, place), tag)
            for place, tensor in enumerate(tensors)
        ]

    def _like(self, tag: str, source: int, goal: int, batch: int, key: Hashable) -> list[torch.Tensor]:
        """Returns empty tensors of a message's shapes and dtypes; receives these first where they are not known yet."""
        boundary = min(source, goal)
        # shapes of a boundary are the same for every batch: told once, with the first
        if (boundary, key) not in self._specs:
            self._specs[boundary, key] = self._hear(boundary, batch)
        specs = [spec for spec in self._specs[boundary, key] if tag == FORWARD or spec.needs_gradient]
        # several gradients: a byte for each says whether backward reached it
        if tag == BACKWARD and len(specs) > 1:  # a byte for each: whether backward reached it (`send_backward`)
            specs.append(TensorSpec((len(specs),), torch.uint8, False))
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]

    def _tell(self, stage: int, batch: int, specs: list[TensorSpec] | None) -> None:
        """Send what the tensors of a boundary are like, as integers: their count, then WIDTH numbers for each.

        Then who owns which index of the cut dims: as many numbers as there are runs, where there are any.
        """
        if specs is None:  # the receiver knows them
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
                row[at : at + 3] = torch.tensor([1 + self._place(name), dim, len(owners.stops)])  # 0: no cut
        # in two messages, since the receiver knows the size of the second from the count in the first
        for part in row.split([FIRST, len(row) - FIRST]):
            if len(part):
                self._control(part.clone(), stage, batch)
        runs = [torch.from_numpy(part).long() for spec in specs for _, _, owners in spec.cuts
                for part in (owners.stops, owners.who)]  # fmt: skip
        if runs:
            self._control(torch.cat(runs), stage, batch)

    def _control(self, row: torch.Tensor, stage: int, batch: int) -> None:
        ready = to_device(row, self.device)
        number = self._number(stage, stage + 1, batch, TELLING)
        self._under_way.append((send(ready, self.axis, self.owner[stage + 1], "control", number), ready))

    def _place(self, name: str) -> int:
        return next(place for place, axis in enumerate(self.inner) if axis.name == name)

    def _hear(self, boundary: int, batch: int) -> list[TensorSpec]:
        """Returns the specs that `_tell` sent. Waits."""
        numbers = self._heard(FIRST, boundary, batch)
        if (more := numbers[0] - TOLD_AT_ONCE) > 0:
            numbers += self._heard(more * WIDTH, boundary, batch)
        rows = [numbers[1 + place * WIDTH :][:WIDTH] for place in range(numbers[0])]
        cuts = [[row[at : at + 3] for at in range(3 + MOST_DIMS, WIDTH, 3) if row[at]] for row in rows]
        total = 2 * sum(count for of_tensor in cuts for _, _, count in of_tensor)  # of each run: its stop, its owner
        runs = iter(self._heard(total, boundary, batch) if total else [])
        return [
            TensorSpec(tuple(row[3 : 3 + row[2]]), DTYPES[row[0]], bool(row[1]),
                 tuple(self._read_cut(cut, runs) for cut in of_tensor))
            for row, of_tensor in zip(rows, cuts, strict=True)
        ]  # fmt: skip

    def _read_cut(self, cut: list[int], numbers: Iterator[int]) -> tuple[str, int, Owners]:
        axis, (_, dim, runs) = self.inner[cut[0] - 1], cut
        stops, who = (np.array([next(numbers) for _ in range(runs)], dtype=np.int64) for _ in range(2))
        return axis.name, dim, Owners(stops, who, axis.size)

    def _heard(self, count: int, boundary: int, batch: int) -> list[int]:
        row = torch.zeros(count, dtype=torch.int64, device=self.device)
        number = self._number(boundary, boundary + 1, batch, TELLING)
        receive(row, self.axis, self.owner[boundary], "control", number).wait()
        return read(row, "shapes of messages")


def _next(gradients: Iterator[torch.Tensor], reached: int) -> torch.Tensor | None:
    gradient = next(gradients)
    return gradient if reached else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in a dtype that every backend sends: booleans as bytes, complex numbers as real pairs."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.dtype} {list(spec.shape)}" for spec in specs)


def _arrived(arriving: Arriving) -> list[torch.Tensor]:
    for pending, _ in arriving:
        pending.wait()
    return [tensor for _, tensor in arriving]


FIRST_SAID, ROUND = 2**28, 2**20  # numbers of these messages, beyond those of hidden states
BY_NAME = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16,
                                          torch.complex64, torch.complex128)}  # fmt: skip


class Talk:
    """Sends dicts (as JSON) and tensors between stages that are neighbours. `owner`: each stage's rank on the axis."""

    def __init__(self, axis: Axis, owner: Sequence[int], device: torch.device):
        self.owner, self.device = owner, device
        self.axis = beside(axis, device)  # said while hidden states wait for a stage that asks first
        self._numbers: dict[tuple[int, int], int] = defaultdict(int)  # of messages so far, by (source, goal)
        self._under_way: list[tuple[Pending, torch.Tensor]] = []

    def say(self, source: int, goal: int, words: dict[str, Any], tensors: Sequence[torch.Tensor | None] = ()) -> None:
        """Send `words` (as JSON) and tensors from stage `source` to stage `goal`; waits for nobody."""
        # what arrived need not be held
        self._under_way = [(pending, kept) for pending, kept in self._under_way if not pending.over]
        plain = [None if tensor is None else tensor.detach().contiguous() for tensor in tensors]
        specs = [None if tensor is None else [str(tensor.dtype), list(tensor.shape)] for tensor in plain]
        text = json.dumps([words, specs]).encode()
        self._send(torch.tensor([len(text)]), source, goal)
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), source, goal)
        # tensors are sent in the order of the words, each by its shape above
        for tensor in plain:
            if tensor is not None and tensor.numel():  # of an empty one the text says all
                self._send(torch.view_as_real(tensor).contiguous() if tensor.is_complex() else tensor, source, goal)

    def hear(self, source: int, goal: int) -> tuple[dict[str, Any], list[torch.Tensor | None]]:
        """Returns the (words, tensors) that stage `source` said next to stage `goal`. Waits."""
        (length,) = read(self._receive(torch.zeros(1, dtype=torch.int64), source, goal), "length of a message")
        text = self._receive(torch.zeros(length, dtype=torch.uint8), source, goal)
        words, specs = json.loads(bytes(read(text, "words of a message")))
        tensors: list[torch.Tensor | None] = []
        for spec in specs:
            # None stays None: a gradient that the other side does not have
            made = None if spec is None else torch.empty(spec[1], dtype=BY_NAME[spec[0]])
            # of an empty tensor nothing was sent, and its shape says all
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
        return FIRST_SAID + number * 2 + (goal < source)

    def _send(self, tensor: torch.Tensor, source: int, goal: int) -> None:
        ready = tensor if on_host(self.device) else to_device(tensor, self.device)
        pending = send(ready, self.axis, self.owner[goal], "inner gradients", self._next(source, goal))
        self._under_way.append((pending, ready))

    def _receive(self, tensor: torch.Tensor, source: int, goal: int) -> torch.Tensor:
        into = tensor if on_host(self.device) else tensor.to(self.device)
        receive(into, self.axis, self.owner[source], "inner gradients", self._next(source, goal)).wait()
        return into
