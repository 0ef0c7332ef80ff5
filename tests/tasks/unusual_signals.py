"""Tasks on series, sound and noise: splines, causal convolutions, forecasters, filters, diffusion, alignments."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, images, task
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from unusual_kit import LENGTH, SAMPLES, draws, in_space, listed

from shardwise import Task

D = 8  # features of a position


class Splines(nn.Module):
    """A layer each of whose weights is a function: a sum of B-splines on a grid that is a buffer (KAN)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(outside, inside) * 0.3)
        self.splines = nn.Parameter(torch.randn(outside, inside, 5) * 0.1)
        self.register_buffer("grid", torch.linspace(-2, 2, 8).repeat(inside, 1))

    def _basis(self, x: Tensor) -> Tensor:
        x, grid = x[..., None], self.grid
        found = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in (1, 2):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * found[..., :-1]
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * found[..., 1:]
            found = left + right
        return found

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(x), self.base) + F.linear(self._basis(x).flatten(1), self.splines.flatten(1))


@listed
def splines() -> Task:
    """Layers whose weights are functions, sums of B-splines (KAN)"""
    return task(lambda: nn.Sequential(Splines(WIDTH, 6), Splines(6, 6), Splines(6, OUT)))


class Chomped(nn.Module):
    """Two causal convolutions with normed weights, and a residual (TCN)."""

    def __init__(self, inside: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.first = weight_norm(nn.Conv1d(inside, D, 3, padding=self.pad, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(D, D, 3, padding=self.pad, dilation=dilation))
        self.beside = nn.Conv1d(inside, D, 1) if inside != D else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x)[..., : -self.pad].contiguous())
        y = F.relu(self.second(y)[..., : -self.pad].contiguous())
        return F.relu(y + (x if self.beside is None else self.beside(x)))


def _series(step: int) -> dict[str, Tensor]:
    g = draws(step)
    return {"x": torch.randn(SAMPLES, 2, LENGTH, generator=g), "y": torch.randn(SAMPLES, OUT, generator=g)}


class Temporal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Chomped(2, 1), Chomped(D, 2), Chomped(D, 4))
        self.leave = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.net(x)[:, :, -1])


@listed
def temporal_convolutions() -> Task:
    """Dilated causal convolutions with normed weights, cut back to their length (TCN)"""
    return task(Temporal, _series)


class Forecast(nn.Module):
    """Blocks that each explain a part of the past and add a part of what is to come (N-BEATS)."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(LENGTH, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU()) for _ in "ab")
            for _ in "ab"
        )
        self.thetas = nn.ModuleList(nn.Linear(12, 4, bias=False) for _ in range(4))
        time = torch.linspace(0, 1, LENGTH + OUT)
        self.register_buffer("trend", torch.stack([time**power for power in range(4)]))

    def forward(self, x: Tensor) -> Tensor:
        past, total = x, x.new_zeros(len(x), OUT)
        thetas = iter(self.thetas)
        for stack in self.stacks:
            for block in stack:
                both = next(thetas)(block(past)) @ self.trend
                past, total = past - both[:, :LENGTH], total + both[:, LENGTH:]
        return total


@listed
def doubly_residual() -> Task:
    """Blocks that each take their part from the past and add to the forecast (N-BEATS)"""
    return task(Forecast, _series, inputs=lambda batch: ((batch["x"][:, 0],), {}))


class GatedResidual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(inside, D), nn.Linear(D, D), nn.Linear(D, 2 * outside)
        self.skip = nn.Linear(inside, outside) if inside != outside else nn.Identity()
        self.norm = nn.LayerNorm(outside)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.first(x) if context is None else self.first(x) + context
        return self.norm(self.skip(x) + F.glu(self.gate(self.second(F.elu(h))), dim=-1))


class Fusion(nn.Module):
    """Variables chosen by weights at each time, an LSTM that begins in a state made of them, attention, quantiles."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleDict({name: GatedResidual(1, D) for name in ("first", "second")})
        self.choose, self.state = GatedResidual(2, 2), GatedResidual(2, D)
        self.lstm, self.norm = nn.LSTM(D, D, batch_first=True), nn.LayerNorm(D)
        self.attend = nn.MultiheadAttention(D, 2, batch_first=True)
        self.leave = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        weights = self.choose(x).softmax(-1)
        mapped = torch.stack([net(x[..., i : i + 1]) for i, net in enumerate(self.each.values())], -1)
        h = (mapped * weights[..., None, :]).sum(-1)
        begin = self.state(x.mean(1))[None]
        h = self.norm(h + self.lstm(h, (begin, begin))[0])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.leave(h + self.attend(h, h, h, attn_mask=mask, need_weights=False)[0])


