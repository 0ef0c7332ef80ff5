"""An engine's state through a checkpoint: any plan to any plan, bit for bit; damage is found before anything moves."""

from __future__ import annotations

import importlib
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_files import damage
from torch import nn

import shardwise
from shardwise.checkpoint import publish
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.stored import Stored
from shardwise.digest import digest
from shardwise.engine.ema import Ema
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RunError
from shardwise.layout import Plan
from shardwise.models import tasks

PLANS = [
    "single", "tp=2,dp_shard=2,zero=2", "dp_shard=3,zero=1", "dp_shard=4,ep=2,zero=1", "pp=2,microbatches=2",
    "dp_shard=2,zero=3", "dp_replicate=2,dp_shard=2,zero=3", "tp=2,sp=false,dp_shard=2,zero=3", "dp_replicate=3",
    "pp=2,dp_shard=2,zero=1,microbatches=2", "dp_shard=4,ep=4,zero=3", "dp_shard=3,zero=2,precision=bf16",
]  # fmt: skip
TASK = "moe_shared"  # experts, uneven heads; (1, E) rows
SEQUENCES = [
    "single", "cp=2", "cp=3,zero=3", "cp=2,tp=2", "cp_ulysses=2,zero=1", "cp=2,cp_ulysses=2,zero=2",
    "pp=2,cp=2,microbatches=2", "dp_replicate=2,cp=2", "dp_shard=2,cp=2,tp=2,zero=2", "dp_shard=2,cp=2,zero=3",
    "cp=2,zero=1,precision=bf16", "dp_shard=3,zero=1",
]  # fmt: skip
FIELDS = [
    "single", "domain=2", "domain=1x3,zero=1", "domain=2x2,zero=3", "domain=2,pp=2", "domain=3x2,zero=2",
    "dp_replicate=2,domain=1x2", "dp_shard=2,domain=2,zero=2", "dp_shard=2,domain=2x2,zero=3",
    "domain=2,zero=1,precision=bf16", "dp_shard=3,zero=1", "pp=2,microbatches=2",
]  # fmt: skip
MATRICES = {TASK: PLANS, "decoder": SEQUENCES, "domain_tasks:resnet": FIELDS}


def world(plan: str) -> int:
    return Plan.parse(plan).world_size


def state_of(engine: Engine, ema: Ema | None = None) -> dict[str, str]:
    """Digests of whole parameters, buffers and optimizer state, gathered by the engine and not by what is tested."""
    found = {f"p/{name}": digest(value) for name, value in engine.full_parameters()}
    found |= {f"b/{name}": digest(value) for name, value in engine.full_buffers()}
    for name, state in engine.full_optimizer_state():
        found |= {f"o/{name}/{key}": digest(torch.as_tensor(value)) for key, value in state.items()}
    if ema is not None:
        with ema.applied():
            found |= {f"e/{name}": digest(value) for name, value in engine.full_parameters()}
    return found


def saved(task: str, plan: str, folder: str, steps: int, read_from: str | None = None) -> dict[str, str]:
    """State after `steps` steps, or of a checkpoint; saved below `folder`."""
    home, _, name = task.rpartition(":")
    made = getattr(importlib.import_module(home) if home else tasks, name)()
    # an engine that only reads takes no step, which a look at samples is for
    engine = shardwise.parallelize(made, plan, seed=0 if read_from is None else 7, check_loss=read_from is None)
    ema = Ema(engine, 0.5)
    saver = Saver(engine, folder, background=False, ema=ema)
    for step in range(steps):
        engine.step(engine.task.batch(step))
        ema.update()
    if read_from is not None:
        chosen = restore(engine, read_from, ema=ema)
        assert chosen.manifest.fields["data"] == {"position": 5} and engine.steps_done == 2
    saver.save({"data": {"position": 5}})
    state = state_of(engine, ema)
    saver.close()
    engine.close()
    return state


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def through(pool, task: str, plans: list[str], folder: Path) -> dict[str, str]:
    """Each plan loads what the one before has saved, and saves it again; the state, which must stay as it was."""
    first, *others = pool.run(saved, world(plans[0]), task, plans[0], str(folder / "0"), 2)
    assert all(not differing(first, other) for other in others)
    for place, plan in enumerate([*plans[1:], plans[0]]):
        ranks = pool.run(saved, world(plan), task, plan, str(folder / str(place + 1)), 0, str(folder / str(place)))
        for state in ranks:
            assert not differing(first, state), (place, plan, differing(first, state)[:3])
    return first


