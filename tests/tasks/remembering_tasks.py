"""Modules that keep something from batch to batch in plain attributes and buffers: functions that return a `Task`."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pipeline_tasks import WIDTH, task, vectors
from torch import Tensor, nn

from shardwise import Task

EVEN = partial(vectors, samples=8)  # micro-batches of one size, as a kept state needs


class Layers(nn.Module):
    """Four layers, each of which adds to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.start()

    def start(self) -> None:
        """What the module keeps before its first batch."""


class Listed(Layers):
    """Hidden states in a list that the outermost forward sets at its end."""

    def start(self) -> None:
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        new = []
        for place, layer in enumerate(self.layers):
            old = self.memory[place] if self.memory else torch.zeros_like(x)
            new.append(x.detach())
            x = x + layer(x + 0.5 * old)
        self.memory = new
        return self.head(x)


class Updated(Layers):
    """All states updated at the end, from those kept and those of now."""

    def start(self) -> None:
        self.memory: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        memory, seen = self.memory or [torch.zeros_like(x) for _ in self.layers], []
        for layer, old in zip(self.layers, memory, strict=True):
            seen.append(x)
            x = x + layer(x + old)
        with torch.no_grad():
            self.memory = [0.5 * old + 0.1 * now for old, now in zip(memory, seen, strict=True)]
        return self.head(x)


class First(Layers):
    """What the first layer gave in the last batch is added at the end, where it is another stage's."""

    def start(self) -> None:
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        old = self.first
        for place, layer in enumerate(self.layers):
            x = x + layer(x)
            if place == 0:
                self.first = x.detach()
        return self.head(x if old is None else x + old)


class Last(Layers):
    """What the head gave in the last batch is added at the start: no stage can begin anywhere."""

    def start(self) -> None:
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            x = x + self.last.mean(-1, keepdim=True)
        for layer in self.layers:
            x = x + layer(x)
        output = self.head(x)
        self.last = output.detach()
        return output


class Counted(Layers):
    """A number that is raised at the end and read at the start, and one in a buffer."""

    def start(self) -> None:
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x / (1 + self.calls) + self.steps
        for layer in self.layers:
            x = x + layer(x)
        self.calls += 1
        self.steps += 0.5
        return self.head(x)


class Turn(nn.Module):
    """A layer that counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.weight(x).tanh() / self.calls


class Turns(Layers):
    """A layer used four times, whose count begins anew in every batch: calls that a stage leaves out count too."""

    def start(self) -> None:
        self.turn = Turn()

    def forward(self, x: Tensor) -> Tensor:
        self.turn.calls = 0
        for layer in self.layers:
            x = layer(self.turn(x))
        return self.head(x)


class Store:
    """States and a count, in an object of a class of one's own."""

    def __init__(self) -> None:
        self.states: dict[str, list[Any]] = {"by layer": [None] * 4}
        self.seen = 0


class Stored(Layers):
    """States in a list, in a dict, in an object."""

    def start(self) -> None:
        self.store = Store()

    def forward(self, x: Tensor) -> Tensor:
        states = self.store.states["by layer"]
        for place, layer in enumerate(self.layers):
            x = x + layer(x if states[place] is None else x + 0.3 * states[place])
            states[place] = x.detach()
        self.store.seen += 1
        return self.head(x) / self.store.seen


class Written(Layers):
    """Averages of weights in tensors of a plain list, into which the forward writes."""

    def start(self) -> None:
        self.averages = [torch.zeros(WIDTH) for _ in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        for average, layer in zip(self.averages, self.layers, strict=True):
            x = x + layer(x + average.to(x))
            average.mul_(0.9).add_(layer[0].bias.detach().to(average))
        return self.head(x)


class Tables(Layers):
    """A table of no weight, kept by the number of features, and the last two hidden states."""

    def start(self) -> None:
        self.tables: dict[int, Tensor] = {}
        self.states: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)
        for layer in self.layers[:2]:
            x = x + layer(x + self.tables[x.shape[1]])
        for state in self.states:
            x = x + 0.1 * state
        self.states.append(x.detach())
        for layer in self.layers[2:]:
            x = x + layer(x + self.tables[x.shape[1]])
        return self.head(x)


class Averaged(Layers):
    """A running mean over the batch in a plain attribute, taken off in the next one."""

    def start(self) -> None:
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        old, self.mean = self.mean, x.mean(0).detach()
        return self.head(x if old is None else x - old)


class Ghost(nn.Module):
    """Batch norm over groups of four samples, and a running mean of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        groups = (self.inner(x - self.mean)).chunk(max(len(x) // 4, 1))
        return self.head(self.drop(torch.cat([self.norm(group) for group in groups])))


def ghost() -> Task:
    return task(Ghost, EVEN, metrics=lambda output, batch: {"size": (output.abs().sum(), len(output))})


def ghost_on_all() -> Task:
    return replace(ghost(), loss_scope="model")


def averaged_on_all() -> Task:
    return task(Averaged, EVEN, loss_scope="model")


@dataclass
class Told:
    """An output of a class that torch's tree functions do not look into."""

    output: Tensor
    weights: list[Tensor]


