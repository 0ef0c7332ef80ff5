"""Mixtures whose experts are modules of their own, in a list, dealt as people write it; each returns a `Task`."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import joined_tasks
import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, squares, task
from torch import Tensor, nn

from shardwise import Task
from shardwise.models import tasks

EXPERTS, CHOICES = 4, 2


class Mlp(nn.Module):
    """A gated MLP, three weights without biases."""

    def __init__(self, inner: int = 5, dropout: float = 0.0):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, inner, bias=False), nn.Linear(WIDTH, inner, bias=False)
        self.w2, self.dropout = nn.Linear(inner, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


def mlps() -> nn.ModuleList:
    return nn.ModuleList(Mlp() for _ in range(EXPERTS))


class ByIndex(nn.Module):
    """Rows of each expert by `torch.where`, added up by `index_add_`."""

    def __init__(self, experts: Any = mlps):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), experts()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOICES, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows)
        made = torch.zeros_like(rows)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            choice, token = torch.where(mask[number])
            made.index_add_(0, token, self.experts[number](rows[token]) * weights[token, choice, None])
        return made.view_as(x)


class ByMask(ByIndex):
    """Boolean masks; an expert without rows is left out."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if not (chosen == number).any():
                continue
            mine, choice = (chosen == number).nonzero(as_tuple=True)
            made[mine] += expert(rows[mine]) * weights[mine, choice].unsqueeze(-1)
        return made.view_as(x)


class Sorted(ByIndex):
    """Rows sorted by expert, counts read by the host, and an expert that every row goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Mlp(3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows)
        order = chosen.view(-1).argsort()
        counts = chosen.view(-1).bincount(minlength=EXPERTS).tolist()
        made, start = [], 0
        for number, count in enumerate(counts):
            if count:
                made.append(self.experts[number](rows[order[start : start + count] // CHOICES]))
                start += count
        pairs = torch.zeros_like(torch.cat(made)).index_copy(0, order, torch.cat(made))
        return ((pairs.view(-1, CHOICES, WIDTH) * weights[..., None]).sum(1) + self.shared(rows)).view_as(x)


class ByChoice(ByIndex):
    """First choices of all experts, then second ones: an expert is called twice in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows)
        made = torch.zeros_like(rows)
        for choice in range(CHOICES):
            for number, expert in enumerate(self.experts):
                mine = chosen[:, choice] == number
                made[mine] = made[mine] + weights[mine, choice, None] * expert(rows[mine])
        return made.view_as(x)


class Slots(ByIndex):
    """Slots of each expert filled by an einsum, one for each row."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.route(rows)
        gates = torch.zeros(len(rows), EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
        place = (gates > 0).long().cumsum(0) - 1
        dealt = F.one_hot(place.clamp(min=0), len(rows)).to(x.dtype) * (gates > 0)[..., None]  # (T, E, slots)
        given = torch.einsum("tes,th->esh", dealt, rows)
        made = torch.stack([expert(given[number]) for number, expert in enumerate(self.experts)])
        return torch.einsum("tes,te,esh->th", dealt, gates, made).view_as(x)


class Named(nn.Module):
    """Experts by name in a module of their own, which is given tokens, choices and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({f"expert_{n}": nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))
                                      for n in range(EXPERTS)})  # fmt: skip

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            token, choice = (chosen == number).nonzero(as_tuple=True)
            result = self.by_name[f"expert_{number}"](rows[token])
            made.index_add_(0, token, result.mul_(weights[token, choice, None]))
        return made


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(WIDTH, EXPERTS), Named()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOICES, -1)
        return self.inner(x.reshape(-1, WIDTH), chosen.view(-1, CHOICES), weights.view(-1, CHOICES)).view_as(x)


