"""What would differ or be lost on ranks is named: weights, buffers and data of one rank; wrappers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_scripts import (
    adamw,
    batches,
    begin,
    equals_one_process,
    made,
    mse,
    net,
    samples,
    stepped,
    weights_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.ranks import RankPool
from shardwise.scripts.part_loader import PartLoader
from shardwise.testing import faults
from shardwise.testing.faults import Fault

# --- what is said


def test_notices_are_printed_once_by_rank_0(capsys: pytest.CaptureFixture) -> None:
    from shardwise.scripts.script_lines import Notices

    for rank in (0, 1):
        told = Notices(rank)
        told.say(["one", "two"])
        told.say(["two", "three"])
    assert capsys.readouterr().err == "shardwise: one\nshardwise: two\nshardwise: three\n"


def test_errors_name_the_line() -> None:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), [])
    with pytest.raises(InputError, match=r"\[test_prepare_refused.py, line \d+: prepared.clip_grad_norm_\(1.0\)\]"):
        prepared.clip_grad_norm_(1.0)


def test_what_is_given_beside_the_loader_is_told() -> None:
    model = net()
    optimizer = adamw(model)
    with pytest.raises(InputError, match="a StepLR too: leave it out: a scheduler goes on with its optimizer"):
        shardwise.prepare(model, optimizer, [], torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(InputError, match=r"the plan by its name: prepare\(model, optimizer, loader, plan='tp=2'\)"):
        shardwise.prepare(model, optimizer, [], "tp=2")
    with pytest.raises(InputError, match="expected text such as 'dp_shard=2,zero=3', got int"):
        shardwise.prepare(model, optimizer, [], plan=2)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"it is of what prepare returns.*; prepared.backward \[test_prepare_refused.py"
    ):
        shardwise.backward(torch.ones(()))
    assert not hasattr(shardwise, "nowhere") and not hasattr(shardwise, "backward")


def test_a_step_without_a_gradient_is_told(capsys: pytest.CaptureFixture) -> None:
    model = net()
    x = torch.randn(4, next(model.parameters()).shape[1])
    _, optimizer, loader = prepared = shardwise.prepare(model, adamw(model), [x])
    optimizer.step()  # as before a scheduler
    for batch in loader:
        loss = prepared.model(batch).square().mean()
        assert "changes nothing" not in capsys.readouterr().err
        optimizer.step()
        assert "optimizer.step() finds no gradient and changes nothing" in capsys.readouterr().err
        prepared.backward(loss)
        optimizer.step()
    assert "changes nothing" not in capsys.readouterr().err


def test_single_samples_are_no_batches() -> None:
    rows = TensorDataset(torch.randn(6, 4), torch.arange(6))
    with pytest.raises(InputError, match=r"it gives single samples .a tensor without dims., which ranks cannot share"):
        next(iter(PartLoader(DataLoader(rows, batch_size=None), 0, 2)))
    assert len(next(iter(PartLoader(DataLoader(rows, batch_size=None), 0, 1)))) == 2


def test_a_later_group_is_of_what_the_plan_has() -> None:
    model: Any = net()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, [])
    optimizer.add_param_group({"params": model.head.weight, "lr": 0.2})
    model.head.bias.requires_grad_(True)
    for param, why in (
        (model.head.bias, "frozen at prepare.*thaws=True"),
        (torch.ones(3), "no parameter of the model"),
    ):
        with pytest.raises(InputError, match=why):
            optimizer.add_param_group({"params": param})


# --- weights that are others than the plan's


def mistaken(plan: str, case: str) -> None:
    model: Any = net()
    if case.startswith("thawed"):
        model.layers[0].requires_grad_(False)
    if case == "masked":
        model.head.weight.register_hook(lambda gradient: gradient * torch.eye(*gradient.shape).to(gradient))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    prepared, model, optimizer, loader = begin(plan, model, batches(32, 8), optimizer)
    if case == "converted":
        model.float()
    if case == "masked later":
        model.head.weight.register_hook(lambda gradient: 0 * gradient)
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
        if case == "converted":
            x, y = x.float(), y.float()
        if case == "thawed later" and step == 3:
            model.layers[0].requires_grad_(True)
        prepared.backward(mse(model, x, y))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("plan", "case", "kind", "words"),
    [
        ("dp_shard=2,zero=1", "converted", InputError, r"converted or moved after prepare \(.*float64.* to .*float32"),
        ("dp_shard=2,zero=3", "converted", InputError, r"converted or moved after prepare"),
        ("dp_replicate=2", "replaced", InputError, "head.weight' was replaced after prepare"),
        ("dp_shard=2,zero=1", "thawed", InputError, r"layers.0.\w+' was frozen"),
        ("dp_shard=2,zero=3", "thawed later", InputError, r"layers.0.\w+' was frozen"),
        ("dp_shard=2,zero=3", "masked later", RefusedPlan, "'head.weight' has a hook on its gradient, which is given"),
        ("tp=2", "masked", RefusedPlan, "'head.weight' has a hook on its gradient, which is given this rank"),
        ("dp_replicate=2", "one rank's weights", RunError, "after step 1 the weights of 'head.weight' .*on rank 1"),
        ("tp=2", "one rank's rate", RunError, "differ between ranks in step 1"),
        ("dp_shard=2,zero=3", "one rank's rate", RunError, "differ between ranks in step 1"),
    ],
)  # fmt: skip
def test_weights_that_do_not_move_as_they_should(plan: str, case: str, kind: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(mistaken, 2, plan, case)


def test_ranks_without_a_plan_are_told_what_to_give(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r'given no plan for the 2 ranks that run.*plan="dp_replicate=2"'):
        pool.run(mistaken, 2, "single", "")


def test_what_is_right_for_summands_is_taken(pool: RankPool) -> None:
    for case in ("masked", "moved nowhere"):
        pool.run(mistaken, 2, "dp_shard=2,zero=1", case)


# --- buffers that a forward writes of a rank's own samples


class Averaging(nn.Module):
    """Keeps a mean of what it was given, as long as the script says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.writes = nn.Linear(6, 2), True
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.writes:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.inner(x)


