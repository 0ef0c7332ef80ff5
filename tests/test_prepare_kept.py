"""What a script keeps of its samples from step to step: equal to one process, or refused in the line that uses it."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_prepare import BAR, adamw, net, samples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.engine.engine import Engine
from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.ranks import RankPool
from shardwise.scripts.draws import SampleDraws

Loss = Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]


def centers(prepared: Any) -> Loss:
    """A center for each class, moved towards its samples by hand."""
    kept = torch.zeros(3, 2, dtype=torch.float64)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        out, of = model(x), (y[:, 0] * 3).long().clamp(0, 2)
        found = (out - y).square().mean() + 0.1 * (out - kept[of]).square().mean()
        for c in range(3):
            if bool((of == c).any()):
                kept[c] += 0.5 * (out[of == c].detach().mean(0) - kept[c])
        return found

    return loss


def trained_centers(prepared: Any) -> Loss:
    """Centers that are parameters, with an optimizer of their own."""
    kept = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([kept], lr=0.5)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        out = model(x)
        return (out - y).square().mean() + (out - kept).square().mean()

    loss.after = step  # type: ignore[attr-defined]
    return loss


def queue(prepared: Any) -> Loss:
    """Negatives from a queue of earlier outputs, as in MoCo."""
    kept, place = torch.randn(8, 2, generator=torch.Generator().manual_seed(3)).double(), [0]

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        q = model(x)
        with torch.no_grad():
            k = model(x + 0.1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ kept.clone().T], dim=1)
        found = nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        kept[place[0] : place[0] + len(k)] = k.detach()
        place[0] = (place[0] + len(k)) % 8
        return found

    return loss


def baseline(prepared: Any) -> Loss:
    """A running mean of rewards, a number of Python's."""
    kept = [0.0]

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        found = ((model(x) - y).square().sum(1) * (y[:, 0] - kept[0])).mean()
        kept[0] = 0.9 * kept[0] + 0.1 * y[:, 0].mean().item()
        return found

    return loss


def baseline_of_policy(prepared: Any) -> Loss:
    """The same beside a distribution, which checks its arguments by a branch on them."""
    kept = [0.0]

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        found = torch.distributions.Categorical(logits=model(x))
        reward = y[:, 0] - kept[0]
        log_prob = found.log_prob((y[:, 1] > 0).long())
        kept[0] = 0.9 * kept[0] + 0.1 * y[:, 0].mean().item()
        return -(log_prob * reward).mean()

    return loss


def summed(prepared: Any) -> Loss:
    """The same, of all samples: `prepared.sum` of numbers and of tensors."""
    kept, center = [0.0], torch.zeros(2, dtype=torch.float64)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        out = model(x)
        found = ((out - y).square().sum(1) * (y[:, 0] - kept[0])).mean() + (out - center).square().mean()
        parts = (y[:, 0].sum(), out.detach().sum(0))
        number, tensor = prepared.sum(*parts) if prepared else parts
        kept[0] = 0.9 * kept[0] + 0.1 * float(number) / total
        center.mul_(0.9).add_(0.1 * tensor / total)
        return found

    return loss


def centered_teacher(prepared: Any) -> Loss:
    """A frozen teacher beside the model, whose outputs are centered by a running mean, as in DINO."""
    teacher, kept = net(), torch.zeros(2, dtype=torch.float64)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        nonlocal kept
        with torch.no_grad():
            given = teacher(x)
        target = (given - kept).softmax(-1)
        kept = kept * 0.9 + given.mean(0) * 0.1
        return -(target * model(x).log_softmax(-1)).sum(-1).mean()

    return loss


def pool_of_outputs(prepared: Any) -> Loss:
    """Earlier outputs in a list, some of which enter the loss again, as in CycleGAN."""
    kept: list[torch.Tensor] = []

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        out = model(x)
        found = (out - y).square().mean()
        if kept:
            found = found + (model(torch.cat([x, torch.cat(kept[-1:]).repeat(1, 3)]))[: len(x)] - y).square().mean()
            found = found + (out - kept[0]).square().mean()
        kept.append(out.detach()[:1])
        return found

    return loss


def averaged_number(prepared: Any) -> Loss:
    """A weight of the loss from its own running mean, a tensor."""
    kept = torch.ones((), dtype=torch.float64)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        nonlocal kept
        found = (model(x) - y).square().mean()
        found, kept = found / kept.sqrt(), 0.5 * kept + 0.5 * found.detach()
        return found

    return loss


