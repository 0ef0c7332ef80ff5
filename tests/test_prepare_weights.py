"""Whole weights out of a prepared model and back: averages, the best so far, a copy that stays ordinary."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_tasks import Net as ExpertNet
from module_tasks import WIDTH
from test_prepare import BAR, adamw, muon, net, samples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.engine.check import added_up
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool
from shardwise.step.loss import Loss


def experts() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return ExpertNet().double(), TensorDataset(x, x[:, :3])


def script(plan: str | None, optimizer_of: Any = adamw, spread: bool = False, **options: Any) -> tuple:
    """Trains, averages its weights, returns to those of the first epoch, and trains on."""
    model, data = experts() if spread else (net(), samples(12))
    optimizer, loader = optimizer_of(model), DataLoader(data, batch_size=4, shuffle=True)
    average = copy.deepcopy(model)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan, **options) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    torch.manual_seed(3)
    losses, best = [], {}
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum() / len(x)
            loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
            if not prepared:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
            with torch.no_grad():
                for mean, now in zip(average.parameters(), (prepared or model).parameters(), strict=True):
                    mean.lerp_(now.to(mean.dtype), 0.2)
        if epoch == 0:
            state = prepared.state_dict() if prepared else model.state_dict()
            best = {name: value.clone() for name, value in state.items()}
        if epoch == 1:
            model.load_state_dict(best)
    weights = prepared.state_dict() if prepared else model.state_dict()
    return losses, weights, average.state_dict()


def on_ranks(plan: str | None, options: dict) -> tuple:
    return script(plan, **options)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("dp_replicate=2", {}),
        ("dp_shard=2,zero=1", {}),
        ("dp_shard=2,zero=2", {"optimizer_of": muon}),
        ("dp_shard=2,zero=3", {"optimizer_of": muon}),
        pytest.param("dp_replicate=2,dp_shard=2,zero=3", {}, marks=pytest.mark.long),
        ("tp=2,dp_shard=2,zero=3", {}),
        ("dp_shard=2,ep=2,zero=3", {"spread": True}),
    ],
)
def test_equal_to_one_process(plan: str, options: dict, pool: RankPool) -> None:
    ((losses, weights, average),) = pool.run(on_ranks, 1, None, options)
    more = options | ({"branches": "per_sample"} if "spread" in options else {})
    for theirs, held, mean in pool.run(on_ranks, shardwise.Plan.parse(plan).world_size, plan, more, timeout_s=60):
        assert theirs == pytest.approx(losses, rel=BAR)
        for name, weight in weights.items():
            assert float((held[name] - weight).abs().max()) < BAR, name
            assert float((mean[name] - average[name]).abs().max()) < BAR, name


def loaded(plan: str) -> tuple[bool, bool]:
    """With masters of their own: what was loaded is held, and a copy of the model loads into itself alone."""
    model = net().float()
    prepared: Any = shardwise.prepare(model, adamw(model), DataLoader(samples(12), batch_size=4), plan=plan)
    state = {name: torch.full_like(value, 0.3) for name, value in prepared.state_dict().items()}
    found = model.load_state_dict(state)
    assert not found.missing_keys and not found.unexpected_keys
    held = all(torch.equal(value, state[name]) for name, value in prepared.state_dict().items())
    with torch.no_grad(), prepared._gate.open():
        masters = [slot.master for slot in prepared.engine.technique.slots]
        return held, all(bool((master == state["head.bias"].flatten()[0]).all()) for master in masters)


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3"])
def test_masters_are_loaded_too(plan: str, pool: RankPool) -> None:
    assert pool.run(loaded, 2, f"{plan},precision=bf16") == [(True, True)] * 2


def wrong(case: str) -> None:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), [], plan="dp_shard=2,zero=3")
    state = prepared.state_dict()
    if case == "missing":
        del state["head.bias"]
        assert model.load_state_dict(state, strict=False).missing_keys == ["head.bias"]
    if case == "wrapped":
        state = {f"module.{name}": value for name, value in state.items()}
    if case == "shape":
        state["head.bias"] = torch.zeros(7)
    model.load_state_dict(state, assign=case == "assign")


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("missing", InputError, "the state lacks head.bias: it is another model's"),
        ("wrapped", InputError, "its names have 'module.' before them, to be taken off"),
        ("shape", InputError, r"'head.bias' has shape \(7,\), the model's \(2,\)"),
        ("assign", RefusedPlan, "assign=True"),
    ],
)
def test_what_cannot_be_loaded_is_named(case: str, kind: type[Exception], words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(wrong, 2, case)


def test_a_copy_of_a_prepared_model_loads_into_itself() -> None:
    model = net()
    shardwise.prepare(model, adamw(model), [], plan="single")
    twin = copy.deepcopy(net())
    twin.load_state_dict = model.load_state_dict.__func__.__get__(twin)  # as deepcopy leaves it
    zeros = {name: torch.zeros_like(value) for name, value in twin.state_dict().items()}
    twin.load_state_dict(zeros)
    assert not twin.head.weight.any() and model.head.weight.any()


def under_autocast(plan: str | None, normed: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of a first step whose forward runs under autocast, which remembers the weights it has cast."""
    model = net().float()
    if normed:  # of a 16-bit input, beside weights in float32
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).float()
    optimizer, loader = adamw(model), DataLoader(samples(4), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x.float()) - y.float()).square().mean()
        (prepared.backward if prepared else torch.Tensor.backward)(loss)
    if prepared:
        with prepared._gate.open():
            return {name: gradient.clone() for name, gradient in prepared.engine.full_gradients()}
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3", "tp=2"])
def test_autocast_loses_no_gradient(plan: str, pool: RankPool) -> None:
    (alone,) = pool.run(under_autocast, 1, None)
    for gradients in pool.run(under_autocast, 2, plan):
        for name, gradient in alone.items():
            assert gradients[name] == pytest.approx(gradient, abs=0.03 * float(gradient.abs().max())), name


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_batch_norm_under_autocast(plan: str, pool: RankPool) -> None:
    (alone,) = pool.run(under_autocast, 1, None, True)
    largest = max(float(gradient.abs().max()) for gradient in alone.values())  # of a bias before a norm it is rounding
    for gradients in pool.run(under_autocast, 2, plan, True):
        for name, gradient in alone.items():
            assert gradients[name] == pytest.approx(gradient, abs=0.03 * largest), name


