"""Forecasts tried at random: architectures x clusters x batches, `plan`, then `simulate` of its first three.

    python benchmarks/believable.py --cases 300 --seed 0 --out believable.jsonl     continues where the file ends

A case is right where no plan computes faster than the device's best product, `plan` and `simulate` agree within 2%
on time and memory, devices are not more times as fast as there are of them, pure data parallelism, ZeRO-3 and tp in a
node do not beat the first plan by more than 5%, and a rank's memory at rest does not grow with `zero`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise import Task, plan, simulate
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.models import tasks
from shardwise.planner import Constraints, Search
from shardwise.simulator.forecast import Forecast

AGREE, GUESS = 0.02, 1.05
AT_REST = ("weights", "master", "gradients", "optimizer")
CLUSTERS = (
    "1 h100-sxm-80gb", "2 l40s", "8 a100-sxm-80gb", "8 h100-sxm-80gb", "2x8 h100-sxm-80gb, ib-400",
    "4x8 a100-sxm-80gb, roce-200", "2x8 h200-sxm-141gb, ib-400",
)  # fmt: skip


class Rows:
    """Zeros of one shape, as many as asked for."""

    def __init__(self, *shape: int):
        self.shape = shape

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self.shape)


def summed(output: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return output.float().square().sum(), len(batch)


def chain(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


def encoder(width: int, heads: int, depth: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, depth)


def convolutions(width: int, depth: int) -> nn.Module:
    inner = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *inner)


def drawn_task(rng: random.Random) -> tuple[str, Task]:
    """(its name, the task): a plain module or one of the reference models, of drawn sizes."""
    kind = rng.choice(["chain", "encoder", "convolutions", *(("gpt2", "decoder", "vit", "unet"))])
    if kind in ("gpt2", "decoder", "vit", "unet"):
        made = getattr(tasks, kind, None)
        if made is not None:
            return kind, made()
        kind = "chain"
    width, depth = rng.choice([64, 256, 768, 2048]), rng.choice([2, 4, 8])
    builders: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "chain": (partial(chain, width, depth), (width,)),
        "encoder": (partial(encoder, width, 8, depth), (rng.choice([16, 128, 512]), width)),
        "convolutions": (partial(convolutions, min(width, 256), depth), (3, 32, 32)),
    }
    model, shape = builders[kind]
    return f"{kind} {width}x{depth} on {shape}", Task(model=model, loss=summed, data=Rows(*shape))


def drawn(seed: int, constraints: Constraints | None = None) -> dict[str, Any]:
    """The case of a seed: what was drawn, what is wrong with it."""
    rng = random.Random(seed)
    name, task = drawn_task(rng)
    cluster, batch = rng.choice(CLUSTERS), 2 ** rng.randint(4, 13)
    case: dict[str, Any] = {"seed": seed, "task": name, "cluster": cluster, "batch": batch}
    began = time.monotonic()
    try:
        found = plan(task, cluster, global_batch=batch, constraints=constraints)
    except InputError as error:
        return {**case, "refused": str(error), "wrong": []}
    wrong = violations(task, cluster, batch, found)
    return {**case, "plan": str(found.best.plan), "step_s": found.best.forecast.step_s, "wrong": wrong,
            "seconds": time.monotonic() - began}  # fmt: skip


def violations(task: Task | str, cluster: str, batch: int, found: Search) -> list[str]:
    """What is wrong with the first three plans of a search."""
    wrong = []
    best = found.best.forecast

    def alone(text: str | Plan) -> Forecast | None:
        try:
            return simulate(task, text, cluster, global_batch=batch)
        except (InputError, RefusedPlan):
            return None

    for place, proposal in enumerate(found.proposals[:3]):
        again = alone(proposal.plan)
        if again is None:
            wrong.append(f"{proposal.plan} is proposed, and refused by simulate")
            continue
        for what, one, two in (
            ("step", proposal.forecast.step_s, again.step_s),
            ("memory", proposal.forecast.needed_bytes, again.needed_bytes),
        ):
            if abs(one / two - 1) > AGREE:
                wrong.append(f"{proposal.plan}: {what} {one:.6g} in plan, {two:.6g} in simulate")
        if place == 0 and proposal.forecast.impossible:
            wrong.append(proposal.forecast.impossible)
    devices = found.best.plan.world_size
    single = [f"accumulate={n}" if n > 1 else "single" for n in (1, 2, 4, 8, 16, 32, 64) if batch % n == 0]
    steps = [each.step_s for text in single if (each := alone(f"{text},precision=bf16".removeprefix("single,")))]
    if steps and min(steps) / best.step_s > devices * (1 + AGREE):
        wrong.append(f"{min(steps) / best.step_s:.2f} times as fast on {devices} devices")
    rest: list[tuple[int, float]] = []
    for zero in range(4 if devices > 1 else 0):
        each = alone(f"dp_shard={devices},zero={zero},precision=bf16")
        if each is None:
            continue
        rest.append((zero, sum(each.worst.terms.get(name, 0.0) for name in AT_REST)))
        if each.step_s * GUESS < best.step_s and each.fits(found.capacity):
            wrong.append(f"zero={zero} over all devices takes {each.step_s:.4g} s, the first plan {best.step_s:.4g}")
    if rest != sorted(rest, key=lambda pair: (-pair[1], pair[0])):
        wrong.append(f"bytes at rest grow with zero: {rest}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first; one for each case")
    parser.add_argument("--out", type=Path, default=Path("believable.jsonl"))
    words = parser.parse_args()
    lines = words.out.read_text().splitlines() if words.out.exists() else []
    done = {case["seed"]: case for case in map(json.loads, lines)}
    for seed in range(words.seed, words.seed + words.cases):
        if seed not in done:
            done[seed] = drawn(seed)
            with words.out.open("a") as file:
                file.write(json.dumps(done[seed]) + "\n")
        if done[seed]["wrong"]:
            print(f"seed {seed}: {done[seed]['task']} on {done[seed]['cluster']}, {done[seed]['batch']} samples")
            print("\n".join(f"  {why}" for why in done[seed]["wrong"]))
    cases = [done[seed] for seed in range(words.seed, words.seed + words.cases)]
    refused = sum("refused" in case for case in cases)
    print(f"{len(cases)} cases, {refused} refused, {sum(bool(case['wrong']) for case in cases)} wrong")


if __name__ == "__main__":
    main()
