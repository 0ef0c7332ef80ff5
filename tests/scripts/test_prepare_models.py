"""Models that are more than one call: in parts, copied, followed, thawed, with states of their samples, in a loop."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_scripts import adamw, back, batches, begin, check_equal, made, mse, net, samples, train, weights_of, whole
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool

ALL_PLANS = ("dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2")
PLAN_4 = "tp=2,dp_shard=2,zero=2"


def cases(quick: list[tuple], rest: list[tuple]) -> list[Any]:
    return [*quick, *(pytest.param(*one, marks=pytest.mark.long) for one in rest if one not in quick)]


def body(out: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, out))


# --- modules that a script calls by themselves


class Agent(nn.Module):
    """A model without a forward, whose methods call its modules and read a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.actor, self.critic = nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.body(x) * self.scale)

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(self.body(x)), self.value(x)


def agent(prepared: Any, model: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    with torch.no_grad():
        model.eval()
        played.append(model.value(torch.ones(3, 6, dtype=torch.float64)).sum().item())
        model.train()
    out, value = model.both(x)
    return (out - y).square().mean() + 0.1 * value.square().mean()


def several(prepared: Any, models: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    """An encoder, a head and a frozen target that follows the encoder, batch norms among them."""
    encoder, head, target = models
    h = encoder(x)
    with torch.no_grad():
        goal = target(x)
        with whole(prepared):
            for kept, param in zip(target.parameters(), encoder.parameters(), strict=True):
                kept.data = 0.9 * kept.data + 0.1 * param.data
    return (head(h) - y).square().mean() + 0.1 * (h - goal).square().mean()


def weighed(prepared: Any, models: Any, x: torch.Tensor, y: torch.Tensor, played: list[float]) -> torch.Tensor:
    """Two terms by learned weights, parameters of the script's own beside the model."""
    model, weights = models
    out, logs = model(x), weights[0]
    each = torch.stack([(out - y).square().mean(), out.abs().mean()])
    return ((-logs).exp() * each + logs).sum()


MAKES: dict[Any, Callable[[], Any]] = {
    agent: Agent,
    several: lambda: nn.ModuleList([body(), nn.Linear(8, 2), body().requires_grad_(False)]),
    weighed: lambda: nn.ModuleList([nn.Linear(6, 2), nn.ParameterList([torch.zeros(2)])]),
}


def in_parts(plan: str | None, case: Callable) -> tuple:
    given, played = made(MAKES[case]), list[float]()
    model = tuple(given) if isinstance(given, nn.ModuleList) else given
    prepared, model, optimizer, loader = begin(plan, model, batches(12, shuffle=True), adamw(given))
    torch.manual_seed(7)
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = case(prepared, model, x, y, played)
            optimizer.zero_grad()
            losses.append(back(prepared, loss))
            optimizer.step()
    return losses, played, weights_of(prepared or given)


IN_PARTS: list[tuple] = [(agent, "dp_shard=2,zero=3"), (several, "dp_shard=2,zero=3"), (agent, "tp=2"),
                         (several, "dp_replicate=2"), (weighed, "dp_shard=2,zero=2"), (weighed, "tp=2")]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "plan"),
    cases(IN_PARTS, [(case, plan) for case in MAKES for plan in (*ALL_PLANS, PLAN_4)]),
)
def test_modules_that_are_called_by_themselves(case: Callable, plan: str, pool: RankPool) -> None:
    check_equal(pool, in_parts, plan, case)


class Coder(nn.Module):
    """Samples are drawn by `decode`, which goes past the model's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.dec = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.ones(6))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.dec(z) * self.scale

    def rebuild(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.enc(x))


def decoded(plan: str | None) -> list[float]:
    prepared, model, optimizer, loader = begin(plan, made(Coder), batches(8))
    z, found = torch.ones(2, 8).double(), []
    for x, _ in loader:
        found.append(back(prepared, mse(model, x, x)))
        optimizer.step()
        found.append(model.decode(z).sum().item())  # with gradients
        optimizer.zero_grad()
        with torch.no_grad():
            found += [model.decode(z).sum().item(), float(model.enc(z[:, :6]).shape[1])]
            found += [model.rebuild(z[:, :6]).sum().item(), sum(p.norm().item() for p in model.parameters())]
    return found


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "tp=2", "dp_shard=2,zero=1"])
def test_what_a_script_calls_and_reads_beside_the_forward(plan: str, pool: RankPool) -> None:
    check_equal(pool, decoded, plan)


class Flat(nn.Module):
    """Its last weight is in no unit of zero=3 but the whole, which gathers for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.out = nn.Parameter(torch.linspace(-1.0, 1.0, 48).view(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x) @ self.out).flatten().view(-1, 6)


