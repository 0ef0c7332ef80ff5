"""Tasks in the shape of public reports of wrong training: a module run twice, a head further ahead, a grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from shardwise import Task
from shardwise.task import Domain

VOCABULARY, WIDTH, LENGTH = 31, 16, 12


class RunsTwice(nn.Module):
    """A block that a forward runs on its own output, so that its weights' gradients come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(gelu(self.shared(gelu(self.shared(x)))))


def runs_twice() -> Task:
    def loss(output: Tensor, batch: dict) -> tuple[Tensor, int]:
        return (output - batch["y"]).square().mean(1).sum(), len(output)

    def batch(step: int) -> dict:
        drawn = torch.Generator().manual_seed(step)
        return {"x": torch.randn(6, 8, generator=drawn), "y": torch.randn(6, 4, generator=drawn)}

    return Task(RunsTwice, batch=batch, loss=loss, inputs=lambda batch: ((batch["x"],), {}))


class FurtherAhead(nn.Module):
    """A decoder with a second head that tells the token after the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.ahead = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x)), self.head(self.norm(self.ahead(x, src_mask=mask, is_causal=True)))


def further_ahead() -> Task:
    """Answers of uneven lengths: the second head has fewer tokens that count, divided by their own number."""

    def loss(output: tuple[Tensor, Tensor], batch: dict) -> tuple[Tensor, Tensor, dict]:
        sums, counts = [], []
        for logits, labels in zip(output, (batch["next"], batch["second"]), strict=True):
            sums.append(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100))
            counts.append((labels != -100).sum())
        return sums[0], counts[0], {"ahead": (0.3 * sums[1], counts[1])}

    def batch(step: int) -> dict:
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (6, LENGTH + 2), generator=drawn)
        counts = torch.arange(LENGTH)[None] < torch.tensor([12, 3, 7, 1, 9, 2])[:, None]
        second = counts & (torch.arange(LENGTH)[None] % 3 > 0)
        return {
            "tokens": tokens[:, :LENGTH], "next": tokens[:, 1:-1].masked_fill(~counts, -100),
            "second": tokens[:, 2:].masked_fill(~second, -100),
        }  # fmt: skip

    return Task(FurtherAhead, batch=batch, loss=loss, inputs=lambda batch: ((batch["tokens"],), {}))


class Downscale(nn.Module):
    """Fields on a grid through a normalised, strided encoder and back: every cell weighs its area."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.back = nn.ConvTranspose2d(8, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(gelu(self.middle(gelu(self.norm(self.into(x))))))


def layout_alone() -> Task:
    def loss(output: Tensor, batch: dict) -> tuple[Tensor, Tensor]:
        area = batch["area"].expand_as(output)
        return ((output - batch["y"]).square() * area).sum(), area.sum()

    def batch(step: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(step)
        area = torch.linspace(-1.4, 1.4, 12).cos()[None, None, :, None].expand(4, 1, 12, 16).contiguous()
        return {"x": torch.randn(4, 3, 12, 16, generator=drawn), "y": torch.randn(4, 2, 12, 16, generator=drawn),
                "area": area}  # fmt: skip

    return Task(
        Downscale, batch=batch, loss=loss, inputs=lambda batch: ((batch["x"],), {}),
        spatial=Domain((-2, -1), ("lat", "lon")),
    )  # fmt: skip
