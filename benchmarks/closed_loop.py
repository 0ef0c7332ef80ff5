"""Probe this machine, then train: forecast step time and memory beside what was measured.

    python benchmarks/closed_loop.py [--write] [--steps N] [--plans "a;b"] [TASK ...]

Two ranks on the cores at hand, probed anew before each task: on a virtual machine the same forecast, from probes nine
minutes apart, was 38.9 and 53.0 ms. Run it on a quiet machine: what else runs between probe and training is error.
Each run is repeated; a cell whose repeats are further than 10% apart is told, and left out of the figures of the rest.
TASKs are names of shardwise.models.tasks or of this file; --write replaces docs/tables/closed_loop.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn

from shardwise import Task, train
from shardwise.measure.machine import probe
from shardwise.models import Decoder, DecoderConfig
from shardwise.models import tasks as small

PLANS = (
    "dp_replicate=2",
    "dp_shard=2,zero=1",
    "dp_shard=2,zero=2",
    "dp_shard=2,zero=3",
    "tp=2",
    "tp=2,sp=true",
    "pp=2",
)
REPEATS_WITHIN = 0.10  # else a cell measures the machine
TABLE = Path(__file__).parent.parent / "docs" / "tables" / "closed_loop.md"


def _decoder(hidden: int, length: int, samples: int) -> Task:
    config = DecoderConfig(
        vocab=512, hidden=hidden, layers=4, heads=4, kv_heads=4, intermediate=3 * hidden, context=length
    )
    return Task(
        model=partial(Decoder, config), loss=small.next_token_loss, inputs=small.tokens_only, optimizer=small.adamw,
        batch=partial(small.token_batch, samples=samples, length=length), name=f"decoder{hidden}",
    )  # fmt: skip


def decoder128() -> Task:
    """A million parameters, 512 tokens."""
    return _decoder(128, 64, 8)


def decoder256() -> Task:
    """Three and a half million parameters, 1,024 tokens."""
    return _decoder(256, 128, 8)


class Fields(nn.Sequential):
    """Convolutions over square fields."""

    def __init__(self) -> None:
        widths = (3, 32, 32, 64)
        parts = [
            part for i, o in pairwise(widths) for part in (nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())
        ]
        super().__init__(*parts, nn.Conv2d(64, 3, 1))


def _field_batch(step: int, samples: int = 8, side: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 3, side, side, generator=generator), torch.randn(
        samples, 3, side, side, generator=generator
    )


def _squares(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (output - batch[1]).square().sum(), batch[1].numel()


def fields() -> Task:
    """Convolutions, group norms, SiLU."""
    return Task(model=Fields, loss=_squares, inputs=small.first_only, batch=_field_batch, name="fields")


class Recurrent(nn.Module):
    """Two layers of LSTM between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 96), nn.Linear(96, 32)
        self.cells = nn.LSTM(96, 96, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(self.into(x))[0])


def _series(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 24, 32, generator=generator), torch.randn(16, 24, 32, generator=generator)


def recurrent() -> Task:
    """An LSTM."""
    return Task(model=Recurrent, loss=_squares, inputs=small.first_only, batch=_series, name="recurrent")


def wide() -> Task:
    """Six products of 512 x 512 over 256 rows."""
    return Task(model=_wide, loss=_squares, inputs=small.first_only, batch=_rows, name="wide")


def _wide() -> nn.Module:
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.GELU())))


def _rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(256, 512, generator=generator), torch.randn(256, 512, generator=generator)


OWN = (decoder128, decoder256, fields, wide, recurrent)
SMALL = ("decoder", "gpt2", "vit", "unet_group", "mlp", "hf_llama")


@dataclass
class Cell:
    """A task under a plan: seconds of a step forecast and measured, by repeat, and the worst error of memory."""

    forecast: list[float]
    measured: list[float]
    pace: float
    memory: float

    @property
    def error(self) -> float:
        return median(self.forecast) / median(self.measured) - 1

    @property
    def spread(self) -> float:
        """How far the measured repeats are apart, as a share of the shortest."""
        return max(self.measured) / min(self.measured) - 1

    def row(self) -> str:
        figures = f"{self.pace:.2f} | {1e3 * median(self.forecast):.2f} | {1e3 * median(self.measured):.2f}"
        return f"{figures} | {self.spread:.1%} | {self.error:+.1%} | {self.memory:.1%}"


def run(target: str, plan: str, cluster: Path, steps: int, out: str, repeats: int) -> Cell | str:
    """The runs' forecasts beside what they took, or why there is none."""
    forecast, measured = [], []
    for _ in range(repeats):
        try:
            found = train(target, plan, steps=steps, cluster=str(cluster), out=out).summary["forecast"]
        except Exception as refused:  # the table says so; the next one runs
            return f"{type(refused).__name__}: {refused}".splitlines()[0]
        forecast.append(found["beside"]["step"][0])
        measured.append(found["beside"]["step"][1])
    memory = max(abs(f / m - 1) for name, (f, m) in found["beside"].items() if name != "step" and m)
    return Cell(forecast, measured, found["pace"], memory)


def told(cells: dict[str, Cell]) -> str:
    """The errors of steps in one paragraph: of cells that repeat within 10%, and which do not."""
    apart = [name for name, cell in cells.items() if cell.spread > REPEATS_WITHIN]
    errors = [cell.error for name, cell in cells.items() if name not in apart]
    sizes = sorted(map(abs, errors))
    worst = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    every = [abs(cell.error) for cell in cells.values()]
    return (
        f"{sum(size <= 0.15 for size in sizes)} of {len(errors)} within 15%; mean |error| {mean(sizes):.1%}, median "
        f"{median(sizes):.1%}, 90th percentile {worst:.1%}, bias {mean(errors):+.1%}; memory at most "
        f"{max(cell.memory for cell in cells.values()):.1%} off. Left out, since repeats are over 10% apart: "
        f"{', '.join(apart) or 'none'}; with them the mean is {mean(every):.1%}. "
        f"Load average at the end: {os.getloadavg()[0]:.1f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=[*SMALL, *(make.__name__ for make in OWN)])
    parser.add_argument("--plans", default=";".join(PLANS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cluster", help="a file of an earlier probe, instead of measuring")
    parser.add_argument("--write", action="store_true")
    words = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    lines = [
        "| task | plan | pace | forecast, ms | measured, ms | repeats apart | step | memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    cells: dict[str, Cell] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(words.cluster) if words.cluster else Path(folder) / "cluster.toml"
        own = {make.__name__ for make in OWN}
        for task in words.tasks:
            if not words.cluster:
                path.write_text(probe(2).to_toml())
            target = f"closed_loop:{task}" if task in own else f"shardwise.models.tasks:{task}"
            for plan in words.plans.split(";"):
                found = run(target, plan, path, words.steps, folder, words.repeats)
                if isinstance(found, str):
                    lines.append(f"| {task} | {plan} | {found} | | | | | |")
                else:
                    cells[f"{task} {plan}"] = found
                    lines.append(f"| {task} | {plan} | {found.row()} |")
                print(lines[-1], flush=True)
    print(told(cells))
    if words.write:
        intro = "Made by `benchmarks/closed_loop.py --write`, which says how. Two ranks on two CPU cores."
        TABLE.write_text("\n".join([intro, "", *lines, "", told(cells), ""]))


if __name__ == "__main__":
    main()