def penalised(plan: str | None, alone: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A penalty on gradients, as for a Wasserstein critic; gradients are zeroed before it is computed. `alone`: the
    loss has nothing else."""
    model, data = net(), samples(11)
    optimizer, loader = adamw(model), DataLoader(data, batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    torch.manual_seed(5)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        mixed = (x + torch.rand(len(x), 1, dtype=x.dtype)).requires_grad_()
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        loss = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = loss if alone else loss + (model(x) - y).square().sum(1).mean()
        loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


@pytest.mark.parametrize(
    ("plan", "alone"),
    [("dp_replicate=2", False), ("dp_shard=2,zero=2", False), ("dp_shard=2,zero=3", True), ("tp=2", False),
     pytest.param("dp_shard=2,zero=3", False, marks=pytest.mark.long)],
)  # fmt: skip
def test_a_penalty_on_gradients_equals_one_process(plan: str, alone: bool, pool: RankPool) -> None:
    ((losses, weights),) = pool.run(penalised, 1, None, alone)
    for theirs, held in pool.run(penalised, 2, plan, alone):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def curved(plan: str | None, penalty: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Second derivatives by the input, of repeated blocks; beside them a plain forward, and a penalty on weights."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Residual() for _ in range(3)), nn.Dropout(0.1), nn.Linear(6, 1)).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(11), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        plain, weights = model(2 * x), sum(p.square().sum() for p in model.parameters()) if penalty else 0.0
        optimizer.zero_grad()
        loss = (curve.sum(1) - y[:, 0]).square().mean() + plain.square().mean() + 1e-3 * weights
        loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


@pytest.mark.parametrize(
    "plan",
    [
        "dp_shard=2,zero=3",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("dp_replicate=2,dp_shard=2,zero=3", "tp=2,dp_shard=2")),
    ],
)
def test_derivatives_of_derivatives_equal_one_process_where_units_free_weights(plan: str, pool: RankPool) -> None:
    penalty = "tp" not in plan  # of which a script reads no weights that units cut too
    ((losses, weights),) = pool.run(curved, 1, None, penalty)
    for theirs, held in pool.run(curved, shardwise.Plan.parse(plan).world_size, plan, penalty):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


def pretrained(plan: str, folder: str) -> dict[str, torch.Tensor]:
    """A tiny decoder with tied embeddings, saved as its library does; returns its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=2, tie_word_embeddings=True, **sizes))
    ids = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(1))
    optimizer, loader = torch.optim.AdamW(model.parameters()), DataLoader(TensorDataset(ids), batch_size=4)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    for (x,) in loader:
        prepared.backward(model(input_ids=x, labels=x).loss)
        optimizer.step()
    model.save_pretrained(folder, is_main_process=prepared.rank == 0)
    return prepared.state_dict()


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "tp=2"])
def test_a_library_saves_it_whole(plan: str, pool: RankPool, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    weights = pool.run(pretrained, 2, plan, str(tmp_path))[0]
    read = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in read)