def averaging(plan: str, check_loss: bool, first: int, most: int, folder: str = "") -> None:
    """The buffer is written from the step `first` on, of `most` or all ten; saved, if a folder is given."""
    prepared, model, optimizer, loader = begin(plan, made(Averaging), batches(40), check_loss=check_loss)
    for step, (x, y) in enumerate(loader, 1):
        model.writes = step >= first
        optimizer.zero_grad()
        prepared.backward(mse(model, x, y))
        optimizer.step()
        if step == most:
            break
    if folder:
        shardwise.save(prepared, folder)


@pytest.mark.parametrize(
    ("plan", "check_loss", "first", "words"),
    [
        ("dp_replicate=2", True, 1, "'mean' is computed from the samples of a micro-batch.*line"),
        ("dp_replicate=2", False, 1, r"step 1 the buffer 'mean' \(1 in all\).*all_reduce.*line \d+: .*step"),
        ("dp_shard=2,zero=3", False, 1, r"step 1 the buffer 'mean' \(1 in all\).*all_reduce.*line \d+: .*step"),
        ("dp_replicate=2", True, 6, r"after step 8 the buffer 'mean' \(1 in all\).*line \d+: .*step"),
        ("dp_replicate=2", True, 9, r"after step 10 the buffer 'mean' \(1 in all\).*line \d+"),  # the epoch's end
    ],
)
def test_a_buffer_of_own_samples_is_refused(
    plan: str, check_loss: bool, first: int, words: str, pool: RankPool
) -> None:
    with pytest.raises(RefusedPlan, match=words):
        pool.run(averaging, 2, plan, check_loss, first, 99)


def test_what_came_apart_since_the_last_comparison_is_not_saved(tmp_path: Path, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"after step 5 the buffer 'mean'"):
        pool.run(averaging, 2, "dp_replicate=2", True, 5, 5, str(tmp_path))
    assert not list(tmp_path.glob("**/*.safetensors"))


# --- scripts that catch what they are told


