"""Bytes that each rank holds between steps, by stage and dtypes, measured and by formula: writes docs/tables/memory.md.

    python benchmarks/memory_table.py            # about a minute on two cores
    python benchmarks/memory_table.py --print    # to the screen alone

A decoder of a few million parameters takes two optimizer steps of three micro-batches on 2 and on 4 ranks. The bytes
are those of tensors on each rank and do not depend on the machine.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from shardwise import Plan, Task, parallelize
from shardwise.engine.engine import Engine
from shardwise.models import Decoder, DecoderConfig
from shardwise.models.tasks import adamw, next_token_loss, token_batch, tokens_only
from shardwise.ranks import RankPool

CONFIG = DecoderConfig(vocab=1024, hidden=192, layers=8, heads=6, kv_heads=6, intermediate=512, context=32)
ACCUMULATE = 3
STAGES = {
    2: ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"],
    4: ["dp_replicate=4", "dp_shard=4,zero=1", "dp_shard=4,zero=2", "dp_shard=4,zero=3",
        "dp_replicate=2,dp_shard=2,zero=2", "dp_replicate=2,dp_shard=2,zero=3"],
}  # fmt: skip
PRECISIONS = ("fp32", "bf16", "bf16-full")
KINDS = ("parameters", "gradients", "optimizer")
IN_FLIGHT = ("parameters after forward", "gradients after backward")
Bytes = dict[str, float]


def task() -> Task:
    """The decoder on synthetic tokens."""
    return Task(
        model=partial(Decoder, CONFIG), loss=next_token_loss, inputs=tokens_only, optimizer=adamw,
        batch=partial(token_batch, samples=12, length=16), name="memory",
    )  # fmt: skip


def hold(plans: list[str]) -> list[Bytes]:
    """On a rank: what it holds under each plan after two steps, and the elements of the model."""
    found = []
    work = task()
    assert work.batch is not None
    for plan in plans:
        engine = parallelize(work, plan)
        engine.step(work.batch(0))
        in_flight = watched_step(engine, work.batch(1))
        counted = engine.memory()
        elements = sum(parameter.numel() for parameter in engine.module.parameters())
        at_rest = {kind: float(counted[kind] or 0) for kind in KINDS}
        found.append(at_rest | in_flight | {"elements": float(elements)})
    return found


def watched_step(engine: Engine, batch: Any) -> Bytes:
    """One step; the most that is held right after a forward, and right after a backward that is not the last."""
    after_forward: list[int] = []
    after_backward: list[int] = []
    finish = engine.technique.finish_micro_batch

    def on_finish() -> set[int]:
        used = finish()
        after_backward.append(engine.memory()["gradients"] or 0)
        return used

    handle = engine.module.register_forward_hook(
        lambda *_: after_forward.append(engine.memory()["parameters"] or 0)  # type: ignore[func-returns-value]
    )
    engine.technique.finish_micro_batch = on_finish  # type: ignore[method-assign]
    engine.step(batch)
    handle.remove()
    del engine.technique.finish_micro_batch
    return dict(zip(IN_FLIGHT, (float(max(after_forward)), float(max(after_backward[:-1]))), strict=True))


def formula(plan: Plan, elements: float) -> Bytes:
    """Bytes of each kind on each rank: P elements, N ranks of dp_shard, AdamW's two numbers for each element."""
    shards = plan.dp_shard if plan.zero else 1
    compute = 4 if plan.precision == "fp32" else 2
    master = 2 if plan.precision == "bf16-full" else 4
    if plan.zero == 3:
        parameters = master / shards
    elif compute == master:
        parameters = compute
    else:
        parameters = compute + master / shards
    if plan.zero >= 2:
        gradients = master / shards
    elif master == 4:
        gradients = 4.0
    else:  # the buckets, in which sums are float32, and the copy that the optimizer reads
        gradients = 4 + master / shards
    # FSDP2 keeps what replicas have not summed yet in the dtype of sums, float32
    accumulated = 4.0 if plan.zero < 2 else (master if plan.zero == 3 and plan.dp_replicate == 1 else 4) / shards
    kinds = {"parameters": parameters, "gradients": gradients, "optimizer": 2 * master / shards}
    kinds |= dict(zip(IN_FLIGHT, (parameters, accumulated), strict=True))
    return {kind: size * elements for kind, size in kinds.items()}


