"""Bytes on the wire under each plan, counted: `python benchmarks/wire_table.py` writes docs/tables/wire.md.

Two and four ranks on this machine train a small decoder for two optimizer steps; the second is counted. Bytes do not
depend on the machine.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shardwise import Plan, Task, parallelize
from shardwise.models import Decoder, DecoderConfig
from shardwise.models.tasks import next_token_loss, token_batch, tokens_only
from shardwise.ranks import RankPool

CONFIG = DecoderConfig(vocab=64, hidden=64, layers=4, heads=4, kv_heads=4, intermediate=256, context=32)
PLANS = (
    "dp_replicate=2",
    "dp_shard=2,zero=1",
    "dp_shard=2,zero=2",
    "dp_shard=2,zero=3",
    "dp_replicate=4",
    "dp_shard=4,zero=1",
    "dp_shard=4,zero=2",
    "dp_shard=4,zero=3",
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=2",
    "dp_replicate=2,dp_shard=2,zero=3",
)
MICRO_BATCHES = 3


def received(plan: str) -> tuple[float, int]:
    """Bytes received in a step as a multiple of the parameters' bytes, and the number of parameters."""
    batch = partial(token_batch, samples=12, length=16)
    task = Task(model=partial(Decoder, CONFIG), loss=next_token_loss, inputs=tokens_only, batch=batch)
    engine = parallelize(task, plan)
    engine.step(batch(0))
    with engine.observe() as ledger:
        engine.step(batch(1))
    elements = sum(tensor.numel() for _, tensor in engine.full_parameters())
    return ledger.received() / (4 * elements), elements


def page() -> str:
    """The whole page."""
    lines, elements = [], 0
    with RankPool() as pool:
        for plan in PLANS:
            ranks = Plan.parse(plan).world_size
            one, elements = pool.run(received, ranks, plan)[0]
            many, _ = pool.run(received, ranks, f"{plan},accumulate={MICRO_BATCHES}")[0]
            lines.append(f"| `{plan}` | {one:.2f} | {many:.2f} |")
    return (
        "# Bytes on the wire\n\n"
        f"Written by `benchmarks/wire_table.py`. A decoder of {elements:,} parameters in fp32. What rank 0 receives in "
        "one optimizer step (the second), in multiples of the parameters' bytes, control traffic left out. An "
        "all-reduce over p ranks counts 2(p-1)/p of its tensor, an all-gather or reduce-scatter (p-1)/p.\n\n"
        f"| plan | one micro-batch | accumulate={MICRO_BATCHES} |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "tables" / "wire.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(), encoding="utf-8")
    print(f"wrote {path.name}")
