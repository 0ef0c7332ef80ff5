"""Whether a person's first guess beats `plan`: 8 obvious plans by `simulate` against the first that a search proposes.

    python benchmarks/no_better_guess.py --cases 60 --seed 0 --out guesses.jsonl     continues where the file ends

A case is a task (small modules of one's own, reference models, decoders by name) on a cluster, of which many are odd:
three nodes, six or seven devices in one, slow links; three in ten of the decoders have samples of 32k or 128k tokens,
fewer than devices, and two guesses more. Each guess is taken with the fewest accumulations, and with
recompute only, with which it fits into what the search may plan for. A case is wrong where the best of them takes over
5% less than the first proposal. Seeds are odd for decoders by name; each line of the file says what was drawn.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from believable import GUESS, LARGE_ODD, NAMES, ODD, Rows, chain, convolutions, encoder, firsts, report, resumed, summed
from torch import nn

from shardwise import Task
from shardwise.cluster import Cluster
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.models import tasks
from shardwise.planner.door import layout_of, subject_of
from shardwise.planner.proposal_text import lacking
from shardwise.planner.propose import search
from shardwise.planner.subject import Subject

COUNTS = tuple(2**place for place in range(9))  # of accumulations
LONG = 0.3  # of the decoders by name have long samples, fewer than devices


class Gates(nn.Module):
    """A recurrent net over (steps, width), and a mean over its states."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.cells = nn.GRU(width, width, depth, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0].mean(1)


class Mixer(nn.Module):
    """Blocks that mix positions, then features, on a field that is normed between them."""

    def __init__(self, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.along = nn.ModuleList(nn.Linear(length, length) for _ in range(depth))
        self.within = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, (along, within) in enumerate(zip(self.along, self.within, strict=True)):
            x = x + along(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2).relu()
            x = x + within(self.norms[2 * index + 1](x)).relu()
        return x


def funnel(width: int) -> nn.Module:
    """Layers of unequal widths, a wide one in front."""
    widths = (width, 8 * width, 4 * width, width, 16)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)))


def residual(width: int, depth: int) -> nn.Module:
    """Convolutions with batch norms."""
    inner = (
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(depth)
    )
    return nn.Sequential(nn.Conv2d(3, width, 7, stride=2, padding=3), *inner, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def drawn_task(rng: random.Random) -> tuple[str, Task]:
    """(its name, the task): small modules of one's own, and the reference models."""
    width, depth, length = rng.choice([64, 256, 1024, 4096]), rng.choice([2, 4, 8]), rng.choice([16, 128, 512])
    narrow = min(width, 256)
    own: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        f"chain {width}x{depth}": (partial(chain, width, depth), (width,)),
        f"encoder {width}x{depth} of {length}": (partial(encoder, width, 8, depth), (length, width)),
        f"convolutions {narrow}x{depth}": (partial(convolutions, narrow, depth), (3, 32, 32)),
        f"batch norms {narrow}x{depth}": (partial(residual, narrow, depth), (3, 64, 64)),
        f"gates {narrow}x2 of 16": (partial(Gates, narrow, 2), (16, narrow)),
        f"mixer {narrow}x{depth} of {length}": (partial(Mixer, length, narrow, depth), (length, narrow)),
        f"funnel {narrow}": (partial(funnel, narrow), (narrow,)),
    }
    names = [*own, *(name for name in ("gpt2", "decoder", "vit", "unet") if hasattr(tasks, name))]
    name = rng.choice(names)
    if name not in own:
        task: Task = getattr(tasks, name)()
        return name, task
    model, shape = own[name]
    return name, Task(model=model, loss=summed, data=Rows(*shape))


def along(cluster: Cluster) -> list[str]:
    """Plans that a person tries first for long samples: the heads, or the positions, of each over a node."""
    node, nodes = cluster.sizes[0], cluster.world_size // cluster.sizes[0]
    shard = f"dp_shard={nodes}," if nodes > 1 else ""
    return [f"{shard}zero=3,{axis}={node}" for axis in ("cp_ulysses", "cp")] if node > 1 else []


def guessed(first: str, subject: Subject, capacity: float) -> Iterator[tuple[str, float]]:
    """(the plan, its seconds): with the fewest accumulations and the least recompute with which it fits, and with four
    times as many."""
    if lacking(Plan.parse(first)):
        return
    for remat in ("none", "selective", "full"):
        fits = []
        for count in COUNTS:
            text = f"{first},accumulate={count},remat={remat},precision=bf16"
            try:
                layout = layout_of(Plan.parse(text), subject)
                if layout.global_batch != subject.global_batch and layout.micro_batch < 2 and count > 1:
                    break
                if not fits and subject.memory(layout).reserved > capacity:
                    continue
                if fits and count != 4 * fits[0]:
                    continue
                forecast = (subject.exact or subject.simulate)(layout)
            except (InputError, RefusedPlan):
                continue
            if forecast.fits(capacity):
                fits.append(count)
                yield text, forecast.step_s
            if len(fits) == 2:
                break
        if fits:
            return


def drawn(seed: int) -> dict[str, Any]:
    """The case of a seed: what was drawn, the first plan, the best guess, and what is wrong with it."""
    rng = random.Random(seed)
    task: Task | str
    if seed % 2:
        name = task = rng.choice(NAMES)
        text, seq = rng.choice(LARGE_ODD), rng.choice([2048, 4096, 8192])
        world = Cluster.parse(text).world_size
        batch = world * 2 ** rng.randint(0, 4)
        if rng.random() < LONG:
            seq, batch = rng.choice([32768, 131072]), max(1, world // rng.choice([2, 8]))
    else:
        name, task = drawn_task(rng)
        text, seq, batch = rng.choice(ODD), None, rng.choice([16, 48, 64, 96, 512, 720, 4096, 65536])
    cluster = Cluster.parse(text)
    case: dict[str, Any] = {"seed": seed, "task": name, "cluster": text, "batch": batch, "seq": seq, "wrong": []}
    began = time.monotonic()
    try:
        subject = subject_of(task, cluster, global_batch=batch, seq=seq)
        found = search(subject, cluster)
    except InputError as error:
        return {**case, "refused": str(error)}
    case |= {"plan": str(found.best.plan), "step_s": found.best.forecast.step_s, "search_s": time.monotonic() - began}
    obvious = [*firsts(cluster), *(along(cluster) if seq is not None else [])]
    guesses = [guess for first in obvious for guess in guessed(first, subject, found.capacity)]
    if guesses:
        text, seconds = min(guesses, key=lambda guess: guess[1])
        case |= {"guesses": len(guesses), "guess": text, "guess_s": seconds}
        if seconds * GUESS < found.best.forecast.step_s:
            case["wrong"] = [f"{text} takes {seconds:.4g} s, the first plan {case['step_s']:.4g}: {case['plan']}"]
    return {**case, "seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first; one for each case")
    parser.add_argument("--out", type=Path, default=Path("guesses.jsonl"))
    words = parser.parse_args()
    cases = resumed(drawn, range(words.seed, words.seed + words.cases), words.out)
    report(cases)
    ratios = sorted(case["guess_s"] / case["step_s"] for case in cases if "guess_s" in case)
    if ratios:
        print(f"best guess over first plan: least {ratios[0]:.3f}, median {ratios[len(ratios) // 2]:.3f}")


if __name__ == "__main__":
    main()
