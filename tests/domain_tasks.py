"""Tasks whose samples are fields, for plans that cut them into tiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Domain, Task

ROWS, COLUMNS = 11, 13


def _fields(channels: int, *extents: int, samples: int = 4, out: int = 2) -> Callable[[int], dict]:
    def batch(step: int) -> dict:
        draws = torch.Generator().manual_seed(step)
        shape = (samples, channels, *extents)
        return {"x": torch.randn(shape, generator=draws), "y": torch.randn(samples, out, *extents, generator=draws)}

    return batch


def _mean_square(output: torch.Tensor, batch: dict) -> tuple:
    """Over each sample's field."""
    return (output - batch["y"]).square().mean(list(range(1, output.dim()))).sum(), float(output.shape[0])


def _area_weighted(output: torch.Tensor, batch: dict) -> tuple:
    """By the cosine of a latitude that is made from the output's shape, where the target is not missing."""
    latitude = torch.linspace(-math.pi / 2, math.pi / 2, output.shape[-2] + 2, dtype=output.dtype)[1:-1]
    area = latitude.cos()[:, None].expand(output.shape[-2:])
    there = batch["y"] > -1.0
    return ((output - batch["y"]).square() * area * there).sum(), (there * area).sum()


def _task(model: Callable[[], nn.Module], batch: Callable[[int], dict], loss: Callable = _mean_square, **more) -> Task:
    return Task(model=model, batch=batch, inputs=lambda batch: ((batch["x"],), {}), loss=loss,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **more)  # fmt: skip


class PointWise(nn.Module):
    """Every cell by itself, on channels last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.25), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.movedim(1, -1)).movedim(-1, 1)


def point_wise() -> Task:
    return _task(PointWise, _fields(3, ROWS, COLUMNS))


def weighted() -> Task:
    return _task(PointWise, _fields(3, ROWS, COLUMNS), _area_weighted)


class Normed(nn.Module):
    """Batch norm and dropout of channels around products with single cells."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.norm, self.drop = nn.BatchNorm2d(8), nn.Dropout2d(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.first(x.movedim(1, -1)).movedim(-1, 1)))
        return self.second(h.relu().movedim(1, -1)).movedim(-1, 1)


def normed() -> Task:
    return _task(Normed, _fields(3, ROWS, COLUMNS))


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def channels_last() -> Task:
    """Fields (B, H, W, C), whose dims of space the task names."""

    def batch(step: int) -> dict:
        return {name: field.movedim(1, -1) for name, field in _fields(3, ROWS, COLUMNS)(step).items()}

    return _task(ChannelsLast, batch, spatial=Domain(dims=(1, 2), names=("lat", "lon")))


def flattened() -> Task:
    """No dims behind batch and channel."""
    return _task(ChannelsLast, lambda step: {name: field.flatten(1)[:, :3] if name == "x" else field.flatten(1)[:, :2]
                                             for name, field in _fields(3, 4, 4)(step).items()})  # fmt: skip


class Sorted(nn.Module):
    """Does with positions what no rule knows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.sort(-1).values.movedim(1, -1)).movedim(-1, 1)


def sorted_rows() -> Task:
    return _task(Sorted, _fields(3, ROWS, COLUMNS))


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(2, channels)


class _Double(nn.Sequential):
    def __init__(self, inside: int, outside: int, norm: str):
        super().__init__(nn.Conv2d(inside, outside, 3, padding=1, bias=False), _norm(norm, outside), nn.ReLU(),
                         nn.Conv2d(outside, outside, 3, padding=1), _norm(norm, outside), nn.SiLU())  # fmt: skip


class UNet(nn.Module):
    """Two scales: pooled down with odd rows left out, up by a transposed convolution and a resize to the skip."""

    def __init__(self, norm: str, width: int = 4):
        super().__init__()
        self.stem, self.down = _Double(3, width, norm), _Double(width, 2 * width, norm)
        self.deep = _Double(2 * width, 2 * width, norm)
        self.up = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.beside, self.above = _Double(4 * width, width, norm), _Double(2 * width, width, norm)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.stem(x)
        b = self.down(F.max_pool2d(a, 2))
        c = self.up(self.deep(F.avg_pool2d(b, 2)))
        c = F.pad(c, [0, b.shape[-1] - c.shape[-1], 0, b.shape[-2] - c.shape[-2]])
        c = self.beside(torch.cat([b, c], 1))
        c = F.interpolate(c, size=a.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.above(torch.cat([a, c], 1)))


def unet_batch() -> Task:
    return _task(lambda: UNet("batch"), _fields(3, 23, 37, samples=2), _area_weighted)


def unet_group() -> Task:
    return _task(lambda: UNet("group"), _fields(3, 23, 37, samples=2))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short = nn.Sequential()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.short(x) + self.last(self.second(F.relu(self.norm(self.first(x))))))


class ResNet(nn.Module):
    """A stem of stride 2 and a pooling of stride 2, blocks, global pooling, classes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
                                  nn.MaxPool2d(3, 2, 1))  # fmt: skip
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def _classes(logits: torch.Tensor, batch: dict) -> tuple:
    return F.cross_entropy(logits, batch["label"], reduction="sum"), float(logits.shape[0])


def _pictures(*extents: int) -> Callable[[int], dict]:
    def batch(step: int) -> dict:
        draws = torch.Generator().manual_seed(step)
        return {"x": torch.randn(4, 3, *extents, generator=draws), "label": torch.randint(5, (4,), generator=draws)}

    return batch


def resnet() -> Task:
    return _task(ResNet, _pictures(45, 38), _classes)


class UNet3D(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True)
        self.deep, self.up = nn.Conv3d(4, 8, 3, 2, 1), nn.ConvTranspose3d(8, 4, 2, stride=2)
        self.head = nn.Conv3d(8, 1, 3, padding=1, padding_mode="replicate")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.norm(self.stem(x)).relu()
        b = self.up(F.gelu(self.deep(a)))
        b = F.interpolate(b, size=a.shape[2:], mode="trilinear", align_corners=True)
        return self.head(torch.cat([a, b], 1))


def unet_3d() -> Task:
    return _task(UNet3D, _fields(1, 7, 9, 6, samples=2, out=1))
