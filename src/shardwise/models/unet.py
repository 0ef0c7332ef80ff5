"""A 2-D U-Net: one output value per pixel and channel, from every scale of the image.

    image -> [enter] ---------------- skip ----------------> [join] -> output
                \\ strided conv              nearest upsample /
                 [down] ------------ skip ----------> [up]
                     \\ ...                       ... /

Ronneberger et al. 2015, section 2, with three changes: a strided convolution instead of pooling, padding
instead of cropping, and norms inside: group (Wu and He 2018, section 3) or batch (Ioffe and Szegedy 2015,
section 3). Upsampling goes to the size of the skip, so that odd heights and widths are kept.

A convolution before a norm has no bias, since a batch norm would cancel it.

It has no attention, no dropout, and no conditioning on a time or a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class UNetConfig:
    """Shape of a `UNet`; `width` channels at the top, twice as many at each of `depth` scales below."""

    channels: int = 3
    out_channels: int = 1
    width: int = 32
    depth: int = 3
    norm: Literal["group", "batch"] = "group"
    groups: int = 8  # of a group norm

    def __post_init__(self) -> None:
        if self.norm not in ("group", "batch"):
            raise ValueError(f"norm is 'group' or 'batch', got {self.norm!r}")
        if self.norm == "group" and self.width % self.groups:
            raise ValueError(f"width={self.width} must be a multiple of groups={self.groups}")


def double_conv(config: UNetConfig, channels: int, out_channels: int) -> nn.Sequential:
    """Returns a module of two times (3 by 3 convolution, norm, GELU), from `channels` to `out_channels`."""

    def norm() -> nn.Module:
        if config.norm == "batch":
            return nn.BatchNorm2d(out_channels)
        return nn.GroupNorm(config.groups, out_channels)

    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 3, padding=1, bias=False),
        norm(),
        nn.GELU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        norm(),
        nn.GELU(),
    )


class Down(nn.Module):
    """A module that halves height and width (rounding up), then doubles the channels by two convolutions."""

    def __init__(self, config: UNetConfig, channels: int) -> None:
        super().__init__()
        self.stride = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.convs = double_conv(config, channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(self.stride(x))  # (B, 2C, ceil(H / 2), ceil(W / 2))


class Up(nn.Module):
    """A module that upsamples x to the size of the skip, concatenates the two, then applies two convolutions."""

    def __init__(self, config: UNetConfig, channels: int) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(2 * channels, channels, 1)
        self.convs = double_conv(config, 2 * channels, channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        grown = F.interpolate(self.narrow(x), size=skip.shape[-2:], mode="nearest")  # (B, C, H, W)
        return self.convs(torch.cat((skip, grown), dim=1))  # (B, C, H, W)


class UNet(nn.Module):
    """A 2-D U-Net: images (B, C, H, W) -> (B, C_out, H, W), of any height and width."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * 2**level for level in range(config.depth)]
        self.enter = double_conv(config, config.channels, config.width)
        self.downs = nn.ModuleList(Down(config, width) for width in widths)
        self.ups = nn.ModuleList(Up(config, width) for width in reversed(widths))
        self.leave = nn.Conv2d(config.width, config.out_channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images)  # (B, width, H, W)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(x)
        for up in self.ups:
            x = up(x, skips.pop())
        return self.leave(x)  # (B, C_out, H, W)
