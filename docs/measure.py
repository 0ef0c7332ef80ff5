"""Measure bytes at rest and on the wire under each plan: `python docs/measure.py` writes docs/tables/bytes.md.

Two and four ranks on this machine train a small decoder for two optimizer steps; the second is counted. Bytes do not
depend on the machine.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shardwise import Task, parallelize
from shardwise.models import Decoder, DecoderConfig
from shardwise.models.tasks import next_token_loss, token_batch, tokens_only
from shardwise.ranks import RankPool

CONFIG = DecoderConfig(vocab=64, hidden=64, layers=4, heads=4, kv_heads=4, intermediate=256, context=32)
PLANS = (
    "single",
    "dp_replicate=2",
    "dp_shard=2,zero=1",
    "dp_shard=2,zero=2",
    "dp_shard=2,zero=3",
    "dp_shard=4,zero=1",
    "dp_shard=4,zero=2",
    "dp_shard=4,zero=3",
    "dp_replicate=2,dp_shard=2,zero=1",
    "dp_replicate=2,dp_shard=2,zero=2",
    "dp_replicate=2,dp_shard=2,zero=3",
)
MICRO_BATCHES = 3
Row = dict[str, float]


def measured(plan: str) -> Row:
    """Bytes on rank 0 after a step, and received in it, as multiples of the parameters' bytes."""
    batch = partial(token_batch, samples=12, length=16)
    task = Task(model=partial(Decoder, CONFIG), loss=next_token_loss, inputs=tokens_only, batch=batch)
    engine = parallelize(task, plan)
    engine.step(batch(0))
    with engine.observe() as ledger:
        engine.step(batch(1))
    whole = sum(4 * tensor.numel() for _, tensor in engine.full_parameters())
    memory = engine.memory()
    row: Row = {kind: (memory[kind] or 0) / whole for kind in ("parameters", "gradients", "optimizer")}
    row["wire"] = ledger.received() / whole
    return row | {"bytes": float(whole)}


def table() -> str:
    """The page."""
    lines, whole = [], 0.0
    with RankPool() as pool:
        for plan in PLANS:
            ranks = _ranks(plan)
            one = pool.run(measured, ranks, plan)[0]
            many = pool.run(measured, ranks, _accumulating(plan))[0]
            whole = one["bytes"]
            cells = [one["parameters"], one["gradients"], one["optimizer"], one["wire"], many["wire"]]
            lines.append(f"| `{plan}` | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return (
        "# Bytes at rest and on the wire\n\n"
        "Written by `docs/measure.py`. A decoder of "
        f"P = {whole / 4:,.0f} parameters in fp32 ({whole:,.0f} bytes) under AdamW. Every number is a multiple of P's "
        "bytes: what rank 0 holds after a step, and what it receives in one optimizer step (the second; control "
        "traffic left out). All-reduce counts 2(p-1)/p of the tensor, all-gather and reduce-scatter (p-1)/p.\n\n"
        "| plan | parameters | gradients | optimizer | on the wire | on the wire, "
        f"accumulate={MICRO_BATCHES} |\n|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def _ranks(plan: str) -> int:
    """Ranks that a plan needs."""
    from shardwise import Plan

    return Plan.parse(plan).world_size


def _accumulating(plan: str) -> str:
    return f"accumulate={MICRO_BATCHES}" if plan == "single" else f"{plan},accumulate={MICRO_BATCHES}"


if __name__ == "__main__":
    path = Path(__file__).parent / "tables" / "bytes.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(table())
    print(f"wrote {path.name}")