def squeezed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What the model gives is written into; in a last batch of two a `squeeze()` would find one sample on a rank."""
    return F.mse_loss(model(x).div_(2.0).sum(1, keepdim=True).squeeze(), y[:, 0])


def written_outputs(plan: str | None, check: bool) -> tuple:
    return train(plan, made(Flat), batches(10), squeezed, check_loss=check)


@pytest.mark.filterwarnings("error:Using a target size")
@pytest.mark.parametrize("check", [True, False])
def test_outputs_are_written_into_and_one_sample_is_never_squeezed(check: bool, pool: RankPool) -> None:
    check_equal(pool, written_outputs, "dp_shard=2,zero=3", check)


def judged(plan: str | None) -> tuple:
    """What one model gives, cut by its last dim, is given to another one, whose weights are gathered to be normed."""
    maker = made(lambda: nn.Sequential(weight_norm(nn.Linear(3, 12)), nn.ReLU(), nn.Linear(12, 5)))
    norm: Any = spectral_norm
    judge = made(lambda: nn.Sequential(norm(nn.Linear(5, 12)), nn.LeakyReLU(0.2), norm(nn.Linear(12, 1))))
    _, maker, _, loader = begin(plan, maker, batches(12))

    def loss_of(judge: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(1 - judge(x[:, :5])).mean() + torch.relu(1 + judge(maker(x[:, :3]).detach())).mean()

    return train(plan, judge, loader, loss_of)


def test_what_another_model_gave_is_whole_for_a_model_whose_weights_are_cut(pool: RankPool) -> None:
    check_equal(pool, judged, "tp=2")


# --- networks that follow the first


class Bootstrap(nn.Module):
    """BYOL: returns its loss, beside a target in training mode that a method moves."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.head = body(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.target: Any = copy.deepcopy(self.online).requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))  # in no unit of zero=3 but the whole
        self.follows = nn.Parameter(torch.ones(4), requires_grad=False)

    @torch.no_grad()
    def move(self) -> None:
        for number, (mine, theirs) in enumerate(zip(self.online.parameters(), self.target.parameters(), strict=True)):
            if number % 2:
                theirs.data = 0.9 * theirs.data + 0.1 * mine.data
            else:
                theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)
        self.follows.data = 0.9 * self.follows.data + 0.1 * self.scale.data
        self.target[0].bias.data.add_(0.1)
        self.follows.data.add_(0.01)

    @torch.no_grad()
    def move_scale(self) -> None:
        self.scale.mul_(0.9)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = self.target(two) * self.follows
        return -F.cosine_similarity(self.head(self.online(one) * self.scale), goal, dim=-1).mean()


def moved_outside(plan: str, leaf: str) -> None:
    prepared, model, _, loader = begin(plan, made(Bootstrap), batches(12))
    x, _ = next(iter(loader))
    prepared.backward(model(x, x.flip(1)))
    model.move_scale() if leaf == "scale" else model.move()


@pytest.mark.parametrize(("leaf", "words"), [("scale", "mul_ into a weight"), ("", "data of a weight")])
def test_a_method_that_writes_weights_is_told_how(leaf: str, words: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=rf"{words}.*prepared.whole.*line \d+"):
        pool.run(moved_outside, 2, "dp_shard=2,zero=3", leaf)


def bootstrapped(plan: str | None, kind: type = Bootstrap) -> tuple:
    prepared, model, optimizer, loader = begin(plan, made(kind), batches(12))
    losses = []
    for x, _ in loader:
        loss = model(x, x.flip(1))
        optimizer.zero_grad()
        losses.append(back(prepared, loss))
        optimizer.step()
        with whole(prepared):
            model.move()
    return losses, weights_of(model)


def copied(plan: str | None) -> tuple:
    """A teacher that is copied after the first step, batch norm and hooks of the plan and all."""
    prepared, model, optimizer, loader = begin(plan, made(lambda: nn.Sequential(body(4), nn.Linear(4, 2))), batches(12))
    losses, teacher, first = [], copy.deepcopy(model), copy.deepcopy(model[0][0])
    for x, y in loader:
        with torch.no_grad():
            goal = teacher.eval()(x)
        loss = mse(model, x, y) + (model[1].weight - teacher[1].weight).square().sum() * 0.1
        loss = loss + 0.1 * mse(model, x, goal) + first.weight.square().mean()
        optimizer.zero_grad()
        losses.append(back(prepared, loss))
        optimizer.step()
        teacher = copy.deepcopy(model)
        assert type(teacher) is nn.Sequential and type(teacher[0][0].weight) is nn.Parameter
        assert not teacher._forward_hooks and "forward" not in vars(teacher[0][1])
    return losses, weights_of(teacher)