def test_one_state_through_plans_of_every_kind_stays_the_same_to_the_bit(pool, tmp_path: Path) -> None:
    """A few cells of the matrix below: each axis and each stage of zero once."""
    kinds = ("tp=2,dp_shard=2,zero=2", "dp_shard=3,zero=1", "dp_shard=4,ep=4,zero=3", "pp=2,microbatches=2",
             "dp_shard=2,zero=3", "dp_shard=3,zero=2,precision=bf16", "single")  # fmt: skip
    assert set(kinds) <= set(PLANS)
    first = through(pool, TASK, list(kinds), tmp_path)
    assert sum(name.startswith("o/") for name in first) == 3 * sum(name.startswith("p/") for name in first)


def test_experts_in_a_list_to_other_plans_and_back(pool, tmp_path: Path) -> None:
    """Of those of other ranks a rank holds nothing; tp cuts five features as 3 and 2, so that flat pieces of what it
    leaves whole end elsewhere on each of its ranks."""
    plans = ["dp_shard=4,ep=2,zero=1", "tp=2,dp_shard=2,ep=2,zero=2", "dp_shard=4,ep=4,zero=3", "single"]
    through(pool, "listed_tasks:by_index", plans, tmp_path)


def test_a_cut_sequence_to_other_plans_and_back(pool, tmp_path: Path) -> None:
    through(pool, "decoder", ["cp=2,zero=3", "cp_ulysses=2,zero=1"], tmp_path)


class Odd(nn.Module):
    """Tensors without elements, of one, of integers that float64 does not hold, of 8 and 16 bits; 15 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.tensor(0.7))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor([2**53 + 1, -3, 5]))
        self.register_buffer("mask", torch.arange(7) % 3 == 0)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("narrow", torch.randn(5).half())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(2**53)
        return x @ self.weight.t() * self.scale + self.none.sum()


def odd() -> shardwise.Task:
    def batch(step: int) -> torch.Tensor:
        return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))

    return shardwise.Task(
        name="odd",
        model=Odd,
        batch=batch,
        inputs=lambda x: ((x,), {}),
        loss=lambda y, x: (y.square().sum(), float(len(x))),
    )


def test_uneven_empty_and_integer_tensors_through_a_few_plans(pool, tmp_path: Path) -> None:
    plans = ["dp_shard=2,zero=3", "dp_shard=3,zero=1", "single", "dp_shard=3,zero=3"]
    first = through(pool, "test_checkpoint:odd", plans, tmp_path)
    assert first["b/count"] == digest(torch.tensor([2**53 + 1, -3, 5]) + 2**54) and "p/none" in first


@pytest.mark.long
@pytest.mark.parametrize("task", ["decoder_tied", "unet_batchnorm", "mlp_frozen_unused", "hf_mixtral", "gpt2"])
def test_other_models_through_a_few_plans(task: str, pool, tmp_path: Path) -> None:
    """Tied weights, buffers, frozen and unused weights, experts of transformers; masters beside 16 bits."""
    plans = ["dp_shard=2,zero=3", "dp_shard=3,zero=1,precision=bf16", "dp_replicate=2,precision=fp16", "single"]
    if task not in ("unet_batchnorm", "mlp_frozen_unused"):
        plans += ["pp=2,dp_shard=2,zero=3,microbatches=2", "tp=2,pp=2,microbatches=2", "tp=2,dp_shard=2,zero=1"]
    if task == "mlp_frozen_unused":  # a frozen weight is held in 16 bits where the module computes in them
        plans = [plan.partition(",precision")[0] for plan in plans]
    through(pool, task, plans, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("task", "plan"), [(task, plan) for task, plans in MATRICES.items() for plan in plans])
def test_every_plan_to_every_plan(task: str, plan: str, pool, tmp_path: Path) -> None:
    assert len(MATRICES[task]) == 12
    first, *_ = pool.run(saved, world(plan), task, plan, str(tmp_path / "a"), 2)
    for other in MATRICES[task]:
        ranks = pool.run(saved, world(other), task, other, str(tmp_path / "b"), 0, str(tmp_path / "a"))
        assert all(not differing(first, state) for state in ranks), (plan, other, differing(first, ranks[0])[:3])


# --- every kind of optimizer state


def _optimizers() -> dict[str, Any]:
    return {
        "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        "nadam": torch.optim.NAdam,
        "asgd": torch.optim.ASGD,
        "rprop": torch.optim.Rprop,
        "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
        "adagrad": torch.optim.Adagrad,
        "adamw": partial(torch.optim.AdamW, amsgrad=True),
        "adafactor": torch.optim.Adafactor,
        "counting": Counting,
        "lbfgs": partial(torch.optim.LBFGS, max_iter=3),
    }


class Counting(torch.optim.SGD):
    """Keeps a counter and an estimate in its groups, as optimizers without a learning rate do."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1  # beside the state of weights
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] *= 0.5 ** self.state["steps"]
        return super().step(closure)


