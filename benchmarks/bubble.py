"""How long a pipeline's ranks wait, measured: `python benchmarks/bubble.py` writes docs/tables/bubble.md.

Four ranks, each with a stage (or two) that sleeps: 150 ms in a forward, 150 ms for the gradient of its input and
150 ms for that of its weight, shared out where a rank has two stages. A sleeping rank needs no core, so four ranks on
two cores run as four devices would. A rank waits when it neither runs an op of the schedule nor hands its result on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize
from shardwise.comm import barrier
from shardwise.engine.engine import Engine
from shardwise.layout.plan import SCHEDULES
from shardwise.layout.schedules import schedule_of
from shardwise.ranks import RankPool

RANKS = 4
SLEEP_S = 0.15
MICRO_BATCHES = (4, 8, 16, 32)


class _Pace:
    """How fast everything goes: 0 while shapes are told and buffers made, then 1."""

    factor = 0.0


class _SleepsForInput(torch.autograd.Function):
    """Sleeps in forward, and again when the gradient of what it was given is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds * _Pace.factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * _Pace.factor)
        return gradient, None


class _SleepsForWeight(torch.autograd.Function):
    """Sleeps when the gradient of a weight is made."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * _Pace.factor)
        return gradient, None


class Sleeper(nn.Module):
    """One stage."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            x = _SleepsForInput.apply(x, self.seconds)
        return x * (_SleepsForWeight.apply(self.weight, self.seconds) if torch.is_grad_enabled() else self.weight)


def _chain(stages: int, seconds: float) -> nn.Module:
    return nn.Sequential(*[Sleeper(seconds) for _ in range(stages)])


def _batch(step: int, samples: int) -> dict[str, Tensor]:
    return {"x": torch.ones(samples, 4, requires_grad=False)}


def _inputs(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (batch["x"].requires_grad_(torch.is_grad_enabled()),), {}


def _loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.sum(), len(output)


def spans(plan: str) -> list[tuple[float, float]]:
    """(start, end) of each op of this rank's row in the second step, on the clock that the ranks share."""
    parsed = Plan.parse(plan)
    stages = parsed.pp * parsed.stages_per_rank
    task = Task(
        model=partial(_chain, stages, SLEEP_S / parsed.stages_per_rank), loss=_loss, inputs=_inputs,
        batch=partial(_batch, samples=parsed.microbatches),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0),
    )  # fmt: skip
    engine = parallelize(task, parsed.with_(stages=tuple(str(stage) for stage in range(1, stages))))
    _Pace.factor = 0.0
    engine.step(task.batch(0))
    barrier(engine.mesh.world)
    _Pace.factor = 1.0
    with _watched(engine) as met:
        engine.step(task.batch(1))
    return met


@contextmanager
def _watched(engine: Engine) -> Iterator[list[tuple[float, float]]]:
    """Notes when each op inside runs: from the end of its receive to the end of its send."""
    assert engine.state.staged is not None
    mail = engine.state.staged.mail
    met: list[tuple[float, float]] = []
    started = [0.0]

    def received(receive: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            found = receive(*args)
            started[0] = time.monotonic()
            return found

        return wrapped

    @contextmanager
    def ran() -> Iterator[None]:
        started[0] = time.monotonic()
        yield
        met.append((started[0], time.monotonic()))

    for name in ("receive_forward", "receive_backward"):
        setattr(mail, name, received(getattr(mail, name)))
    with engine.around("micro_batch", ran):
        yield met


def waits(pool: RankPool, plan: str) -> float:
    """Share of the ranks' time, from the first op to the end of the last, in which no op runs."""
    found = pool.run(spans, RANKS, plan, timeout_s=120)
    first = min(start for rank in found for start, _ in rank)
    last = max(end for rank in found for _, end in rank)
    busy = sum(end - start for rank in found for start, end in rank)
    return 1.0 - busy / (len(found) * (last - first))


def page(micro_batches: tuple[int, ...] = MICRO_BATCHES) -> str:
    """The whole page."""
    lines = []
    with RankPool() as pool:
        for name in SCHEDULES:
            cells = []
            for count in micro_batches:
                if name == "dualpipev" and count < 2 * RANKS:
                    cells.append("")
                    continue
                plan = f"pp={RANKS},schedule={name},microbatches={count}"
                counted = schedule_of(Plan.parse(plan)).bubble()
                cells.append(f"{waits(pool, plan):.1%} ({counted:.1%})")
                print(plan, cells[-1], flush=True)
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    formula = " | ".join(f"{(RANKS - 1) / (count + RANKS - 1):.1%}" for count in micro_batches)
    return (
        "# How long a pipeline waits\n\n"
        f"Written by `benchmarks/bubble.py`. {RANKS} ranks on this machine, whose stages sleep {SLEEP_S * 1e3:.0f} ms "
        "in a forward and as long for each half of a backward. Measured share of the ranks' time in which they wait, "
        "and in brackets what the schedule's table says. The last line is (p-1)/(m+p-1).\n\n"
        f"| schedule | {' | '.join(f'{count} micro-batches' for count in micro_batches)} |\n"
        f"|---|{'---|' * len(micro_batches)}\n" + "\n".join(lines) + f"\n| (p-1)/(m+p-1) | {formula} |\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="*", default=list(MICRO_BATCHES))
    text = page(tuple(parser.parse_args().microbatches))
    path = Path(__file__).parents[1] / "docs" / "tables" / "bubble.md"
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path.name}")
