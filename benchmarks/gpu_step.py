"""A step on one GPU beside a loop written by hand, and its forecast: `python benchmarks/gpu_step.py --write`.

Both sides train the same module from the same batch on the host: AdamW, clipping, the loss read once. Steps alternate
in pairs, and a pair's ratio is t_shardwise / t_hand. Memory is the peak of torch's allocator above what lay there
before. The forecast is `simulate`'s for a device of the catalogue, which has never seen this machine.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from peers import decay_groups, token_loss, tokens_only
from torch import nn

from shardwise import Task, parallelize, simulate
from shardwise.models.decoder import Decoder, DecoderConfig

TABLE = Path(__file__).resolve().parent.parent / "docs" / "tables" / "gpu_step.md"
CLIP_NORM, LR, WARM_UP = 1.0, 1e-4, 4
CATALOGUE = {"H100": "h100-sxm-80gb", "H200": "h200-sxm-141gb", "A100": "a100-sxm-80gb"}


def fused(groups: Any) -> torch.optim.Optimizer:
    """AdamW in one kernel for many tensors."""
    return torch.optim.AdamW(groups, lr=LR, weight_decay=0.01, fused=True)


def tokens(step: int, vocab: int, samples: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of random tokens."""
    return {"tokens": torch.randint(vocab, (samples, length), generator=torch.Generator().manual_seed(step))}


def decoder(name: str, samples: int, **sizes: int) -> Task:
    """A decoder of these sizes, on `samples` of its context."""
    config = DecoderConfig(**sizes)
    batch = partial(tokens, vocab=config.vocab, samples=samples, length=config.context)
    return Task(partial(Decoder, config), batch=batch, loss=token_loss, inputs=tokens_only, optimizer=fused, name=name)


class Pictures(nn.Module):
    """(B, 3, 64, 64) -> (B, 100): residual convolutions, batch norm, three widths."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64] * 4 + [128] * 4 + [256] * 4
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        for before, width in zip([64, *widths], widths, strict=False):
            conv = nn.Conv2d(before, width, 3, stride=1 + (before != width), padding=1, bias=False)
            self.blocks.append(nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU()))
        self.head = nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)  # (B, 64, 64, 64)
        for block in self.blocks:
            y = block(x)
            x = x + y if x.shape == y.shape else y
        return self.head(x.mean((2, 3)))


def pictures() -> Task:
    """Random pictures of 100 classes."""

    def batch(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {
            "x": torch.randn(128, 3, 64, 64, generator=generator),
            "y": torch.randint(100, (128,), generator=generator),
        }

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output, batch["y"], reduction="sum"), len(output)

    return Task(Pictures, batch=batch, loss=loss, inputs=lambda b: ((b["x"],), {}), optimizer=fused, name="pictures")


GPT = {"vocab": 50304, "hidden": 768, "layers": 12, "heads": 12, "kv_heads": 12, "intermediate": 2048, "context": 1024}
WIDE = GPT | {"hidden": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "intermediate": 2816}
TINY = {"vocab": 64, "hidden": 64, "layers": 32, "heads": 8, "kv_heads": 8, "intermediate": 176, "context": 8}
CASES: list[tuple[str, Callable[[], Task], str]] = [
    ("decoder of 12 x 768, 8 x 1,024 tokens", partial(decoder, "gpt", 8, **GPT), "precision=bf16"),
    ("the same", partial(decoder, "gpt", 8, **GPT), "precision=bf16,remat=full"),
    ("the same", partial(decoder, "gpt", 8, **GPT), "precision=fp32"),
    ("decoder of 24 x 1,024, 8 x 1,024 tokens", partial(decoder, "wide", 8, **WIDE), "precision=bf16"),
    ("12 convolutions, 128 pictures of 64 x 64", pictures, "precision=bf16"),
    ("decoder of 32 x 64, 8 tokens", partial(decoder, "tiny", 1, **TINY), "precision=bf16"),
]


def by_hand(task: Task, precision: str, remat: bool) -> Callable[[Any], float]:
    """A loop as people write it: autocast, clipping, AdamW; returns its step."""
    assert task.optimizer is not None and task.inputs is not None and task.loss is not None
    torch.manual_seed(0)
    model: Any = task.model()
    model = model.cuda()
    optimizer = task.optimizer(decay_groups(model))
    if remat:
        for block in model.blocks:
            forward = block.forward
            block.forward = partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False)

    def step(batch: Any) -> float:
        batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
        args, kwargs = task.inputs(batch)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss, weight = task.loss(model(*args, **kwargs), batch)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) / weight

    return step


@dataclass
class Row:
    """One case: milliseconds, a ratio, bytes."""

    name: str
    plan: str
    ours_ms: float
    hand_ms: float
    ratio: float
    forecast_ms: float
    ours_bytes: int
    hand_bytes: int
    forecast_bytes: float


def timed(step: Callable[[Any], Any], batch: Any) -> float:
    """Milliseconds of a step, to the end of its last kernel."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step(batch)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def measured(make: Callable[[], Callable[[Any], Any]], task: Task) -> tuple[Callable[[Any], Any], int]:
    """The step, warmed up, and the peak of memory since it was made; what lay there before is not counted."""
    gc.collect()  # an engine lies in cycles, and what the last case left is not to be freed in this one
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make()
    torch.cuda.reset_peak_memory_stats()
    for number in range(WARM_UP):
        step(task.batch(number))  # type: ignore[misc]
    return step, torch.cuda.max_memory_allocated() - before


