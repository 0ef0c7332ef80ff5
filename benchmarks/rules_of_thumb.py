# ruff: noqa: E501 - rows of a table are prose
"""Check the arithmetic that everyone quotes: `python benchmarks/rules_of_thumb.py [--check]`.

Writes docs/rules-of-thumb.md.

Every figure in the column *ours* is computed here by the same functions that the planner uses.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from rules_of_scale import decisions, links, minimums, on_one_device, scale, sizes

from shardwise.cluster import Cluster, model
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.memory import layer_activations, states
from shardwise.costs.offload import LINK_SHARE, offloaded, update_bytes
from shardwise.costs.shapes import Shape
from shardwise.costs.software import STATES, Software, software
from shardwise.costs.wire import RankGroup, Wire
from shardwise.layout.schedules import Times, make_schedule
from shardwise.layout.timing import play
from shardwise.simulator import simulate

PAGE = Path(__file__).parents[1] / "docs" / "rules-of-thumb.md"
YEAR = 365.25 * 86400
H100 = 989e12
Row = tuple[str, str, str, str]


def llama(name: str) -> Shape:
    return Shape.from_row(model(name))


def gb(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value < 1e12 else f"{value / 1e12:,.2f} TB"


def state_bytes(policy: str, count: float, **layout: int) -> float:
    soft = Software("any", states=policy)
    return sum(states({"dense": count}, Layout(**layout), soft).values())  # type: ignore[arg-type]


def per_parameter() -> Iterator[Row]:
    for name, who in (
        ("fp16-apex", "ZeRO paper, DeepSpeed: fp16 weights and gradients, fp32 master, Adam"),
        ("bf16", "Megatron-LM, shardwise `bf16`: the same with gradients summed in fp32"),
        ("fp16-apex-fp32-grad", "the first with an fp32 copy of gradients at the step"),
        ("fp32", "PyTorch's default, shardwise `fp32`; FSDP's mixed precision at rest"),
    ):
        yield f"{STATES[name].total:.0f} bytes for each parameter", who, f"{STATES[name].total:.0f}", "equal"
    seven, seventy = llama("llama-2-7b").parameters, llama("llama-2-70b").parameters
    for quoted, policy in (("112 GB", "fp16-apex"), ("140 GB", "fp16-apex-fp32-grad")):
        yield (
            f"7B needs {quoted}",
            f"{STATES[policy].total:.0f} bytes x 7.0B",
            gb(state_bytes(policy, seven)),
            ("the model has 6.74B; activations come on top"),
        )
    yield (
        "7B needs 150 GB",
        "none of the policies",
        gb(state_bytes("fp16-apex-fp32-grad", seven)),
        ("20 bytes for each parameter and something for activations, which depend on batch and length"),
    )
    low, high = state_bytes("fp16-apex", seventy), state_bytes("fp16-apex-fp32-grad", seventy)
    yield (
        "70B needs 1.1 to 1.5 TB",
        "16 to 20 bytes",
        f"{gb(low)} to {gb(high)}",
        "no policy above gives 1.5 TB of states",
    )
    twelve, sixteen = 12 * 70e9, 16 * 70e9
    yield (
        "70B on 8 GPUs: 840 GB replicated, 105 GB sharded",
        "2 + 2 + 8 bytes: 16-bit weights and gradients, Adam in fp32",
        f"{gb(twelve)} and {gb(twelve / 8)}; with the fp32 master {gb(sixteen)} and {gb(sixteen / 8)}",
        "the quoted figure has weights and gradients and leaves out the fp32 master; neither fits a device of 80 GB",
    )
    yield (
        "2 + 4 + 4 + 8 = 20 bytes",
        "a sum",
        f"{2 + 4 + 4 + 8}",
        "16-bit weights, fp32 gradients, master and Adam: Megatron's 18",
    )
    thirteen, largest = llama("llama-2-13b").parameters, llama("llama3-405b").parameters
    for name, quoted, count in (("13B", "300 GB", thirteen), ("405B", "8 TB and 100 GPUs", largest)):
        low, high = state_bytes("fp16-apex", count), state_bytes("fp16-apex-fp32-grad", count)
        yield (
            f"{name} needs {quoted}", "20 bytes", f"{gb(low)} to {gb(high)}, over {devices_for(low)} to {devices_for(high)} GPUs of 80 GB",
            "16 to 20 bytes for each parameter; activations come on top",
        )  # fmt: skip
    yield (
        "19+ GPUs for one copy of 70B", "1.5 TB over 80 GB", f"{devices_for(high_of(seventy))} at 20 bytes, {devices_for(state_bytes('fp16-apex', seventy))} at 16",
        "states alone, without activations; see the fewest GPUs below",
    )  # fmt: skip


def devices_for(size: float) -> int:
    """The number of devices of 80 GB that hold so many bytes, rounded up."""
    return math.ceil(size / 80e9)


def high_of(count: float) -> float:
    return state_bytes("fp16-apex-fp32-grad", count)


def zero_table() -> Iterator[str]:
    yield "| ranks | " + " | ".join(f"{p} ZeRO-{z}" for p in ("7.5B", "128B", "1T") for z in (1, 2, 3)) + " |"
    yield "|---|" + "---|" * 9
    for ranks in (1, 4, 16, 64, 256, 1024):
        cells = []
        for count in (7.5e9, 128e9, 1e12):
            for zero in (1, 2, 3):
                shard = 1.0 / ranks
                weights = 2 * (shard if zero == 3 else 1)
                gradients = 2 * (shard if zero >= 2 else 1)
                cells.append(f"{count * (weights + gradients + 12 * shard) / 1e9:,.4g}")
        yield f"| {ranks} | " + " | ".join(cells) + " |"


def wires() -> Iterator[Row]:
    size = 2 * 70e9
    moved = 2 * size
    yield (
        "ring all-reduce of 70B gradients moves 280 GB a rank",
        "2 x 140 GB, 16-bit",
        gb(2 * 7 / 8 * size) + " on 8 ranks",
        f"2 (p-1)/p n: 280 GB is the limit for many ranks ({gb(moved)})",
    )
    for rate, quoted, link in ((900, "0.31 s", "nvlink"), (50, "5.6 s on 1,024 GPUs", "ib-400")):
        text = "8 h100-sxm-80gb" if link == "nvlink" else "128x8 h100-sxm-80gb, ib-400"
        ranks = 8 if link == "nvlink" else 1024
        ours = Wire(Cluster.parse(text)).collective("all_reduce", RankGroup(ranks, 1), size)
        why = (
            "900 GB/s is both directions together; NCCL reaches 445 GB/s each way"
            if rate == 900
            else "eight ports of a node carry a ring of whole nodes; with one port for each node it would be near the quoted"
        )
        yield f"... in {quoted} at {rate} GB/s", "280 GB over the rate", f"{ours:.2f} s over {link}", why
    wire = Wire(Cluster.parse("8x8 h100-sxm-80gb, ib-400"))
    whole = wire.collective("all_gather", RankGroup(64, 1), size)
    hybrid = wire.collective("all_gather", RankGroup(8, 1), size)
    rest = wire.collective("all_reduce", RankGroup(8, 8), 2 * size / 8)
    yield (
        "hybrid sharding beats full sharding over slow links",
        "no figure",
        (
            f"gathering 70B once: {whole:.2f} s over 64 ranks, {hybrid:.2f} s inside nodes, and {rest:.2f} s for the "
            "gradients between them"
        ),
        "it pays where a step gathers more than once, each micro-batch twice, and where the link between nodes is slow (below)",
    )


def bubbles() -> Iterator[Row]:
    for micro, quoted in ((1, "75%"), (16, "19%"), (32, "9%")):
        p = 4
        ours = (p - 1) / (micro + p - 1)
        ratio = (p - 1) / micro
        yield (
            f"4 stages, {micro} micro-batch{'es' * (micro > 1)}: bubble {quoted}",
            "(p-1)/(m+p-1) at 1, (p-1)/m beyond",
            (f"{ours:.1%} of the time; {ratio:.1%} of the work"),
            "two formulas mixed: share of the time, and ratio to the work",
        )
    yield (
        "4 stages lose 25%",
        "unclear",
        f"{3 / (9 + 3):.1%} at 9 micro-batches",
        "true for one number of micro-batches",
    )
    for name, quoted in (("gpipe", "75%"), ("1f1b", "12.5%")):
        table = make_schedule(name, 4, 4)
        played = play(table, [1.0] * 4, [1.0] * 4, [1.0] * 4, [0.0] * 3)
        yield (
            f"4 stages x 4 micro-batches: {name} {quoted}",
            "—",
            f"{played.bubble:.1%} (played), {table.bubble(Times()):.1%} (table)",
            ("the two schedules have one bubble; they differ in memory"),
        )


def work() -> Iterator[Row]:
    shape, node = llama("llama3-8b"), Cluster.parse("8 h100-sxm-80gb")
    soft = software("megatron-core")
    base = Layout(seq=8192, micro_batch=1, n_micro=8)
    plain, again = (simulate(shape, base.with_(recompute=r), node, soft) for r in ("none", "full"))
    kept, less = (sum(layer_activations(shape, base.with_(recompute=r), soft).values()) for r in ("none", "full"))
    peaks = [
        forecast.worst.allocated - sum(states({"dense": shape.parameters}, base, soft).values())
        for forecast in (plain, again)
    ]
    yield (
        "recompute costs 30% and saves 4 to 8 times",
        "a forward is a third of a step",
        f"+{again.step_s / plain.step_s - 1:.0%} of the step; {peaks[0] / peaks[1]:.1f} times less beside the states at the peak; between forward and backward a layer keeps {kept / less:.1f} times less",
        "8B, 8192 tokens on H100; the share is under a third since the optimizer and the loss are not recomputed; at the peak one layer is whole again, and so are the logits",
    )
    h, s, b = 8192, 4096, 1
    yield (
        "tp moves 80 x 2 x 8192 x batch bytes",
        "one vector for each layer",
        f"{gb(80 * 4 * 2 * b * s * h)} of tensors; at tp=4 a rank receives {gb(1.5 * 80 * 4 * 2 * b * s * h)}",
        f"two all-reduces forward and two backward, batch 1 at {s} tokens, 2 (p-1)/p each; the quoted figure leaves out the "
        "sequence and backward, and counts one all-reduce of four",
    )
    yield (
        "a pipeline moves little",
        "—",
        f"{2 * b * s * h / 1e6:.0f} MB for each boundary, micro-batch and direction",
        (
            f"a tensor split reduces four such tensors in every layer, forward and backward together, and a boundary sends two: {4 * 20 / 2:.0f} times as much at 20 layers a stage"
        ),
    )
    yield "tp=8 x pp=16 x dp=128 = 16,384", "—", f"{8 * 16 * 128:,}", "equal"
    activations, selective = (
        32 * sum(layer_activations(llama("llama-2-7b"), Layout(seq=4096, micro_batch=4, recompute=r), software("shardwise")).values())
        for r in ("none", "selective")
    )  # fmt: skip
    yield (
        "7B activations of 30 to 40 GB at batch 4 x 4096",
        "—",
        f"{gb(activations)}; {gb(selective)} with the selective policy",
        "fused attention; no policy that keeps products comes down to 30 to 40 GB",
    )
    yield "a 73 x 721 x 1440 sample is 303 MB", "fp32", f"{73 * 721 * 1440 * 4 / 1e6:.0f} MB", "equal"
    yield (
        "attention over a million tokens: 4.3 TB of scores",
        "2^20 squared, 4 bytes, one head",
        gb(2.0**40 * 4),
        ("2^40 x 4 = 4.4 x 10^12 bytes; fused kernels never write them"),
    )


def times() -> Iterator[Row]:
    for name, tokens, quoted, count in (
        ("7B", 1e12, "45 days", 7e9), ("70B", 15e12, "29 years", 70e9), ("405B", 15e12, "170 years", 405e9),
    ):  # fmt: skip
        seconds = 6 * count * tokens / (0.4 * H100)
        ours = f"{seconds / 86400:,.0f} days" if seconds < 5 * YEAR else f"{seconds / YEAR:,.0f} years"
        yield f"{name} on {tokens / 1e12:.0f}T tokens, one H100: {quoted}", "—", ours, "6 P D at 40% MFU"
    yield (
        "16,384 H100 x 54 days: 6.4M GPU-hours",
        "—",
        f"{16384 * 54 * 24 / 1e6:.1f}M",
        "devices x days x 24",
    )


def costs() -> Iterator[Row]:
    shape, machine, soft = llama("llama-3.2-1b"), Cluster.parse("2x8 h100-sxm-80gb, ib-400"), software("shardwise")
    base = Layout(seq=4096, micro_batch=2, n_micro=4, replicas=16)
    replicas = simulate(shape, base, machine, soft)
    ddp = replicas.step_s
    for quoted, label, layout in (
        ("1.1 to 1.3", "FSDP", base.with_(zero=3, shard=16, replicas=1)),
        ("1.5 to 2.0", "ZeRO-3 + tp", base.with_(zero=3, shard=4, replicas=1, tp=4, sp=True, n_micro=16)),
        ("2 to 3", "3D", base.with_(zero=1, shard=4, replicas=1, tp=2, sp=True, pp=2, n_micro=16)),
    ):
        ours = simulate(shape, layout, machine, soft)
        updates = (
            f"Each replica updates all weights, {replicas.parts['optimizer'] * 1e3:.0f} ms of {ddp * 1e3:.0f}, a shard its 16th, {ours.parts['optimizer'] * 1e3:.0f} ms. "
            if label == "FSDP"
            else ""
        )
        yield (
            f"{label} costs {quoted} times DDP",
            "—",
            f"{ours.step_s / ddp:.2f}",
            f"1B on 16 H100, 4 micro-batches of 2 samples of 4096 tokens, the same batch for both. {updates}At 70B on 64: {_at_70b(label)}",
        )
    yield from _offload()
    shown = []
    for count in (1, 4):
        layout = base.with_(n_micro=count)
        parameters = shape.parameters
        whole = Wire(machine).collective("all_reduce", RankGroup(16, 1), 4.0 * parameters)
        left = simulate(shape, layout, machine, soft).exposed["data"]
        shown.append(f"{max(0.0, 1 - left / whole):.0%}")
    yield (
        "overlap hides 50 to 80%",
        "—",
        f"{shown[0]} and {shown[1]} of a DDP step's all-reduce with 1 and 4 micro-batches",
        "derived, not assumed: 1B on 16 H100 over ib-400; 0 to 100% by plan and links",
    )


def _at_70b(label: str) -> str:
    """The same technique for a model that replicas cannot hold, against FSDP."""
    shape, machine, soft = llama("llama-3-70b"), Cluster.parse("8x8 h100-sxm-80gb, ib-400"), software("shardwise")
    base = Layout(seq=4096, micro_batch=1, n_micro=4, zero=3, shard=64, recompute="full")
    if label == "FSDP":
        return "DDP does not fit, FSDP does"
    layouts = {
        "ZeRO-3 + tp": base.with_(shard=8, tp=8, sp=True, n_micro=32),
        "3D": base.with_(zero=1, shard=4, tp=8, sp=True, pp=2, n_micro=64),
    }
    ours = simulate(shape, layouts[label], machine, soft).step_s / simulate(shape, base, machine, soft).step_s
    return f"{ours:.2f} times FSDP, where DDP does not fit"


def _offload() -> Iterator[Row]:
    """States on the host: they go to the device and back in each step. Nothing hidden."""
    shape, machine, soft = llama("llama3-8b"), Cluster.parse("8 h100-sxm-80gb"), software("shardwise")
    told = []
    for n_micro in (1, 16):
        base = Layout(seq=4096, micro_batch=1, n_micro=n_micro, zero=3, shard=8, recompute="full")
        there = simulate(shape, base.with_(offload="optimizer"), machine, soft).step_s
        told.append(f"{there / simulate(shape, base, machine, soft).step_s:.2f}")
    policy, moved = STATES[soft.states], base.with_(offload="optimizer")
    once = offloaded(shape.parameters / 8, policy, moved, machine, update_bytes(policy, fused=soft.fused_adam))
    yield (
        "offload costs 3 to 10 times DDP",
        "—",
        f"{told[0]} times FSDP with 1 micro-batch of 4096 tokens, {told[1]} with 16",
        f"8B on 8 H100: {once.link_s:.2f} s of state over PCIe and back a step, whatever its batch "
        f"(assumed: {LINK_SHARE:g} of the link, nothing hidden); it holds for small batches alone, or where weights are "
        "read from the host for every micro-batch",
    )


def page() -> str:
    parts = [
        "# Rules of thumb, checked\n",
        "Written by `benchmarks/rules_of_thumb.py`: every figure under *ours* is computed by the functions that the planner "
        "uses. GB are 10^9 bytes.\n",
    ]
    for title, rows in (
        ("Bytes for each parameter", per_parameter()), ("Links", wires()), ("Bubbles", bubbles()), ("Work and activations", work()),
        ("Training times", times()), ("The fewest GPUs", minimums()), ("Links between devices", links()), ("Many devices", scale()),
        ("Sizes", sizes()), ("What a technique costs", costs()),
    ):  # fmt: skip
        parts.append(f"## {title}\n\n| rule | where it comes from | ours | why they differ |\n|---|---|---|---|")
        parts += [f"| {' | '.join(row)} |" for row in rows]
        parts.append("")
        if title.startswith("Bytes"):
            parts.append("ZeRO, GB for each rank, 16 bytes for each parameter (Rajbhandari et al. 2020, table 1):\n")
            parts += [*zero_table(), ""]
    parts.append(
        "## Which plan when\n\nThe usual table of decisions, beside what a search answers for one case of each.\n"
    )
    parts.append(
        "| situation | usual advice | what `plan` answers | GPU-hours for 10^9 tokens | to start it |\n|---|---|---|---|---|"
    )
    parts += [*(f"| {' | '.join(row)} |" for row in decisions()), ""]
    parts.append(
        "## What fits on one GPU\n\nAdamW in bf16 with float32 masters, 18 bytes for each parameter, one sample of 2048 tokens, everything recomputed, 8% of memory kept free.\n"
    )
    parts.append(
        "| memory | room for states | the largest of these that fits | the smallest that does not |\n|---|---|---|---|"
    )
    parts += [*(f"| {' | '.join(row)} |" for row in on_one_device()), ""]
    kernels = Kernels(Cluster.parse("8 h100-sxm-80gb").device)
    parts.append(f"Products on H100 here: {kernels.basis}.\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is not what would be written")
    args = parser.parse_args()
    text = page()
    if args.check:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
