"""Tasks of the fourth set of held-out bugs: the features that some of them need."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path

import run_tasks
import torch
import torch.nn.functional as F
from chat_tokenizer import STYLES, WORDS, styled
from pipeline_tasks import WIDTH, task
from remembering_tasks import EVEN, Layers
from torch import Tensor, nn

from mutations.held_out_second_tasks import Counted, Segments, segments
from mutations.held_out_tasks import ONE_STEP, Biased, biased
from mutations.held_out_third_tasks import OfBytes, _ids, _of_labels
from shardwise import Task, rollout
from shardwise.data import JsonlSource
from shardwise.data.chat import ChatTemplate
from shardwise.models.tasks import decoder, mlp


class Levelled(Segments):
    """The mean over channels is taken off in each cell."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x - x.mean(1, keepdim=True)


def levelled() -> Task:
    return segments().with_(model=Levelled)


class Scattered(Biased):
    """The last position is replaced."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(x)
        return super().forward(h.select_scatter(torch.tanh(h[:, 0]), 1, -1))


class Assigned(Segments):
    """Three times what was written into a field of zeros is added."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        plain = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        plain[:] = torch.tanh(x)
        return torch.add(x, plain, alpha=3)


def scattered() -> Task:
    return biased().with_(model=Scattered, sequence={"x": 1})


def assigned() -> Task:
    return segments().with_(model=Assigned)


class Marked(nn.Module):
    """Layers of which one says at which rate it is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 7), nn.Linear(7, 5)
        self.first.weight.times = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class ByMarks(torch.optim.Optimizer):
    """Momentum at rates that parameters say."""

    def __init__(self, params: list, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.mul_(0.9).add_(param.grad)
                    param.add_(moment, alpha=-group["lr"] * getattr(param, "times", 1.0))


def marked() -> Task:
    return mlp().with_(model=Marked, optimizer=ByMarks)


class Chosen(Counted):
    """Keeps each feature with a chance of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h * torch.bernoulli(0.2 + 0.3 * torch.sigmoid(h.detach())))


class Shifted(Counted):
    """Adds numbers about one half."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + torch.normal(0.5, 0.3, h.shape, dtype=h.dtype, device=h.device))


def chosen() -> Task:
    return mlp().with_(model=Chosen)


def shifted() -> Task:
    return mlp().with_(model=Shifted)


class WideNorm(run_tasks.Net):
    """A norm whose bias, a buffer, stays float32 beside narrow weights."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm)
        self.register_buffer("shift", torch.linspace(0, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x).unsqueeze(2) * torch.linspace(0.3, 1.7, 4, dtype=x.dtype) ** 2
        h = F.instance_norm(torch.tanh(h), None, None, torch.ones(3, dtype=x.dtype), self.shift)
        return (h * torch.linspace(-1, 2, 4, dtype=h.dtype)).sum(2)


def wide_norm() -> Task:
    return run_tasks.layered().with_(model=WideNorm)


class Remembers(Layers):
    """A layer that is used from the second batch on, of what the first one left."""

    def start(self) -> None:
        self.second = nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        seen, self.seen = self.seen, x.detach()
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x if seen is None else x + torch.tanh(F.linear(seen, self.second.weight)))


def remembers() -> Task:
    return task(Remembers, EVEN)


def weighted_curriculum() -> Task:
    """The first steps have one step of a forecast, whose weight is the first of three."""
    return rollout(ONE_STEP, forcings=["sun"], weights=[1.0, 0.5, 0.1], curriculum={0: 2, 1: 3})


@lru_cache(maxsize=1)
def _tokenizer() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="shardwise-held-out-"))
    styled(folder, STYLES["chatml"])
    return folder


class OfMarks(OfBytes):
    """Learns bytes and marks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 16), nn.Linear(32, 300)


def chats() -> Task:
    """Conversations under a template, whose answers end with a mark and a line's end."""
    home = _tokenizer()
    path = home / "chats.jsonl"
    turns = [[{"role": "user", "content": WORDS[n % 2]}, {"role": "assistant", "content": WORDS[1] * (1 + n % 3)}]
             for n in range(60)]  # fmt: skip
    path.write_text("".join(json.dumps({"messages": said}) + "\n" for said in turns), encoding="utf-8")
    data = JsonlSource(path, 90, tokenizer=home, template=ChatTemplate(home), pack=False)
    return decoder().with_(model=OfMarks, batch=None, data=data, loss=_of_labels, inputs=_ids)