FOLLOWERS: list[tuple] = [
    (bootstrapped, "dp_replicate=2"), (bootstrapped, "dp_shard=2,zero=3"), 
    (copied, "dp_shard=2,zero=2"), (copied, "dp_shard=2,zero=3"), (copied, "tp=2"),
]  # fmt: skip
MORE = [(bootstrapped, "dp_shard=2,zero=1"), (copied, "tp=2,dp_shard=2,zero=2")]


@pytest.mark.parametrize(("script", "plan"), cases(FOLLOWERS, MORE))
def test_a_network_that_follows_another_is_one_process_s(script: Any, plan: str, pool: RankPool) -> None:
    check_equal(pool, script, plan)


# --- what changes in mid training


def thawed(plan: str | None, how: str) -> tuple:
    """A body that is frozen at `prepare` and trained from the second epoch on."""
    model = made(lambda: nn.Sequential(body(4), nn.Linear(4, 2)))
    model[0].requires_grad_(False)
    loader = batches(8)
    prepared, model, optimizer, loader = begin(plan, model, loader, adamw(model[1]), thaws=how != "untold")
    losses = []
    for epoch in range(2):
        if epoch:
            model[0].requires_grad_(True)
            if how == "group":
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.002})
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                optimizer = prepared.replace_optimizer(optimizer) if prepared else optimizer
        for x, y in loader:
            loss = mse(model, x, y)
            optimizer.zero_grad()
            losses.append(back(prepared, loss))
            optimizer.step()
    return losses, weights_of(model)


@pytest.mark.parametrize(("how", "plan"), [("group", "dp_shard=2,zero=3"), ("another", "dp_replicate=2")])
def test_what_is_frozen_at_prepare_may_be_trained_later(how: str, plan: str, pool: RankPool) -> None:
    check_equal(pool, thawed, plan, how)


def test_what_is_thawed_without_a_word_is_refused_with_the_remedy(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"'0.0.weight', which was frozen at prepare.*thaws=True"):
        pool.run(thawed, 2, "dp_replicate=2", "untold")


def in_stages(plan: str | None) -> tuple:
    """The head alone, then all with a new optimizer; then a group is added to a third one."""
    prepared, model, optimizer, loader = begin(plan, net(), batches(11, shuffle=True))
    torch.manual_seed(3)
    losses = []
    for stage in range(3):
        model.layers.requires_grad_(stage > 0)
        if stage == 1:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if stage == 2:
            optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.01)
        optimizer = prepared.replace_optimizer(optimizer) if prepared and stage else optimizer
        for number, (x, y) in enumerate(loader):
            if stage == 2 and number == 1:
                optimizer.add_param_group({"params": model.layers.parameters(), "lr": 0.02})
            optimizer.zero_grad()
            losses.append(back(prepared, mse(model, x, y)))
            optimizer.step()
    return losses, weights_of(model), optimizer.state_dict()["state"]


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2"])
def test_stages_with_optimizers_of_their_own(plan: str, pool: RankPool) -> None:
    check_equal(pool, in_stages, plan)


def by_the_old_one(plan: str) -> None:
    prepared, model, optimizer, loader = begin(plan, net(), batches(8))
    prepared.replace_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in loader:
        prepared.backward(mse(model, x, y))
        optimizer.step()


def test_an_optimizer_that_was_replaced_steps_no_more(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"replace_optimizer took the place of.*line \d+"):
        pool.run(by_the_old_one, 2, "dp_replicate=2")


# --- what is kept from step to step


class Recurrent(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.cell, self.head, self.keeps = nn.GRUCell(6, 5), nn.Linear(5, 2), keeps
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, h: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, self.state if self.keeps else h)
        self.state = h.detach()
        return self.head(h), h


def recurrent(plan: str | None, when: str) -> tuple:
    """The state of one batch's samples goes on in the next: of the script, detached before or after, or the model's."""
    prepared, model, optimizer, loader = begin(plan, made(lambda: Recurrent(when == "kept")), batches(16))
    losses, h = [], None
    for x, y in loader:
        h = torch.zeros(len(x), 5, dtype=torch.float64) if h is None else h.detach() if when == "before" else h
        out, h = model(x, None if when == "kept" else h)
        optimizer.zero_grad()
        losses.append(back(prepared, 2.0 * (out - y).square().mean()))
        h = h.detach() if when == "after" else h
        optimizer.step()
    return losses, weights_of(model)


