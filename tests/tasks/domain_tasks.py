"""Tasks whose samples are fields, for plans that cut them into tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Domain, Task, whole
from shardwise.data import ArraySource

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
    like = {"dtype": output.dtype, "device": output.device}
    latitude = torch.linspace(-math.pi / 2, math.pi / 2, output.shape[-2] + 2, **like)[1:-1]
    area = latitude.cos()[:, None].expand(output.shape[-2:])
    there = batch["y"] > -1.0
    return ((output - batch["y"]).square() * area * there).sum(), (there * area).sum()


def _task(
    model: Callable[[], nn.Module], batch: Callable[[int], dict] | None, loss: Callable = _mean_square, **more
) -> Task:
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


class Penalised(PointWise):
    """With a penalty on all its weights, taken past their attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-3 * torch.stack([weight.square().sum() for weight in self.parameters()]).sum()


def penalised() -> Task:
    return _task(Penalised, _fields(3, ROWS, COLUMNS))


def weighted() -> Task:
    return _task(PointWise, _fields(3, ROWS, COLUMNS), _area_weighted)


class Normed(nn.Module):
    """Batch norm and dropout of channels around products with single cells."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8, bias=False), nn.Linear(8, 2)
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
    """Reads each row in the order of its values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.mixed(x).movedim(1, -1)).movedim(-1, 1)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values


def sorted_rows() -> Task:
    return _task(Sorted, _fields(3, ROWS, COLUMNS), _hardest)


