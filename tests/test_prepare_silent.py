"""What scripts do that would differ from one process without a word: each equals it, or is refused by name."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, momentum, muon, net, samples, stepped
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.ranks import RankPool
from shardwise.scripts.dealt import Dealer, deal

# --- the optimizer's state


def resumed(plan: str | None, when: str, make: str = "adamw") -> tuple[list[float], dict, dict]:
    """Goes on from the states of model and optimizer that a run was left with; part of the model is frozen."""
    model = net()
    model.layers[0].requires_grad_(False)
    optimizer_of = {"adamw": adamw, "muon": muon, "groups": momentum}[make]
    first, loader = optimizer_of(model), DataLoader(samples(12), batch_size=4)
    for x, y in loader:
        first.zero_grad()
        (model(x) - y).square().mean().backward()
        first.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    optimizer: Any = optimizer_of(model)
    if when == "before":
        optimizer.load_state_dict(saved["optimizer"])
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for epoch in range(2):
        if when == "after" and epoch == 0:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        if when == "later" and epoch == 1:
            model.layers.load_state_dict({k[7:]: v for k, v in saved["model"].items() if k.startswith("layers.")})
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(stepped((model(x) - y).square().mean(), optimizer, prepared))
    part = model.layers.state_dict(prefix="layers.")
    assert {name: value.shape for name, value in part.items()} == {
        name: value.shape for name, value in model.state_dict().items() if name.startswith("layers.")
    }
    return losses, model.state_dict(), optimizer.state_dict()


def apart(one: Any, other: Any) -> float:
    """How far two nested states are apart; anything but tensors must be equal."""
    ones, shape = tree_flatten(one)
    others, also = tree_flatten(other)
    assert shape == also
    if not all(isinstance(a, torch.Tensor) or a == b for a, b in zip(ones, others, strict=True)):
        return float("inf")
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if isinstance(a, torch.Tensor)]
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("plan", "when", "make"),
    [
        ("dp_replicate=2", "before", "adamw"),
        ("dp_replicate=2", "later", "adamw"),
        ("dp_shard=2,zero=1", "before", "adamw"),
        ("dp_shard=2,zero=1", "after", "groups"),
        ("dp_shard=2,zero=2", "later", "muon"),
        ("dp_shard=2,zero=3", "before", "muon"),
        ("dp_shard=2,zero=3", "later", "groups"),
        ("tp=2", "before", "groups"),
        ("tp=2", "after", "adamw"),
        ("tp=2,dp_shard=2,zero=3", "later", "adamw"),
    ],
)
def test_states_go_in_and_out_whole(plan: str, when: str, make: str, pool: RankPool) -> None:
    losses, weights, state = resumed(None, when, make)
    for theirs, held, of_optimizer in pool.run(resumed, shardwise.Plan.parse(plan).world_size, plan, when, make):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert apart(dict(held), dict(weights)) < BAR and list(held) == list(weights)
        assert apart(of_optimizer["state"], state["state"]) < BAR
        assert of_optimizer["param_groups"] == state["param_groups"]


def on_one_rank(plan: str, case: str) -> None:
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, y in loader:
        prepared.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if case == "another" and prepared.rank == 1:
            model.state_dict()
        elif case in ("model", "another") and prepared.rank == 0:
            model.layers.state_dict() if case == "model" else optimizer.state_dict()
        if case == "optimizer" and prepared.rank == 1:
            optimizer.state_dict()
        if case == "evaluates" and prepared.rank == 0:
            with torch.no_grad():
                model(x)
        if case == "steps" and prepared.rank == 0:
            optimizer.step()
        if case == "draws" and prepared.rank == 0:
            with torch.no_grad():
                model(torch.randn(3, 6).double())
    if case == "at the end" and prepared.rank == 0:
        prepared.meeting.wait_s = 0.2
        prepared.save_weights("/nowhere")
    if case == "pickled":
        torch.save(model, io.BytesIO())


BOTH = r"rank . comes to {} \[.*line \d+.*, and rank . to {} \[.*line \d+"


@pytest.mark.parametrize(
    ("plan", "case", "words"),
    [
        ("dp_shard=2,zero=3", "model", BOTH.format(*[r"(layers.state_dict\(\)|a forward in training)"] * 2)),
        ("dp_shard=2,zero=1", "optimizer", BOTH.format(*[r"(optimizer.state_dict\(\)|a forward in training)"] * 2)),
        ("tp=2", "another", BOTH.format(*[r"(model|optimizer).state_dict\(\)"] * 2)),
        ("dp_shard=2,zero=3", "evaluates", BOTH.format(*["a forward (in training|without gradients)"] * 2)),
        ("dp_replicate=2", "steps", BOTH.format(*[r"(optimizer.step\(\)|a forward in training)"] * 2)),
        ("dp_replicate=2", "draws", "under if rank == 0 .an evaluation that draws its batches"),
        ("dp_shard=2,zero=2", "at the end", "rank 0 comes to save_weights.*and rank 1 did not come in 0.2 s"),
        ("dp_shard=2,zero=3", "pickled", r"save model.state_dict\(\) \(of every rank"),
        ("dp_replicate=2", "pickled", r"save model.state_dict\(\) \(of every rank"),
    ],
)
def test_what_one_rank_cannot_do_is_named(plan: str, case: str, words: str, pool: RankPool) -> None:
    with pytest.raises((RunError, RefusedPlan), match=words):
        pool.run(on_one_rank, 2, plan, case, timeout_s=60)


def test_a_group_of_what_was_frozen_or_is_held_is_not_added() -> None:
    model = net()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, [])
    optimizer.add_param_group({"params": model.head.weight, "lr": 0.2})
    for param, why in ((model.head.bias, "frozen at prepare.*thaws=True"), (model.head.weight, "in another group")):
        with pytest.raises(InputError, match=why):
            optimizer.add_param_group({"params": param})


# --- what is said


def test_notices_are_printed_once_by_rank_0(capsys: pytest.CaptureFixture) -> None:
    from shardwise.scripts.saying import Notices

    for rank in (0, 1):
        told = Notices(rank)
        told.say(["one", "two"])
        told.say(["two", "three"])
    assert capsys.readouterr().err == "shardwise: one\nshardwise: two\nshardwise: three\n"


def test_errors_name_the_line() -> None:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), [])
    with pytest.raises(InputError, match=r"\[test_prepare_silent.py, line \d+: prepared.clip_grad_norm_\(1.0\)\]"):
        prepared.clip_grad_norm_(1.0)


# --- losses that are no sums over samples


def dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p, t = logits.sigmoid(), (target > 0).double()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def dice_of_each(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p, t = logits.sigmoid(), (target > 0).double()
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def contrastive(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    a, b = nn.functional.normalize(made, dim=1), nn.functional.normalize(target, dim=1)
    return nn.functional.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))


def focal(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    t = (target > 0).double()
    ce = nn.functional.binary_cross_entropy_with_logits(logits, t, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def one_hot(target: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(len(target), 2, dtype=target.dtype)
    made[torch.arange(len(target)), (target[:, 0] > 0).long()] = 1
    return made


LOSSES = {one.__name__: one for one in (dice, dice_of_each, contrastive, focal)}
LOSSES |= {
    "hardest": lambda made, target: (made - target).square().sum(1).topk(len(made) // 2).values.mean(),
    "balanced": lambda made, target: ((made - target).square() * (target > 0) / (target > 0).double().mean()).mean(),
    "one hot": lambda made, target: -(one_hot(target) * made.log_softmax(1)).sum(1).mean(),
    "mse": nn.functional.mse_loss,
    "l1": nn.functional.l1_loss,
    "ratio": lambda made, target: (made * target).sum() / (made.abs().sum() + 1),
    "dice and mse": lambda made, target: nn.functional.mse_loss(made, target) + 0.1 * dice(made, target),
}


class Inside(nn.Module):
    """Returns its loss alone, as many do."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSSES[self.kind](self.inner(x), y)


