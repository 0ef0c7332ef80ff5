"""Published fine-tunings with LoRA beside what is forecast for them.

    python benchmarks/forecast_fine_tuning.py [WORD ...]      rows whose text has each word

A row says what its table says: model, devices, tokens, degrees, and tokens/s of all devices or GiB of one. What no
table says is recompute: it is taken to be on, for every block, where the run would not fit its devices without.
NeMo's rows ran with Transformer Engine's kernels (`--software nemo`), torchtune's compiled. A row takes a CPU core a
quarter of a minute to three minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

NEMO = "NeMo AutoModel"  # github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.md of April 2026
TUNE = "torchtune"  # github.com/pytorch/torchtune, README.md of version 0.4
RANK = 16  # beside every linear layer, by the recipes of the first; the second does not say


@dataclass(frozen=True)
class Row:
    """A published run. `tokens_per_s` of all devices together; `gib` of the fullest, where it is said."""

    who: str
    model: str
    cluster: str
    samples: int
    seq: int
    plan: str
    tokens_per_s: float
    gib: float | None = None

    @property
    def said(self) -> str:
        return f"{self.who}: {self.model}, {self.cluster}, {self.samples} x {self.seq}, {self.plan}"


TP, FULL = "tp=2,dp_shard={},zero=3,accumulate={},precision=bf16", ",remat=full"
H100 = "h100-sxm-80gb"
ROWS = (
    Row(NEMO, "llama3-8b", f"1x1 {H100}", 32, 4096, "accumulate=16,precision=bf16", 12472.87),
    Row(NEMO, "qwen2.5-7b", f"1x1 {H100}", 32, 4096, "accumulate=16,precision=bf16", 14110.05),
    Row(NEMO, "llama3-70b", f"1x8 {H100}", 32, 4096, TP.format(4, 4) + FULL, 8 * 1091.85),
    Row(NEMO, "qwen2.5-32b", f"1x8 {H100}", 32, 4096, TP.format(4, 4) + FULL, 8 * 2250.31),
    Row(NEMO, "llama3-70b", f"2x8 {H100}, ib-400", 32, 4096, TP.format(8, 2) + FULL, 16 * 984.85),
    Row(NEMO, "qwen2.5-32b", f"2x8 {H100}, ib-400", 32, 4096, TP.format(8, 2) + FULL, 16 * 2072.89),
    Row(TUNE, "llama3-8b", "1x1 rtx-4090", 2, 2048, "precision=bf16,compile=true,remat=full", 3083, 16.2),
    Row(TUNE, "llama3-8b", "1x1 rtx-a6000", 2, 2048, "precision=bf16,compile=true", 4699, 30.3),
    Row(TUNE, "llama3-70b", "1x8 a100-sxm-80gb", 16, 2048, "dp_shard=8,zero=3,precision=bf16,remat=full,compile=true",
        3497, 27.6),
)  # fmt: skip


def forecast(row: Row) -> dict:
    """Returns what `shardwise simulate --json` says of the row's run."""
    words = ["simulate", row.model, "--lora", str(RANK), "--cluster", row.cluster, "--seq", str(row.seq),
             "--global-batch", str(row.samples), "--plan", row.plan, "--json"]  # fmt: skip
    words += ["--software", "nemo"] if row.who == NEMO else []
    run = subprocess.run([sys.executable, "-m", "shardwise", *words], stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout)


def line(row: Row) -> str:
    """Returns the row of the table: what was published, what is forecast, and how far that is from it."""
    said = forecast(row)
    if said.get("step_s") is None:
        return f"{row.said}: {said['error'] or said['refused']}"
    rate = row.samples * row.seq / said["step_s"]
    text = f"{row.said}: {row.tokens_per_s:,.0f} tokens/s, forecast {rate:,.0f} ({rate / row.tokens_per_s - 1:+.0%})"
    gib = max(device["allocated"] for device in said["memory"]) / 2**30
    if row.gib is None:
        return f"{text}; {gib:.1f} GiB{'' if said['fits'] else ', which does not fit'}"
    return f"{text}; {row.gib} GiB, forecast {gib:.1f} ({gib / row.gib - 1:+.0%})"


def main() -> None:
    for row in ROWS:
        if all(word in row.said for word in sys.argv[1:]):
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
