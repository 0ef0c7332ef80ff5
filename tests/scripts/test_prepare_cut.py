"""`prepare` where a rank holds shares of weights: tensor, sequence and expert parallelism in a script's own loop."""

from __future__ import annotations

from typing import Any

import torch
from expert_tasks import Net as ExpertNet
from module_tasks import WIDTH
from small_scripts import (
    adamw,
    begin,
    by_counts,
    equals_one_process,
    made,
    refused_with_its_line,
    samples,
    weights_of,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.scripts.spread import tensors_of

WORDS = 12


class Words(nn.Module):
    """Embedding, attention, an MLP and a head: everything in it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, WORDS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        h = self.embed(x)
        b, t, d = h.shape
        q, k, v = (z.view(b, t, 2, d // 2).transpose(1, 2) for z in self.qkv(self.norm(h)).chunk(3, -1))
        scores = q @ k.mT if mask is None else (q @ k.mT).masked_fill(~mask, -1e9)
        h = h + self.out(F.dropout(scores.softmax(-1), 0.1, self.training).matmul(v).transpose(1, 2).reshape(b, t, d))
        return {"logits": self.head(h + self.down(F.gelu(self.up(h))))}


def experts() -> nn.Module:
    return made(ExpertNet)


def words() -> nn.Module:
    return made(Words)


def cross_entropy(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)["logits"][:, :-1].reshape(-1, WORDS), x[:, 1:].reshape(-1), reduction="sum")


def masked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mask that is made of no samples among the model's arguments."""
    logits = model(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())["logits"]
    return F.cross_entropy(logits[:, :-1].mT, x[:, 1:], reduction="sum")


def unusual(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Operations on the output that cut tensors have no rules for, reading of values, and metrics."""
    logits = model(x)["logits"]
    guess = logits.detach().argmax(-1).numpy()
    best = logits.detach().cpu().topk(2).indices.tolist()
    assert guess.shape == tuple(x.shape) and len(best) == len(x)
    assert torch.tensor(logits.detach().numpy()).shape == logits.shape
    smooth = torch.cdist(logits.softmax(-1), F.one_hot(x, WORDS).double()).diagonal(dim1=1, dim2=2)
    return smooth.sum() + logits.sort(-1).values[..., :3].square().sum() + torch.linalg.norm(logits[0, 0]) * 0


LOSSES = {"cross_entropy": cross_entropy, "masked": masked, "unusual": unusual}


def tokens(count: int) -> TensorDataset:
    return TensorDataset(torch.randint(WORDS, (count, 6), generator=torch.Generator().manual_seed(3)))


def script(plan: str | None, loss: str = "cross_entropy", every: int = 1, clip: float = 0.0) -> tuple:
    def value_of(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return LOSSES[loss](model, x), x[:, 1:].numel()

    return by_counts(plan, words(), tokens(11), value_of, tokens(3).tensors[0], every, clip)


def on_ranks(plan: str | None, options: dict) -> tuple:
    """Scripts with shares equal one process."""
    return script(plan, **options)


def with_experts(plan: str | None) -> tuple:
    """Experts in a script equal one process."""
    x = torch.randn(13, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    prepared, model, optimizer, loader = begin(plan, experts(), loader, branches="per_sample")
    losses = []
    for (rows,) in loader:
        value = model(rows).square().sum()
        value = prepared.backward(value, len(rows)) if prepared else value / len(rows)
        if not prepared:
            value.backward()
        clip = prepared.clip_grad_norm_ if prepared else lambda m: nn.utils.clip_grad_norm_(model.parameters(), m)
        clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, weights_of(prepared or model)


# --- what would differ is refused


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hidden(Words):
    def forward(self, x: torch.Tensor) -> Any:
        return Opaque(super().forward(x)["logits"])


def once(plan: str, case: str) -> None:
    """One mistake of a script, on ranks."""
    model = Hidden().double() if case == "hidden" else words()
    if case == "dropout in experts":
        model = experts()
        own = model.layers[0].experts.forward
        model.layers[0].experts.forward = lambda x, *args: F.dropout(own(x, *args), 0.5)
    if case == "compiled":
        model = torch.compile(model)
    optimizer = adamw(model)
    dataset = samples(8) if case in ("nothing to cut", "dropout in experts") else tokens(8)
    if case == "nothing to cut":
        model = nn.PReLU().double()
        optimizer = adamw(model)
    loader: Any = DataLoader(dataset, batch_size=4)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, *_ in loader:
        output = model(x)
        loss = (output["logits"] if isinstance(output, dict) else output).square().sum()
        if case == "closure":
            optimizer.step(lambda loss=loss: prepared.backward(loss, 1))
        prepared.backward(loss, len(x))
        optimizer.step()
        optimizer.zero_grad()


def test_tensors_are_found_in_what_models_return() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        more: list

    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(tensors_of({"a": Output(one, [two, None]), "b": (three, "text")}))
    assert [t.numel() for t in found] == [1, 2, 3]


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (on_ranks, "tp=2", {}), (on_ranks, "tp=2,sp=true", {"loss": "masked", "clip": 0.3}),
    (on_ranks, "tp=2,dp_shard=2,zero=3", {"clip": 0.3}),
    (on_ranks, "tp=2,sp=true,dp_shard=2,zero=2", {"loss": "unusual"}),
    (on_ranks, "tp=2,accumulate=2,remat=full", {"loss": "unusual", "every": 2}), (with_experts, "dp_shard=2,ep=2"),
    (with_experts, "dp_shard=4,ep=2,zero=2"), (with_experts, "tp=2,dp_shard=2,ep=2,zero=1"),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL)


REFUSED: list[tuple] = [
    (once, "tp=2", "closure", RefusedPlan, "closure"),
    (once, "tp=2", "compiled", RefusedPlan, "the model is compiled"),
    (once, "tp=2", "hidden", InputError, "returned Opaque, in which no floating"),
    (once, "tp=2", "nothing to cut", RefusedPlan, "no weight of the module can be cut"),
    (once, "dp_shard=2,ep=2", "experts", RefusedPlan, "no experts were found"),
    (once, "dp_shard=2,ep=2", "dropout in experts", RefusedPlan, "on their order, or on chance"),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED)
