"""Calls that one rank makes alone, or some ranks more often, are named with their lines instead of a hang."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch
from changed_scripts import run_script
from small_scripts import batches, begin, mse, net

from shardwise.errors import RefusedPlan, RunError, ShardwiseError
from shardwise.ranks import RankPool

# --- calls that one rank makes


def on_one_rank(plan: str, case: str) -> None:
    prepared, model, optimizer, loader = begin(plan, net(), batches(12))
    for x, y in loader:
        prepared.backward(mse(model, x, y))
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
        ("dp_replicate=2", "draws", "under if rank == 0 .an evaluation that draws its batches"),
        ("dp_shard=2,zero=2", "at the end", "rank 0 comes to save_weights.*and rank 1 did not come in 0.2 s"),
        ("dp_shard=2,zero=3", "pickled", r"save model.state_dict\(\) \(of every rank"),
        ("dp_replicate=2", "pickled", r"save model.state_dict\(\) \(of every rank"),
        pytest.param("dp_shard=2,zero=3", "evaluates", BOTH.format(*["a forward (in training|without gradients)"] * 2),
                     marks=pytest.mark.long),
        pytest.param("dp_replicate=2", "steps", "comes to .*as often as the others.*calls.py, line",
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_what_one_rank_cannot_do_is_named(plan: str, case: str, words: str, pool: RankPool) -> None:
    with pytest.raises((RunError, RefusedPlan), match=words):
        pool.run(on_one_rank, 2, plan, case, timeout_s=60)


def after_a_forward_that_raised(plan: str) -> tuple[list[torch.Tensor], list[int]]:
    prepared, model, optimizer, loader = begin(plan, net(), batches(12))
    counts = []
    for x, y in loader:
        for _ in range(2):
            with pytest.raises(TypeError):
                model(x, no_such_argument=True)
        with prepared.whole():
            counts.append(sum(p.numel() for p in model.parameters()))
        prepared.backward(mse(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    with prepared.whole():
        return [p.detach().clone() for p in model.parameters()], counts


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_a_script_goes_on_after_a_forward_that_raised(plan: str, pool: RankPool) -> None:
    (weights, counts), *_ = pool.run(after_a_forward_that_raised, 2, plan, timeout_s=60)
    alone, whole = pool.run(after_a_forward_that_raised, 1, "single", timeout_s=60)[0]
    assert counts == whole
    torch.testing.assert_close(weights, alone, rtol=1e-12, atol=1e-12)


def what_is_told_of_files(folder: str) -> tuple[str, str]:
    """What this rank says on standard error as it writes a file of all ranks, and one of its own."""
    prepared, model, *_ = begin("dp_shard=2,zero=1", net(), batches(12))
    said = io.StringIO(), io.StringIO()
    state = model.state_dict()
    with contextlib.redirect_stderr(said[0]):
        for _ in range(2):
            torch.save(state, f"{folder}/all.pt")
    with contextlib.redirect_stderr(said[1]):
        torch.save(state, f"{folder}/rank{prepared.rank}.pt")
        if prepared.rank == 0:
            torch.save(state, f"{folder}/one.pt")
    return said[0].getvalue(), said[1].getvalue()


def test_a_file_that_every_rank_writes_is_told(pool: RankPool, tmp_path: Path) -> None:
    told, own = zip(*pool.run(what_is_told_of_files, 2, str(tmp_path)), strict=True)
    said = "".join(told)
    assert said.count(f"several ranks write {tmp_path}/all.pt, each over the others [test_prepare_calls.py") == 1
    assert "under if prepared.rank == 0" in said and not any(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.pt", "one.pt", "rank0.pt", "rank1.pt"]


# --- calls that some ranks make

SOME = """
import torch
import shardwise
from torch import nn
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(16, 4)
has = torch.arange(16) % 8 < 4
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, has), batch_size=8)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.second = nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.first(h), self.second(h), h

model = Two()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=PLAN)
losses = []
for a, here in loader:
    optimizer.zero_grad()
    first, second, h = model(a)
    LINES
    optimizer.step()
"""
LINES = {
    "backward": "prepared.backward(second.square().mean(), retain_graph=True)\n    "
    "if here.any():\n        prepared.backward(first[here].square().mean(), mean_over=here.sum())",
    "branch": "prepared.backward(second.square().mean() + (first[here].square().mean() if here.any() else 0))",
}


@pytest.mark.parametrize(
    ("lines", "plan", "reason"),
    [
        ("backward", "dp_replicate=2", r"prepared.backward\(loss, mean_over=n\).*as often as the others"),
        pytest.param("backward", "dp_shard=2,zero=3", "as often as the others", marks=pytest.mark.long),
        ("branch", "dp_shard=2,zero=3", "the gathering of .* where rank . came to .*a sum that may be of nothing"),
    ],
)
def test_what_some_ranks_do_is_told(lines: str, plan: str, reason: str, pool: RankPool, tmp_path: Path) -> None:
    code = SOME.replace("PLAN", repr(plan)).replace("LINES", LINES[lines])
    (tmp_path / "some.py").write_text(code)
    with pytest.raises(ShardwiseError, match=f"(?s){reason}"):
        pool.run(run_script, 2, str(tmp_path / "some.py"))
