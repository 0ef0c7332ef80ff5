"""Tasks whose forwards make buffers of their samples: counts of experts, sums set anew, a centre; and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Task

WIDTH, EXPERTS = 6, 4


class Mixture(nn.Module):
    """Two of four experts for each row, chosen with a bias that follows from how many rows each had in earlier steps.

    fresh  the count of a forward is set anew and moves the bias in the next; else all counts are added up
    """

    def __init__(self, fresh: bool):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.fresh = fresh

    def forward(self, x: Tensor) -> Tensor:  # (B, WIDTH)
        scores = self.gate(x).sigmoid()
        if self.training:
            self.bias += 0.1 * torch.sign(self.load.mean() - self.load)
        chosen = (scores + self.bias).topk(2, -1).indices
        if self.training:
            with torch.no_grad():
                counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
                self.load = counts.to(self.load.dtype) if self.fresh else self.load + counts
                self.rows += len(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, chosen[rows, place], None])
        return x + out


class Centred(nn.Module):
    """Outputs less a centre that moves towards the mean of each batch's outputs (as a teacher's are in DINO)."""

    def __init__(self, sharpened: bool = False):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.sharpened = sharpened  # what is kept is no mean of samples

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        out = y - self.centre
        if self.training:
            with torch.no_grad():
                mean = y.mean(0)
                self.centre = 0.7 * self.centre + 0.3 * (mean.tanh() if self.sharpened else mean)
        return out


class Spectral(nn.Module):
    """Outputs less a complex mean of their spectra, which moves towards each batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.body(x))
        out = torch.fft.irfft(spectrum - self.mean, n=WIDTH)
        if self.training:
            with torch.no_grad():
                self.mean = 0.7 * self.mean + 0.3 * spectrum.mean(0)
        return out


class Latest(nn.Linear):
    """A layer that keeps its last sample's largest output, and adds it to the next batch's."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        out = y + self.last
        self.last = y[-1].detach().max()
        return out


def _batch(step: int) -> Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))


def _task(*layers: Callable[[], nn.Module]) -> Task:
    def model() -> nn.Module:
        return nn.Sequential(*(layer() for layer in layers), nn.Linear(WIDTH, WIDTH))

    return Task(
        model=model, batch=_batch, loss=lambda output, batch: ((output - batch.sin()).square().sum(), len(batch))
    )


def counted() -> Task:
    return _task(lambda: Mixture(fresh=False), lambda: Mixture(fresh=False))


def set_anew() -> Task:
    return _task(lambda: Mixture(fresh=True), lambda: nn.Linear(WIDTH, WIDTH), lambda: Mixture(fresh=True))


def spectral() -> Task:
    return _task(Spectral)


def centred() -> Task:
    return _task(Centred, Centred)


class Visited(nn.Linear):
    """A layer that marks the numbers that came, and adds how many to the next batch's outputs."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(100_000))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + 0.01 * self.seen.sum()
        self.seen[(x[:, 0].detach() * 1e5).long() % 100_000] = 1.0
        return out


def visited() -> Task:
    return _task(Visited)


def sharpened() -> Task:
    return _task(lambda: Centred(sharpened=True))


def latest() -> Task:
    return _task(Latest)


class Routed(nn.Module):
    """A mixture over positions that routes within its own forward: rows by expert, counts read in Python.

    most  rows that an expert takes; further ones are left out
    """

    def __init__(self, most: int | None = None):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.most = most

    def forward(self, x: Tensor) -> Tensor:  # (B, S, WIDTH)
        rows = x.reshape(-1, WIDTH)
        weight, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        if self.training:
            self.load += counts
        given, parts = rows[by_expert // 2], []
        for number, part in enumerate(given.split(counts.tolist())):
            kept = part if self.most is None else part * (torch.arange(len(part)) < self.most)[:, None]
            parts.append(kept @ self.weight[number])
        made = torch.cat(parts) * weight.flatten()[by_expert, None]
        return torch.zeros_like(rows).index_add(0, by_expert // 2, made).view_as(x)


class Words(nn.Module):
    """Causal attention and a mixture over positions, twice; a word at each position."""

    def __init__(self, most: int | None = None):
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.attention = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mixtures = nn.ModuleList(Routed(most) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for attention, mixture in zip(self.attention, self.mixtures, strict=True):
            q, k, v = attention(x).unsqueeze(1).chunk(3, -1)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
            x = x + mixture(x)
        return self.head(x)


def _words(step: int) -> Tensor:
    return torch.randint(0, 11, (5, 9), generator=torch.Generator().manual_seed(step))


def _next(output: Tensor, words: Tensor) -> tuple[Tensor, int]:
    loss = nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="sum")
    return loss, words[:, 1:].numel()


def of_words(model: Any) -> Task:
    return Task(model=model, batch=_words, loss=_next)


def routed() -> Task:
    return of_words(Words)


def routed_up_to() -> Task:
    return of_words(lambda: Words(most=12))
