"""Tasks whose modules read positions in ways of their own, for plans that cut them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Task

VOCABULARY, LENGTH, WIDTH = 17, 11, 8


def _words(step: int) -> dict:
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (4, LENGTH), generator=draws)
    lengths = torch.tensor([LENGTH, LENGTH - 2, LENGTH - 1, LENGTH - 2])  # the first half has no padding
    return {"ids": ids * (torch.arange(LENGTH) < lengths[:, None])}


def _of_words(logits: torch.Tensor, batch: dict) -> tuple:
    loss = F.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten(), ignore_index=0, reduction="sum")
    return loss, float((batch["ids"] != 0).sum())


class Words(nn.Module):
    """Words of a vocabulary, mixed, and words again."""

    def __init__(self):
        super().__init__()
        self.words, self.mix, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def mixed(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixed(self.words(ids), ids))


def _task(model: type[nn.Module]) -> Task:
    return Task(model=model, batch=_words, loss=_of_words, inputs=lambda batch: ((batch["ids"],), {}),
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


class Branches(Words):
    """Takes another way where words are padded, by what it reads of the mask: collectives differ between the ways."""

    def mixed(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kept = ids != 0
        longest = max(kept.sum(1).tolist())
        if kept.all():
            return self.mix(x) * longest
        scores = (self.mix(x) @ x.mT).masked_fill(~kept[:, None], -torch.inf)
        return scores.softmax(-1) @ x / longest


def branches() -> Task:
    return _task(Branches)


class Relative(Words):
    """Relative scores, shifted as in Transformer-XL: padded, seen as rows of another length, sliced."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Linear(WIDTH, WIDTH, bias=False)

    def mixed(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        angles = torch.outer(torch.arange(s - 1, -1, -1, dtype=x.dtype), torch.arange(1, WIDTH + 1) / WIDTH)
        scores = self.mix(x) @ self.relative(angles.sin()).T  # (B, S, S): by distance
        scores = F.pad(scores, (1, 0)).view(b, s + 1, s)[:, 1:].reshape(b, s, s)
        scores = self.mix(x) @ x.mT + scores
        later = torch.ones(s, s, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ x


def relative() -> Task:
    return _task(Relative)


class Selected(Words):
    """Words in the place of others, and a loss at those alone; beside it, one position of all is asked for."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(LENGTH + 3.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.place = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> tuple:
        holes = (ids * 7 + torch.arange(ids.shape[1]) * 3) % 5 == 0
        x = self.words(ids.masked_fill(holes, 1))
        for block in self.blocks:
            pairs = torch.view_as_complex(block(x).unflatten(-1, (2, 2, 2)))
            turned = torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(2)
            x = x + (turned @ x.mT).softmax(-1) @ x
        counts = torch.zeros_like(x[..., 0]).scatter_add(1, ids % x.shape[1], x[..., 1].sigmoid())
        return self.head(x), self.place(x).squeeze(-1) * counts, holes


def _at_holes(output: tuple, batch: dict) -> tuple:
    logits, places, holes = output
    loss = F.cross_entropy(logits[holes], batch["ids"][holes], reduction="sum")
    return loss + F.cross_entropy(places, batch["ids"][:, 0] % places.shape[1], reduction="sum"), float(holes.sum())


def selected() -> Task:
    return _task(Selected).with_(loss=_at_holes)


class Turned(Words):
    """Everything that is made of positions alone: angles, learned places, distances, and a table written into."""

    def __init__(self):
        super().__init__()
        self.places, self.distances = nn.Embedding(LENGTH + 3, WIDTH), nn.Embedding(5, 1)

    def mixed(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1])
        x = x + self.places(at)
        angles = at[None, :, None] * torch.arange(1, WIDTH // 2 + 1) / WIDTH
        cos, sin = angles.cos(), angles.sin()
        seen, shifted = at.view(1, -1), at * 1
        shifted += 2
        marked = torch.arange(ids.shape[1])
        marked[0] = 3
        marked[2:4] += 1
        bias = self.distances((shifted[:, None] - at).clamp(0, 4)).squeeze(-1) + (marked[:, None] - at).cos()
        later = seen.mT < at
        a, b = self.mix(x).chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        scores = turned @ turned.mT + bias
        fading = torch.linspace(1, 0.5, ids.shape[1], dtype=x.dtype)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ x * fading[:, None] / len(at)


def turned() -> Task:
    return _task(Turned)


class OneByOne(Words):
    """Takes its positions one by one from a tensor that does not lie in order; two products read each of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(2, 2, 2)), nn.Parameter(torch.randn(2, 2))

    def mixed(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        heads = self.mix(x).view(len(x), -1, 2, 2, 2).permute(1, 0, 3, 2, 4)
        read = [heads[at] @ self.first + heads[at] @ self.second for at in range(x.shape[1])]
        return x + torch.stack(read).permute(1, 0, 3, 2, 4).reshape(x.shape)


def one_by_one() -> Task:
    return _task(OneByOne)


class Routed(Words):
    """Words to two of three experts each, read and written at places that `torch.where` and `nonzero` give."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def mixed(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            which, row = torch.where(chosen.t() == number)
            out[row] += weights[row, which, None] * expert(rows[row])
            row = (chosen[:, 0] == number).nonzero().squeeze(1)
            out = out.index_add(0, row, rows.index_select(0, row).tanh())
        return out.view(x.shape)


class Shifted(Routed):
    """Writes into places before it reads there: they name rows of other ranks too."""

    def mixed(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        sample, at = torch.where(self.gate(x).argmax(-1) == 0)
        at.add_(1).clamp_(max=x.shape[1] - 1)
        return super().mixed(x, ids).index_put((sample, at), self.mix(x[sample, at]), accumulate=True)


def routed() -> Task:
    return _task(Routed)


def shifted() -> Task:
    return _task(Shifted)


class Nearest(nn.Module):
    """Distances to three points, of which each takes the place of what is farther, as farthest points are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.full(x.shape[:2], 1e10, dtype=x.dtype)
        for place in range(3):
            distance = (x - x[:, place, None]).square().sum(-1)
            nearer = distance < nearest
            nearest[nearer] = distance[nearer]
        return self.inner(x) * nearest[..., None].tanh()


def nearest() -> Task:
    def rows(step: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(step))}

    return Task(
        model=Nearest, batch=rows, inputs=lambda b: ((b["x"],), {}), loss=lambda o, b: (o.square().sum(), len(o))
    )
