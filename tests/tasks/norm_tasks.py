"""Modules with batch norms: between layers that tp cuts, apart from them, behind an energy."""

from __future__ import annotations

import torch
from torch import nn

from shardwise import Task


class Normed(nn.Module):
    """Convolutions whose channels tp cuts, with batch norms between: one without weights, one that keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, affine=False, momentum=None), nn.ReLU(),
            nn.Conv2d(6, 5, 1, bias=False), nn.BatchNorm2d(5, track_running_stats=False), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Apart(nn.Module):
    """Layers and their norms in two lists: each norm is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).tanh()
        return x.mean((2, 3))


class Forces(nn.Module):
    """Gradients of an energy behind a batch norm: its backward is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.outer(self.norm(self.inner(x)).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def forces() -> Task:
    def batch(step: int) -> torch.Tensor:
        return torch.randn(7, 3, generator=torch.Generator().manual_seed(step))

    return Task(
        Forces, batch=batch, loss=lambda out, x: ((out - x).square().sum(), len(x)), inputs=lambda x: ((x,), {})
    )


def apart() -> Task:
    return normed().with_(model=Apart)


def of_groups() -> Task:
    """Its norm's groups of channels are dealt over ranks."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 3, 3))

    return normed().with_(model=model, loss=lambda out, b: (out.square().sum(), len(out)))


def normed() -> Task:
    def batch(step: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(step)
        return {"x": torch.randn(8, 2, 5, 5, generator=g), "y": torch.randn(8, 2, generator=g)}

    return Task(
        model=Normed, batch=batch, inputs=lambda b: ((b["x"],), {}), name="normed",
        loss=lambda out, b: ((out - b["y"]).square().sum(), len(b["y"])),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    )  # fmt: skip


class Gated(nn.Module):
    """A linear layer and a norm, each added behind the same gate."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x = x + gate * self.out(x)
        return x + gate * nn.functional.layer_norm(x, (16,))


class GatedPatches(nn.Module):
    """Gated blocks of patches, whose channels lie outermost in memory, as a convolution leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 16, 2, 2)
        self.gate = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, image: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        x, gate = self.patch(image).flatten(2).transpose(1, 2), self.gate(given)[:, None]
        for block in self.blocks:
            x = block(x, gate)
        return x.mean(1)


def gated_patches() -> Task:
    def batch(step: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(step)
        shapes = {"image": (6, 2, 8, 8), "given": (6, 4), "y": (6, 16)}
        return {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return (output - batch["y"]).square().mean(1).sum(), len(output)

    return Task(model=GatedPatches, batch=batch, loss=loss, inputs=lambda batch: ((batch["image"], batch["given"]), {}))