def counted(groups: list[dict]) -> torch.optim.Optimizer:
    return Counting([{**group, "k": 0} for group in groups], lr=0.1)


def task_of(name: str) -> shardwise.Task:
    make = counted if name == "counting" else lambda groups: _optimizers()[name](_no_decay(name, groups))
    return tasks.mlp_frozen_unused().with_(optimizer=make, name=name)


def _no_decay(name: str, groups: list[dict]) -> Any:
    if name == "lbfgs":
        return [param for group in groups for param in group["params"]]
    return groups if name != "rprop" else [{k: v for k, v in g.items() if k != "weight_decay"} for g in groups]


def optimizer_run(names: list[str], plan: str, folder: str, start: int, stop: int) -> dict[str, Any]:
    """For each optimizer: steps [start, stop), from a checkpoint where start is not 0; losses, states, groups."""
    found = {}
    for name in names:
        engine = shardwise.parallelize(task_of(name), plan, clip_norm=1.0)
        saver = Saver(engine, f"{folder}/{name}", background=False)
        if start:
            restore(engine, f"{folder}/{name}")
        losses = [engine.step(engine.task.batch(step)).loss for step in range(start, stop)]
        if not start:
            saver.save()
        state = [] if name == "lbfgs" else state_of(engine)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
        found[name] = losses, state, groups, [digest(value) for _, value in engine.full_parameters()]
        saver.close()
        engine.close()
    return found


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("dp_shard=2,zero=2", [name for name in _optimizers() if name != "lbfgs"]),
        ("tp=2", ["adafactor"]),
        ("dp_replicate=2", ["lbfgs", "counting"]),  # whose states are whole, as those of all others are there
        pytest.param("dp_replicate=2", list(_optimizers()), marks=pytest.mark.long),
    ],
    ids=["cut", "owned", "whole", "all-whole"],
)
def test_every_optimizer_goes_on_as_if_it_had_never_stopped(plan: str, names: list[str], pool, tmp_path: Path) -> None:
    whole = pool.run(optimizer_run, 2, names, plan, f"{tmp_path}/x", 0, 4)
    pool.run(optimizer_run, 2, names, plan, str(tmp_path), 0, 2)
    again = pool.run(optimizer_run, 2, names, plan, str(tmp_path), 2, 4)
    for rank in range(2):
        for name in names:
            losses, *rest = whole[rank][name]
            assert again[rank][name][0] == losses[2:], name
            assert list(again[rank][name][1:]) == rest, name
    if "counting" in names:
        assert whole[0]["counting"][2][0]["k"] == 4 and whole[0]["counting"][2][0]["lr"] == 0.1 / 2**10


# --- what does not fit


