"""`prepare` where the plan cuts positions: a sequence (cp, cp_ulysses) or space (domain), in a script's own loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_scripts import (
    back,
    begin,
    by_counts,
    equals_one_process,
    made,
    refused_with_its_line,
    weights_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.scripts.start import check_given

WORDS, ROWS, COLUMNS = 12, 7, 9


class Fields(nn.Module):
    """Convolutions, batch norm and dropout on fields (B, 2, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.drop, self.last = nn.Dropout(0.2), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


class Words(nn.Module):
    """Attention with dropout over tokens (B, S), and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        b, t, d = h.shape
        q, k, v = (z.view(b, t, 4, d // 4).transpose(1, 2) for z in self.qkv(h).chunk(3, -1))
        rate = 0.1 if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=rate, is_causal=mask is None)
        return {"logits": self.head(h + self.out(F.dropout(a.transpose(1, 2).reshape(b, t, d), 0.1, self.training)))}


def fields(count: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(count, 2, ROWS, COLUMNS, generator=draws, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count, ROWS, COLUMNS), generator=draws))


def tokens(count: int) -> TensorDataset:
    x = torch.randint(WORDS, (count, 9), generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.roll(-1, 1))


# losses as people write them: (model, x, y) -> (sum, what it is divided by)


def classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = model(x)
    assert out.shape == (len(x), 3, ROWS, COLUMNS) and out[:, :, 1:-1].shape[2] == ROWS - 2
    weight = torch.linspace(-1, 1, out.shape[-2], dtype=out.dtype).cos()[:, None].expand(out.shape[-2:])
    each = F.cross_entropy(out, y, reduction="none", ignore_index=2) * weight
    return each.sum() + 0.1 * (out[:, 0, 1:] - out[:, 0, :-1]).square().sum(), (y != 2).sum()


def moments(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Means over space, masks by index, values in Python, a product with what is whole, and a conserved sum."""
    out = model(x)
    column = out.mean(dim=(2, 3))
    kept = out.movedim(1, -1)[y == 1]
    conserved = (out.sum((2, 3)) - x.sum((2, 3))[:, :1]).square().sum()
    return column.square().sum() + kept.abs().sum() + conserved * 1e-3, len(x)


def unusual(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Operations without a rule, of the output and of what was made of it, and values read by NumPy and lists."""
    out = model(x)
    guess = out.detach().argmax(1)
    assert guess.numpy().shape == tuple(y.shape) and len(out.detach().cpu().tolist()) == len(x)
    warm = (out * 2).flatten(2)
    largest = warm.sort(-1).values[..., :5].square().sum() + warm.cummax(-1).values.sum()
    return largest + torch.cdist(warm, warm + 1).sum(), len(x)


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A penalty on weights, which the script computes beside the model."""
    return model(x).square().sum() + len(x) * sum(param.square().sum() for param in model.parameters()), len(x)


def shifted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    logits = model(x)["logits"]
    labels = x.masked_fill(x == 3, -100)[:, 1:]
    value = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels.reshape(-1), reduction="sum")
    return value, (labels != -100).sum()


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A mask over pairs of positions among the arguments, and a pooled output."""
    logits = model(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())["logits"]
    last = logits[:, -1].log_softmax(-1).gather(1, y[:, :1]).sum()
    return -last + logits.mean(1).square().sum() - logits.log_softmax(-1).gather(-1, y[..., None]).sum(), len(x)


LOSSES = {one.__name__: one for one in (classes, moments, unusual, penalty, shifted, masked)}
SEQUENCE = ("shifted", "masked")


def script(plan: str | None, loss: str, every: int = 1, clip: float = 0.0) -> tuple:
    data, model = (tokens, made(Words)) if loss in SEQUENCE else (fields, made(Fields))
    return by_counts(plan, model, data(10), LOSSES[loss], data(3).tensors[0], every, clip, epochs=2)


def on_ranks(plan: str | None, options: dict) -> tuple:
    """Scripts on shares of positions equal one process."""
    return script(plan, **options)


# --- what would differ is refused


class Levels(Fields):
    """Positions are mixed in a way that no rule knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / torch.unique(x.detach().round()).numel())


