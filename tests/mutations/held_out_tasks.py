"""Tasks of the held-out bugs: the features that some of them need."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import run_tasks
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task, rollout
from shardwise.data import Blend, TokenSource
from shardwise.models.tasks import VOCAB, decoder


def thirds() -> Task:
    """Reads two sources two to one, in blocks of 4,096 places, which three does not divide."""
    parts = {"a": (run_tasks.Numbered(7001, 0), 2.0), "b": (run_tasks.Numbered(2003, 1), 1.0)}
    return run_tasks.classified().with_(data=Blend(parts))


def _tokens() -> Path:
    path = Path(tempfile.gettempdir()) / "shardwise-held-out-words.npy"
    if not path.exists():
        own = path.with_name(f"{path.stem}-{id(path)}.npy")
        np.save(own, np.random.default_rng(3).integers(0, VOCAB, 700).astype(np.uint16))
        own.replace(path)
    return path


def of_tokens() -> Task:
    """A decoder on windows of a file of tokens, some of them held out."""
    train, held_out = TokenSource(_tokens(), 10).split(0.3)
    return decoder().with_(batch=None, data=train, eval_data=held_out, loss=_of_next, inputs=_before)


def _before(batch: dict[str, Tensor]) -> tuple:
    return (batch["tokens"][:, :-1],), {}


def _of_next(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    targets = batch["tokens"][:, 1:].flatten()
    return F.cross_entropy(output.flatten(0, 1), targets, reduction="sum"), len(targets)


class Step(nn.Module):
    """One step of a forecast of a vector, beside a forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 4)

    def forward(self, x: Tensor, sun: Tensor) -> Tensor:
        return torch.tanh(self.map(torch.cat([x, sun], 1)))


def _states(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(6, 4, generator=g),
        "y": torch.randn(6, 3, 4, generator=g),
        "sun": torch.randn(6, 3, 2, generator=g),
    }


def _of_state(batch: dict[str, Tensor]) -> tuple:
    return (batch["x"], batch["sun"]), {}


def _squares(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    return (output - batch["y"]).square().sum(), len(output)


ONE_STEP = Task(model=Step, batch=_states, inputs=_of_state, loss=_squares,
                optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))  # fmt: skip


def forecast() -> Task:
    return rollout(ONE_STEP, forcings=["sun"], weights=[1.0, 0.5, 0.25])


def growing_forecast() -> Task:
    return rollout(ONE_STEP, forcings=["sun"], curriculum={0: 1, 1: 3})


class Pooled(nn.Module):
    """Windows that would begin beyond a field's edge are dropped; resized by a factor; a table of bias by head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1, padding_mode="reflect")
        self.pool = nn.MaxPool2d(2, stride=3, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.tanh(self.first(x)))
        return self.last(F.interpolate(x, scale_factor=1.5, mode="bilinear"))[..., ::2]


def _fields(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, 12, 24, generator=torch.Generator().manual_seed(step))}


def pooled() -> Task:
    return Task(model=Pooled, batch=_fields, inputs=lambda batch: ((batch["x"],), {}),
                loss=lambda output, batch: (output.square().mean((1, 2, 3)).sum(), len(output)),
                optimizer=partial(torch.optim.AdamW, lr=1e-2))  # fmt: skip


class Halves(nn.Module):
    """Multiplies the halves of a map: backward keeps views that lie within what the block has made."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.map(x).chunk(2, -1)
        return x + first * second


def halves() -> Task:
    return Task(model=lambda: nn.Sequential(*[Halves() for _ in range(4)]), batch=_rows,
                inputs=lambda batch: ((batch["x"],), {}),
                loss=lambda output, batch: (output.square().mean((1, 2)).sum(), len(output)),
                optimizer=partial(torch.optim.AdamW, lr=1e-2))  # fmt: skip


def _rows(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(step))}


class Biased(nn.Module):
    """Attention with a bias of its own for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 4, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        place = torch.arange(s)
        bias = -(place[:, None] - place[None]).abs() * self.slopes.view(1, 4, 1, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype)).transpose(1, 2).reshape(b, s, 8))


def _vectors(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(step))}


def biased() -> Task:
    return Task(model=Biased, batch=_vectors, inputs=lambda batch: ((batch["x"],), {}),
                loss=lambda output, batch: (output.square().mean((1, 2)).sum(), len(output)),
                optimizer=partial(torch.optim.AdamW, lr=1e-2))  # fmt: skip
