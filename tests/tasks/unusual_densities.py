"""Tasks of densities and fields: flows, energies, mixtures, radiance, weights that are drawn, buffers that move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, images, squares, task
from torch import Tensor, nn
from unusual_kit import SAMPLES, draws, fields, in_space, listed, net_of

from shardwise import Task


def _likelihood(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    z, volume = output
    return (0.5 * z.square().sum(-1) - volume).sum(), len(z)


class Coupling(nn.Module):
    def __init__(self, parity: int) -> None:
        super().__init__()
        self.net = net_of(WIDTH, 12, 2 * WIDTH)
        self.register_buffer("mask", (torch.arange(WIDTH) % 2 == parity).float())

    def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.net(x * self.mask).chunk(2, dim=-1)
        scale = torch.tanh(scale) * (1 - self.mask)
        return x * scale.exp() + shift * (1 - self.mask), volume + scale.sum(-1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(place % 2) for place in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x), dtype=x.dtype)
        for layer in self.layers:
            x, volume = layer(x, volume)
        return x, volume


@listed
def coupling_flow() -> Task:
    """A normalising flow of affine couplings (RealNVP), its loss a likelihood"""
    return task(Flow, loss=_likelihood)


class GlowStep(nn.Module):
    """A scale and shift that its first batch sets, or constant ones; an invertible mixing of channels; a coupling."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.register_buffer("ready", torch.tensor(not by_data))

    def forward(self, x: Tensor, volume: Tensor) -> tuple[Tensor, Tensor]:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(dim=(0, 2, 3)))
                self.ready.fill_(True)
        x = (x + self.shift[:, None, None]) * self.log_scale.exp()[:, None, None]
        x = F.conv2d(x, self.mix[:, :, None, None])
        volume = volume + x[0, 0].numel() * (self.log_scale.sum() + torch.linalg.slogdet(self.mix)[1])
        kept, moved = x.chunk(2, dim=1)
        shift, scale = self.net(kept).chunk(2, dim=1)
        scale = torch.sigmoid(scale + 2)
        return torch.cat([kept, (moved + shift) * scale], dim=1), volume + scale.log().sum(dim=(1, 2, 3))


class Glow(nn.Module):
    def __init__(self, by_data: bool = False) -> None:
        super().__init__()
        self.steps = nn.ModuleList(GlowStep(by_data) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.pixel_unshuffle(x, 2)
        volume = x.new_zeros(len(x))
        for step in self.steps:
            x, volume = step(x, volume)
        return x.flatten(1), volume


def _squares_of_pixels(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(SAMPLES, 1, 8, 8, generator=draws(step))}


@listed
def glow() -> Task:
    """A flow over pictures with invertible mixing of channels (Glow)"""
    return task(Glow, _squares_of_pixels, loss=_likelihood)


@listed
def glow_by_data() -> Task:
    """The same, its scales set by the first batch (ActNorm)"""
    return task(lambda: Glow(True), _squares_of_pixels, loss=_likelihood)


class Energy(nn.Module):
    """An energy, and its negative gradient by position, which is what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = net_of(WIDTH, 12, 12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = self.energy(x).sum(-1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -force


def _matching(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    energy, force = output
    return (energy - batch["y"].sum(-1)).square().sum() + (force - batch["x"].sin()).square().sum(), len(energy)


@listed
def energies_and_forces() -> Task:
    """An energy and the forces that are its gradient (`torch.autograd.grad` in the forward), both in the loss"""
    return task(Energy, loss=_matching)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net_of(WIDTH, 12, 12)
        self.weight, self.mean, self.scale = nn.Linear(12, 4), nn.Linear(12, 4 * OUT), nn.Linear(12, 4 * OUT)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.silu(self.body(x))
        means, scales = (each(h).unflatten(-1, (4, OUT)) for each in (self.mean, self.scale))
        return {"weights": self.weight(h).log_softmax(-1), "means": means, "scales": F.softplus(scales) + 0.1}


def _of_mixture(output: dict[str, Tensor], batch: Any) -> tuple[Tensor, int]:
    each = torch.distributions.Normal(output["means"], output["scales"], validate_args=False)
    logs = each.log_prob(batch["y"][:, None]).sum(-1) + output["weights"]
    return -logs.logsumexp(-1).sum(), len(logs)


@listed
def mixture_density() -> Task:
    """A mixture of normal distributions, its likelihood by `torch.distributions`"""
    return task(Mixture, loss=_of_mixture)


class Radiance(nn.Module):
    """Colours along rays: waves of positions, densities, the light that comes through."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 2.0 ** torch.arange(3) * math.pi, persistent=False)
        self.body, self.density, self.colour = net_of(18, 16, 16), nn.Linear(16, 1), nn.Linear(16 + 3, 3)

    def forward(self, origin: Tensor, towards: Tensor) -> dict[str, Tensor]:
        depth = torch.linspace(0.1, 1.0, 7, dtype=origin.dtype)
        places = origin[:, None] + towards[:, None] * depth[:, None]
        turned = (places[..., None] * self.waves).flatten(-2)
        h = F.relu(self.body(torch.cat([turned.sin(), turned.cos()], -1)))
        opacity = 1 - torch.exp(-F.softplus(self.density(h)[..., 0]) * 0.15)
        through = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], -1), -1)[:, :-1]
        weights = opacity * through
        views = towards[:, None].expand_as(places)
        colours = torch.sigmoid(self.colour(torch.cat([h, views], -1)))
        return {"colour": (weights[..., None] * colours).sum(1), "depth": (weights * depth).sum(-1)}


