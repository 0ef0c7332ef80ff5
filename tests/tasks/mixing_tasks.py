"""Modules that mix the samples of a micro-batch between others that do not, as their users write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task

WIDTH, FEATURES, CODES, STORED = 8, 12, 16, 32


class Between(nn.Module):
    """A module between two linear layers."""

    def __init__(self, module: nn.Module, width: int = WIDTH):
        super().__init__()
        self.first, self.module, self.last = nn.Linear(FEATURES, WIDTH), module, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.module(torch.tanh(self.first(x))))


class Spread(nn.Module):
    """Adds a channel with the spread of the batch (a GAN's critic)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.std(0, unbiased=False).mean().expand(len(x), 1)], 1)


class OwnNorm(nn.Module):
    """Batch norm written by hand, whose buffers are set anew."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            mean, var = x.mean(0), x.var(0)
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.var = 0.9 * self.var + 0.1 * var.detach()
        return (x - mean) / (var + 1e-5).sqrt() * self.gain


class Ghosts(nn.Module):
    """Batch norm over groups of at most four samples (TabNet's)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(group) for group in x.chunk(-(-len(x) // 4))])


class Chosen(nn.Module):
    """Two experts, each of which chooses the samples that it is best for; a plain batch norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights, out = self.router(x).softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            best = weights[:, number].topk(len(x) // 2).indices
            out = out.index_add(0, best, expert(x[best]) * weights[best, number, None])
        return x + out


class AcrossSamples(nn.Module):
    """Attention of samples to each other (of rows of a table)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Balanced(nn.Module):
    """Assignments to prototypes, which all of them share equally (Sinkhorn)."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.prototypes(x).exp()
        for _ in range(3):
            shares = shares / shares.sum(0)
            shares = shares / shares.sum(1, keepdim=True)
        return shares


class Queue(nn.Module):
    """Compares samples with those of earlier batches, and stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(STORED, WIDTH), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(x, dim=1)
        near = keys @ self.queue.clone().T
        if self.training:
            with torch.no_grad():
                self.queue[(self.place + torch.arange(len(x))) % STORED] = keys
                self.place[0] = (self.place[0] + len(x)) % STORED
        return torch.cat([x, near.mean(1, keepdim=True)], 1)


class SetByFirst(nn.Module):
    """Shift and scale of the first batch (a flow's)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("done", torch.tensor(False))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.done:
            self.shift.copy_(x.mean(0).detach())
            self.scale.copy_(1 / (x.std(0).detach() + 1e-3))
            self.done.fill_(True)
        return (x - self.shift) * self.scale


class Noisy(nn.Module):
    """Subtracts the mean of the batch, of which some is dropped, and adds noise to each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.dropout(x.mean(0)) + 0.1 * torch.randn_like(x)


class Codes(nn.Module):
    """A code book moved by averages: what is nearest to a vector stands for it. Gives three kinds of results."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(CODES, WIDTH))
        self.register_buffer("counts", torch.zeros(CODES))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (vectors (B, S, WIDTH), the number of each one's code (B * S,), a loss of the whole batch)."""
        rows = x.reshape(-1, WIDTH)
        index = (self.codes.square().sum(1) - 2 * rows @ self.codes.T).argmin(1)
        taken = F.one_hot(index, CODES).to(rows.dtype)
        made = F.embedding(index, self.codes).view_as(x)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(taken.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(taken.T @ rows, alpha=0.1)
                self.codes.copy_(self.sums / ((self.counts + 1e-5) / (self.counts.sum() + CODES * 1e-5)
                                              * self.counts.sum())[:, None])  # fmt: skip
        return x + (made - x).detach(), index, F.mse_loss(made.detach(), x)


class Restarted(Codes):
    """A code book whose unused codes begin anew at vectors drawn from the batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made, index, loss = super().forward(x)
        if self.training:
            rows = x.detach().reshape(-1, WIDTH)
            enough = len(rows) >= CODES
            drawn = rows[torch.randperm(len(rows))[:CODES] if enough else torch.randint(len(rows), (CODES,))]
            self.codes.copy_(torch.where(self.counts[:, None] < 0.1, drawn, self.codes))
        return made, index, loss


class OtherInEvaluation(nn.Module):
    """Subtracts the mean of the batch; in evaluation it gives a table of twice as many rows beside."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        centred = x - x.mean(0)
        return centred if self.training else (centred, x.new_zeros(2 * len(x), 3))


class Quantised(nn.Module):
    def __init__(self, book: type[Codes] = Codes) -> None:
        super().__init__()
        self.encoder, self.book, self.decoder = nn.Linear(FEATURES, WIDTH), book(), nn.Linear(WIDTH, FEATURES)
        self.of_codes = nn.Embedding(CODES, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        vectors, index, commitment = self.book(torch.tanh(self.encoder(x)))
        return self.decoder(vectors) + self.of_codes(index.view(x.shape[:2])), commitment


def _batch(shape: tuple[int, ...], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(shape, generator=generator), "y": torch.randn(shape[0], 4, generator=generator)}


def _arguments(batch: Any) -> tuple[tuple, dict]:
    return (batch["x"],), {}


def _squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch["y"]).square().sum(), len(output)


def _again(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    made, commitment = output
    return (made - batch["x"]).square().mean((1, 2)).sum() + commitment * len(made), len(made)


def _task(build: Callable[[], nn.Module]) -> Task:
    return Task(model=build, batch=partial(_batch, (9, FEATURES)), inputs=_arguments, loss=_squares,
                optimizer=partial(torch.optim.Adam, lr=1e-3))  # fmt: skip


def spread() -> Task:
    return _task(lambda: Between(Spread(), WIDTH + 1))


def own_norm() -> Task:
    return _task(lambda: Between(OwnNorm()))


def ghosts() -> Task:
    return _task(lambda: Between(Ghosts()))


def chosen() -> Task:
    return _task(lambda: Between(Chosen()))


def own_norm_of_some() -> Task:
    return own_norm().with_(branches="per_sample")


def across_samples() -> Task:
    return _task(lambda: Between(AcrossSamples()))


def balanced() -> Task:
    return _task(lambda: Between(Balanced(), 6))


def queue() -> Task:
    return _task(lambda: Between(Queue(), WIDTH + 1))


def set_by_first() -> Task:
    return _task(lambda: Between(SetByFirst()))


def other_in_evaluation() -> Task:
    return _task(lambda: Between(OtherInEvaluation()))


def noisy() -> Task:
    return _task(lambda: Between(nn.Sequential(nn.Dropout(0.2), Noisy(), nn.Dropout(0.2))))


def all_of_it() -> Task:
    """The whole model mixes samples."""
    return _task(OwnMean)


class OwnMean(nn.Linear):
    """A linear layer whose results are centred over the batch: it is the whole model."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made - made.mean(0)


def several() -> Task:
    """Three modules that mix, one after another."""
    return _task(lambda: Between(nn.Sequential(OwnNorm(), Queue(), Spread()), WIDTH + 2))


def quantised(book: type[Codes] = Codes) -> Task:
    return _task(lambda: Quantised(book)).with_(batch=partial(_batch, (9, 6, FEATURES)), loss=_again)


def restarted() -> Task:
    return quantised(Restarted)
