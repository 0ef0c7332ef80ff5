"""Forecasts tried at random: architectures x clusters x batches, `plan`, then `simulate` of its first three.

    python benchmarks/believable.py --cases 300 --seed 0 --out believable.jsonl     continues where the file ends
    python benchmarks/believable.py --cases 300 --seed 1000                         decoders by name
    python benchmarks/believable.py --cases 300 --seed 1000000                      transformers' configurations, shrunk
    python benchmarks/believable.py --cases 300 --seed 2000000                      the same from 2000000, 2001000 and
                                                                                    3000000 on: three nodes, six devices
                                                                                    in one, slow links

A case is right where no plan computes faster than the device's best product, `plan` and `simulate` agree within 2%
on time and memory, devices are not more times as fast as there are of them, pure data parallelism, ZeRO-3 and tp in a
node do not beat the first plan by more than 5%, and a rank's memory at rest does not grow with `zero`.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise import Task, plan, simulate
from shardwise.cluster import Cluster
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.models import tasks
from shardwise.planner import Constraints, Search
from shardwise.simulator.forecast import Forecast

BY_NUMBERS = 1000  # seeds from here on are decoders by name
BY_CONFIG = 1_000_000  # and from here on configurations of transformers
ON_ODD = 2_000_000  # and from here on the three kinds again, on odd clusters
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer", "n_layers")
NAMES = ("llama-3.2-1b", "llama3-8b", "qwen2.5-14b", "qwen2.5-32b", "llama3-70b", "gpt-3-13b", "gpt-3-175b", "mpt-7b")
AGREE, GUESS = 0.02, 1.05
AT_REST = ("weights", "master", "gradients", "optimizer")
CLUSTERS = (
    "1 h100-sxm-80gb", "2 l40s", "8 a100-sxm-80gb", "8 h100-sxm-80gb", "2x8 h100-sxm-80gb, ib-400",
    "4x8 a100-sxm-80gb, roce-200", "2x8 h200-sxm-141gb, ib-400",
)  # fmt: skip
ODD = (
    "1 h100-sxm-80gb", "3 a100-sxm-80gb", "6 a100-sxm-80gb", "7 v100-sxm2-32gb", "12x1 rtx-4090, eth-10",
    "2x4 l40s, eth-10", "3x6 a100-sxm-40gb, roce-100", "3x8 h100-sxm-80gb, eth-25", "5x3 h200-sxm-141gb, eth-100",
    "3x4 mi300x, roce-400", "1x72 gb200", "2x2x8 h100-sxm-80gb, ib-400, eth-25",
)  # fmt: skip
LARGE_ODD = (
    "8 h100-sxm-80gb", "3x8 h100-sxm-80gb, eth-25", "3x6 h200-sxm-141gb, roce-100", "1x72 gb200",
    "4x2x8 h100-sxm-80gb, ib-400, eth-25", "16x8 a100-sxm-80gb, ib-200", "64x8 h100-sxm-80gb, ib-400",
    "6x8 mi300x, roce-400",
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


def drawn_name(rng: random.Random, odd: bool) -> tuple[str, str, int, int]:
    """(a decoder by name, a cluster that it may fit, samples, tokens of each)."""
    name = rng.choice(NAMES)
    if odd:
        cluster = rng.choice(LARGE_ODD)
        return name, cluster, Cluster.parse(cluster).world_size * 2 ** rng.randint(0, 4), rng.choice([2048, 4096, 8192])
    device, link = rng.choice(["h100-sxm-80gb, ib-400", "a100-sxm-80gb, ib-200", "h200-sxm-141gb, roce-400"]).split(
        ", "
    )
    nodes = 2 ** rng.randint(0, 7)
    cluster = f"{nodes}x8 {device}, {link}" if nodes > 1 else f"8 {device}"
    return name, cluster, nodes * 8 * 2 ** rng.randint(0, 4), rng.choice([2048, 4096, 8192])


def firsts(cluster: Cluster) -> list[str]:
    """Eight plans that a person tries first, on all devices."""
    devices, node = cluster.world_size, cluster.sizes[0]
    wide = max(d for d in (8, 6, 4, 3, 2, 1) if node % d == 0)
    two = 2 if devices % 2 == 0 else wide
    found = [f"dp_replicate={devices}", *(f"dp_shard={devices},zero={zero}" for zero in (1, 3))]
    if node < devices:
        found.append(f"dp_replicate={devices // node},dp_shard={node},zero=3")
    found += [_over(devices, f"tp={tp},sp=true", tp) for tp in dict.fromkeys((wide, two)) if tp > 1]
    pp = next((d for d in (2, 4, 3, 5, 7) if devices % d == 0), 1)
    found += [_over(devices, f"pp={pp},microbatches={4 * pp}", pp)] if pp > 1 else []
    if pp > 1 and devices % (wide * pp) == 0 and wide > 1:
        found.append(_over(devices, f"tp={wide},sp=true,pp={pp},microbatches={4 * pp}", wide * pp))
    return found


def _over(devices: int, cut: str, ranks: int) -> str:
    rest = devices // ranks
    return f"{cut},dp_shard={rest},zero=1" if rest > 1 else cut


def guesses(cluster: Cluster, batch: int) -> list[str]:
    """The first plans, each with as many accumulations as divide."""
    texts = []
    for first in firsts(cluster):
        plan = Plan.parse(first)
        for count in (2**place for place in range(8)):
            if batch % (plan.data_ranks * plan.microbatches * count) == 0:
                texts.append(f"{first},accumulate={count}" if count > 1 else first)
    return texts


def drawn_decoder(seed: int, odd: bool) -> dict[str, Any]:
    """The case of a decoder by its numbers: agreement, MFU, and guesses under each recompute."""
    name, cluster, batch, seq = drawn_name(random.Random(seed), odd)
    case: dict[str, Any] = {"seed": seed, "task": f"{name}, {seq} tokens", "cluster": cluster, "batch": batch}
    began = time.monotonic()
    try:
        found = plan(name, cluster, global_batch=batch, seq=seq)
    except InputError as error:
        return {**case, "refused": str(error), "wrong": []}
    wrong = []
    for proposal in found.proposals[:3]:
        again = simulate(name, proposal.plan, cluster, global_batch=batch, seq=seq)
        if abs(proposal.forecast.step_s / again.step_s - 1) > AGREE:
            wrong.append(f"{proposal.plan}: {proposal.forecast.step_s:.6g} in plan, {again.step_s:.6g} in simulate")
        if again.impossible:
            wrong.append(again.impossible)
    best = found.best.forecast.step_s
    for text in guesses(Cluster.parse(cluster), batch):
        for remat in ("none", "selective", "full"):
            guess = f"{text},remat={remat},precision=bf16"
            try:
                each = simulate(name, guess, cluster, global_batch=batch, seq=seq)
            except (InputError, RefusedPlan):  # heads or layers that do not divide
                continue
            if each.fits(found.capacity) and each.step_s * GUESS < best:
                wrong.append(f"{guess} takes {each.step_s:.4g} s, the first plan {best:.4g}: {found.best.plan}")
    ranks = Cluster.parse(cluster).sizes[0]
    rest = [
        sum(
            simulate(name, f"dp_shard={ranks},zero={zero},precision=bf16", cluster, global_batch=batch, seq=seq)
            .worst.terms.get(term, 0.0) for term in AT_REST
        )
        for zero in range(4)
    ]  # fmt: skip
    if rest != sorted(rest, reverse=True):
        wrong.append(f"bytes at rest grow with zero: {rest}")
    return {**case, "plan": str(found.best.plan), "step_s": best, "wrong": wrong, "seconds": time.monotonic() - began}


def drawn_config(seed: int, odd: bool) -> dict[str, Any]:
    """The case of a model type of transformers with few layers, at its own widths."""
    from transformers import CONFIG_MAPPING, AutoConfig

    rng = random.Random(seed)
    kind, cluster, batch = (
        rng.choice(sorted(CONFIG_MAPPING)),
        rng.choice(ODD if odd else CLUSTERS),
        2 ** rng.randint(4, 10),
    )
    case: dict[str, Any] = {"seed": seed, "task": kind, "cluster": cluster, "batch": batch}
    began = time.monotonic()
    try:
        config = AutoConfig.for_model(kind)
        for name in LAYERS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, rng.choice([2, 4]))
        text = config.to_json_string(use_diff=False)
    except Exception as error:  # transformers' own: this type has no configuration of so few layers
        return {**case, "refused": f"transformers: {error}", "wrong": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(text)
        why = ""
        for seq in (None, rng.choice([128, 512])):  # a length is asked for where a model reads tokens
            try:
                found = plan(str(path), cluster, global_batch=batch, seq=seq)
            except (InputError, RefusedPlan) as error:
                why = str(error)
                continue
            wrong = violations(str(path), cluster, batch, found, seq)
            return {**case, "plan": str(found.best.plan), "step_s": found.best.forecast.step_s, "wrong": wrong,
                    "seconds": time.monotonic() - began}  # fmt: skip
    return {**case, "refused": why, "wrong": []}


def drawn(seed: int, constraints: Constraints | None = None) -> dict[str, Any]:
    """The case of a seed: what was drawn, what is wrong with it."""
    odd = seed >= ON_ODD
    kind = seed - ON_ODD if odd else seed
    if kind >= BY_CONFIG:
        return drawn_config(seed, odd)
    if kind >= BY_NUMBERS:
        return drawn_decoder(seed, odd)
    rng = random.Random(seed)
    name, task = drawn_task(rng)
    cluster, batch = rng.choice(ODD if odd else CLUSTERS), 2 ** rng.randint(4, 13)
    batch = batch * 3 if odd and rng.random() < 0.5 else batch
    case: dict[str, Any] = {"seed": seed, "task": name, "cluster": cluster, "batch": batch}
    began = time.monotonic()
    try:
        found = plan(task, cluster, global_batch=batch, constraints=constraints)
    except InputError as error:
        return {**case, "refused": str(error), "wrong": []}
    wrong = violations(task, cluster, batch, found)
    return {**case, "plan": str(found.best.plan), "step_s": found.best.forecast.step_s, "wrong": wrong,
            "seconds": time.monotonic() - began}  # fmt: skip


def violations(task: Task | str, cluster: str, batch: int, found: Search, seq: int | None = None) -> list[str]:
    """What is wrong with the first three plans of a search."""
    wrong = []
    best = found.best.forecast

    def alone(text: str | Plan) -> Forecast | None:
        try:
            return simulate(task, text, cluster, global_batch=batch, seq=seq)
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


def resumed(draw: Callable[[int], dict[str, Any]], seeds: range, path: Path) -> list[dict[str, Any]]:
    """The cases of the seeds: those that a file of an earlier run has, and the others, added to it one by one."""
    lines = path.read_text().splitlines() if path.exists() else []
    done = {case["seed"]: case for case in map(json.loads, lines)}
    for seed in seeds:
        if seed not in done:
            done[seed] = draw(seed)
            with path.open("a") as file:
                file.write(json.dumps(done[seed]) + "\n")
    return [done[seed] for seed in seeds]


def report(cases: list[dict[str, Any]]) -> None:
    """Print what is wrong, case by case, and how many are."""
    for case in cases:
        if case["wrong"]:
            print(f"seed {case['seed']}: {case['task']} on {case['cluster']}, {case['batch']} samples")
            print("\n".join(f"  {why}" for why in case["wrong"]))
    refused = sum("refused" in case for case in cases)
    print(f"{len(cases)} cases, {refused} refused, {sum(bool(case['wrong']) for case in cases)} wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first; one for each case")
    parser.add_argument("--out", type=Path, default=Path("believable.jsonl"))
    words = parser.parse_args()
    report(resumed(drawn, range(words.seed, words.seed + words.cases), words.out))


if __name__ == "__main__":
    main()
