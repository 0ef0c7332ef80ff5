"""Runs with their optimizer's state at rest in fewer bytes, beside runs with the state in full. One process each.

    python benchmarks/lean_state.py [STEPS] [PLAN ...]     a thousand steps of the text example
    python benchmarks/lean_state.py optimizers             a hundred steps of a perceptron, by each optimizer

Of the text example: held-out losses over 512 samples; bytes of parameters (masters too) and optimizer, at rest. By
optimizer: the mean loss of the last 20 steps, how far from it codes are, and bytes of state.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from optimizer_table import MAKERS, make

from shardwise import parallelize, train
from shardwise.errors import RefusedPlan

TASK = f"{Path(__file__).parents[1] / 'examples' / 'text.py'}:task"
PLANS = (
    "single", "optimizer_state=bf16", "optimizer_state=8bit", "precision=bf16", "precision=bf16,masters=split",
    "precision=bf16,optimizer_state=8bit,masters=split",
)  # fmt: skip
BY_OPTIMIZER, LAST = 100, 20


def main(steps: int = 1000, *plans: str) -> None:
    print(f"{'plan':52} {'held-out':>10} {'seconds':>8} {'parameters':>11} {'optimizer':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for plan in plans or PLANS:
            run = train(TASK, plan, steps=steps, out=folder, batch_samples=16, eval_every=steps, eval_samples=512)
            held = run.summary["memory"][0]
            row = f"{plan:52} {run.eval_loss:10.6f} {run.summary['seconds']:8.1f}"
            print(f"{row} {held['parameters']:11,} {held['optimizer']:10,}", flush=True)


def by_optimizer() -> None:
    print(f"{'optimizer':16} {'loss':>8} {'bytes':>7}   {'bf16':>8} {'bytes':>7}   {'8bit':>8} {'bytes':>7}")
    for name in MAKERS:
        loss, size = ended(name, "single") or (0.0, 0)
        row = f"{name:16} {loss:8.4f} {size:7,}"
        for code in ("bf16", "8bit"):
            coded = ended(name, f"optimizer_state={code}")
            row += "    refused        " if coded is None else f"   {coded[0] / loss - 1:+8.2%} {coded[1]:7,}"
        print(row, flush=True)


def ended(name: str, plan: str) -> tuple[float, int] | None:
    """The mean loss of the last steps and the bytes of state; None where the plan is refused."""
    task = make(name)
    assert task.batch is not None
    try:
        engine = parallelize(task, plan)
    except RefusedPlan:
        return None
    losses = [float(engine.step(task.batch(step % 4)).loss) for step in range(BY_OPTIMIZER)]
    return sum(losses[-LAST:]) / LAST, engine.memory()["optimizer"] or 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["optimizers"]:
        by_optimizer()
    else:
        main(*map(int, sys.argv[1:2]), *sys.argv[2:])
