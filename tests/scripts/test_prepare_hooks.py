"""Hooks around `optimizer.step()` have whole weights and gradients; calls of some ranks alone are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from changed_scripts import run_script, same

from shardwise.errors import ShardwiseError
from shardwise.ranks import RankPool

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(24, 5)
y = 3 * x.prod(1, keepdim=True)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
seen = []

@torch.no_grad()
def average(*_):
    seen.append(sum(float(p.abs().sum()) for p in model.parameters()))

@torch.no_grad()
def shorten(*_):
    model[0].weight.mul_((0.3 / model[0].weight.norm(dim=1, keepdim=True)).clamp(max=1))

def clip(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_((0.2 / p.grad.norm()).clamp(max=1))

HOOK
#prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=PLAN)
losses = []
for a, b in loader:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
losses += seen
"""
HOOKS = {
    "average": "optimizer.register_step_post_hook(average)",
    "written": "optimizer.register_step_post_hook(shorten)",
    "clip": "optimizer.register_step_pre_hook(clip)",
}
PLANS = ("dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2")


def text(hook: str, plan: str | None) -> str:
    made = SCRIPT.replace("HOOK", HOOKS[hook])
    if plan is None:
        return made
    made = made.replace("#prepared", "import shardwise\nprepared").replace("PLAN", repr(plan))
    return made.replace("loss.backward()", "loss = prepared.backward(loss)")


def ran(pool: RankPool, folder: Path, code: str, ranks: int) -> list:
    path = folder / f"on_{ranks}.py"
    path.write_text(code)
    return pool.run(run_script, ranks, str(path))


QUICK = [("average", "dp_shard=2,zero=2"), ("written", "dp_shard=2,zero=3"), ("clip", "tp=2")]
REST = [(hook, plan) for hook in HOOKS for plan in PLANS if (hook, plan) not in QUICK]


@pytest.mark.parametrize(("hook", "plan"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)])
def test_a_hook_has_what_one_process_has(hook: str, plan: str, pool: RankPool, tmp_path: Path) -> None:
    (one,) = ran(pool, tmp_path, text(hook, None), 1)
    for run in ran(pool, tmp_path, text(hook, plan), 2):
        same(run, one)


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
    with pytest.raises(ShardwiseError, match=f"(?s){reason}"):
        ran(pool, tmp_path, code, 2)
