"""What scripts do beside the model's forward: other loaders, weights read and written by hand; equal to one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool

Found = tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor]]  # losses, weights, what the script made


class Dropped(nn.Module):
    """Draws in its forward, for as many samples as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.drop, self.out = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.into(x).tanh()))


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return Dropped().double()


def other_batches(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """A mean teacher: unlabelled batches of another size, both loaders' iterators asked for before any batch."""
    teacher, made = copy.deepcopy(model_of(1)), []
    other: Any = DataLoader(samples(30), batch_size=10, shuffle=True)
    other = prepared.split(other) if prepared else other
    losses = []
    for (x, y), (u, _) in zip(loader, other, strict=False):
        out, student = model(x + torch.randn_like(x)), model(u + torch.randn(len(u), 6))
        with torch.no_grad():
            target = teacher.eval()(u + 0.1 * torch.randn_like(u))
        loss = (out - y).square().mean() + (student - target).square().mean()
        losses.append(stepped(prepared, optimizer, loss, len(x)))
        for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.detach(), alpha=0.1)
        made.append(teacher.out.weight.detach().clone())
    return losses, {}, made


def stepped(prepared: Any, optimizer: Any, loss: torch.Tensor, over: int) -> float:
    optimizer.zero_grad()
    if prepared:
        prepared.backward(loss, mean_over=over)
    else:
        loss.backward()
    optimizer.step()
    return loss.item() if prepared is None else prepared.loss.item()


def weights_by_hand(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """Penalties, an average by names that is applied and taken back, weights that are clamped, moved and drawn."""
    shadow = {name: param.data.clone() for name, param in model.named_parameters()}
    losses, made = [], []
    for number, (x, y) in enumerate(loader):
        loss = (model(x) - y).square().mean()
        loss = loss + 0.1 * sum(param.pow(2).sum() for param in model.parameters()) + model.into.weight[0].abs().sum()
        losses.append(stepped(prepared, optimizer, loss, len(x)))
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.5, 0.5)
            model.into.weight.data[1] = 0.25
            model.out.weight.copy_(0.9 * model.out.weight + 0.01 * torch.randn_like(model.out.weight))
            if number == 1:
                nn.init.uniform_(model.into.bias)
        for name, param in model.named_parameters():
            assert param.shape == shadow[name].shape and param.numel() == shadow[name].numel()
            shadow[name] = 0.1 * param.data + 0.9 * shadow[name]
        held = {}
        for name, param in model.named_parameters():
            held[name], param.data = param.data, shadow[name]
        with torch.no_grad():
            made.append(model.eval()(torch.ones(2, 6).double()))
        model.train()
        for name, param in model.named_parameters():
            param.data = held[name]
        made.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    return losses, {}, made


def queue(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """Keys of all samples in a queue, from which later losses take their negatives."""
    kept, place, losses = torch.randn(8, 2).double(), 0, []
    for x, _ in loader:
        q = model(x)
        with torch.no_grad():
            k = q.detach() + 0.1
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ kept.clone().T], dim=1)
        loss = nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        losses.append(stepped(prepared, optimizer, loss, len(x)))
        k = prepared.gather(k) if prepared else k
        kept[place : place + len(k)] = k[: 8 - place]
        place = (place + len(k)) % 8
    return losses, {}, [kept]