def interrupted(plan: str | None, folder: str, part: str) -> tuple[list[float], dict]:
    """Two epochs in random order with dropout. "first": saves in the second one and leaves; "rest": goes on."""
    torch.manual_seed(0 if part != "rest" else 5)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2)).double()
    model[0].bias.requires_grad_(False)
    optimizer, data = adamw(model), samples(17)
    loader: Any = DataLoader(data, batch_size=4, shuffle=True)
    if "sliced" in folder:
        loader = [(x, y) for x, y in DataLoader(data, batch_size=4)]
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], 0.5)  # whose state has numbers as keys
    losses, begin = [], 0
    if part == "rest":
        told = shardwise.load(prepared, folder)
        begin, losses = told["epoch"], told["losses"]
        schedule.load_state_dict(told["schedule"])
    for epoch in range(begin, 2):
        for number, (x, y) in enumerate(loader):
            loss = (model(x) - y).square().sum(1).mean()
            loss = prepared.backward(loss, mean_over=len(x)) if prepared else loss
            if not prepared:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            if part == "first" and (epoch, number) == (1, 1):
                shardwise.save(prepared, folder, epoch=epoch, losses=losses, schedule=schedule.state_dict())
                return losses, {}
    return losses, prepared.state_dict() if prepared else model.state_dict()


@pytest.mark.parametrize(
    ("first", "rest", "name"),
    [
        ("dp_shard=2,zero=3", "tp=2", "a"),
        ("tp=2", "dp_shard=2,zero=1", "b"),
        ("dp_shard=2,zero=2", "dp_shard=3,zero=3", "c"),
        ("dp_replicate=2", "dp_replicate=2", "sliced"),
    ],
)
def test_a_run_goes_on_within_an_epoch_under_another_plan(
    first: str, rest: str, name: str, pool: RankPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / name)
    losses, weights = interrupted(None, folder, "all")
    pool.run(interrupted, shardwise.Plan.parse(first).world_size, first, folder, "first")
    for theirs, held in pool.run(interrupted, shardwise.Plan.parse(rest).world_size, rest, folder, "rest"):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


def test_what_a_script_gives_comes_back_as_it_was(tmp_path: Path) -> None:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), DataLoader(samples(12), batch_size=4), plan="single")
    given = {"best": float("inf"), "step": np.int64(3), "loss": torch.tensor(0.1), "sizes": (4, [None, True, "a"]),
             "at": Counter({30: 1}), "table": {1: {"lr": 0.1}, "b": -0.0}}  # fmt: skip
    shardwise.save(prepared, tmp_path, **given)
    told = shardwise.load(prepared, tmp_path)
    assert told == given and type(told["at"]) is Counter and type(told["sizes"]) is tuple and type(told["step"]) is int
    with pytest.raises(InputError, match=r"'ema.head.weight' is a tensor of shape .2, 8.*under if prepared.rank"):
        shardwise.save(prepared, tmp_path, ema={"n": 3, "head.weight": torch.zeros(2, 8)})
    with pytest.raises(InputError, match=r"save\(..., model=...\): 'model' is of type Net"):
        shardwise.save(prepared, tmp_path, model=model)


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


def beside(plan: str | None) -> list[float]:
    torch.manual_seed(0)
    model: Any = Coder().double()
    optimizer, loader = adamw(model), DataLoader(samples(8), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    if prepared:
        model, optimizer, loader = prepared
    found = []
    for x, _ in loader:
        loss = (model(x) - x).square().mean()
        if prepared:
            prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        found.append(model.decode(torch.ones(2, 8).double()).sum().item())  # with gradients
        optimizer.zero_grad()
        with torch.no_grad():
            found += [
                model.decode(torch.ones(2, 8).double()).sum().item(),
                model.enc(torch.ones(2, 6).double()).shape[1],
            ]
            found.append(model.rebuild(torch.ones(2, 6).double()).sum().item())
            found.append(sum(p.norm().item() for p in model.parameters()))
    return found


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3", "tp=2", "dp_shard=2,zero=1"])
def test_what_a_script_calls_and_reads_beside_the_forward(plan: str, pool: RankPool) -> None:
    for found in pool.run(beside, 2, plan):
        assert found == pytest.approx(beside(None), rel=BAR)


def test_sums_under_autocast_are_compared_as_its_dtype_rounds() -> None:
    """Terms that cancel leave the rounding of all of them; without autocast float32 has to add up."""

    class Cancelling(Loss):
        terms = 10.0

    whole = Cancelling(torch.tensor(0.4), 5.0)
    assert not added_up("sum", whole, 0.43, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert added_up("sum", whole, 0.43, torch.float32) and not added_up("sum", whole, 1.4, torch.float32)
        assert not added_up("weight", whole, 5.4, torch.float32) and not added_up("sum", whole, 0.43, torch.float64)
    assert not added_up("sum", Loss(torch.tensor(0.4), 5.0), 0.43, torch.bfloat16)
