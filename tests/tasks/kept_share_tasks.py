"""Modules none of whose products tp can share: recurrences, transforms, steps of descent; each name gives a `Task`."""

from __future__ import annotations

import torch
from module_tasks import OUT, WIDTH, sequences, task
from torch import Tensor, nn

from shardwise import Task


class Recurrent(nn.Module):
    """Nothing but recurrences, which hold their parameters in a list of their own, and a matrix function."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(WIDTH, 5, batch_first=True, bidirectional=True), nn.GRUCell(10, 7)
        self.turn = nn.Parameter(torch.randn(7, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        read, _ = self.lstm(x)
        state = read.new_zeros(len(x), 7)
        for moment in read.unbind(1):
            state = self.cell(moment, state) @ torch.linalg.matrix_exp(self.turn - self.turn.T)
        return state[:, :OUT]


class Contractive(nn.Module):
    """Reads its weights inside a transform of `torch.func`, whose derivative is in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.leave = nn.Linear(WIDTH, 5), nn.Linear(5, OUT)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(1)
        slopes = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.inner(row))))(rows)
        return self.leave(torch.tanh(self.inner(rows))) + slopes.square().sum((1, 2))[:, None]


class PastAttributes(Recurrent):
    """Reads some weights past their attributes, writes into another, and sets one anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mean = nn.Parameter(torch.ones(OUT)), nn.Parameter(torch.ones(4, OUT))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=0.9)
        self.mean.data = torch.nn.functional.normalize(self.mean.data, dim=0)
        length = sum(param.square().sum() for param in self.cell.parameters())
        return super().forward(x) * self.scale * self.mean.sum(0) + 0.1 * length


class Stepping(nn.Module):
    """For each sample a step of descent on its own error, by weights that are read again to be named (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rate = nn.Parameter(torch.randn(OUT, WIDTH) / 3), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for rows in x:
            with torch.enable_grad():
                error = (rows @ self.weight.T).square().mean()
                (slope,) = torch.autograd.grad(error, [self.weight], create_graph=True)
            found.append((rows @ (self.weight - self.rate * slope).T).mean(0))
        return torch.stack(found)


MODULES = {"stepping": Stepping, "recurrent": Recurrent, "contractive": Contractive, "past_attributes": PastAttributes}


def made(name: str) -> Task:
    return task(MODULES[name], sequences)


def recurrent() -> Task:
    return made("recurrent")