def with_loss(
    plan: str | None, kind: str, inside: bool = False, late: bool = False, batch: int = 8, mean_over: bool = True,
    count: int = 24, **options: Any,
) -> tuple[list[float], dict]:  # fmt: skip
    model = Inside(net(), kind) if inside else net()
    optimizer, loader = adamw(model), DataLoader(samples(count), batch_size=batch)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan, **options) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    losses = []
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        of = LOSSES["mse" if late and number == 0 else kind]
        loss = model(x, y) if inside else of(model(x), y)
        if prepared and mean_over:
            loss = prepared.backward(loss, mean_over=len(x))
        elif prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


def with_loss_of(plan: str | None, kind: str, options: dict) -> tuple[list[float], dict]:
    return with_loss(plan, kind, **options)


def test_every_sample_counts_once_however_a_batch_is_dealt() -> None:
    for ranks in range(1, 6):
        for total in range(1, 12):
            for several in (False, True):
                dealt = [deal(total, ranks, rank, several=several) for rank in range(ranks)]
                counted = [n for one in dealt for n in range(one.part.start, one.part.start + one.part.count)]
                assert counted == list(range(total))
                assert all(one.held.start + one.held.count <= total and one.held.count for one in dealt)
                assert {one.several for one in dealt} == {min(one.held.count for one in dealt) > 1}
                assert {one.even for one in dealt} == {len({one.part.count for one in dealt}) == 1}
                assert not several or total < 2 or dealt[0].several
                assert sum(one.proportion(ranks) for one in dealt) == pytest.approx(ranks)