class Net(nn.Module):
    def __init__(self, mixture: Any, first: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(mixture() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.out(x)


class Words(nn.Module):
    """Causal attention and a mixture over positions, twice; a word at each position."""

    def __init__(self, mixture: Any = ByIndex, width: int = WIDTH):
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mixtures = nn.ModuleList(mixture() for _ in range(2))
        self.head = nn.Linear(width, 11)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for attention, mixture in zip(self.attention, self.mixtures, strict=True):
            q, k, v = attention(x).unsqueeze(1).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
            x = x + mixture(x)
        return self.head(x)


def words() -> Task:
    return joined_tasks.of_words(Words)


def words_by_mask() -> Task:
    return joined_tasks.of_words(partial(Words, ByMask))


def words_with_slots() -> Task:
    return joined_tasks.of_words(partial(Words, Slots))


def of(mixture: Any, branches: str = "per_sample", **options: Any) -> Task:
    return task(partial(Net, mixture), branches=branches, **options)


def by_index() -> Task:
    """Every expert is called by every forward, if with no rows."""
    return of(ByIndex, branches="same")


def by_mask() -> Task:
    return of(ByMask)


def sorted_rows() -> Task:
    return of(Sorted)


def by_choice() -> Task:
    return of(ByChoice)


def slots() -> Task:
    return of(Slots)


def by_name() -> Task:
    return of(Router)


def dropout() -> Task:
    return of(partial(ByIndex, lambda: nn.ModuleList(Mlp(dropout=0.2) for _ in range(EXPERTS))))


class Drawn(Mlp):
    """Left out by chance, by one of Python's numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.random() > 0.1)


def drawn_by_python() -> Task:
    return of(partial(ByIndex, lambda: nn.ModuleList(Drawn() for _ in range(EXPERTS))))


class Noisy(ByIndex):
    """Choices with noise of a learned size, as by noisy top-k gating; and what leaves the mixture has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Linear(WIDTH, EXPERTS)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        weights, chosen = logits.softmax(-1).topk(2, dim=-1)
        return weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


def noisy() -> Task:
    return of(Noisy)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def batch_norms() -> Task:
    return of(partial(ByIndex, lambda: nn.ModuleList(Normed() for _ in range(EXPERTS))))


class Chained(ByIndex):
    """Each expert is given what the one before gave."""

    def forward(self, x: Tensor) -> Tensor:
        _, chosen = self.route(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).any(-1)
            x = x.index_put((mine,), expert(x[mine]))
        return x


def chained() -> Task:
    return of(Chained)


class Tied(Mlp):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def tied_by_norm() -> Task:
    """One norm, held by all experts."""

    def experts() -> nn.ModuleList:
        norm = nn.LayerNorm(WIDTH)
        return nn.ModuleList(Tied(norm) for _ in range(EXPERTS))

    return of(partial(ByIndex, experts))


class Outside(ByIndex):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts[1].w2.weight.mean()


def weights_outside() -> Task:
    return of(Outside)


class Told(Mlp):
    def forward(self, x: Tensor, scale: float) -> Tensor:
        return super().forward(x) * scale


class Telling(ByIndex):
    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            made[chosen == number] = expert(x[chosen == number], number / 2)
        return made


def told_their_number() -> Task:
    """Experts that are given a number beside their rows."""
    return of(partial(Telling, lambda: nn.ModuleList(Told() for _ in range(EXPERTS))))


class All(ByIndex):
    """Every expert is given every row: nothing is chosen for it."""

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype)
        weights, chosen = self.route(x)
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * gates.scatter(-1, chosen, weights)[..., None, :]).sum(-1)


def all_rows() -> Task:
    return of(All)


class Jittered(ByIndex):
    """Rows are scaled by chance in training, by one of Python's numbers; the constructor leaves it in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.01 * random.random()) if self.training else x)


def jittered() -> Task:
    return of(Jittered)


class Counted(ByIndex):
    """Counts its forwards in a buffer, and keeps a loss of its own, as auxiliary losses are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.losses.append(self.gate(x).square().sum())
        return super().forward(x)


class Kept(Net):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            layer.losses.clear()
        return super().forward(x), sum(layer.losses[-1] * len(layer.losses) for layer in self.layers)


def kept_losses() -> Task:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        made, beside = output
        total, count = squares(made, batch)
        return total + 0.01 * beside, count

    return task(partial(Kept, Counted), branches="per_sample", loss=loss)


class First(ByIndex):
    """Experts 0 and 1 take everything, the others nothing: they have no gradient."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.gate(x).softmax(-1)[:, :CHOICES]
        return weights, torch.arange(CHOICES).expand(len(x), CHOICES)


def only_the_first() -> Task:
    return of(First, optimizer=tasks.adamw)


class Skipping(First, ByMask):
    pass


def skipping() -> Task:
    """As `only_the_first`, where the others are not called: one process leaves their weights and state alone."""
    return of(Skipping, optimizer=tasks.adamw)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__(ByIndex)
        self.layers[0].experts.requires_grad_(False)
        self.layers[1].experts[1].requires_grad_(False)


def frozen() -> Task:
    return task(Frozen, branches="per_sample")


class BySample(ByIndex):
    """Whole sequences are routed: an expert is given (n, S, H)."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x.mean(1)).argmax(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            made[chosen == number] = expert(x[chosen == number])
        return made


def words_by_sample() -> Task:
    return joined_tasks.of_words(partial(Words, BySample))


class WideByIndex(nn.Module):
    """`ByIndex` of a width at which bytes of activations and weights count."""

    def __init__(self, width: int = 64, inner: int = 128):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows).softmax(-1).topk(CHOICES, -1)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            made.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return made.view_as(x)


def wide() -> Task:
    """Causal attention and mixtures of 64 features, on eight sequences of 16 words."""

    def batch(step: int) -> Tensor:
        return torch.randint(0, 11, (8, 16), generator=torch.Generator().manual_seed(step))

    return joined_tasks.of_words(partial(Words, WideByIndex, 64)).with_(batch=batch)