class Telling(Layers):
    """It returns weights and hidden states of its first layers in an object."""

    def forward(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        x = first
        for layer in self.layers[1:]:
            x = x + layer(x)
        return Told(self.head(x), [self.layers[0][0].weight, first])


def telling() -> Task:
    def loss(told: Told, batch: Any) -> tuple[Tensor, int]:
        extra = len(batch["y"]) * told.weights[0].square().sum() + told.weights[1].square().sum()
        return (told.output - batch["y"]).square().sum() + 0.1 * extra, len(batch["y"])

    return task(Telling, EVEN, loss=loss)


def listed() -> Task:
    return task(Listed, EVEN)


def updated() -> Task:
    return task(Updated, EVEN)


def first() -> Task:
    return task(First, EVEN)


def last() -> Task:
    return task(Last, EVEN)


def counted() -> Task:
    return task(Counted, EVEN)


def turns() -> Task:
    return task(Turns, EVEN)


def stored() -> Task:
    return task(Stored, EVEN)


def written() -> Task:
    return task(Written, EVEN)


def tables() -> Task:
    return task(Tables, EVEN)


def averaged() -> Task:
    return task(Averaged, EVEN)


# --- what lies outside the module

FORWARDS = [0]
STORE: dict[str, Tensor] = {}


def noted(x: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
    calls.append(len(calls))
    STORE["last"] = x
    return x


class Outside(Layers):
    """Scales by the number of forwards, which a list of the file, a class and a closure's cell count."""

    seen = 0

    def start(self) -> None:
        FORWARDS[0], Outside.seen, count = 0, 0, 0

        def hook(module: nn.Module, args: Any) -> None:
            nonlocal count
            count += 1
            module.scale = 1 / count

        self.layers[0].register_forward_pre_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS[0] += 1
        Outside.seen += 1
        for layer in self.layers:
            x = x + layer(x) * (1 + 1 / FORWARDS[0] + 1 / Outside.seen + self.layers[0].scale)
        return self.head(noted(x))


def outside() -> Task:
    return task(Outside, EVEN)


# --- numbers drawn by Python and numpy


class Dropped(Layers):
    """Layers dropped by a draw of Python's; each draws another number of numpy's inside."""

    def start(self) -> None:
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() > 0.4:
                x = x + layer(x)
        return self.head(x)


class DroppedByTorch(Layers):
    """Layers dropped by draws of torch's: of one tensor for all, and of one at each that has a dropout of its own."""

    def start(self) -> None:
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.empty(2).uniform_()
        for place, layer in enumerate(self.layers):
            if (drawn[place] if place < 2 else torch.rand(1)) > 0.4:
                x = x + layer(x).tanh()
        return self.head(x)


@dataclass
class Shown:
    """What a layer says of its run; two of them do not compare."""

    hidden: Tensor


class OfAll(nn.Module):
    """A layer of the mean of all results so far, which may return an object beside its own."""

    def __init__(self, shows: bool) -> None:
        super().__init__()
        self.inner, self.shows = nn.Linear(WIDTH, WIDTH), shows

    def forward(self, before: list[Tensor]) -> Any:
        hidden = self.inner(torch.stack(before).mean(0)).tanh()
        return (hidden, Shown(hidden)) if self.shows else hidden


class Objects(Layers):
    """An object beside a result, and a state that goes on; in `either`, one of two layers by a draw of Python's."""

    def __init__(self, *, either: bool) -> None:
        self.either = either
        super().__init__()

    def start(self) -> None:
        self.layers, self.memory = nn.ModuleList(OfAll(place == 0) for place in range(4)), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, shown = self.layers[0]([x + self.memory])
        if not self.either or random.random() > 0.5:
            results = [x, self.layers[1]([x])]
        else:  # one result more for the layer behind
            results = [x, self.layers[2]([x]), x]
        self.memory = shown.hidden.detach().mean(0)
        return self.head(self.layers[3](results))


class Scaled(nn.Module):
    """A layer times a number drawn by numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * float(np.random.rand() + 0.5)


class OwnGenerators(Layers):
    """Numbers of generators that the module itself holds, which go on from batch to batch."""

    def start(self) -> None:
        self.numbers, self.others = np.random.default_rng(3), random.Random(5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * (float(self.numbers.random()) + self.others.random())
        return self.head(x)


def dropped() -> Task:
    return task(Dropped, EVEN)


def objects() -> Task:
    return task(partial(Objects, either=False), EVEN)


def either_object() -> Task:
    return task(partial(Objects, either=True), EVEN)


def dropped_by_torch() -> Task:
    return task(DroppedByTorch, EVEN)


def own_generators() -> Task:
    return task(OwnGenerators, EVEN)


class Reset(Layers):
    """A state of each sample, that begins anew where there are more or fewer samples."""

    def start(self) -> None:
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        old = self.state if self.state is not None and len(self.state) == len(x) else torch.zeros_like(x)
        for layer in self.layers:
            x = x + layer(x + old)
        self.state = x.detach()
        return self.head(x)


def reset() -> Task:
    return task(Reset, lambda step: vectors(step, samples=5 - step))


class Freezes(Layers):
    """Trains its first layer in its first forward alone, and its second one after that."""

    def start(self) -> None:
        self.layers[1].requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.layers[0].requires_grad_(self.calls < 2)
        self.layers[1].requires_grad_(self.calls > 1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def freezes() -> Task:
    return task(Freezes, EVEN)
