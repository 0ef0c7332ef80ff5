"""Modules with complex parameters, written as in the repositories where they first stood; each gives a `Task`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import expert_tasks
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import Task
from shardwise.models import tasks

WIDTH, SAMPLES = 6, 5


def _batch(step: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, *shape, generator=generator)
    return {"x": x, "y": x.roll(1, 1).tanh()}


def _loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (output - batch["y"]).square().sum(), len(output)


def _task(model: Any, shape: tuple[int, ...], **options: Any) -> Task:
    options = {"optimizer": tasks.adamw, "inputs": lambda batch: ((batch["x"],), {}), **options}
    return Task(model=model, batch=partial(_batch, shape=shape), loss=_loss, **options)


# --- Fourier neural operators


class SpectralConv1d(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, modes1: int) -> None:
        super().__init__()
        self.out_channels, self.modes1 = out_channels, modes1
        self.scale = 1 / (in_channels * out_channels)
        self.weights1 = nn.Parameter(self.scale * torch.rand(in_channels, out_channels, modes1, dtype=torch.cfloat))

    def compl_mul1d(self, input: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("bix,iox->box", input, weights)

    def forward(self, x: Tensor) -> Tensor:
        x_ft = torch.fft.rfft(x)
        out_ft = torch.zeros(x.shape[0], self.out_channels, x.size(-1) // 2 + 1, device=x.device, dtype=torch.cfloat)
        out_ft[:, :, : self.modes1] = self.compl_mul1d(x_ft[:, :, : self.modes1], self.weights1)
        return torch.fft.irfft(out_ft, n=x.size(-1))


class SpectralConv2d(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, modes1: int, modes2: int) -> None:
        super().__init__()
        self.out_channels, self.modes1, self.modes2 = out_channels, modes1, modes2
        shape, scale = (in_channels, out_channels, modes1, modes2), 1 / (in_channels * out_channels)
        self.weights1 = nn.Parameter(scale * torch.rand(*shape, dtype=torch.cfloat))
        self.weights2 = nn.Parameter(scale * torch.rand(*shape, dtype=torch.cfloat))

    def compl_mul2d(self, input: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("bixy,ioxy->boxy", input, weights)

    def forward(self, x: Tensor) -> Tensor:
        m1, m2 = self.modes1, self.modes2
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros(
            x.shape[0], self.out_channels, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device
        )
        out_ft[:, :, :m1, :m2] = self.compl_mul2d(x_ft[:, :, :m1, :m2], self.weights1)
        out_ft[:, :, -m1:, :m2] = self.compl_mul2d(x_ft[:, :, -m1:, :m2], self.weights2)
        return torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1)))


class SpectralConv3d(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, modes: int) -> None:
        super().__init__()
        self.out_channels, self.modes = out_channels, modes
        shape, scale = (in_channels, out_channels, modes, modes, modes), 1 / (in_channels * out_channels)
        for number in range(1, 5):
            self.register_parameter(f"weights{number}", nn.Parameter(scale * torch.rand(*shape, dtype=torch.cfloat)))

    def forward(self, x: Tensor) -> Tensor:
        m = self.modes
        x_ft = torch.fft.rfftn(x, dim=[-3, -2, -1])
        out_ft = torch.zeros(x.shape[0], self.out_channels, *x.shape[2:4], x.size(-1) // 2 + 1, dtype=torch.cfloat)
        low, high = slice(None, m), slice(-m, None)
        corners = ((low, low), (high, low), (low, high), (high, high))
        for (a, b), weights in zip(corners, (self.weights1, self.weights2, self.weights3, self.weights4), strict=True):
            out_ft[:, :, a, b, :m] = torch.einsum("bixyz,ioxyz->boxyz", x_ft[:, :, a, b, :m], weights)
        return torch.fft.irfftn(out_ft, s=(x.size(-3), x.size(-2), x.size(-1)))


class FNO(nn.Module):
    """Lifts, four Fourier layers beside 1x1 convolutions, and a projection; channels last outside."""

    def __init__(self, spectral: Any, conv: Any, width: int = WIDTH, layers: int = 4) -> None:
        super().__init__()
        self.fc0 = nn.Linear(1, width)
        for number in range(layers):
            self.add_module(f"conv{number}", spectral(width, width))
            self.add_module(f"w{number}", conv(width, width, 1))
        self.layers = layers
        self.fc1, self.fc2 = nn.Linear(width, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc0(x[..., None]).movedim(-1, 1)
        for number in range(self.layers):
            x1, x2 = getattr(self, f"conv{number}")(x), getattr(self, f"w{number}")(x)
            x = x1 + x2
            if number < self.layers - 1:
                x = F.gelu(x)
        return self.fc2(F.gelu(self.fc1(x.movedim(1, -1))))[..., 0]


def fno1d() -> Task:
    return _task(lambda: FNO(partial(SpectralConv1d, modes1=3), nn.Conv1d), (8,))


def fno2d() -> Task:
    return _task(lambda: FNO(partial(SpectralConv2d, modes1=2, modes2=3), nn.Conv2d, layers=2), (6, 7))


def fno3d() -> Task:
    return _task(lambda: FNO(partial(SpectralConv3d, modes=2), nn.Conv3d, 4, layers=2), (4, 5, 6))


# --- state spaces


class DSS(nn.Module):
    """A diagonal state space: complex poles and readout, applied as a long convolution."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) * 2 - 3)
        self.Lambda = nn.Parameter(torch.complex(torch.rand(states).neg(), math.pi * torch.arange(states)))
        self.C = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat) * 0.5**0.5)
        self.D = nn.Parameter(torch.randn(width))

    def kernel(self, length: int) -> Tensor:
        dtA = torch.exp(self.log_dt)[:, None] * self.Lambda
        powers = torch.exp(dtA[..., None] * torch.arange(length, device=dtA.device))
        c = self.C * (torch.exp(dtA) - 1.0) / self.Lambda
        return 2 * torch.einsum("hn,hnl->hl", c, powers).real

    def forward(self, u: Tensor) -> Tensor:
        length = u.size(-1)
        k = torch.fft.rfft(self.kernel(length), n=2 * length)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * k, n=2 * length)[..., :length]
        return y + u * self.D[:, None]