class Centred(nn.Module):
    """Takes the mean over the samples at hand from each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return self.outer(torch.relu(hidden - hidden.mean(0)))


def catching(plan: str) -> tuple[list[str], bool]:
    """A loop that passes over batches that fail; returns the errors and whether the weights are as they were."""
    prepared, model, optimizer, loader = begin(plan, made(Centred), batches(12))
    before, errors = weights_of(model), []
    for x, y in loader:
        for call in (lambda x=x, y=y: prepared.backward(mse(model, x, y)), optimizer.step, optimizer.zero_grad):
            try:
                call()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    return errors, all(torch.equal(value, before[name]) for name, value in weights_of(model).items())


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3", "dp_shard=2,ep=2"])
def test_a_script_that_catches_a_refusal_is_refused_on_every_batch(plan: str, pool: RankPool) -> None:
    for errors, as_before in pool.run(catching, 2, plan):
        assert as_before and len([e for e in errors if e.startswith("RefusedPlan: ")]) >= 3, errors
        assert len({e.partition(" [")[0] for e in errors if e.startswith("RefusedPlan: ")}) == 1, errors


# --- ranks that begin with, or are given, other weights, state and data


def unseeded(plan: str | None) -> tuple:
    """A script that never seeds its weights: each process has its own."""
    seed = 3 if plan is None else 3 + torch.distributed.get_rank()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    for buffer in model.buffers():
        buffer += seed
    prepared, model, optimizer, loader = begin(plan, model, batches(12))
    losses = []
    for x, y in loader:
        losses.append(stepped(prepared, optimizer, mse(model, x, y)))
    return losses, weights_of(model)


def loads(plan: str, case: str) -> None:
    """The file of a run is loaded on one rank alone, or is another one on rank 1."""
    rank = torch.distributed.get_rank()
    saved, model = net(), net()
    old, optimizer = adamw(saved), adamw(model)
    saved(next(iter(batches(4)))[0]).sum().backward()
    old.step()
    weights, state = saved.state_dict(), old.state_dict()
    if case == "state before" and rank == 0:
        optimizer.load_state_dict(state)
    prepared, model, optimizer, loader = begin(plan, model, batches(12), optimizer)
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
        prepared.backward(mse(model, x, y))
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
)
def test_what_one_rank_alone_loads_is_named(plan: str, case: str, kind: Any, words: str, pool: RankPool) -> None:
    with pytest.raises(kind, match=words):
        pool.run(loads, 2, plan, case, timeout_s=60)


class Split(torch.utils.data.IterableDataset):
    """Every second sample, as a script deals them to ranks beforehand."""

    def __iter__(self):
        return iter([samples(12)[at] for at in range(torch.distributed.get_rank(), 12, 2)])


def reads(plan: str, case: str, randomness: str) -> int:
    """A split that no seed made alike; a dataset that deals samples itself; samples in NumPy, from workers."""
    data: Any = samples(12)
    if case != "alike":
        g = torch.Generator().manual_seed(torch.distributed.get_rank())
        data = torch.utils.data.random_split(data, [8, 4], g)[0]
    pairs, join = [tuple(each.numpy() for each in pair) for pair in data], torch.utils.data.default_collate
    loader: Any = {
        "alike": DataLoader(pairs, batch_size=4, num_workers=1),
        "split": DataLoader(pairs, batch_size=4, num_workers=1),
        "joined": DataLoader(data, batch_size=4, collate_fn=lambda batch: join(batch)),
        "dealt": DataLoader(Split(), batch_size=4),
    }[case]
    prepared, model, optimizer, loader = begin(plan, net(), loader, randomness=randomness)
    steps = 0
    for x, y in loader:
        optimizer.zero_grad()
        prepared.backward(mse(model, x, y))
        optimizer.step()
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("plan", "case"),
    [("dp_replicate=2", "split"), ("dp_shard=2,zero=1", "joined"), ("dp_replicate=2", "dealt"),
     pytest.param("tp=2", "split", marks=pytest.mark.long)],
)  # fmt: skip
def test_ranks_that_read_other_data_are_named(plan: str, case: str, pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"first samples are others on rank 1 than on rank 0.*a seeded generator"):
        pool.run(reads, 2, plan, case, "global", timeout_s=60)


def test_ranks_that_read_the_same_or_say_so_go_on(pool: RankPool) -> None:
    assert pool.run(reads, 2, "dp_replicate=2", "alike", "global") == [3, 3]
    assert pool.run(reads, 2, "dp_replicate=2", "dealt", "fast") == [2, 2]


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
        "optimizer": r"Around around AdamW: give prepare the inner one \(optimizer.optimizer\)",
    }.items():
        with pytest.raises(InputError, match=words):
            pool.run(wrapped, 2, how)


# --- faults on purpose


def steps(plan: str, folder: str) -> int:
    prepared, model, optimizer, loader = begin(plan, net(), batches(12))
    done = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            prepared.backward(mse(model, x, y))
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


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (unseeded, "dp_replicate=2"), (unseeded, "dp_shard=2,zero=1"), (unseeded, "dp_shard=2,zero=3"), (unseeded, "tp=2"),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL)