def _quantiles(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    apart = batch["x"][:, 0, :, None] - output
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=output.dtype)
    return torch.maximum(levels * apart, (levels - 1) * apart).sum(), apart[..., 0].numel()


@listed
def temporal_fusion() -> Task:
    """Chosen variables, an LSTM with a made state, attention, a loss of quantiles (TFT)"""
    return task(Fusion, _series, loss=_quantiles)


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.carry = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for gate in self.carry:
            nn.init.constant_(gate.bias, -2.0)
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for turn, carry in zip(self.turn, self.carry, strict=True):
            gate = torch.sigmoid(carry(x))
            x = gate * F.relu(turn(x)) + (1 - gate) * x
        return self.leave(x)


@listed
def highway() -> Task:
    """Layers that gate what they change and what they carry on (highway nets)"""
    return task(Highway)


class Bands(nn.Module):
    """Filters of a convolution made of two numbers each: the edges of a band (SincNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.width = nn.Parameter(torch.linspace(0.05, 0.3, D)), nn.Parameter(torch.full((D,), 0.1))
        self.register_buffer("time", torch.arange(1, 4).float(), persistent=False)
        self.register_buffer("window", torch.hamming_window(7, periodic=False))

    def forward(self, x: Tensor) -> Tensor:
        low = self.low.abs()[:, None]
        high = (low + self.width.abs()[:, None]).clamp(max=0.5)
        right = (torch.sin(2 * math.pi * high * self.time) - torch.sin(2 * math.pi * low * self.time)) / self.time
        filters = torch.cat([right.flip(1), 2 * math.pi * (high - low), right], 1) * self.window
        return F.conv1d(x, filters[:, None], padding=3)


@listed
def sound_bands() -> Task:
    """Filters over sound that are made of the edges of their bands (SincNet)"""

    def net() -> nn.Module:
        layers = [Bands(), nn.BatchNorm1d(D), nn.LeakyReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(2 * D, OUT))

    return task(net, _series, inputs=lambda batch: ((batch["x"][:, :1],), {}))


class Noised(nn.Module):
    """A small U-Net that is told how noisy its input is; the noise is drawn in the forward (diffusion)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2 * D))
        self.enter, self.down = nn.Conv2d(3, D, 3, padding=1), nn.Conv2d(D, D, 3, 2, 1)
        self.norm, self.up, self.leave = nn.GroupNorm(2, D), nn.ConvTranspose2d(D, D, 2, 2), nn.Conv2d(2 * D, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise, level = torch.randn_like(x), torch.rand(len(x), dtype=x.dtype)
        noisy = (1 - level)[:, None, None, None] * x + level[:, None, None, None] * noise
        waves = level[:, None] * 10.0 ** torch.arange(4, dtype=x.dtype)
        scale, shift = self.time(torch.cat([waves.sin(), waves.cos()], -1))[..., None, None].chunk(2, dim=1)
        first = self.enter(noisy)
        second = F.silu(self.norm(self.down(first)) * (1 + scale) + shift)
        return self.leave(torch.cat([first, self.up(second)], 1)), noise


@in_space
def diffusion() -> Task:
    """A diffusion model: noise and its level drawn in the forward, a U-Net told of the level"""
    return task(Noised, images, loss=lambda output, batch: ((output[0] - output[1]).square().sum(), len(output[0])))


class Transcribe(nn.Module):
    """Frames to letters by a recurrent net, over all alignments (CTC)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gru, self.leave = (
            nn.Conv1d(2, D, 3, padding=1),
            nn.GRU(D, D, batch_first=True),
            nn.Linear(D, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.gru(F.relu(self.enter(x)).mT)[0]).log_softmax(-1)


def _letters(step: int) -> dict[str, Tensor]:
    letters = torch.randint(1, 5, (SAMPLES, 3), generator=draws(step))
    return {**_series(step), "letters": letters, "many": 1 + torch.arange(SAMPLES) % 3}


def _aligned(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    frames = torch.full((len(output),), output.shape[1])
    return F.ctc_loss(output.transpose(0, 1), batch["letters"], frames, batch["many"], reduction="sum"), len(output)


@listed
def transcription() -> Task:
    """Sound to letters, the loss over all alignments (`ctc_loss`)"""
    return task(Transcribe, _letters, loss=_aligned)