def once(plan: str, case: str) -> None:
    """One mistake of a script, on ranks."""
    torch.manual_seed(0)
    model: Any = (Levels() if case == "levels" else Words() if case == "no field" else Fields()).double()
    if case == "compiled":
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader((tokens if case == "no field" else fields)(8), batch_size=4)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, _ in loader:
        if case == "penalty on gradients":
            x.requires_grad_(True)
        output = model(x)
        loss = (output["logits"] if isinstance(output, dict) else output).square().sum()
        if case == "penalty on gradients":
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        if case == "one rank" and prepared.rank == 0:
            with torch.no_grad():
                model.eval()(x)
        prepared.backward(loss, len(x))
        optimizer.step()
        optimizer.zero_grad()


def test_outputs_are_gathered_over_samples_or_cut_along_positions() -> None:
    model = nn.Linear(2, 2)
    given = (model, torch.optim.SGD(model.parameters(), lr=0.1))
    check_given(*given, shardwise.Plan.parse("domain=2"), "global", "global")
    with pytest.raises(RefusedPlan, match="not both yet"):
        check_given(*given, shardwise.Plan.parse("domain=2,dp_replicate=2"), "global", "global")


# --- several models


def pair_of_models(plan: str | None, other: str | None = None) -> tuple:
    """What the first model gives is given to the second, by its cut."""
    first = made(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh()))
    second = made(lambda: nn.Conv2d(4, 1, 3, padding=1))
    of_first, first, one, loader = begin(plan, first, DataLoader(fields(6), batch_size=3))
    of_second, second, two, loader = begin(other or plan, second, loader)
    losses = []
    for x, _ in loader:
        for prepared, optimizer in ((of_first, one), (of_second, two)):
            optimizer.zero_grad()
            given = first(x)
            losses.append(back(prepared, second(given if optimizer is one else given.detach()).square().mean()))
            optimizer.step()
    return losses, weights_of(first), weights_of(second)


def closures(plan: str | None, called_before: bool) -> tuple:
    """Steps by closures alone; `called_before`: the model is called once before the first one."""
    model = made(Words)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    prepared, model, optimizer, loader = begin(plan, model, DataLoader(tokens(8), batch_size=4), sgd)
    losses = []
    for x, y in loader:
        if called_before and not losses:
            model(x)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x)["logits"].flatten(0, 1), y.flatten())
            losses.append(back(prepared, loss))
            return loss

        optimizer.step(closure)
    return losses, weights_of(model)


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (on_ranks, "domain=2", {"loss": "classes"}),
    (on_ranks, "domain=1x2,dp_replicate=2", {"loss": "moments", "clip": 0.3}),
    (on_ranks, "domain=2,dp_shard=2,zero=3", {"loss": "classes", "clip": 0.3}),
    (on_ranks, "domain=1x2,zero=2,accumulate=2", {"loss": "unusual", "every": 2}),
    (on_ranks, "domain=2,remat=full", {"loss": "penalty"}), (on_ranks, "domain=2,zero=1", {"loss": "penalty"}),
    (on_ranks, "cp=2", {"loss": "shifted", "clip": 0.3}), (on_ranks, "cp=2,dp_replicate=2", {"loss": "masked"}),
    (on_ranks, "cp_ulysses=2,zero=2", {"loss": "masked", "clip": 0.3}), (on_ranks, "cp=2,tp=2", {"loss": "shifted"}),
    (on_ranks, "cp=2,position_chunks=2", {"loss": "shifted"}), (pair_of_models, "domain=2"),
    (closures, "cp=2", True),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    (on_ranks, "domain=2x2,zero=1", {"loss": "moments"}),
    (on_ranks, "cp_ulysses=2,dp_shard=2,zero=3,accumulate=2", {"loss": "shifted", "every": 2}),
    (pair_of_models, "domain=2x2"),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


REFUSED: list[tuple] = [
    (once, "domain=2", "levels", RefusedPlan, "unique.*test_prepare_positions.py, line"),
    (once, "domain=2", "no field", RefusedPlan, "no dim of the batch can be cut as a field.*spatial="),
    (once, "domain=2", "compiled", RefusedPlan, "the model is compiled"),
    (once, "domain=2", "penalty on gradients", RefusedPlan, "create_graph=True.*positions are cut"),
    (once, "domain=2", "one rank", RunError, "rank [01] comes to .*every rank is needed"),
    (closures, "cp=2", False, InputError, "before any forward, .* derives its cuts: call the model"),
    (pair_of_models, "domain=2", "domain=1x2", InputError, "was cut over domain0 by another prepared model"),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED)