def test_one_batch_is_dealt_for_a_look_where_workers_read_ahead() -> None:
    dealer = Dealer(4, 0, lambda: True)
    first, second = dealer.deal(4), dealer.deal(4)
    assert first.several and not second.several
    dealer.handed_out(second)
    assert not dealer.deal(4).several
    dealer.handed_out(first)
    assert dealer.deal(4).several


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("dp_replicate=2", {"batch": 2, "count": 6}),
        ("dp_replicate=2", {"batch": 2, "count": 5, "mean_over": False}),
        ("dp_shard=3,zero=3", {"batch": 4, "count": 12, "inside": True}),
        ("dp_shard=2,zero=2", {"batch": 3, "count": 7, "mean_over": False}),
    ],
)
def test_one_sample_to_a_rank_is_looked_at_too(plan: str, options: dict, pool: RankPool) -> None:
    world = shardwise.Plan.parse(plan).world_size
    for kind, late in (("dice", False), ("contrastive", False), ("dice", True)):
        if not (late and options.get("inside")):
            words = r"no sum or mean over|not a mean over|cannot be seen|hangs on how many samples"
            with pytest.raises((RefusedPlan, InputError), match=words):
                pool.run(with_loss_of, world, plan, kind, {**options, "late": late})
    for kind in ("dice_of_each", "mse"):
        losses, weights = with_loss_of(None, kind, options)
        for theirs, held in pool.run(with_loss_of, world, plan, kind, options):
            assert theirs == pytest.approx(losses, rel=BAR)
            assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


MIXED, APART = ("dice", "contrastive", "ratio", "dice and mse", "hardest"), ("dice_of_each", "focal", "mse", "one hot")


@pytest.mark.parametrize(
    ("plan", "inside", "mixed", "apart"),
    [
        ("dp_replicate=2", False, MIXED, APART),
        ("dp_replicate=2", True, MIXED, APART),
        ("dp_shard=2,zero=3", False, MIXED[:2], APART[-1:]),  # the loss sees the same samples, of sharded weights
        ("dp_shard=2,tp=2", True, MIXED[:1], APART[-1:]),  # and of cut ones
        *(
            pytest.param(plan, inside, MIXED, APART, marks=pytest.mark.long)
            for plan in ("dp_shard=2,zero=3", "dp_shard=2,tp=2")
            for inside in (False, True)
        ),
    ],
)
def test_losses_that_mix_samples_are_refused_and_others_are_not(
    plan: str, inside: bool, mixed: tuple[str, ...], apart: tuple[str, ...], pool: RankPool
) -> None:
    world = shardwise.Plan.parse(plan).world_size
    for kind in mixed:
        with pytest.raises(RefusedPlan, match=r"no sum or mean over samples.*line \d+: loss = prepared.backward"):
            pool.run(with_loss, world, plan, kind, inside)
    for kind in apart:
        losses, weights = with_loss(None, kind, inside)
        for theirs, held in pool.run(with_loss, world, plan, kind, inside):
            assert theirs == pytest.approx(losses, rel=BAR)
            assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


def test_a_loss_that_changes_later_is_looked_at_again(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match="no sum or mean over samples"):
        pool.run(with_loss, 2, "dp_replicate=2", "dice", False, True)


def with_weight(plan: str, case: str) -> None:
    model, y = net(), torch.randint(0, 2, (12,), generator=torch.Generator().manual_seed(3))
    y[[1, 2, 7]] = -100
    optimizer, loader = (
        adamw(model),
        DataLoader([(x, t) for (x, _), t in zip(samples(12), y, strict=True)], batch_size=6),
    )
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, t in loader:
        classes = torch.tensor([1.0, 3.0], dtype=x.dtype) if case == "classes" else None
        loss = nn.functional.cross_entropy(model(x), t, weight=classes)
        n = (t != -100).sum()
        if case == "tokens as a number":
            prepared.backward(loss * n.item(), n.item())
        elif case == "tokens":
            prepared.backward(loss, mean_over=n)
        elif case == "sum":
            prepared.backward(loss * n, n)
        else:
            prepared.backward(loss, mean_over=len(x))
        optimizer.step()
        optimizer.zero_grad()


