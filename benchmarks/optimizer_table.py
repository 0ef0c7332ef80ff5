"""Which optimizers equal one process under which stage, each proven by `verify`: writes docs/tables/optimizers.md.

    python benchmarks/optimizer_table.py                  # a few minutes on two cores
    python benchmarks/optimizer_table.py --only Muon,Lion --print

Three steps in float64 on two ranks against a plain loop in one process. A cell says "equal" with the largest error of
any parameter, "refused" with a number for the reason below the table, or what went wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise import Task, verify
from shardwise.models import tasks
from shardwise.ranks import RankPool

STAGES = ("dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2")
STEPS = 3


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), without weight decay: the sign of an average moves the weights.

    The sign is smoothed (x / (|x| + eps)), since rounding would otherwise decide the sign of what is nearly zero.
    """

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-4):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                mixed = average * first + param.grad * (1 - first)
                param.sub_(mixed / (mixed.abs() + group["eps"]), alpha=group["lr"])
                average.lerp_(param.grad, 1 - second)


MAKERS: dict[str, Callable[[list[dict]], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3),
    "Adam(amsgrad)": partial(torch.optim.Adam, lr=3e-3, amsgrad=True),
    "SGD(momentum)": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=3e-3),
    "NAdam": partial(torch.optim.NAdam, lr=3e-3),
    "RAdam": partial(torch.optim.RAdam, lr=3e-3),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=0.02),
    "Lion": partial(Lion, lr=1e-3),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "LBFGS": lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]], lr=0.1, max_iter=4),
}
MATRICES_ALONE = {"Muon"}  # takes no vectors, so its model has none


class Matrices(nn.Module):
    """A perceptron without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((12, 17), (17, 17), (17, tasks.CLASSES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 12) -> (B, classes)"""
        for layer in self.layers[:-1]:
            x = nn.functional.gelu(layer(x))
        return self.layers[-1](x)


def make(name: str) -> Task:
    """The task of one row."""
    base = tasks.mlp().with_(optimizer=MAKERS[name], name=name)
    return base.with_(model=Matrices) if name in MATRICES_ALONE else base


def prove(name: str, plan: str, pool: RankPool, reasons: list[str]) -> str:
    """One cell."""
    try:
        parity = verify(partial(make, name), plan, steps=STEPS, pool=pool, timeout_s=120)
    except Exception as error:
        return f"**failed**: {str(error).splitlines()[0][:120]}"
    reason = parity.refused or parity.error
    if reason:
        reason = reason.splitlines()[0]
        if reason not in reasons:
            reasons.append(reason)
        return f"refused ({reasons.index(reason) + 1})"
    worst = max(parity.parameter_error.values())
    return f"equal, {worst:.0e}" if parity.parity else f"**differs**, {worst:.0e}"


def table(names: list[str]) -> str:
    """The page."""
    reasons: list[str] = []
    lines = []
    with RankPool() as pool:
        for name in names:
            cells = [prove(name, plan, pool, reasons) for plan in STAGES]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    notes = "\n".join(f"{place}. {reason}" for place, reason in enumerate(reasons, start=1))
    return (
        "# Optimizers under each stage\n\n"
        f"Written by `benchmarks/optimizer_table.py`: `verify` over {STEPS} steps in float64, two ranks against one "
        "process. The number is the largest error of a parameter (the bar is 1e-10).\n\n"
        f"| optimizer | {' | '.join(f'`{stage}`' for stage in STAGES)} |\n|---|{'---|' * len(STAGES)}\n"
        + "\n".join(lines)
        + (f"\n\nReasons:\n\n{notes}\n" if notes else "\n")
    )


def main() -> None:
    """Prove, then write or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MAKERS), help="names, with commas between")
    parser.add_argument("--print", action="store_true", help="print the page, write nothing")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    unknown = [name for name in names if name not in MAKERS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)} (known: {', '.join(MAKERS)})")
    page = table(names)
    if arguments.print:
        print(page)
        return
    path = Path(__file__).parent.parent / "docs" / "tables" / "optimizers.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    print(f"wrote docs/tables/{path.name}")


if __name__ == "__main__":
    main()