def _hardest(output: torch.Tensor, batch: dict) -> tuple:
    """Of the quarter of each sample's cells that are furthest off, and the median of all."""
    off = (output - batch["y"]).abs().flatten(1)
    return (off.topk(off.shape[1] // 4, 1).values.mean(1) + off.median(1).values).sum(), float(off.shape[0])


class Levels(Sorted):
    """Does with positions what no rule knows."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.unique(x.detach().round()).numel()


def levels() -> Task:
    return _task(Levels, _fields(3, ROWS, COLUMNS))


class SingularWhole(Sorted):
    """Singular values of the field that it asks for whole, beside each cell's own."""

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(whole(x.tanh())).sum() + x


def singular_whole() -> Task:
    return _task(SingularWhole, _fields(3, ROWS, COLUMNS))


def instances() -> Task:
    """Each sample's own statistics, of which running ones are kept."""
    norm = partial(nn.InstanceNorm2d, 3, affine=True, track_running_stats=True)
    return _task(lambda: nn.Sequential(norm(), nn.Conv2d(3, 2, 3, padding=1)), _fields(3, ROWS, COLUMNS))


def wrapped_twice() -> Task:
    """A circular kernel that is wider than the field: torch itself refuses it, without a number."""
    return _task(lambda: nn.Sequential(nn.Conv2d(3, 2, 25, padding=12, padding_mode="circular")), _fields(3, 11, 13))


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(2, channels)


class _Double(nn.Sequential):
    def __init__(self, inside: int, outside: int, norm: str):
        super().__init__(nn.Conv2d(inside, outside, 3, padding=1, bias=False), _norm(norm, outside), nn.ReLU(),
                         nn.Conv2d(outside, outside, 3, padding=1), _norm(norm, outside), nn.SiLU())  # fmt: skip


class UNet(nn.Module):
    """Two scales: pooled down with odd rows left out, up by a transposed convolution and a resize to the skip."""

    def __init__(self, norm: str, width: int = 4, inside: int = 3, outside: int = 2):
        super().__init__()
        self.stem, self.down = _Double(inside, width, norm), _Double(width, 2 * width, norm)
        self.deep = _Double(2 * width, 2 * width, norm)
        self.up = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.beside, self.above = _Double(4 * width, width, norm), _Double(2 * width, width, norm)
        self.head = nn.Conv2d(width, outside, 1)

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


def cut_batch_norm() -> Task:
    """A batch norm whose channels tp cuts: its running statistics are of all of them."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                             nn.Conv2d(8, 2, 3, padding=1))  # fmt: skip

    return _task(model, _fields(2, 9, 10, samples=2))


def unet_degree_batch() -> Task:
    """One degree: 181 latitudes, the poles among them."""
    return _task(lambda: UNet("batch", 2), _fields(3, 181, 360, samples=2), _area_weighted)


def unet_degree_group() -> Task:
    return _task(lambda: UNet("group", 2), _fields(3, 181, 360, samples=2), _area_weighted)


def unet_quarter_group() -> Task:
    """A quarter of a degree, one variable."""
    return _task(lambda: UNet("group", 2, 1, 1), _fields(1, 721, 1440, samples=2, out=1))


class States:
    """So many states of the atmosphere, 73 variables on 721 latitudes and 1440 longitudes, each followed by itself."""

    extents = 721, 1440

    def __len__(self) -> int:
        return 1000

    def read(self, indices: list[int]) -> dict:
        x = torch.zeros(len(indices), 73, *self.extents)
        return {"x": x, "y": x}


def weather() -> Task:
    """A U-Net that is too large for one device with a sample of its size: to plan, not to run."""
    task = _task(lambda: UNet("group", 1024, 73, 73), lambda step: {}, name="weather")
    return replace(task, batch=None, data=States())


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


class Attention(nn.Module):
    """Of tokens (B, S, C), among themselves."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        b, s, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, c))
        return x + self.mlp(self.second(x))


class ViT(nn.Module):
    """Tokens of patches with learned positions, a mean over them, classes."""

    def __init__(self, extents: tuple[int, int] = (25, 20), patch: int = 5):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, patch, patch)
        self.places = nn.Parameter(torch.randn(1, (extents[0] // patch) * (extents[1] // patch), 8) * 0.02)
        self.blocks = nn.ModuleList(Attention(8, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def vit() -> Task:
    return _task(ViT, _pictures(25, 20), _classes)


def large_vit() -> Task:
    """Learned positions for 200 x 75 cells, and no other number of them."""
    return _task(lambda: ViT((200, 75), 25), _pictures(200, 75), _classes)


class Swin(nn.Module):
    """Attention within windows of 4 x 4, the second time shifted by 2, and a head of each cell."""

    window, shift = 4, 2

    def __init__(self, extents: tuple[int, int]):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
        self.blocks = nn.ModuleList(Attention(8, 2) for _ in range(2))
        h, w = extents
        place = torch.zeros(1, h, w, 1)
        regions = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for number, (rows, columns) in enumerate((r, c) for r in regions for c in regions):
            place[:, rows, columns] = number
        apart = self._windows(place).squeeze(-1)
        self.register_buffer("mask", (apart[:, None, :] == apart[:, :, None])[:, None])  # (windows, 1, 16, 16)

    def _windows(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        n = self.window
        return x.view(b, h // n, n, w // n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)

    def _together(self, windows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        b, h, w, c = shape
        n = self.window
        return windows.view(b, h // n, w // n, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        x = self._together(self.blocks[0](self._windows(x)), x.shape)
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = self._together(self.blocks[1](self._windows(x), self.mask.repeat(x.shape[0], 1, 1, 1)), x.shape)
        x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return self.head(x.permute(0, 3, 1, 2))


def swin() -> Task:
    return _task(lambda: Swin((16, 24)), _fields(3, 16, 24, samples=2))


class Spectral(nn.Module):
    """Products of the lowest modes with weights of their own, and a product of channels."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width)
        self.beside = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        weight, m = torch.view_as_complex(self.weight), self.modes
        out = torch.zeros(spectrum.shape, dtype=spectrum.dtype, device=spectrum.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], weight[0])
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], weight[1])
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.beside(x))


class FNO(nn.Module):
    """With the cells' places beside the field, made from its shape."""

    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Conv2d(5, 4, 1), nn.Conv2d(4, 2, 1)
        self.layers = nn.Sequential(Spectral(4, 3), Spectral(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, _, h, w = x.shape
        rows = torch.linspace(0, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(b, 1, h, w)
        columns = torch.linspace(0, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(b, 1, h, w)
        return self.head(self.layers(self.lift(torch.cat([x, rows, columns], 1))))


def fno() -> Task:
    return _task(FNO, _fields(3, 13, 18, samples=2))


def convnext() -> Task:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    def model() -> nn.Module:
        return ConvNextForImageClassification(
            ConvNextConfig(num_stages=2, hidden_sizes=[4, 8], depths=[1, 1], num_labels=5, drop_path_rate=0.0)
        )

    return _task(model, _pictures(45, 38), lambda output, batch: _classes(output.logits, batch))


class Gated(nn.Module):
    """Two convolutions, of which the second is dilated, around a norm, and what is resized beside them."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, 1, 2, 2)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        coarse = F.interpolate(F.avg_pool2d(x, 3, 2, 1), size=x.shape[-2:], mode="bilinear")
        return x + self.second(F.gelu(self.norm(self.first(x)))) * coarse.mean((2, 3), keepdim=True).sigmoid()


class GatedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.blocks = nn.Sequential(Gated(4), Gated(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


def gated_stack() -> Task:
    return _task(GatedStack, _fields(3, ROWS, COLUMNS))


class PlainStack(nn.Module):
    """Convolutions without norms, as super-resolution has them: an exchange may serve several."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 5, padding=2), nn.Conv2d(4, 2, 3, padding=1)
        self.firsts = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.seconds = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.written = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).tanh()
        for first, second, between in zip(
            self.firsts, self.seconds, (self.written, F.gelu, torch.sigmoid), strict=True
        ):
            x = x + second(between(first(x))) * 0.5
        return self.head(x)


def plain_stack() -> Task:
    return _task(PlainStack, _fields(3, 17, 19))


class Bounded(nn.Module):
    """Conditions at the boundary, written in place at every step: fixed, without a gradient, periodic."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.inflow = nn.Conv2d(2, 2, 3, padding=1), nn.Parameter(torch.rand(COLUMNS) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.step(x).tanh() / 9
            x[:, 0, 0] = self.inflow
            x[:, 1, -1] *= 0.5
            x[:, 1, [1, -2], 1:-1] = 0.25
            x[..., 0] = x[..., -2]
            x[..., -1] = x[..., 1]
        return x


def bounded() -> Task:
    return _task(Bounded, _fields(2, ROWS, COLUMNS))


class Frames(nn.Module):
    """Steps of time before channels (B, T, C, H, W), a state that is carried on, and a running mean of fields."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Conv2d(5, 3, 3, padding=1), nn.Conv2d(3, 2, 1)
        self.register_buffer("seen", torch.zeros(ROWS, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * x.mean((0, 1, 2)))
        state = torch.zeros_like(x[:, 0, :1]).repeat(1, 3, 1, 1) + self.seen
        for frame in x.unbind(1):
            state = self.step(torch.cat([frame, state], 1)).tanh()
        return self.head(state)


def frames() -> Task:
    def batch(step: int) -> dict:
        x, y = (_fields(4, ROWS, COLUMNS, samples=2, out=2)(step)[name] for name in ("x", "y"))
        return {"x": x.unflatten(1, (2, 2)), "y": y}

    return _task(Frames, batch)


class Patchwise(nn.Module):
    """Patches that overlap, each by a layer of its own and their mean; attention of which the queries come last; a
    field that is read by indices which it computes itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.key, self.head = (
            nn.Conv2d(3, 4, 1),
            nn.Linear(36, 36),
            nn.Conv2d(4, 4, 1),
            nn.Linear(4, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, (rows, columns) = self.stem(x).tanh(), x.shape[-2:]
        patches = self.mix(F.unfold(h, 3, padding=1).transpose(1, 2)).transpose(1, 2)
        count = F.fold(F.unfold(torch.ones_like(h), 3, padding=1), (rows, columns), 3, padding=1)
        h = h + F.fold(patches, (rows, columns), 3, padding=1) / count
        query, key, value = h.flatten(2), self.key(h).flatten(2), h.flatten(2)
        scores = torch.bmm(query.transpose(1, 2), key).softmax(-1)
        h = h + torch.bmm(value, scores.transpose(1, 2)).view_as(h)
        down, across = ((h[:, c].sigmoid() * n).long().clamp(max=n - 1) for c, n in ((0, rows), (1, columns)))
        read = h[torch.arange(len(h))[:, None, None], :, down, across].movedim(-1, 1)
        read = read + torch.gather(
            h.flatten(2), 2, (down * columns + across).flatten(1)[:, None].expand(-1, 4, -1)
        ).view_as(h)
        return self.head((h + read).movedim(1, -1)).movedim(-1, 1)


def patchwise() -> Task:
    return _task(Patchwise, _fields(3, 7, 9, samples=2))


class Rollout(nn.Module):
    """A step that is fed its own result; every state is returned."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps = steps
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1, padding_mode="circular"), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = []
        for _ in range(self.steps):
            x = x + self.second(self.first(x).tanh())
            states.append(x)
        return torch.stack(states, 1)


def _weighted_states(states: torch.Tensor, batch: dict) -> tuple:
    weights = torch.tensor([0.7**k for k in range(states.shape[1])], dtype=states.dtype)
    each = (states - batch["y"][:, None]).square().mean((-3, -2, -1))
    return (each * weights).sum(), float(states.shape[0])


def rollout() -> Task:
    return _task(lambda: Rollout(4), _fields(2, ROWS, COLUMNS, samples=2), _weighted_states)


class Pyramid(nn.Module):
    """What is learned, or pooled to one cell, is resized to the field's size; halved until one rank has all rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.places = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.randn(1, 8, 3, 4) * 0.1)
        self.halves = nn.ModuleList(nn.Conv2d(8, 8, 2, 2) for _ in range(3))
        self.mlp, self.beside, self.head = nn.Linear(8, 8), nn.Conv2d(8, 8, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        h = x + F.interpolate(self.places, size=x.shape[-2:], mode="bicubic", align_corners=False)
        for half in self.halves:
            h = half(h)
            h = h + self.mlp(h.movedim(1, -1)).movedim(-1, 1).tanh()
        one = F.interpolate(self.beside(F.adaptive_avg_pool2d(h, 1)).relu(), size=x.shape[-2:], mode="bilinear")
        return self.head(torch.cat([x, one + F.interpolate(h, size=x.shape[-2:])], 1))


def pyramid() -> Task:
    return _task(Pyramid, _fields(3, 17, 15, samples=2))


class Warped(nn.Module):
    """Pooled with the places of the largest, put back there, and read where a flow says."""

    def __init__(self):
        super().__init__()
        self.stem, self.flow, self.head = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 2, 3, 1, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, places = F.max_pool2d(self.stem(x).tanh(), 3, 2, 1, return_indices=True)
        h = F.max_unpool2d(h * 2, places, 3, 2, 1, output_size=x.shape[-2:])
        here = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(len(x), 2, 3), list(x.shape), align_corners=False)
        flow = self.flow(h).tanh().permute(0, 2, 3, 1)
        return self.head(F.grid_sample(h, here + flow / 4, align_corners=False))


def warped() -> Task:
    return _task(Warped, _fields(3, ROWS, COLUMNS, samples=2))


class Aligned(nn.Module):
    """A spatial transformer: the whole field says where it is read."""

    def __init__(self):
        super().__init__()
        self.places, self.head = nn.Linear(3, 6), nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theta = self.places(x.mean((2, 3))).view(-1, 2, 3) + torch.eye(2, 3, dtype=x.dtype)
        return self.head(F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=True), align_corners=True))


def aligned() -> Task:
    return _task(Aligned, _fields(3, ROWS, COLUMNS, samples=2))


class Sphere(nn.Module):
    """Spectra along longitudes, mixed along latitudes by a table (a Legendre transform), and nodes of a mesh."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.register_buffer("there", torch.randn(6, 5, 8, generator=draws) / 4)
        self.register_buffer("node", torch.randint(7, (8 * 12,), generator=draws))
        self.register_buffer("near", torch.randperm(8 * 12, generator=draws))
        self.weight, self.skip = nn.Parameter(torch.randn(2, 2, 5, 2) / 4), nn.Conv2d(2, 2, 1)
        self.inside, self.head = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.view_as_real(torch.fft.rfft(x, dim=-1, norm="forward"))[..., :6, :]
        degrees = [torch.einsum("...km,mlk->...lm", modes[..., i], self.there) for i in (0, 1)]
        degrees = torch.view_as_complex(torch.stack(degrees, -1))
        mixed = torch.einsum("bilm,iol->bolm", degrees, torch.view_as_complex(self.weight))
        back = [torch.einsum("...lm,mlk->...km", part, self.there) for part in (mixed.real, mixed.imag)]
        y = torch.fft.irfft(torch.complex(*back), n=x.shape[-1], norm="forward") + self.skip(x)
        cells = self.inside(y.flatten(2).transpose(1, 2))
        nodes = cells.new_zeros(len(x), 7, 4).index_add(1, self.node, cells).tanh()
        return y + self.head(nodes[:, self.node] + cells[:, self.near]).transpose(1, 2).reshape(y.shape)


def sphere() -> Task:
    return _task(Sphere, _fields(2, 8, 12, samples=2))


class Interpolated(nn.Module):
    """To coarser latitudes and to the nodes of a mesh by tables of weights, and back."""

    def __init__(self) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.stem, self.coarse, self.gate = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.norm, self.node, self.head = nn.InstanceNorm2d(4, affine=True), nn.Linear(4, 4), nn.Conv2d(8, 2, 1)
        self.register_buffer("rows", torch.rand(6, ROWS, generator=draws))
        self.register_buffer("near", torch.randint(0, ROWS * COLUMNS, (17, 3), generator=draws))
        self.register_buffer("back", torch.randint(0, 17, (ROWS * COLUMNS, 3), generator=draws))
        self.register_buffer("share", torch.rand(ROWS * COLUMNS, 3, 1, generator=draws))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        coarse = self.norm(self.coarse(torch.einsum("bchw,kh->bckw", h, self.rows)))
        cells = h.flatten(2).transpose(1, 2)
        nodes = self.node(cells[:, self.near].mean(2)).tanh()
        mesh = (nodes[:, self.back] * self.share).sum(2).transpose(1, 2).view_as(h)
        h = F.glu(self.gate(h), 1) + torch.einsum("bckw,kh->bchw", coarse, self.rows)
        return self.head(torch.cat([h, mesh], 1))


def interpolated() -> Task:
    return _task(Interpolated, _fields(3, ROWS, COLUMNS))


class MeshEdges(nn.Module):
    """Messages along edges from cells to the nodes of a mesh and back, summed where they arrive; written in place."""

    def __init__(self) -> None:
        super().__init__()
        draws, cells, nodes = torch.Generator().manual_seed(0), ROWS * COLUMNS, 9
        self.stem, self.there, self.back = nn.Conv2d(3, 4, 1), nn.Linear(8, 4), nn.Linear(8, 4)
        self.mesh, self.head = nn.Parameter(torch.randn(nodes, 4, generator=draws)), nn.Linear(4, 2)
        self.register_buffer("sent", torch.randint(cells, (2 * cells,), generator=draws))
        self.register_buffer("node", torch.randint(nodes, (2 * cells,), generator=draws))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cells = F.hardswish(self.stem(x), inplace=True).flatten(2).transpose(1, 2)
        mesh = self.mesh.expand(len(x), -1, -1)
        edges = self.there(torch.cat([cells[:, self.sent], mesh[:, self.node]], -1)).tanh()
        mesh = mesh.index_add(1, self.node, edges)
        edges = self.back(torch.cat([mesh[:, self.node], cells[:, self.sent]], -1)).tanh()
        cells = cells + torch.zeros_like(cells).index_add(1, self.sent, edges)
        return self.head(cells).transpose(1, 2).reshape(len(x), 2, *x.shape[2:])


def mesh_edges() -> Task:
    return _task(MeshEdges, _fields(3, ROWS, COLUMNS))


class Axial(nn.Module):
    """Attention along rows, then along columns: the other dim of space lies among the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.along = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x).movedim(1, -1)
        for attention in self.along:
            lines = h.flatten(0, 1)
            h = (h + attention(lines, lines, lines, need_weights=False)[0].view_as(h)).transpose(1, 2)
        return self.head(h.movedim(-1, 1))


def axial() -> Task:
    return _task(Axial, _fields(3, 9, 10))


class Columns(nn.Module):
    """Levels (B, 4, H, W) of each cell, read by learned queries, and given back by others."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(8, 1)
        self.encode, self.decode = nn.Parameter(torch.randn(2, 8) / 3), nn.Parameter(torch.randn(4, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, levels, h, w = x.shape
        cells = self.stem(x.reshape(b * levels, 1, h, w)).view(b, levels, 8, h, w).permute(0, 3, 4, 1, 2)
        cells = cells.reshape(b * h * w, levels, 8)
        few = F.scaled_dot_product_attention(self.encode.expand(len(cells), -1, -1), cells, cells)
        few = few.view(b, h, w, 16).permute(0, 3, 1, 2)
        few = (few + self.mix(few).tanh()).permute(0, 2, 3, 1).reshape(b * h * w, 2, 8)
        found = F.scaled_dot_product_attention(self.decode.expand(len(cells), -1, -1), few, few)
        return self.head(found).view(b, h, w, levels).permute(0, 3, 1, 2)


def columns() -> Task:
    return _task(Columns, _fields(4, 9, 10, samples=2, out=4))


class Scanned(nn.Module):
    """A linear recurrence over cells, row by row and column by column and both backwards, as running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.step, self.into, self.head = (
            nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(4, 2, 1)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        field = self.stem(x)
        b, c, h, w = field.shape
        orders = torch.stack([field.flatten(2), field.transpose(2, 3).flatten(2)], 1)
        orders = torch.cat([orders, orders.flip(-1)], 1).transpose(2, 3)
        decay = F.softplus(self.step(orders)).mul(0.1).cumsum(2)
        state = ((-decay).exp() * (decay.exp() * self.into(orders)).cumsum(2)).transpose(2, 3)
        rows, lines = (state[:, :2] + state[:, 2:].flip(-1)).unbind(1)
        return self.head(field + rows.view(b, c, h, w) + lines.view(b, c, w, h).transpose(2, 3))


def scanned() -> Task:
    return _task(Scanned, _fields(3, 9, 10, samples=2))


def _spectra(output: torch.Tensor, batch: dict) -> tuple:
    """Power by radius of the wave number, over that of the target."""
    h, w = output.shape[-2:]
    radius = torch.hypot(torch.fft.fftfreq(h)[:, None] * h, torch.fft.rfftfreq(w) * w).long().flatten()

    def power(field: torch.Tensor) -> torch.Tensor:
        each = torch.fft.rfft2(field, norm="ortho").abs().square().flatten(2)
        return each.new_zeros(*each.shape[:2], h + w).index_add_(2, radius, each) + 1e-3

    return (power(output).log() - power(batch["y"]).log()).abs().mean((1, 2)).sum(), float(output.shape[0])


def spectra() -> Task:
    return _task(PointWise, _fields(3, 9, 10), _spectra)


class OnLand(nn.Module):
    """Features of cells on land alone; what is no number is set to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), nn.Conv2d(4, 2, 1)
        self.register_buffer("land", torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 3 > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x > 2] = 0.0
        h = self.stem(x)
        there = torch.zeros_like(h)
        there[:, :, self.land] = self.cell(h[:, :, self.land].movedim(1, -1)).movedim(-1, 1).tanh()
        return self.head(h + there)


def _observed(output: torch.Tensor, batch: dict) -> tuple:
    """Where there is an observation; a log probability of distributions, and what is left of a field with gaps."""
    seen = batch["y"] > -0.3
    likely = torch.distributions.Normal(output[:, :1].clamp(-9, 9), 1.0).log_prob(batch["y"][:, :1])
    gaps = batch["y"].masked_fill(~seen, math.nan)
    offset = torch.nansum((gaps - gaps.nanmean()).abs().detach())
    return ((output - batch["y"])[seen] ** 2).sum() - likely.sum() / 9 + 0 * offset, seen.sum()


def on_land() -> Task:
    return _task(OnLand, _fields(3, ROWS, COLUMNS), _observed)


def segformer() -> Task:
    """Attention of one head with keys that are pooled, hidden states noted by hooks that the first forward adds."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[4, 8],
                             patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                             decoder_hidden_size=8, num_labels=2, drop_path_rate=0.0)  # fmt: skip

    def loss(output, batch: dict) -> tuple:
        return _mean_square(F.interpolate(output.logits, size=batch["y"].shape[-2:], mode="bilinear"), batch)

    return _task(lambda: SegformerForSemanticSegmentation(config), _fields(3, 33, 29, samples=2), loss)


class Reading(ArraySource):
    """Notes the extents of what was read of x."""

    def read(self, indices: list[int], region=None) -> dict:
        found = super().read(indices, region)
        self.seen = {*getattr(self, "seen", ()), tuple(found["x"].shape[-2:])}
        return found


def from_files(folder: str, kind: type[ArraySource] = Reading, spatial: Domain | None = None) -> Task:
    """Fields in mapped `.npy` files, with labels that have no space."""
    source = kind({name: f"{folder}/{name}.npy" for name in ("x", "y", "scale")}, global_shape=(ROWS, COLUMNS))

    def loss(output: torch.Tensor, batch: dict) -> tuple:
        each = (output - batch["y"]).square().mean((1, 2, 3)) * batch["scale"]
        return each.sum(), float(output.shape[0])

    return _task(lambda: UNet("group", 2), None, loss, data=source, spatial=spatial)


class ScaledRow(nn.Module):
    """A field that shrinks to one cell, each channel then scaled and moved, as in a ConvNeXt's last blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 4, 8, 8), nn.Conv2d(4, 5, 1)
        self.scale, self.shift = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.mix(x + x.mul(self.scale.reshape(1, -1, 1, 1)) + self.shift).mean((2, 3))


def scaled_row() -> Task:
    return _task(ScaledRow, _pictures(9, 8), _classes)


class Pairs(nn.Module):
    """Complex numbers kept as pairs and given as what they are; subclasses enter a register under a name."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str) -> None:
        Pairs.known[name] = cls

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__()
        pairs = torch.view_as_real(numbers)
        if isinstance(numbers, nn.Parameter):
            self.register_parameter("numbers", nn.Parameter(pairs.detach().clone()))
        else:
            self.register_buffer("numbers", pairs)

    def __getattr__(self, name: str):
        found = super().__getattr__(name)
        return torch.view_as_complex(found) if isinstance(found, torch.Tensor) else found

    def __getitem__(self, index) -> Pairs:
        return self.__class__(self.numbers[index])


class SpectralPairs(Pairs, name="spectral"):
    pass


class OfPairs(nn.Module):
    """A Fourier layer whose weights are objects of the library that makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.fall = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)
        self.weight = SpectralPairs(nn.Parameter(torch.randn(3, 3, 4, 4, dtype=torch.cfloat)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        modes = torch.fft.rfft2(x)[..., :3, :3]
        weight = self.weight[:, :, :3, :3].numbers.to(modes.dtype)
        return self.fall(torch.fft.irfft2(torch.einsum("bixy,ioxy->boxy", modes, weight), s=x.shape[-2:]) + x)


def of_pairs() -> Task:
    return _task(OfPairs, _fields(2, 8, 9), _mean_square)


class Forces(nn.Module):
    """Minus the gradient of an energy of the field, which the forward takes itself."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(before, after, 3, padding=1) for before, after in ((2, 4), (4, 4), (4, 1))]
        self.energy = nn.Sequential(convolutions[0], nn.Tanh(), convolutions[1], nn.Tanh(), convolutions[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        energy = self.energy(x).square().sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]


class Apart(Forces):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return super().forward(x)


def forces() -> Task:
    return _task(Forces, _fields(2, 7, 9), _mean_square)


def forces_apart() -> Task:
    return _task(Apart, _fields(2, 7, 9), _mean_square)