def test_a_weight_that_is_not_the_mean_s_is_refused(pool: RankPool) -> None:
    for case in ("samples", "classes"):
        with pytest.raises(
            InputError, match=r"is not a mean over 3.*ignored, weights of classes|is a mean over .*weights"
        ):
            pool.run(with_weight, 2, "dp_replicate=2", case)
    for case in ("tokens", "tokens as a number", "sum"):
        pool.run(with_weight, 2, "dp_replicate=2", case)


# --- samples that are not along the first dim


class Language(nn.Module):
    """Time first, with a hidden state that goes on from batch to batch."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(11, 6), nn.LSTM(6, 5, 2, dropout=0.3), nn.Linear(5, 11)

    def forward(self, x: torch.Tensor, state: Any) -> tuple:
        y, state = self.lstm(self.words(x), state)
        return self.out(y), state


class Columns:
    """Batches as a language model has them: (time, samples)."""

    def __init__(self, length: int, batch_size: int, tells: bool) -> None:
        text = torch.randint(0, 11, (3 * length + 1, batch_size), generator=torch.Generator().manual_seed(5))
        self.pairs = [(text[i : i + length], text[i + 1 : i + length + 1]) for i in range(0, 3 * length, length)]
        if tells:
            self.batch_size = batch_size

    def __iter__(self):
        return iter(self.pairs)


def language(plan: str | None, length: int, tells: bool, **options: Any) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model: Any = Language(length).double()
    optimizer, loader = adamw(model), Columns(length, 4, tells)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan, **options) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    torch.manual_seed(3)
    losses, state = [], None
    for x, y in loader:
        if state is None:
            state = (torch.zeros(2, x.shape[1], 5).double(), torch.zeros(2, x.shape[1], 5).double())
        out, state = model(x, tuple(one.detach() for one in state))
        loss = nn.functional.cross_entropy(out.view(-1, 11), y.reshape(-1))
        if prepared:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


def on_columns(plan: str | None, length: int, tells: bool, options: dict) -> tuple:
    return language(plan, length, tells, **options)


@pytest.mark.parametrize(
    ("plan", "length", "tells", "options"),
    [
        ("dp_replicate=2", 7, True, {}),
        ("dp_shard=2,zero=3", 7, False, {"batch_dim": 1}),
        ("dp_replicate=2", 4, False, {"batch_dim": 1}),  # as many steps as samples
    ],
)
def test_samples_along_the_second_dim(plan: str, length: int, tells: bool, options: dict, pool: RankPool) -> None:
    losses, weights = language(None, length, tells)
    for theirs, held in pool.run(on_columns, 2, plan, length, tells, options):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


@pytest.mark.parametrize("length", [8, 4])
def test_time_is_not_taken_for_samples(length: int, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"batch_dim=1"):
        pool.run(on_columns, 2, "dp_replicate=2", length, False, {})


# --- samples that every rank has


def with_fixed_noise(plan: str | None, count: int, size: int = 8) -> tuple[list[float], dict]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    fixed = torch.randn(count, 6).double()
    optimizer, loader = adamw(model), DataLoader(samples(15), batch_size=size)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    losses = []
    for x, y in loader:
        loss = (model(x) - y).square().sum(1).mean()
        if prepared:
            loss = prepared.backward(loss, mean_over=len(x))
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), model(fixed).sum().item()]
    return losses, prepared.state_dict() if prepared else model.state_dict()


@pytest.mark.parametrize(("count", "size"), [(4, 8), (3, 8), (8, 8), (2, 5)])
def test_a_forward_on_what_every_rank_has(count: int, size: int, pool: RankPool) -> None:
    losses, weights = with_fixed_noise(None, count, size)
    for theirs, held in pool.run(with_fixed_noise, 2, "dp_replicate=2", count, size):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


# --- weights that do not move as they should


class Idle(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """Nothing."""


def mistaken(plan: str, case: str) -> list[str]:
    torch.manual_seed(0)
    model: Any = net().float() if case == "rounding" else net()
    if case == "rounding":
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    if case.startswith("thawed"):
        model.layers[0].requires_grad_(False)
    if case == "hooked":
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    if case == "masked":
        model.head.weight.register_hook(lambda gradient: gradient * torch.eye(*gradient.shape).to(gradient))
    optimizer: Any = Idle(model.parameters(), 0.1) if case == "idle" else torch.optim.Adam(model.parameters(), 1e-2)
    loader: Any = DataLoader(samples(32), batch_size=8)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    if case == "converted":
        model.float()
    if case == "moved nowhere":
        model.to("cpu").to(torch.float64)
    if case == "thawed":
        model.layers[0].requires_grad_(True)
    if case == "replaced":
        model.head = nn.Linear(8, 2).double()
    if case == "one rank's rate" and prepared.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    if case == "one rank's weights" and prepared.rank == 1:
        with torch.no_grad():
            model.head.weight[0, 0] = 0.5
    for step, (x, y) in enumerate(loader):
        if case in ("converted", "rounding"):
            x, y = x.float(), y.float()
        if case == "thawed later" and step == 3:
            model.layers[0].requires_grad_(True)
        if case == "taken":
            torch.autograd.grad(model(x).sum(), model.head.weight)
        prepared.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return prepared.notices


@pytest.mark.parametrize(
    ("plan", "case", "kind", "words"),
    [
        ("dp_replicate=2", "idle", RunError, "did not move in 3 steps"),
        ("dp_shard=2,zero=3", "idle", RunError, "did not move in 3 steps"),
        ("dp_shard=2,zero=1", "converted", InputError, r"converted or moved after prepare \(.*float64.* to .*float32"),
        ("dp_shard=2,zero=3", "converted", InputError, r"converted or moved after prepare"),
        ("dp_replicate=2", "replaced", InputError, "head.weight' was replaced after prepare"),
        ("dp_shard=2,zero=1", "thawed", InputError, "layers.0.bias' was frozen"),
        ("dp_shard=2,zero=3", "thawed later", InputError, "layers.0.bias' was frozen"),
        ("dp_replicate=2", "hooked", RefusedPlan, "'head.weight' has a hook on its gradient, which is given this rank"),
        ("tp=2", "masked", RefusedPlan, "'head.weight' has a hook on its gradient, which is given this rank"),
        ("dp_replicate=2", "taken", RefusedPlan, "the gradient of this rank's samples alone"),
        (
            "dp_replicate=2",
            "one rank's weights",
            RunError,
            "after step 1 the weights of 'head.weight' .*on rank 1 than",
        ),
        (
            "tp=2",
            "one rank's rate",
            RunError,
            "settings differ between ranks in step 0 .*0.01 on rank 0; 0.5 on rank 1",
        ),
        ("dp_shard=2,zero=3", "one rank's rate", RunError, "settings differ between ranks in step 0"),
    ],
)
def test_weights_that_do_not_move_as_they_should(plan: str, case: str, kind: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(mistaken, 2, plan, case)


def test_a_hook_that_is_right_for_summands_is_taken(pool: RankPool) -> None:
    pool.run(mistaken, 2, "dp_shard=2,zero=1", "masked")


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2"])
def test_gradients_that_are_rounding_are_told(plan: str, pool: RankPool) -> None:
    for notices in pool.run(mistaken, 2, plan, "rounding"):
        assert [one for one in notices if "the gradients of 0.bias are below 1e-05 of the largest" in one]


# --- what was wrapped already


class Around(torch.optim.Optimizer):
    """As libraries wrap an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults


