"""Scripts whose ranks begin with, or are given, other weights and other state: rank 0's for all, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, net, samples, stepped
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RunError
from shardwise.ranks import RankPool
from shardwise.testing import faults
from shardwise.testing.faults import Fault


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    for buffer in model.buffers():
        buffer += seed
    return model


def unseeded(plan: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A script that never seeds its weights: each process has its own."""
    model: Any = model_of(3 if plan is None else 3 + torch.distributed.get_rank())
    optimizer, loader = adamw(model), DataLoader(samples(12), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        losses.append(stepped((model(x) - y).square().mean(), optimizer, prepared))
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2"])
def test_weights_that_no_seed_made_alike_are_rank_0_s(plan: str, pool: RankPool) -> None:
    losses, weights = unseeded(None)
    for theirs, held in pool.run(unseeded, 2, plan):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all((held[name] - value).abs().max() < BAR for name, value in weights.items())


def loads(plan: str, case: str) -> None:
    """The file of a run is loaded on one rank alone, or is another one on rank 1."""
    rank = torch.distributed.get_rank()
    saved = net()
    old, loader = adamw(saved), DataLoader(samples(12), batch_size=4)
    saved(next(iter(loader))[0]).sum().backward()
    old.step()
    weights, state = saved.state_dict(), old.state_dict()
    model: Any = net()
    optimizer = adamw(model)
    if case == "state before" and rank == 0:
        optimizer.load_state_dict(state)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    if case == "weights of rank 0" and rank == 0:
        model.load_state_dict(weights)
    if case == "state of rank 0" and rank == 0:
        optimizer.load_state_dict(state)
    if case == "another file":
        weights["layers.0.weight"][0, 0] += rank
        model.load_state_dict(weights)
    if case == "another state":
        state["state"][1]["exp_avg"][0] += rank
        optimizer.load_state_dict(state)
    for x, y in loader:
        optimizer.zero_grad()
        prepared.backward((model(x) - y).square().mean())
        optimizer.step()


CALL = r"(.*load_state_dict|an epoch over the loader)"
ALONE = rf"rank . comes to {CALL}.*, and rank . to {CALL}"
ANOTHER = "is another on ranks 0 and 1. Each rank keeps its part"


@pytest.mark.parametrize(
    ("plan", "case", "kind", "words"),
    [
        ("dp_shard=2,zero=1", "weights of rank 0", RunError, ALONE),
        ("dp_replicate=2", "state of rank 0", RunError, ALONE),
        ("dp_shard=2,zero=3", "another file", InputError, rf"'layers.0.weight' {ANOTHER}"),
        ("tp=2", "another state", InputError, rf"'state.1.exp_avg' {ANOTHER}"),
        ("tp=2", "state before", InputError, "the optimizer's state: '.*' is given to one of them alone"),
        ("dp_replicate=2", "state before", InputError, "the optimizer's state: '.*' is given to one of them alone"),
    ],
)  # fmt: skip
def test_what_one_rank_alone_loads_is_named(
    plan: str, case: str, kind: type[Exception], words: str, pool: RankPool
) -> None:
    with pytest.raises(kind, match=words):
        pool.run(loads, 2, plan, case, timeout_s=60)


class Split(torch.utils.data.IterableDataset):
    """Every second sample, as a script deals them to ranks beforehand."""

    def __iter__(self):
        return iter([samples(12)[at] for at in range(torch.distributed.get_rank(), 12, 2)])


def reads(plan: str, case: str, randomness: str) -> int:
    """A split that no seed made alike; a dataset that deals samples itself; samples in NumPy, from workers."""
    rank = torch.distributed.get_rank()
    data: Any = samples(12)
    if case != "alike":
        data = torch.utils.data.random_split(data, [8, 4], torch.Generator().manual_seed(rank))[0]
    pairs = [tuple(each.numpy() for each in pair) for pair in data]
    join = torch.utils.data.default_collate
    loader: Any = {
        "alike": DataLoader(pairs, batch_size=4, num_workers=1),
        "split": DataLoader(pairs, batch_size=4, num_workers=1),
        "joined": DataLoader(data, batch_size=4, collate_fn=lambda batch: join(batch)),
        "dealt": DataLoader(Split(), batch_size=4),
    }[case]
    model: Any = net()
    prepared = model, optimizer, loader = shardwise.prepare(
        model, adamw(model), loader, plan=plan, randomness=randomness
    )
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        prepared.backward((model(x) - y).square().mean())
        optimizer.step()
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("plan", "case"), [("dp_replicate=2", "split"), ("tp=2", "split"), ("dp_shard=2,zero=1", "joined"),
                       ("dp_replicate=2", "dealt")],
)  # fmt: skip
def test_ranks_that_read_other_data_are_named(plan: str, case: str, pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"first samples are others on rank 1 than on rank 0.*a seeded generator"):
        pool.run(reads, 2, plan, case, "global", timeout_s=60)


def test_ranks_that_read_the_same_or_say_so_go_on(pool: RankPool) -> None:
    assert pool.run(reads, 2, "dp_replicate=2", "alike", "global") == [3, 3]
    assert pool.run(reads, 2, "dp_replicate=2", "dealt", "fast") == [2, 2]


# --- experts by samples


class Routed(nn.Module):
    """Runs an expert where a sample asks for it, which in the second batch those of the second rank do."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor, ask: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.experts[int(one.any())](row) for row, one in zip(x, ask, strict=True)])


def routed(plan: str) -> None:
    torch.manual_seed(0)
    model: Any = Routed().double()
    data = TensorDataset(torch.randn(16, 6, dtype=torch.float64), (torch.arange(16) > 11)[:, None])
    prepared: Any = shardwise.prepare(model, adamw(model), DataLoader(data, batch_size=8), plan=plan)
    for x, ask in prepared.loader:
        prepared.backward(prepared.model(x, ask).square().mean())
        prepared.optimizer.step()


@pytest.mark.long
def test_the_line_by_which_ranks_run_other_units_is_named(pool: RankPool) -> None:
    with pytest.raises(RunError, match=r'a branch differs.*prepare\(..., branches="per_sample"\).*line \d+: '):
        pool.run(routed, 2, "dp_shard=2,zero=3")


# --- faults on purpose


def steps(plan: str, folder: str) -> int:
    model: Any = net()
    prepared = model, optimizer, loader = shardwise.prepare(
        model, adamw(model), DataLoader(samples(12), batch_size=4), plan=plan
    )
    done = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            prepared.backward((model(x) - y).square().mean())
            optimizer.step()
            done += 1
        shardwise.save(prepared, folder)
    return done


POINTS = [("input", None, 8), ("forward", None, 6), ("forward", 4, 1), ("forward", 6, 0), ("reduce", 2, 1),
          ("update", 5, 1), ("save", 3, 1), ("save", 6, 1), ("save", 4, 0)]  # fmt: skip


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=2", "tp=2"])
def test_faults_meet_a_script_in_the_step_that_is_asked_for(plan: str, pool: RankPool, tmp_path: Path) -> None:
    """Sleeps of no time, which strike whenever rank 1 comes by."""
    sleeps = [Fault("sleep", rank=1, step=step, at=at, seconds=0.0, times=99) for at, step, _ in POINTS]
    with faults.injected(*sleeps) as folder:
        assert pool.run(steps, 2, plan, str(tmp_path), timeout_s=60) == [6, 6]
        assert [len(list(folder.glob(f"fault-{n}-*"))) for n in range(len(POINTS))] == [count for *_, count in POINTS]
