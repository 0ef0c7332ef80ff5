"""Tasks whose weights are made, shared, moved or read in unusual ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, sequences, task, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from unusual_kit import LENGTH, SAMPLES, WORDS, draws, listed

from shardwise import Task


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(OUT, 8)
        self.middle = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(OUT))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.middle(torch.tanh(self.encode(x)))), self.encode.weight.t(), self.bias)


@listed
def tied_autoencoder() -> Task:
    """An autoencoder whose decoder is its encoder's weight, transposed"""
    return task(Tied, inputs=lambda batch: ((batch["y"],), {}))


class Hyper(nn.Module):
    """A net that makes the weights of another one, different for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH * 8))
        self.leave = nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x).view(-1, 8, WIDTH)
        return self.leave(torch.tanh(torch.bmm(weights, x[..., None])[..., 0]))


@listed
def hypernetwork() -> Task:
    """A hypernetwork: one net makes the weights with which another maps each sample"""
    return task(Hyper)


class Modulated(nn.Module):
    """A net whose weights are those of a module, moved by a low-rank product (`functional_call`)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUT))
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        moved = {"0.weight": self.base[0].weight + self.up @ self.down}
        return torch.func.functional_call(self.base, moved, (x,))


@listed
def low_rank() -> Task:
    """Weights moved by a low-rank product, run by `torch.func.functional_call`"""
    return task(Modulated)


class Ensemble(nn.Module):
    """Stacked weights of five nets, mapped over by `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5, 8, WIDTH)), nn.Parameter(torch.randn(5, OUT, 8))

    def forward(self, x: Tensor) -> Tensor:
        def net(first: Tensor, second: Tensor) -> Tensor:
            return F.linear(torch.tanh(F.linear(x, first)), second)

        return torch.func.vmap(net)(self.first, self.second).mean(0)


@listed
def ensemble() -> Task:
    """An ensemble of stacked weights under `torch.func.vmap`"""
    return task(Ensemble)


class Adapting(nn.Module):
    """One step of gradient descent on each sample inside the forward (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.leave = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        def adapted(row: Tensor) -> Tensor:
            def own(weight: Tensor) -> Tensor:
                return (torch.tanh(weight @ row) - row).square().sum()

            return torch.tanh((self.weight - 0.1 * torch.func.grad(own)(self.weight)) @ row)

        return self.leave(torch.func.vmap(adapted)(x))


@listed
def inner_gradient() -> Task:
    """A step of gradient descent for each sample inside the forward (`torch.func.grad`)"""
    return task(Adapting)


def _parametrized(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), wrap(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, OUT))


@listed
def weight_norm() -> Task:
    """A layer under `parametrizations.weight_norm`"""
    return task(_parametrized(parametrizations.weight_norm))


@listed
def spectral_norm() -> Task:
    """A layer under `parametrizations.spectral_norm`, whose buffers move in every forward"""
    return task(_parametrized(parametrizations.spectral_norm))


@listed
def orthogonal() -> Task:
    """A layer under `parametrizations.orthogonal`, a matrix exponential"""
    return task(_parametrized(parametrizations.orthogonal))


class Quantised(nn.Module):
    """Weights rounded to sixteenths, their gradient passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            weight = layer.weight + ((layer.weight * 16).round() / 16 - layer.weight).detach()
            x = torch.tanh(F.linear(x, weight, layer.bias))
        return x


@listed
def quantised() -> Task:
    """Weights rounded in the forward, with a straight-through gradient"""
    return task(Quantised)


class Spectrum(nn.Module):
    """Complex weights, as pairs, on the Fourier transform along time."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH, 8, 2) / 3)
        self.leave = nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x, dim=1) @ torch.view_as_complex(self.pairs)
        return self.leave(torch.fft.irfft(waves, n=x.shape[1], dim=1).tanh().mean(1))


@listed
def complex_pairs() -> Task:
    """Complex weights on a Fourier transform along time"""
    return task(Spectrum, lambda step: sequences(step, SAMPLES, LENGTH))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.leave = nn.EmbeddingBag(WORDS, 8, mode="sum"), nn.Linear(8, OUT)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.bag(x, per_sample_weights=weights)))


@listed
def embedding_bag() -> Task:
    """`nn.EmbeddingBag` with a weight for each word"""
    return task(
        Bag,
        lambda step: tokens(step) | {"weights": torch.rand(7, 5, generator=draws(step))},
        inputs=lambda batch: ((batch["x"], batch["weights"]), {}),
    )