def refusals(folder: str) -> list[str]:
    """What loading says, each time before anything has changed."""
    said = []
    for task in (tasks.vit(), tasks.mlp().with_(optimizer=lambda g: torch.optim.SGD(g, lr=0.1))):
        engine = shardwise.parallelize(task, "dp_shard=2,zero=3")
        before = state_of(engine)
        for where in (folder, folder + "/nothing"):
            with pytest.raises(InputError) as caught:
                restore(engine, where)
            said.append(str(caught.value))
        assert state_of(engine) == before and engine.steps_done == 0
        engine.close()
    return said


def test_another_model_or_optimizer_or_no_checkpoint_is_one_message_and_changes_nothing(pool, tmp_path: Path) -> None:
    pool.run(saved, 2, "mlp", "dp_replicate=2", str(tmp_path), 1)
    before = sorted(os.listdir(tmp_path))
    for said in pool.run(refusals, 2, str(tmp_path)):
        for words in ("it lacks model/", "it is of the task 'mlp', and this run's is 'vit'"):
            assert said[0].count(words) == 1, said[0]  # once, of all ranks' pieces
        assert "holds no checkpoint" in said[1] and "manifest.json" in said[1]
        assert "its optimizer is AdamW, this run's SGD: --init-from takes weights alone" in said[2]
    assert sorted(os.listdir(tmp_path)) == before


# --- damage


def under_damage(folder: str, trials: int, seed: int) -> list[str]:
    """Damage the newer of two checkpoints, or both, in one place each, and load; returns what went wrong."""
    engine = shardwise.parallelize(tasks.mlp(), "dp_shard=2,zero=1")
    older = publish.scan(Path(folder, "good"))[1]
    restore(engine, older)
    of_older, rng, wrong = state_of(engine), random.Random(seed), []
    for trial in range(trials):
        bad, both = Path(folder, f"bad-{trial}"), trial % 2 == 1
        engine.state.steps_done = 0
        next(iter(engine.technique.slots)).master.data.zero_()
        engine.technique.publish()
        before = state_of(engine)
        if engine.rank == 0:
            shutil.copytree(Path(folder, "good"), bad)
            for path in publish.scan(bad)[: 1 + both]:
                damage(path, rng)
        torch.distributed.barrier()
        try:
            chosen = restore(engine, bad)
            ok = not both and chosen.manifest.step == 1 and "is damaged and was not loaded" in chosen.notices[0]
            ok = ok and state_of(engine) == of_older and engine.steps_done == 1
        except InputError as error:
            ok = both and "no checkpoint that can be loaded" in str(error) and state_of(engine) == before
        wrong += [] if ok else [str(trial)]
        torch.distributed.barrier()
        if engine.rank == 0:
            shutil.rmtree(bad)
    engine.close()
    return wrong


@pytest.mark.parametrize("trials", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_damage_is_found_before_anything_changes(trials: int, pool, tmp_path: Path) -> None:
    for steps in (1, 2):
        pool.run(saved, 2, "mlp", "dp_replicate=2", str(tmp_path / "good"), steps)
    assert pool.run(under_damage, 2, str(tmp_path), trials, trials, timeout_s=600) == [[], []]


def with_a_bad_disk(folder: str) -> str:
    """Rank 1 cannot read: every rank is told."""
    engine = shardwise.parallelize(tasks.mlp(), "dp_replicate=2")
    if engine.rank == 1:
        Stored._bytes = _no_bytes  # type: ignore[method-assign]
    try:
        with pytest.raises(RunError) as caught:
            restore(engine, folder)
    finally:
        Stored._bytes = _BYTES  # type: ignore[method-assign]
    engine.close()
    return str(caught.value)


_BYTES = Stored._bytes


def _no_bytes(*_: Any) -> Any:
    raise RunError("rank-00000.safetensors cannot be read: Input/output error")


def test_a_rank_that_cannot_read_ends_the_others_too(pool, tmp_path: Path) -> None:
    pool.run(saved, 2, "mlp", "dp_replicate=2", str(tmp_path), 1)
    one, other = pool.run(with_a_bad_disk, 2, str(tmp_path))
    assert one == "rank 1 could not load the checkpoint: " + other