def drawn_by_numpy(prepared: Any) -> Loss:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        return (model(x + torch.from_numpy(np.random.randn(*x.shape))) - y).square().mean()

    return loss


def mixed_by_numpy(prepared: Any) -> Loss:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        return (model(0.7 * x + 0.3 * x[np.random.permutation(len(x))]) - y).square().mean()

    return loss


def beside(prepared: Any) -> Loss:
    """Unlabelled samples of another loader, cut likewise, in every step."""
    held: Any = DataLoader(samples(16), batch_size=4)
    batches = iter(prepared.split(held) if prepared else held)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        nonlocal batches
        other = next(batches, None)
        if other is None:
            batches = iter(prepared.split(held) if prepared else held)
            other = next(batches)
        return (model(x) - y).square().mean() + (model(other[0]) - other[1]).abs().mean()

    return loss


def noise_beside(prepared: Any) -> Loss:
    """Noise for unlabelled samples, of which another loader has more to a batch."""
    held: Any = DataLoader(samples(64), batch_size=8)
    batches = iter(prepared.split(held) if prepared else held)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        other = next(batches)[0]
        return (model(x) - y).square().mean() + model(other + torch.randn_like(other)).abs().mean()

    return loss


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return self.head(h), h


def honest(prepared: Any) -> Loss:
    """Everything that may be kept: averages of weights, constants, numbers that are drawn or counted, scratch."""
    torch.manual_seed(5)
    average, eye = copy.deepcopy(net()), torch.eye(2, dtype=torch.float64)
    total_loss, step, logged = torch.zeros((), dtype=torch.float64), [0], [0.0]
    scratch, features = torch.zeros(8, 2, dtype=torch.float64), []
    random.seed(3)

    def loss(model: Any, x: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
        nonlocal total_loss
        if not features:
            model.layers.register_forward_hook(lambda m, a, out: features.append(out.detach()))
        step[0] += 1
        lam = random.random()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), (prepared or model).parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            target = average(x)
        out = model(x + lam * torch.randn_like(x) / step[0])
        scratch.zero_()
        scratch[: len(x)] = y
        found = (out @ eye - scratch[: len(x)]).square().mean() + torch.tensor(0.3) * (out - target).square().mean()
        found = found + 0.1 * features[-1].square().mean()  # a constant, of this step
        total_loss = total_loss + found.detach()
        logged[0] += found.item()
        return found

    return loss


def run(plan: str | None, case: str, options: dict, batch: int = 4, epochs: int = 2) -> tuple[list[float], dict]:
    model = net()
    optimizer, loader = adamw(model), DataLoader(samples(16), batch_size=batch)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan, **options)
    torch.manual_seed(3)
    loss_of, losses = globals()[case](prepared), []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y, batch)
            if prepared:
                loss = prepared.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            getattr(loss_of, "after", lambda: None)()
            losses.append(loss.item())
    return losses, model.state_dict()


def compare(ran: list, expected: tuple[list[float], dict]) -> None:
    for losses, weights in ran:
        assert losses == pytest.approx(expected[0], rel=BAR)
        for name, weight in expected[1].items():
            assert float((weights[name] - weight).abs().max()) < BAR, name


KEPT = ["centers", "queue", "baseline", "baseline_of_policy", "centered_teacher", "pool_of_outputs", "averaged_number"]


@pytest.mark.parametrize("case", KEPT)
def test_what_a_script_keeps_of_its_samples_is_refused_or_whole(case: str, pool: RankPool) -> None:
    words = r"keeps from step to step.*prepared.sum.*loss_scope=.global.*\[test_prepare_kept.py, line \d+: .*kept"
    with pytest.raises(RefusedPlan, match=words):
        pool.run(run, 2, "dp_replicate=2", case, {})
    compare(pool.run(run, 2, "dp_shard=2,zero=2", case, {"loss_scope": "global"}), run(None, case, {}))


def test_noise_for_samples_beside_is_theirs(pool: RankPool) -> None:
    compare(pool.run(run, 2, "dp_replicate=2", "noise_beside", {}), run(None, "noise_beside", {}))


def test_a_parameter_trained_beside_is_refused(pool: RankPool) -> None:
    words = r"shape \(2,\), which is trained outside.*line \d+: .*out - kept"
    with pytest.raises(RefusedPlan, match=words):
        pool.run(run, 2, "dp_shard=2,zero=1", "trained_centers", {})