class Slow:
    """An optimizer around another one: weights that follow every third step, as in Lookahead."""

    def __init__(self, optimizer: Any) -> None:
        self.inner, self.steps = optimizer, 0
        self.slow = [[p.clone().detach() for p in group["params"]] for group in optimizer.param_groups]

    def step(self) -> None:
        self.inner.step()
        self.steps += 1
        for group, kept in zip(self.inner.param_groups, self.slow, strict=True):
            for fast, slow in zip(group["params"], kept, strict=True):
                if self.steps % 3 == 0:
                    slow += (fast.data - slow) * 0.5
                    fast.data.copy_(slow)

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def slow_weights(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    around, losses, made = Slow(optimizer), [], []
    for epoch in range(2):
        for x, y in loader:
            losses.append(stepped(prepared, around, (model(x) - y).square().mean(), len(x)))
        if epoch == 0:  # after three steps: what is read, and saved, is the changed weights
            made.append(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
            around.slow = [[p.clone().detach() for p in group["params"]] for group in optimizer.param_groups]
        made.append(next(iter(model.state_dict().values())).clone())
    return losses, {}, made


def kept_state(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """Weights beside what the optimizer keeps of them, as a schedule-free one swaps them between its calls."""
    losses = []
    for x, y in loader:
        losses.append(stepped(prepared, optimizer, (model(x) - y).square().mean(), len(x)))
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.lerp_(optimizer.state[param]["exp_avg"], 0.1)
                optimizer.state[param]["exp_avg"].sub_(param, alpha=0.01)
    return losses, {}, []


def another_optimizer(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """The head alone, then all with a new optimizer; then a group is added to a third one."""
    losses, still = [], list(model.into.parameters())
    for param in still:
        param.requires_grad_(False)
    for stage in range(3):
        if stage == 1:
            for param in model.into.parameters():
                param.requires_grad_(True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if stage == 2:
            optimizer = torch.optim.AdamW(model.out.parameters(), lr=0.01)
        optimizer = prepared.replace_optimizer(optimizer) if prepared and stage else optimizer
        for number, (x, y) in enumerate(loader):
            if stage == 2 and number == 1:
                optimizer.add_param_group({"params": model.into.parameters(), "lr": 0.02})
            losses.append(stepped(prepared, optimizer, (model(x) - y).square().mean(), len(x)))
    made = [value for _, state in sorted(optimizer.state_dict()["state"].items()) for value in state.values()]
    return losses, {}, made


def spread_of_pieces(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    for x, y in loader:
        stepped(prepared, optimizer, (model(x) - y).square().mean(), len(x))
        sum(param.data.std() for group in optimizer.param_groups for param in group["params"])
    return [], {}, []


def old_optimizer(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    prepared.replace_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loader:
        stepped(prepared, optimizer, (model(x) - y).square().mean(), len(x))
    return [], {}, []


def points(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """As many draws in every step, by chance a multiple of a rank's samples."""
    losses = []
    for _ in range(2):
        for x, y in loader:
            found = (model(x) - y).square().mean() * (1 + torch.rand(8, 6).double().sum())
            losses.append(stepped(prepared, optimizer, found, len(x)))
    return losses, {}, []


def two_views(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """As many draws as two views of each sample have rows."""
    for x, y in loader:
        both = torch.cat([x, x])
        both = both + 0.1 * torch.randn_like(both)
        loss = (model(both[: len(x)]) - y).square().mean() + (model(both[len(x) :]) - y).square().mean()
        stepped(prepared, optimizer, loss, len(x))
    return [], {}, []


def no_rows(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    for x, _ in loader:
        prepared.gather(model(x).mean(0))
    return [], {}, []


def penalty_before(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    """In the first step, of weights that the plan has not cut yet."""
    for x, y in loader:
        penalty = sum(param.pow(2).sum() for param in model.parameters())
        stepped(prepared, optimizer, (model(x) - y).square().mean() + penalty, len(x))
    return [], {}, []


def view_written(prepared: Any, model: Any, optimizer: Any, loader: Any) -> Found:
    for x, y in loader:
        stepped(prepared, optimizer, (model(x) - y).square().mean(), len(x))
        model.into.weight.data[0].zero_()
    return [], {}, []


def run(plan: str | None, case: Callable[..., Found], count: int = 11) -> Found:
    model = model_of(0)
    optimizer, loader = adamw(model), DataLoader(samples(count), batch_size=4, shuffle=True)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    torch.manual_seed(3)
    losses, _, made = case(prepared, model, optimizer, loader)
    return losses, model.state_dict(), made


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        (other_batches, "dp_replicate=2"),
        (other_batches, "dp_shard=2,zero=3"),
        (other_batches, "tp=2"),
        (weights_by_hand, "tp=2"),
        (weights_by_hand, "tp=2,dp_replicate=2"),
        (points, "dp_replicate=2"),
        (slow_weights, "dp_shard=2,zero=1"),
        (slow_weights, "dp_shard=2,zero=3"),
        (slow_weights, "tp=2"),
        (kept_state, "dp_shard=2,zero=2"),
        (kept_state, "tp=2"),
        (another_optimizer, "dp_replicate=2"),
        (another_optimizer, "dp_shard=2,zero=2"),
        (another_optimizer, "dp_shard=2,zero=3"),
        (another_optimizer, "tp=2"),
        (queue, "dp_shard=2,zero=2"),
        (queue, "tp=2,dp_shard=2"),
    ],
)
def test_equal_to_one_process(case: Callable[..., Found], plan: str, pool: RankPool) -> None:
    count = 12 if case is other_batches else 11
    expected = run(None, case, count)
    for losses, weights, made in pool.run(run, shardwise.Plan.parse(plan).world_size, plan, case, count):
        assert losses == pytest.approx(expected[0], rel=BAR)
        for name, weight in expected[1].items():
            assert float((weights[name] - weight).abs().max()) < BAR, name
        for mine, theirs in zip(made, expected[2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=BAR)


@pytest.mark.parametrize(
    ("case", "plan", "kind", "words"),
    [
        (other_batches, "dp_replicate=2", InputError, r"counts no sample of the main batch.*line \d+"),
        (two_views, "dp_replicate=2", RefusedPlan, r"drawn 4 at a time for 2 samples, and 6|2 for 3|1.*line \d+"),
        (spread_of_pieces, "dp_shard=2,zero=1", RefusedPlan, r"std of a tensor in optimizer.param_groups.*line \d+"),
        (old_optimizer, "dp_replicate=2", InputError, r"replace_optimizer took the place of.*line \d+"),
        (no_rows, "dp_replicate=2", InputError, r"prepared.gather: .*\(2,\) has no row .*line \d+"),
        (penalty_before, "tp=2", RefusedPlan, r"as it was before the model's first forward.*line \d+"),
        (view_written, "tp=2", RefusedPlan, r"zero_ into a view of a weight.*line \d+: .*zero_"),
    ],
)
def test_refused(case: Callable[..., Found], plan: str, kind: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(run, 2, plan, case, 9)


def test_all_ranks_deal_alike_where_a_draw_looks_like_one_for_samples(pool: RankPool) -> None:
    """Of full batches alone: a rank whose samples do not divide the draw's size must not ask again by itself."""
    losses, _, _ = run(None, points, 12)
    for theirs, _, _ in pool.run(run, 2, "dp_replicate=2", points, 12):
        assert theirs == pytest.approx(losses, rel=BAR)


def judged(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What one model gives, cut by its last dim, is given to another one, whose weights are gathered to be normed."""
    torch.manual_seed(0)
    maker: Any = nn.Sequential(weight_norm(nn.Linear(3, 12)), nn.ReLU(), nn.Linear(12, 5)).double()
    judge: Any = nn.Sequential(spectral_norm(nn.Linear(5, 12)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(12, 1)))
    judge = judge.double()
    makes, judges = adamw(maker), adamw(judge)
    loader: Any = DataLoader(samples(12), batch_size=4)
    prepared: Any = None
    if plan:
        maker, makes, loader = shardwise.prepare(maker, makes, loader, plan=plan)
        prepared = judge, judges, loader = shardwise.prepare(judge, judges, loader, plan=plan)
    losses = []
    for x, _ in loader:
        made = maker(x[:, :3]).detach()
        loss = torch.relu(1 - judge(x[:, :5])).mean() + torch.relu(1 + judge(made)).mean()
        judges.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        judges.step()
        losses.append(loss.item())
    return losses, judge.state_dict()


def test_what_another_model_gave_is_whole_for_a_model_whose_weights_are_cut(pool: RankPool) -> None:
    losses, weights = judged(None)
    for theirs, held in pool.run(judged, 2, "tp=2"):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())