class StateSpaces(nn.Module):
    """Residual blocks of a state space, an activation and a mix of channels."""

    def __init__(self, width: int = WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(1, width), nn.Linear(width, 1)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.dss = nn.ModuleList(DSS(width, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x[..., None]).transpose(1, 2)
        for dss, mix in zip(self.dss, self.mix, strict=True):
            x = x + mix(F.gelu(dss(x)))
        return self.leave(x.transpose(1, 2))[..., 0]


def state_spaces() -> Task:
    return _task(StateSpaces, (9,))


# --- complex-valued networks


class ComplexNet(nn.Module):
    """Linear layers of torch's own with complex weights, and an activation by modulus."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 2 * width, dtype=torch.cfloat)
        self.inner = nn.Linear(2 * width, width, dtype=torch.cfloat)
        self.bias = nn.Parameter(torch.rand(()) * (1 + 1j))
        self.leave = nn.Linear(width, 5, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        z = self.enter(torch.complex(x, x.flip(-1)))
        z = z * torch.tanh(z.abs()) / (z.abs() + 1e-3)
        z = self.inner(z) + self.bias
        z = torch.complex(F.relu(z.real), F.relu(z.imag))
        return self.leave(z).abs()


def complex_net() -> Task:
    return _task(ComplexNet, (5,))


# --- experts


class ComplexExperts(nn.Module):
    """Two products with complex weights for each pair of a token and an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.5 * torch.randn(expert_tasks.EXPERTS, expert_tasks.WIDTH, 5, dtype=torch.cfloat))
        self.down = nn.Parameter(0.5 * torch.randn(expert_tasks.EXPERTS, 5, expert_tasks.WIDTH, dtype=torch.cfloat))

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            rows, choice = torch.where(index == expert)
            inner = torch.tanh(x[rows].to(self.up.dtype) @ self.up[expert])
            out.index_add_(0, rows, (inner @ self.down[expert]).real * weight[rows, choice, None])
        return out


def complex_experts() -> Task:
    return expert_tasks.task(partial(expert_tasks.Net, ComplexExperts))