def _rays(step: int) -> dict[str, Tensor]:
    g = draws(step)
    return {name: torch.randn(SAMPLES, 3, generator=g) for name in ("origin", "towards", "y")}


@listed
def radiance_field() -> Task:
    """A neural radiance field: densities and colours along rays, summed by running products (NeRF)"""
    return task(Radiance, _rays, inputs=fields("origin", "towards"),
                loss=lambda output, batch: squares(output["colour"], batch))  # fmt: skip


class Sine(nn.Module):
    def __init__(self, inside: int, outside: int, omega: float) -> None:
        super().__init__()
        self.linear, self.omega = nn.Linear(inside, outside), omega
        with torch.no_grad():
            bound = math.sqrt(6 / inside) / omega
            self.linear.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * self.linear(x))


@listed
def sine_net() -> Task:
    """A net of sines (SIREN), its weights drawn again by its constructor"""
    return task(lambda: nn.Sequential(Sine(WIDTH, 12, 30.0), Sine(12, 12, 5.0), nn.Linear(12, OUT)))


class Masked(nn.Conv2d):
    """A convolution that sets the weights of what comes later to zero, in every forward (PixelCNN as often copied)."""

    def __init__(self, inside: int, outside: int, kind: str) -> None:
        super().__init__(inside, outside, 3, padding=1)
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 1 + (kind == "B") :] = 0
        mask[:, :, 2:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@in_space
def masked_pixels() -> Task:
    """Convolutions whose later weights are set to zero in every forward (`weight.data *= mask`)"""
    return task(lambda: nn.Sequential(Masked(3, 8, "A"), nn.ReLU(), Masked(8, 8, "B"), nn.ReLU(), nn.Conv2d(8, 3, 1)),
                images, loss=_pixels)  # fmt: skip


def _pixels(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch["x"]).square().mean((1, 2, 3)).sum(), len(output)


@dataclass
class Answer:
    values: Tensor
    hidden: tuple[Tensor, ...]
    state: Tensor | None = None


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Answer:
        hidden: tuple[Tensor, ...] = ()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden += (x,)
        return Answer(self.leave(x), hidden)


@listed
def dataclass_output() -> Task:
    """An output that is a dataclass with a tuple and a None in it, all used by the loss"""
    return task(Answering, loss=lambda output, batch: (
        squares(output.values, batch)[0] + 0.1 * sum(h.square().sum() for h in output.hidden), len(batch["y"])
    ))  # fmt: skip


class Frozen(nn.Module):
    """An encoder that is never trained, kept in evaluation mode, under a head that is."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)).eval()
        self.encode.requires_grad_(False)
        self.head = net_of(8, 8, OUT)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.encode.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encode(x)
        return self.head(x)


@listed
def frozen_encoder() -> Task:
    """An encoder that is frozen and kept in evaluation mode by its owner's `train`"""
    return task(Frozen)


class Bayesian(nn.Module):
    """Weights drawn anew in every forward, by means and scales that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.randn(8, WIDTH) * 0.3), nn.Parameter(torch.full((8, WIDTH), -3.0))
        self.leave = nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mean + F.softplus(self.scale) * torch.randn_like(self.scale)
        return self.leave(torch.tanh(F.linear(x, weight)))


@listed
def drawn_weights() -> Task:
    """Weights drawn anew in every forward, by means and scales (Bayes by backprop)"""
    return task(Bayesian)


class MovedCodebook(nn.Module):
    """The nearest of a codebook that is no parameter: it moves by averages over all that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 4), nn.Linear(4, OUT)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        chosen = torch.cdist(h, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 6).to(h.dtype)
                self.counts.lerp_(hot.sum(0), 0.1)
                self.codes.lerp_(hot.T @ h / self.counts[:, None].clamp_min(1e-3), 0.1)
                self.steps += 1
        return self.leave(h + (self.codes[chosen] - h).detach())


@listed
def moved_codebook() -> Task:
    """A codebook that moves by averages over the batch, in every forward of training"""
    return task(MovedCodebook)
