"""Scripts whose model has complex parameters: what their own lines read, write and sum up is one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_prepare import BAR, run_script

from shardwise import Plan
from shardwise.ranks import RankPool

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
x = torch.randn(8, 5)
loader = DataLoader(TensorDataset(x, x.roll(1, 1).tanh()), batch_size=4, shuffle=True)


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.enter = nn.Linear(5, 2 * width, dtype=torch.cdouble)
        self.inner = nn.Linear(2 * width, width, dtype=torch.cdouble)
        self.scale, self.real = nn.Parameter(torch.rand(width) * (1 + 1j)), nn.Linear(width, width)
        self.leave = nn.Linear(width, 5, dtype=torch.cdouble)

    def forward(self, x):
        z = self.enter(torch.complex(x, x.flip(-1)))
        z = self.inner(z * torch.tanh(z.abs())) + self.scale
        return self.leave(torch.complex(self.real(z.real), torch.tanh(z.imag))).abs()


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-4)
losses, made = [], []
#prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=PLAN)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss = loss + PENALTY
        loss.backward()  # or prepared's
        GRADIENTS
        optimizer.step()
        with torch.no_grad():
            WEIGHTS
        losses.append(loss.item())
"""
ALL = "model.parameters()"
LINES = {
    "penalty": ("PENALTY", f"1e-2 * sum(p.abs().sum() for p in {ALL})"),
    "sizes": ("WEIGHTS", "made += [(n, p.shape, p.dtype, p.numel()) for n, p in model.named_parameters()]"),
    "clipped": ("GRADIENTS", f"made.append(round(float(torch.nn.utils.clip_grad_norm_({ALL}, 0.5)), 9))"),
    "gradients": ("GRADIENTS", f"for p in {ALL}: p.grad = p.grad / (1 + p.grad.abs())"),
    "turned": ("WEIGHTS", "model.inner.weight.mul_(torch.exp(torch.tensor(0.1j)))"),
    "assigned": ("WEIGHTS", "model.enter.weight.data = model.enter.weight.data / model.enter.weight.data.abs()"),
    "loaded": ("WEIGHTS", "model.load_state_dict({k: 0.9 * v for k, v in model.state_dict().items()})"),
    "state": ("WEIGHTS", "made += [(v['exp_avg'].dtype, v['exp_avg'].shape)"
                         " for v in optimizer.state_dict()['state'].values()]"),
}  # fmt: skip
PLANS = ("dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2")
QUICK = [("penalty", "dp_shard=2,zero=3"), ("gradients", "tp=2")]
REST = [(name, plan) for name in LINES for plan in PLANS if (name, plan) not in QUICK]


def text(name: str, plan: str | None) -> str:
    """The script with one line more, prepared where there is a plan."""
    place, line = LINES[name]
    script = SCRIPT.replace(place, line).replace("PENALTY", "0").replace("GRADIENTS", "pass").replace("WEIGHTS", "pass")
    if plan is None:
        return script
    script = script.replace("#prepared", "import shardwise\nprepared").replace("PLAN", repr(plan))
    return script.replace("loss.backward()", "loss = prepared.backward(loss)")


@pytest.mark.parametrize(
    ("name", "plan"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in REST)]
)  # fmt: skip
def test_a_script_with_complex_weights_equals_one_process(
    name: str, plan: str, pool: RankPool, tmp_path: Path
) -> None:  # fmt: skip
    paths = [tmp_path / "one.py", tmp_path / "many.py"]
    for path, of in zip(paths, (None, plan), strict=True):
        path.write_text(text(name, of))
    (one,) = pool.run(run_script, 1, str(paths[0]))
    for run in pool.run(run_script, Plan.parse(plan).world_size, str(paths[1]), timeout_s=120):
        assert run["told"] == one["told"]
        assert max(abs(a - b) for a, b in zip(run["losses"], one["losses"], strict=True)) < BAR
        for key, weight in one["weights"].items():
            assert run["weights"][key].dtype == weight.dtype
            assert float((run["weights"][key] - weight).abs().max()) < 100 * BAR, key