def wrapped(how: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = net()
    if how == "FSDP":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if how == "FSDP inside":
        model.layers = FullyShardedDataParallel(model.layers, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "fully_shard":
        fully_shard(model)
    if how == "DistributedDataParallel":
        model = nn.parallel.DistributedDataParallel(model)
    if how == "DataParallel":
        model = nn.DataParallel(model)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    shardwise.prepare(model, Around(optimizer) if how == "optimizer" else optimizer, [], plan="dp_replicate=2")


def test_what_is_wrapped_already_is_refused_by_name(pool: RankPool) -> None:
    for how, words in {
        "FSDP": "the model .FullyShardedDataParallel. is sharded already",
        "FSDP inside": "the model's 'layers' .*is sharded already",
        "fully_shard": "is sharded already, by FSDP, fully_shard or DTensor",
        "DistributedDataParallel": r"wrapped in DistributedDataParallel.*\(\.module\)",
        "DataParallel": "wrapped in DataParallel",
        "optimizer": r"Around around AdamW \(its 'optimizer'\)",
    }.items():
        with pytest.raises(InputError, match=words):
            pool.run(wrapped, 2, how)


def plain_backward(plan: str) -> None:
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, y in loader:
        (model(x) - y).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2"])
def test_a_backward_of_its_own_is_told(plan: str, pool: RankPool) -> None:
    with pytest.raises(
        InputError, match=r"loss.backward\(\) or another.*call prepared.backward.*line \d+: optimizer.step"
    ):
        pool.run(plain_backward, 2, plan)