def cell(measured: float, expected: float) -> str:
    """Measured, by formula, and how far apart."""
    return f"{measured / 1e6:.2f} / {expected / 1e6:.2f} ({measured / expected - 1:+.1%})"


def table() -> str:
    """The page."""
    lines = []
    elements = 0.0
    with RankPool() as pool:
        for ranks, stages in STAGES.items():
            for precision in PRECISIONS:
                plans = [f"{stage},accumulate={ACCUMULATE},precision={precision}" for stage in stages]
                by_rank = pool.run(hold, ranks, plans, timeout_s=600)
                for place, stage in enumerate(stages):
                    found = [rank[place] for rank in by_rank]
                    elements = found[0]["elements"]
                    expected = formula(Plan.parse(plans[place]), elements)
                    totals = [sum(rank[kind] for kind in KINDS) for rank in found]
                    worst = max(found, key=lambda rank: sum(rank[kind] for kind in KINDS))
                    cells = [cell(worst[kind], expected[kind]) for kind in KINDS]
                    at_rest = sum(expected[kind] for kind in KINDS)
                    cells += [cell(max(totals), at_rest), f"{max(totals) * ranks / sum(totals):.3f}"]
                    cells += [cell(max(rank[kind] for rank in found), expected[kind]) for kind in IN_FLIGHT]
                    lines.append(f"| `{stage}` | {precision} | " + " | ".join(cells) + " |")
    return (
        "# Bytes held by a rank\n\n"
        f"Written by `benchmarks/memory_table.py`. A decoder of P = {elements:,.0f} parameters under AdamW, after two "
        f"steps of {ACCUMULATE} micro-batches. MB (10^6 bytes) on the rank that holds most, measured / by formula. "
        "*Balance* is the largest rank over the mean. The first columns are what a rank holds at rest, between steps; "
        "the last two what it holds right after a forward, and right after a backward that is not the step's last.\n\n"
        "| plan | precision | parameters | gradients | optimizer | all | balance | parameters after forward "
        "| gradients after backward |\n|---|---|---|---|---|---|---|---|---|\n"
        + "\n".join(lines)
        + "\n\nBytes by formula, N ranks of dp_shard: fp32 | bf16 (float32 masters) | bf16-full\n\n"
        "| stage | parameters | gradients | optimizer |\n|---|---|---|---|\n"
        "| dp_replicate | 4P \\| 2P + 4P \\| 2P | 4P \\| 4P \\| 4P + 2P | 8P \\| 8P \\| 4P |\n"
        "| zero=1 | 4P \\| 2P + 4P/N \\| 2P | 4P \\| 4P \\| 4P + 2P/N | 8P/N \\| 8P/N \\| 4P/N |\n"
        "| zero=2 | 4P \\| 2P + 4P/N \\| 2P | 4P/N \\| 4P/N \\| 2P/N | 8P/N \\| 8P/N \\| 4P/N |\n"
        "| zero=3 | 4P/N \\| 4P/N \\| 2P/N | 4P/N \\| 4P/N \\| 2P/N | 8P/N \\| 8P/N \\| 4P/N |\n\n"
        "Between micro-batches a bucket (zero=2) and, with replicas, FSDP2 (zero=3) hold sums in float32: "
        "4P/N in bf16-full too.\n"
    )


def main() -> None:
    """Measure, then write or print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the page, write nothing")
    page = table() if parser.parse_args().print else None
    if page is not None:
        print(page)
        return
    path = Path(__file__).parent.parent / "docs" / "tables" / "memory.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table())
    print(f"wrote docs/tables/{path.name}")


if __name__ == "__main__":
    main()
