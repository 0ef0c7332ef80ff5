"""A thousand steps of the text example with its optimizer's state at rest in fewer bytes, beside the state in full.

    python benchmarks/lean_state.py [STEPS] [PLAN ...]

One process each. Held-out losses over 512 samples; bytes of parameters (masters too) and optimizer, at rest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from shardwise import train

TASK = f"{Path(__file__).parents[1] / 'examples' / 'text.py'}:task"
PLANS = (
    "single", "optimizer_state=bf16", "optimizer_state=8bit", "precision=bf16", "precision=bf16,masters=split",
    "precision=bf16,optimizer_state=8bit,masters=split",
)  # fmt: skip


def main(steps: int = 1000, *plans: str) -> None:
    print(f"{'plan':52} {'held-out':>10} {'seconds':>8} {'parameters':>11} {'optimizer':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for plan in plans or PLANS:
            run = train(
                TASK, plan, steps=steps, out=folder, batch_samples=16, eval_every=steps, eval_samples=512,
            )  # fmt: skip
            held = run.summary["memory"][0]
            row = f"{plan:52} {run.eval_loss:10.6f} {run.summary['seconds']:8.1f}"
            print(f"{row} {held['parameters']:11,} {held['optimizer']:10,}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
