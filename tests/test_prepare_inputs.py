"""Scripts that differentiate by what a model is given, hold its weights still for a forward, or transform it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import stepped
from torch import nn
from torch.func import jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.ranks import RankPool

BAR = 1e-10


def samples(count: int, *shape: int) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(count, *one, dtype=torch.float64, generator=made) for one in (shape, (2,))))


def attacked(plan: str | None, options: dict[str, Any], penalty: bool) -> tuple[list[list[float]], dict]:
    """Inputs moved by the loss's gradient while the weights are held still; a penalty on it differentiates it again."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    loader: Any = DataLoader(samples(14, 4), batch_size=4)  # the last batch has two samples
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan, **options)
    found = []
    for x, y in loader:
        given = x.clone().requires_grad_()
        if not penalty:
            model.requires_grad_(False)
        (asked,) = torch.autograd.grad((model(given) - y).square().sum(), given, create_graph=penalty)
        model.requires_grad_(True)
        loss = (model(x + 0.1 * asked.detach()) - y).square().mean()
        if penalty:
            loss = loss + (asked.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        if prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        # a script reads the gradient of all samples where it has all of them
        found.append([loss.item(), *(asked.abs().sum(1).tolist() if not plan or options else [])])
    return found, model.state_dict()


@pytest.mark.parametrize(
    ("plan", "options", "penalty"),
    [
        ("dp_shard=2,zero=3", {}, False),
        ("tp=2", {}, False),
        ("dp_shard=2,zero=3", {"loss_scope": "global"}, False),
        ("dp_shard=3,zero=2", {"loss_scope": "global"}, True),  # in the last batch a rank has no sample
    ],
)
def test_gradients_of_inputs(plan: str, options: dict[str, Any], penalty: bool, pool: RankPool) -> None:
    expected, weights = attacked(None, options, penalty)
    for found, trained in pool.run(attacked, shardwise.Plan.parse(plan).world_size, plan, options, penalty):
        for mine, alone in zip(found, expected, strict=True):
            assert mine == pytest.approx(alone[: len(mine)], rel=BAR)
        for name, weight in weights.items():
            assert float((trained[name] - weight).abs().max()) < BAR, name


def transformed(plan: str, before: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = shardwise.prepare(model, optimizer, DataLoader(samples(8, 4), batch_size=4), plan=plan)
    for x, _ in loader:
        vmap(lambda row: row.sin())(x)  # of the batch alone
        if before:
            model(x)
        vmap(jacrev(model))(x)


@pytest.mark.parametrize(("plan", "before"), [("dp_replicate=2", True), ("tp=2", False)])
def test_a_model_within_a_transform_is_refused(plan: str, before: bool, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"inside a transform of torch.func.*autograd.grad.*line \d+: .*vmap"):
        pool.run(transformed, 2, plan, before)


class AsLongAsTheLongest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(3, 2, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True, padding_value=1.0)[0]


def padded() -> None:
    model = AsLongAsTheLongest().double()
    lengths = torch.tensor([5, 3, 5, 3, 5, 5, 3, 3])
    data = TensorDataset(samples(8, 5, 3).tensors[0], lengths)
    prepared: Any = shardwise.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4), plan="dp_replicate=2"
    )
    for x, n in prepared.loader:
        model(x, n)


def test_an_output_as_long_as_the_longest_sample_is_told(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"gives \(2, 5, 2\) for 2 samples and \(1, 3, 2\) for 1 .*total_length"):
        pool.run(padded, 2)


GIVEN = {
    "normalised": lambda x: (x - x.mean(0)) / x.std(0),
    "in place": lambda x: x.sub_(x.mean(0)),
    "rolled": lambda x: x + x.roll(1, 0),
    "by itself": lambda x: (x - x.mean(1, keepdim=True) + torch.randn_like(x))[:, : int((x > -9).sum(1).max())],
    "scaled by a constant": lambda x: torch.cat([x[:, :2] * 3, x[:, 2:]], 1).clamp_(-2, 2),
}


def given(plan: str | None, how: str) -> list[float]:
    """A model whose arguments the script computes from the batch."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(14, 4), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(GIVEN[how](x)) - y).square().mean()
        losses.append(stepped(loss, optimizer, prepared))
    return losses


@pytest.mark.parametrize("how", ["normalised", "in place", "rolled"])
def test_arguments_made_of_several_samples_are_refused(how: str, pool: RankPool) -> None:
    with pytest.raises(
        RefusedPlan, match=r"given for some samples changes.*loss_scope=.global.*line \d+: loss = .*GIVEN"
    ):
        pool.run(given, 2, "dp_shard=2,zero=2", how)


@pytest.mark.parametrize("how", ["by itself", "scaled by a constant"])
def test_arguments_made_sample_by_sample_are_right(how: str, pool: RankPool) -> None:
    for losses in pool.run(given, 2, "dp_replicate=2", how):
        assert losses == pytest.approx(given(None, how), rel=BAR)


class Potential(nn.Module):
    """Energies, and forces as their gradient, which a loss differentiates again."""

    def __init__(self) -> None:
        super().__init__()
        self.of_pairs = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def forward(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places.requires_grad_()
        apart = (places[:, :, None] - places[:, None]).square()
        energies = self.of_pairs(apart[..., None]).sum((1, 2, 3))
        return energies, -torch.autograd.grad(energies.sum(), places, create_graph=True)[0]


def forces(plan: str | None) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model: Any = Potential()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=1e-2), DataLoader(samples(14, 3), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for places, y in loader:
        energies, pulled = model(places)
        optimizer.zero_grad()
        loss = (energies - y[:, 0]).square().mean() + pulled.square().mean()
        losses.append(stepped(loss, optimizer, prepared))
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2"])
def test_a_model_that_takes_gradients_itself(plan: str, pool: RankPool) -> None:
    losses, weights = forces(None)
    for theirs, held in pool.run(forces, 2, plan):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(3, 4).double(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.sparse.mm(edges, self.net(x)))


def graph(plan: str) -> None:
    """One graph for good, beside which nothing is loaded."""
    model, x, edges = Graph(), torch.randn(4, 3).double(), torch.eye(4).double().to_sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, _ = shardwise.prepare(model, optimizer, [(x, x)], plan=plan)  # type: ignore[assignment]
    model(x, edges)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("tp=2", r"layout torch.sparse_coo.*to_dense.*line \d+: model\(x, edges\)"),
        ("dp_replicate=2", r"has handed out no batch.*line \d+: model\(x, edges\)"),
    ],
)
def test_a_graph_that_is_no_batch_is_refused(plan: str, told: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=told):
        pool.run(graph, 2, plan)