def row(name: str, make: Callable[[], Task], plan: str, pairs: int, device: str) -> Row:
    """Both sides of a case, and its forecast."""
    task = make()
    parts = dict(part.split("=") for part in plan.split(","))
    forecast = simulate(task, plan, f"1x1 {device}")
    ours, ours_bytes = measured(lambda: parallelize(task, plan, clip_norm=CLIP_NORM, device="cuda").step, task)
    hand, hand_bytes = measured(lambda: by_hand(task, parts["precision"], "remat" in parts), task)
    times: list[tuple[float, float]] = []
    for number in range(pairs):
        batch = task.batch(number)  # type: ignore[misc]
        first = number % 2
        pair = [timed(step, batch) for step in ((ours, hand) if first else (hand, ours))]
        times.append((pair[0], pair[1]) if first else (pair[1], pair[0]))
    return Row(
        name, plan, median(a for a, _ in times), median(b for _, b in times), median(a / b for a, b in times),
        1e3 * forecast.step_s, ours_bytes, hand_bytes, forecast.memory[0].allocated,
    )  # fmt: skip


def table(rows: list[Row], pairs: int, device: str) -> str:
    """The rows as a page."""
    lines = [
        "# A step on one GPU",
        "",
        f"Written by `benchmarks/gpu_step.py`, {pairs} pairs of steps, on {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}. By hand: autocast, clipping, fused AdamW. The ratio is the median over pairs; forecasts "
        f"are `simulate`'s for `{device}` of the catalogue. Memory is torch's peak.",
        "",
        "| module | plan | shardwise (ms) | by hand (ms) | ratio | forecast (ms) | shardwise (GB) | by hand (GB) | "
        "forecast (GB) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        lines.append(
            f"| {one.name} | `{one.plan}` | {one.ours_ms:.1f} | {one.hand_ms:.1f} | {one.ratio:.2f} | "
            f"{one.forecast_ms:.1f} ({one.forecast_ms / one.ours_ms - 1:+.0%}) | {one.ours_bytes / 1e9:.2f} | "
            f"{one.hand_bytes / 1e9:.2f} | {one.forecast_bytes / 1e9:.2f} "
            f"({one.forecast_bytes / one.ours_bytes - 1:+.0%}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=TABLE)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_step: needs a CUDA device, and this machine has none")
    name = torch.cuda.get_device_name()
    device = next((mine for known, mine in CATALOGUE.items() if known in name), CATALOGUE["H100"])
    rows = []
    for case in CASES:
        rows.append(row(*case, given.pairs, device))
        print(table(rows[-1:], given.pairs, device).splitlines()[-1], flush=True)
    if given.write:
        given.out.write_text(table(rows, given.pairs, device), encoding="utf-8")


if __name__ == "__main__":
    main()
