"""Modules whose operations along positions have no rule: sorts, choices, systems, spectra; each name gives a `Task`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task

LENGTH, WIDTH = 11, 8


class Chosen(nn.Module):
    """Layers that sort positions, and choose among them."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.router, self.deep = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        weight, places = self.router(x).squeeze(-1).topk(4, dim=1)  # the four that go deeper
        places, order = places.sort(1)
        index = places[..., None].expand(-1, -1, WIDTH)
        deep = self.deep(x.gather(1, index)).tanh() * weight.gather(1, order)[..., None]
        x = x.scatter_add(1, index, deep)
        bucket = x.detach()[..., 0].argsort(dim=1, stable=True)  # neighbours by value, mixed, and put back
        near = x.gather(1, bucket[..., None].expand_as(x))
        near = (near + near.roll(1, 1)).gather(1, bucket.argsort(dim=1)[..., None].expand_as(x))
        middle = x.median(1, keepdim=True).values - x.kthvalue(2, 1, keepdim=True).values
        return self.out(near * middle.sigmoid() + x.sort(1, descending=True).values)


class Solved(nn.Module):
    """A delta rule as a triangular system, windows that overlap in memory, and spectra of spectra."""

    def __init__(self):
        super().__init__()
        self.into, self.keys, self.out = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        x, keys = self.into(x), self.keys(x).tanh()
        told = torch.eye(x.shape[1], device=x.device) + (keys @ keys.mT / WIDTH).tril(-1)
        x = torch.linalg.solve_triangular(told, x, upper=False, unitriangular=True)
        heads = x.view(*x.shape[:2], 2, WIDTH // 2).transpose(1, 2)
        size, (batch, head, step, one) = (len(x), 2, x.shape[1] - 2, 3, WIDTH // 2), heads.stride()
        windows = heads.as_strided(size, (batch, head, step, step, one))
        x = x[:, 2:] + windows.tanh().mean(3).transpose(1, 2).flatten(2)
        turned = torch.fft.rfft(x, n=2 * LENGTH, dim=1) * torch.fft.rfft(x.tanh(), n=2 * LENGTH, dim=1)
        return self.out(x + torch.fft.irfft(turned, n=2 * LENGTH, dim=1)[:, : x.shape[1]])


@torch.library.custom_op("ruleless::norm", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """Returns x less its mean over positions: the name is one of ATen's, what it does is not."""
    return x - x.mean(1, keepdim=True)


centred.register_fake(torch.empty_like)
centred.register_autograd(lambda ctx, gradient: centred(gradient))


class NamedAlike(nn.Module):
    """A layer with an operation of another library."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.ops.ruleless.norm(self.into(x)).tanh())


class LearnedKeys(nn.Module):
    """Attention whose keys every rank has, or whose values."""

    def __init__(self, keys: bool):
        super().__init__()
        self.keys = keys
        self.into, self.out, self.own = nn.Linear(WIDTH, 12), nn.Linear(4, 3), nn.Parameter(torch.randn(1, 4, 32, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(*x.shape[:2], 4, 1).transpose(1, 2) for each in self.into(x).chunk(3, -1))
        own = self.own[:, :, : x.shape[1]].expand_as(q)
        k, v = (own, v) if self.keys else (k, own)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Drawn(nn.Module):
    """Draws positions."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.multinomial(x.detach()[..., 0].exp(), 2)
        return self.out(x.gather(1, drawn[..., None].expand(-1, -1, WIDTH)))


def _numbers(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))}


def _squares(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    weights = torch.linspace(0.5, 1.5, output.shape[1], device=output.device)
    return (output.square() * weights[:, None]).sum(), len(output)


def chosen() -> Task:
    return Task(model=Chosen, batch=_numbers, inputs=lambda batch: ((batch["x"],), {}), loss=_squares)


def solved() -> Task:
    return replace(chosen(), model=Solved)


def named_alike() -> Task:
    return replace(chosen(), model=NamedAlike)


def learned_keys() -> Task:
    return replace(chosen(), model=lambda: LearnedKeys(True))


def learned_values() -> Task:
    return replace(chosen(), model=lambda: LearnedKeys(False))


def drawn() -> Task:
    return replace(chosen(), model=Drawn)
