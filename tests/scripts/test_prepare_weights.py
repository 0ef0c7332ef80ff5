"""Whole weights and states out of a prepared script and back: averages, checkpoints, other plans, libraries' files."""

from __future__ import annotations

import copy
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_scripts import (
    adamw,
    back,
    batches,
    begin,
    close,
    equals_one_process,
    momentum,
    mse,
    muon,
    net,
    samples,
    stepped,
    weights_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool


def resumed(plan: str | None, when: str, optimizer_of: Any) -> tuple:
    """Goes on from the states of model and optimizer that a run was left with; part of the model is frozen."""
    model: Any = net()
    model.layers[0].requires_grad_(False)
    first = optimizer_of(model)
    for x, y in batches(12):
        first.zero_grad()
        mse(model, x, y).backward()
        first.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()))
    optimizer: Any = optimizer_of(model)
    if when == "before":
        optimizer.load_state_dict(saved["optimizer"])
    prepared, model, optimizer, loader = begin(plan, model, batches(12), optimizer)
    losses = []
    for epoch in range(2):
        if (when, epoch) in (("after", 0), ("later", 1)):
            model.layers.load_state_dict({k[7:]: v for k, v in saved["model"].items() if k.startswith("layers.")})
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for x, y in loader:
            losses.append(stepped(prepared, optimizer, mse(model, x, y)))
    part = model.layers.state_dict(prefix="layers.")
    return losses, list(model.state_dict()), weights_of(model), {**part}, optimizer.state_dict()


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


def under_autocast(plan: str | None, normed: bool) -> dict[str, torch.Tensor]:
    """Gradients of a first step whose forward runs under autocast, which remembers the weights it has cast."""
    model = net().float()
    if normed:  # of a 16-bit input, beside weights in float32
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).float()
    prepared, model, _, loader = begin(plan, model, batches(4))
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse(model, x.float(), y.float())
        back(prepared, loss)
    if prepared:
        with prepared._gate.open():
            return {name: gradient.clone() for name, gradient in prepared.engine.full_gradients()}
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("plan", "normed"),
    [("dp_replicate=2", False), ("dp_shard=2,zero=3", False), ("tp=2", False), ("dp_replicate=2", True),
     ("dp_shard=2,zero=3", True)],
)  # fmt: skip
def test_autocast_loses_no_gradient(plan: str, normed: bool, pool: RankPool) -> None:
    (alone,) = pool.run(under_autocast, 1, None, normed)
    largest = max(float(gradient.abs().max()) for gradient in alone.values())  # of a bias before a norm it is rounding
    for gradients in pool.run(under_autocast, 2, plan, normed):
        for name, gradient in alone.items():
            bar = 0.03 * (largest if normed else float(gradient.abs().max()))
            assert float((gradients[name] - gradient).abs().max()) <= bar, name


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


def interrupted(plan: str | None, folder: str, part: str) -> tuple:
    """Two epochs in random order with dropout. "first": saves in the second one and leaves; "rest": goes on."""
    torch.manual_seed(0 if part != "rest" else 5)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2)).double()
    model[0].bias.requires_grad_(False)
    loader: Any = batches(17, shuffle=True)
    if "sliced" in folder:
        loader = [(x, y) for x, y in batches(17)]
    prepared, model, optimizer, loader = begin(plan, model, loader)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], 0.5)  # whose state has numbers as keys
    losses, start = [], 0
    if part == "rest":
        told = shardwise.load(prepared, folder)
        start, losses = told["epoch"], told["losses"]
        schedule.load_state_dict(told["schedule"])
    for epoch in range(start, 2):
        for number, (x, y) in enumerate(loader):
            losses.append(stepped(prepared, optimizer, mse(model, x, y)))
            schedule.step()
            if part == "first" and (epoch, number) == (1, 1):
                shardwise.save(prepared, folder, epoch=epoch, losses=losses, schedule=schedule.state_dict())
                return losses, {}
    return losses, weights_of(prepared or model)


@pytest.mark.parametrize(
    ("first", "rest", "name"),
    [
        ("tp=2", "dp_shard=2,zero=1", "a"),
        ("dp_shard=2,zero=2", "dp_shard=3,zero=3", "b"),
        ("dp_replicate=2", "dp_replicate=2", "sliced"),
        pytest.param("dp_shard=2,zero=3", "tp=2", "c", marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_within_an_epoch_under_another_plan(
    first: str, rest: str, name: str, pool: RankPool, tmp_path: Path
) -> None:
    folder = str(tmp_path / name)
    alone = interrupted(None, folder, "all")
    pool.run(interrupted, shardwise.Plan.parse(first).world_size, first, folder, "first")
    for found in pool.run(interrupted, shardwise.Plan.parse(rest).world_size, rest, folder, "rest"):
        close(found, alone)


def test_a_scheduler_that_is_not_saved_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), DataLoader(samples(12), batch_size=4), plan="single")
    shardwise.save(prepared, tmp_path)
    schedule = torch.optim.lr_scheduler.StepLR(prepared.optimizer, 3)
    shardwise.save(prepared, tmp_path, state={"schedule": schedule.state_dict()})
    assert not capsys.readouterr().err
    shardwise.save(prepared, tmp_path, epoch=1)
    assert "begins its schedule anew" in capsys.readouterr().err


def test_what_a_script_gives_comes_back_as_it_was(tmp_path: Path) -> None:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), DataLoader(samples(12), batch_size=4), plan="single")
    given = {"best": float("inf"), "step": np.int64(3), "loss": torch.tensor(0.1), "sizes": (4, [None, True, "a"]),
             "at": Counter({30: 1}), "table": {1: {"lr": 0.1}, "b": -0.0}}  # fmt: skip
    shardwise.save(prepared, tmp_path, **given)
    told = shardwise.load(prepared, tmp_path)
    assert told == given and type(told["at"]) is Counter and type(told["sizes"]) is tuple and type(told["step"]) is int
    with pytest.raises(InputError, match=r"ema=...\): there is a tensor of shape .2, 8.*under if prepared.rank"):
        shardwise.save(prepared, tmp_path, ema={"n": 3, "head.weight": torch.zeros(2, 8)})
    with pytest.raises(InputError, match=r"save\(..., model=...\): there is a Net in it"):
        shardwise.save(prepared, tmp_path, model=model)


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (resumed, "dp_replicate=2", "before", adamw), (resumed, "dp_replicate=2", "later", adamw),
    (resumed, "dp_shard=2,zero=1", "before", adamw), (resumed, "dp_shard=2,zero=1", "after", momentum),
    (resumed, "dp_shard=2,zero=2", "later", muon), (resumed, "dp_shard=2,zero=3", "before", muon),
    (resumed, "dp_shard=2,zero=3", "later", momentum), (resumed, "tp=2", "before", momentum),
    (resumed, "tp=2", "after", adamw), (resumed, "tp=2", "later", muon),
    (resumed, "tp=2,dp_shard=2,zero=3", "later", adamw),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL)
