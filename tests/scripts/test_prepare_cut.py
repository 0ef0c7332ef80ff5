"""`prepare` where a rank holds shares of weights: tensor, sequence and expert parallelism in a script's own loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_tasks import Net as ExpertNet
from module_tasks import WIDTH
from small_scripts import adamw, begin, check_equal, made, samples, weights_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.ranks import RankPool
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
    """Losses, weights and what the model says at the end; evaluated before and after training too."""
    prepared, model, optimizer, loader = begin(plan, words(), DataLoader(tokens(11), batch_size=4, shuffle=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(7)
    losses, total, weight = [], 0.0, 0
    with torch.no_grad():
        assert model.eval()(tokens(3).tensors[0])["logits"].shape == (3, 6, WORDS)
    model.train()
    optimizer.zero_grad()
    for number, (x,) in enumerate(loader):
        value, n = LOSSES[loss](model, x), x[:, 1:].numel()
        if prepared:
            prepared.backward(value, n)
        else:
            value.backward()
            total, weight = total + value.item(), weight + n
        if (number + 1) % every and number + 1 < len(loader):
            continue
        for param in model.parameters() if not prepared else ():
            param.grad /= weight
        if clip:
            (prepared.clip_grad_norm_ if prepared else lambda m: nn.utils.clip_grad_norm_(model.parameters(), m))(clip)
        optimizer.step()
        scheduler.step()
        losses.append(float(prepared.loss) if prepared else total / weight)
        optimizer.zero_grad()
        total, weight = 0.0, 0
    with torch.no_grad():
        said = model.eval()(tokens(3).tensors[0])["logits"]
    assert type(said) is torch.Tensor
    return losses, weights_of(prepared or model), said


def on_ranks(plan: str | None, options: dict) -> tuple:
    return script(plan, **options)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("tp=2", {}),
        ("tp=2,sp=true", {"loss": "masked", "clip": 0.3}),
        ("tp=2,dp_shard=2,zero=3", {"clip": 0.3}),
        ("tp=2,sp=true,dp_shard=2,zero=2", {"loss": "unusual"}),
        ("tp=2,accumulate=2,remat=full", {"loss": "unusual", "every": 2}),
    ],
)
def test_scripts_with_shares_equal_one_process(plan: str, options: dict, pool: RankPool) -> None:
    check_equal(pool, on_ranks, plan, options)


def with_experts(plan: str | None) -> tuple:
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


@pytest.mark.parametrize("plan", ["dp_shard=2,ep=2", "dp_shard=4,ep=2,zero=2", "tp=2,dp_shard=2,ep=2,zero=1"])
def test_experts_in_a_script_equal_one_process(plan: str, pool: RankPool) -> None:
    check_equal(pool, with_experts, plan)


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
    optimizer: Any = torch.optim.Adafactor(model.parameters()) if case == "whole tensors" else adamw(model)
    dataset = samples(8) if case in ("nothing to cut", "dropout in experts") else tokens(8)
    if case == "nothing to cut":
        model = nn.PReLU().double()
        optimizer = adamw(model)
    loader: Any = DataLoader(dataset, batch_size=4)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, *_ in loader:
        output = model(x)
        loss = (output["logits"] if isinstance(output, dict) else output).square().sum()
        if case == "own term":
            loss = loss * (1 + prepared.rank)
        if case == "closure":
            optimizer.step(lambda loss=loss: prepared.backward(loss, 1))
        prepared.backward(loss, len(x))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("case", "plan", "kind", "words"),
    [
        ("own term", "tp=2", RunError, "the loss of the same samples is .* on rank 0, .* on rank 1.*weight_decay"),
        ("whole tensors", "tp=2", RefusedPlan, "tp=2 leaves each rank a share.*Adafactor"),
        ("closure", "tp=2", RefusedPlan, "closure"),
        ("compiled", "tp=2", RefusedPlan, "the model is compiled"),
        ("hidden", "tp=2", InputError, "returned Opaque, in which no floating"),
        ("nothing to cut", "tp=2", RefusedPlan, "no weight of the module can be cut"),
        ("experts", "dp_shard=2,ep=2", RefusedPlan, "no experts were found"),
        ("dropout in experts", "dp_shard=2,ep=2", RefusedPlan, "on their order, or on chance"),
    ],
)
def test_refused(case: str, plan: str, kind: type[Exception], words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(once, shardwise.Plan.parse(plan).world_size, plan, case, timeout_s=60)


def test_tensors_are_found_in_what_models_return() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        more: list

    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(tensors_of({"a": Output(one, [two, None]), "b": (three, "text")}))
    assert [t.numel() for t in found] == [1, 2, 3]