@pytest.mark.parametrize(
    ("plan", "when"),
    [("dp_replicate=2", "before"), ("dp_replicate=2", "after"), ("dp_replicate=2", "kept"),
     ("dp_replicate=4", "before")],
)  # fmt: skip
def test_the_state_of_samples_goes_on_with_them(plan: str, when: str, pool: RankPool) -> None:
    check_equal(pool, recurrent, plan, when)


def kept(plan: str | None) -> tuple:
    """Running means of all samples by `prepared.sum`, keys of all by `prepared.gather`, an average of the weights."""
    prepared, model, optimizer, loader = begin(plan, net(), batches(16))
    average, queue, at = copy.deepcopy(net()), torch.randn(8, 2, generator=torch.Generator().manual_seed(3)).double(), 0
    reward, center, losses, features = 0.0, torch.zeros(2, dtype=torch.float64), [], list[torch.Tensor]()
    model.layers.register_forward_hook(lambda m, a, out: features.append(out.detach()))
    for step, (x, y) in enumerate((batch for _ in range(2) for batch in loader), 1):
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), (prepared or model).parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            goal = average(x)
        q = model(x + torch.randn_like(x) / step)
        keys = q.detach() + 0.1
        logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ queue.clone().T], dim=1)
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)) + (q - center).square().mean()
        loss = loss + ((q - y).square().sum(1) * (y[:, 0] - reward)).mean() + 0.3 * (q - goal).square().mean()
        loss = loss + 0.1 * features[-1].square().mean()
        optimizer.zero_grad()
        losses.append(back(prepared, loss))
        optimizer.step()
        parts = (y[:, 0].sum(), q.detach().sum(0), len(x))
        number, tensor, n = prepared.sum(*parts) if prepared else parts
        reward = 0.9 * reward + 0.1 * float(number) / n
        center.mul_(0.9).add_(0.1 * tensor / n)
        keys = prepared.gather(keys) if prepared else keys
        queue[at : at + len(keys)] = keys
        at = (at + len(keys)) % 8
    return losses, weights_of(model), queue


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3", "tp=2,dp_shard=2"])
def test_what_is_kept_of_all_samples_is_one_process_s(plan: str, pool: RankPool) -> None:
    check_equal(pool, kept, plan)


def no_rows(plan: str) -> None:
    prepared, model, _, loader = begin(plan, net(), batches(9))
    for x, _ in loader:
        prepared.gather(model(x).mean(0))


def test_only_rows_of_samples_are_gathered(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"prepared.gather: .*\(2,\) has no row .*line \d+"):
        pool.run(no_rows, 2, "dp_replicate=2")


def ended(plan: str) -> int:
    """How many engines more are alive after a script's loop has ended and its names are gone."""

    def engines() -> int:
        gc.collect()
        return sum(isinstance(one, Engine) for one in gc.get_objects())

    before = engines()  # of scripts that had not come to an end
    train(plan, net(), batches(16, 8), mse)
    return engines() - before


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_a_script_that_has_ended_leaves_nothing_behind(plan: str, pool: RankPool) -> None:
    """Its last outputs held the graph, that the weights, and these their groups: in every job of a process one more."""
    assert pool.run(ended, 2, plan) == [0, 0]


# --- what cannot be dealt is refused


class AsLongAsTheLongest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(3, 2, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True, padding_value=1.0)[0]


def longest(plan: str) -> None:
    x, lengths = samples(8, 15).tensors[0].view(8, 5, 3), torch.tensor([5, 3, 5, 3, 5, 5, 3, 3])
    _, model, _, loader = begin(plan, made(AsLongAsTheLongest), DataLoader(TensorDataset(x, lengths), batch_size=4))
    for batch in loader:
        model(*batch)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(3, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.sparse.mm(edges, self.net(x)))


def sparse(plan: str) -> None:
    """One graph for good, beside which nothing is loaded."""
    x, edges = torch.randn(4, 3).double(), torch.eye(4).double().to_sparse()
    _, model, *_ = begin(plan, made(Sparse), [(x, x)])
    model(x, edges)


@pytest.mark.parametrize(
    ("script", "plan", "told"),
    [
        (longest, "dp_replicate=2", r"gives \(2, 5, 2\) for 2 samples and \(1, 3, 2\) for 1 .*total_length"),
        (sparse, "tp=2", r"layout torch.sparse_coo.*to_dense.*line \d+: model\(x, edges\)"),
        (sparse, "dp_replicate=2", r"has handed out no batch.*line \d+: model\(x, edges\)"),
    ],
)
def test_what_is_no_batch_of_samples_is_refused(script: Any, plan: str, told: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=told):
        pool.run(script, 2, plan)