@pytest.mark.parametrize("case", ["drawn_by_numpy", "mixed_by_numpy"])
def test_numbers_that_numpy_draws_for_samples_are_refused(case: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"NumPy's or Python's generator.*line \d+: .*random"):
        pool.run(run, 2, "dp_replicate=2", case, {})


@pytest.mark.parametrize(
    ("plan", "case"),
    [
        ("dp_shard=2,zero=3", "summed"),
        ("dp_replicate=2", "beside"),
        ("dp_shard=2,zero=3", "honest"),
        ("dp_replicate=2", "honest"),
    ],
)
def test_what_is_alike_on_all_ranks_is_right(plan: str, case: str, pool: RankPool) -> None:
    compare(pool.run(run, 2, plan, case, {}), run(None, case, {}))


def recurrent(plan: str | None, when: str) -> tuple[list[float], dict]:
    """Lines of text in columns: the state of one batch's samples goes on in the next."""
    torch.manual_seed(0)
    model: Any = Recurrent().double()
    optimizer, loader = adamw(model), DataLoader(samples(16), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses, h = [], None
    for x, y in loader:
        h = torch.zeros(len(x), 5, dtype=torch.float64) if h is None else h.detach() if when == "before" else h
        out, h = model(x, h)
        loss = (out - y).square().mean()
        optimizer.zero_grad()
        if prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        h = h.detach() if when == "after" else h
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_state_of_samples_goes_on_with_them(when: str, pool: RankPool) -> None:
    compare(pool.run(recurrent, 2, "dp_replicate=2", when), recurrent(None, when))


def test_a_state_of_other_samples_is_refused(pool: RankPool) -> None:
    """The first batch of four is dealt two to a rank, so that its loss can be looked at, and the next one to a rank."""
    with pytest.raises(RefusedPlan, match=r"for samples \d to \d of 4, .*check_loss=False.*line \d+: out, h = model"):
        pool.run(recurrent, 4, "dp_replicate=4", "before")


class Quantized(nn.Module):
    """Counts how often each of its codes is nearest, in a buffer, and pulls towards the rare ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 2), nn.Linear(2, 2)
        self.writes = True
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        if self.training and self.writes:
            found = torch.bincount((z[:, 0] * 9).long() % 4, minlength=4)
            self.counts.mul_(0.9).add_(found, alpha=0.1)
            self.last.copy_(found.argmax())
        return self.decode(z / self.counts.mean())


def quantized(plan: str, check_loss: bool, first: int = 0) -> None:
    """`first`: the step from which on the buffer is written."""
    torch.manual_seed(0)
    model = Quantized().double()
    loader = DataLoader(samples(40 if first else 16), batch_size=4)
    prepared = shardwise.prepare(model, adamw(model), loader, plan=plan, check_loss=check_loss)
    for step, (x, y) in enumerate(prepared.loader):
        model.writes = step >= first
        prepared.optimizer.zero_grad()
        prepared.backward((model(x) - y).square().mean())
        prepared.optimizer.step()


@pytest.mark.parametrize(
    ("plan", "check_loss", "words"),
    [
        ("dp_replicate=2", True, "'counts' is computed from the samples of a micro-batch.*line"),
        ("dp_replicate=2", False, r"buffer 'counts' \(1 in all\).*all_reduce.*line \d+: .*step"),
        ("dp_shard=2,zero=3", False, r"buffer 'counts' \(1 in all\).*all_reduce.*line \d+: .*step"),
    ],
)
def test_a_buffer_that_a_rank_writes_from_its_samples_is_refused(
    plan: str, check_loss: bool, words: str, pool: RankPool
) -> None:
    with pytest.raises(RefusedPlan, match=words):
        pool.run(quantized, 2, plan, check_loss)


def test_a_buffer_that_is_written_from_a_later_step_on_is_refused(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"after step 8 the buffer 'counts' \(1 in all\).*line \d+: .*step"):
        pool.run(quantized, 2, "dp_replicate=2", True, 5)


def by_tokens(plan: str, what: str) -> list[str]:
    """A learning rate that follows the tokens seen, as each rank counts its own."""
    model = net()
    prepared: Any = shardwise.prepare(model, adamw(model), DataLoader(samples(16), batch_size=4), plan=plan)
    schedule = torch.optim.lr_scheduler.ExponentialLR(prepared.optimizer, 0.9) if what == "scheduled" else None
    tokens, said = 0, prepared._told._said
    for x, y in prepared.loader:
        prepared.optimizer.zero_grad()
        prepared.backward((model(x) - y).square().mean())
        prepared.optimizer.step()
        tokens += (y > -9).sum() if what != "summed" else torch.tensor(prepared.sum((y > -9).sum())[0])
        if schedule is not None:
            schedule.step()
            assert float(tokens) > 0  # as it is logged
        else:
            prepared.optimizer.param_groups[0]["lr"] = 1e-2 / float(tokens)
    return sorted(said)


def test_a_rate_by_a_count_of_own_samples_is_refused(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"tokens seen.*line \d+: .*float\(tokens\)"):
        pool.run(by_tokens, 2, "dp_replicate=2", "own")
    assert not any("tokens seen" in each for each in pool.run(by_tokens, 2, "dp_replicate=2", "summed")[0])
    assert any("tokens seen" in each for each in pool.run(by_tokens, 2, "dp_replicate=2", "scheduled")[0])


def with_taken_gradients(plan: str) -> None:
    model: Any = net()
    optimizer = adamw(model)
    prepared = shardwise.prepare(model, optimizer, DataLoader(samples(16), batch_size=4), plan=plan)
    for x, y in prepared.loader:
        loss = (model(x) - y).square().mean()
        torch.autograd.grad(loss, model.layers[2].weight, retain_graph=True)
        prepared.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_a_gradient_at_a_cut_weight_is_refused(pool: RankPool) -> None:
    """As tasks are weighted by the norms of their gradients at a shared layer."""
    with pytest.raises(RefusedPlan, match=r"autograd.grad\(..., parameters\).*line \d+: .*layers"):
        pool.run(with_taken_gradients, 2, "tp=2")


ORDERS = {
    "first": lambda n: torch.zeros(n, 3, 4),
    "second": lambda n: torch.zeros(3, n, 4).transpose(0, 1),
    "last": lambda n: torch.zeros(3, 4, n).permute(2, 0, 1),
    "expanded": lambda n: torch.zeros(n, 3, 1).expand(n, 3, 4),
    "channels last": lambda n: torch.zeros(n, 3, 2, 2).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 2])
def test_draws_into_a_tensor_follow_its_order_in_memory(order: str, count: int) -> None:
    """As attention gives it where a module computes time first: dropout draws in the order of memory."""
    make, watched = ORDERS[order], SampleDraws()
    into = [] if order == "expanded" else [lambda t: t.bernoulli_(0.5)]
    for draw in (*into, lambda t: nn.functional.dropout(t + 1, 0.5), torch.rand_like):
        torch.manual_seed(0)
        expected = draw(make(6))
        torch.manual_seed(0)
        watched.part = Share(None, count, 2, 6)
        with watched:
            assert torch.equal(draw(make(count)), expected[2 : 2 + count])


def ended(plan: str) -> int:
    """How many engines more are alive after a script's loop has ended and its names are gone."""

    def script() -> None:
        model = net()
        prepared = model, optimizer, loader = shardwise.prepare(
            model, adamw(model), DataLoader(samples(16), batch_size=8), plan=plan
        )
        for x, y in loader:
            optimizer.zero_grad()
            prepared.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()

    def engines() -> int:
        gc.collect()
        return sum(isinstance(one, Engine) for one in gc.get_objects())

    before = engines()  # of scripts that had not come to an end
    script()
    return engines() - before


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_a_script_that_has_ended_leaves_nothing_behind(plan: str, pool: RankPool) -> None:
    """Its last outputs held the graph, that the weights, and these their groups: in every job of a process one more."""
    assert pool.run(ended, 2, plan) == [0, 0]


class Flow(nn.Module):
    """A log density that is begun with zeros, in a method that is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        found, z = x.new_zeros(x.shape[0]), x
        z = self.net(z)
        found -= z.square().sum(dim=1)
        return self.prior.log_prob(z) + found


def dense(plan: str | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = Flow().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(40, 2, dtype=torch.float64)), batch_size=10)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for (x,) in loader:
        loss = -model.log_prob(x).mean()
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_zeros_for_each_sample_are_of_the_samples(pool: RankPool) -> None:
    """Also where parts are uneven, to find out what a number of unknown making counts."""
    alone = dense(None)
    for losses in pool.run(dense, 2, "dp_replicate=2"):
        assert losses == pytest.approx(alone, rel=1e-9)
