# ruff: noqa: E501 - rows of a table are prose
"""Rules of thumb about clusters, and the usual table of decisions beside what `plan` answers; for rules_of_thumb.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.cluster import Cluster, model
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES
from shardwise.costs.shapes import Shape
from shardwise.costs.software import software
from shardwise.costs.wire import RankGroup, Wire
from shardwise.errors import InputError
from shardwise.launch.lines import start_line
from shardwise.planner import Constraints, Search
from shardwise.planner.candidates import HEADROOM
from shardwise.planner.propose import search
from shardwise.planner.subject import decoder
from shardwise.simulator import simulate

Row = tuple[str, str, str, str]
DEVICE = "h100-sxm-80gb"
SOFT = software("shardwise")
NO_MODEL_AXES = (("tp", 1), ("pp", 1), ("cp", 1))


def shape_of(name: str) -> Shape:
    return Shape.from_row(model(name))


def cluster_of(devices: int, device: str = DEVICE, link: str = "ib-400") -> Cluster:
    return Cluster.parse(f"{devices} {device}" if devices <= 8 else f"{devices // 8}x8 {device}, {link}")


def searched(name: str, devices: int, batch: int, seq: int = 4096, **limits: Any) -> Search:
    machine = cluster_of(devices)
    subject = decoder(shape_of(name), machine, SOFT, batch, seq, "bf16")
    return search(subject, machine, Constraints(**limits, offload=False))


def any_fits(name: str, devices: int, seq: int = 4096) -> bool:
    """Whether a plan fits so many devices, at 16 samples for each."""
    machine = cluster_of(devices)
    subject = decoder(shape_of(name), machine, SOFT, 16 * devices, seq, "bf16")
    room = machine.device.memory_bytes * (1 - HEADROOM) - CONTEXT_BYTES
    limits = Constraints(most=(("cp", 1),), fixed=(("remat", "full"),))
    return any(
        layout.recompute == "full" and subject.memory(layout).reserved <= room
        for layout in subject.layouts(devices, limits)
    )


def minimums() -> Iterator[Row]:
    for name, quoted in (
        ("llama-2-7b", "2"), ("llama-2-13b", "4"), ("llama-2-70b", "19 to 20"), ("llama3-405b", "100"),
    ):  # fmt: skip
        found = next(n for n in (*range(1, 9), *range(16, 257, 8)) if any_fits(name, n))
        yield (
            f"{name}: {quoted} H100 at least", "the states alone, over 80 GB", f"{found}",
            "bf16 with fp32 states and Adam, 4096 tokens a sample, everything recomputed, 8% of memory kept free; every number up to 8, then whole nodes",
        )  # fmt: skip


def scale() -> Iterator[Row]:
    """What changes with the number of devices."""
    yield (
        "405B for 90 days on 16,384 H100: 35M GPU-hours", "devices x days x 24", f"{16384 * 90 * 24 / 1e6:.1f}M", "equal",
    )  # fmt: skip
    found = searched("llama-3-70b", 1000, 1000, 8192, most=(("cp", 1), ("pp", 8), ("tp", 8))).best
    assert found.forecast.tokens_per_s is not None
    yield (
        "70B on 15T tokens: 1,000 GPUs in days", "no figure",
        f"{15e12 / found.forecast.tokens_per_s / 86400:,.0f} days", f"`{found.plan}` at {found.forecast.mfu:.0%} MFU; half a year is not days",
    )  # fmt: skip
    meta = [
        simulate(shape_of("llama3-405b"), Layout(tp=8, sp=True, pp=pp, shard=dp, zero=1, n_micro=2048 // dp, seq=8192, schedule="interleaved1f1b", chunks=chunks, recompute="selective"),
                 cluster_of(16384), SOFT)
        for pp, dp, chunks in ((8, 256, 8), (16, 128, 4))
    ]  # fmt: skip
    yield (
        "Llama 3 405B ran as 8 x 8 x 256, and as 8 x 16 x 128", "both are quoted; the paper's table says 8 x 16 x 128",
        f"{meta[0].step_s:.2f} and {meta[1].step_s:.2f} s a step, {meta[0].needed_bytes / 1e9:.0f} and {meta[1].needed_bytes / 1e9:.0f} GB", "tp x pp x dp on 16,384 H100, 16M tokens, selective recompute, one layer or two in a stage",
    )  # fmt: skip
    for devices in (100, 1000, 10_000, 100_000):
        told = []
        for label, limits in (
            ("DDP", {"most": NO_MODEL_AXES, "fixed": (("dp_shard", 1),)}),
            ("FSDP", {"most": NO_MODEL_AXES, "fixed": (("zero", 3),)}),
            ("3D", {"most": (("tp", 8), ("pp", 8), ("cp", 1))}),
        ):
            world = devices // 8 * 8
            try:
                best = searched("llama3-8b", world, world, 8192, **limits).best
                told.append(f"{label} {best.forecast.mfu:.0%}")
            except InputError:
                told.append(f"{label} does not fit")
        yield (
            f"{ {100: 'DDP', 1000: 'FSDP', 10_000: '3D', 100_000: '3D'}[devices] } up to {devices:,} GPUs", "no source",
            f"MFU of 8B at {devices // 8 * 8:,} H100: {', '.join(told)}",
            "one sample of 8192 tokens for each device: what limits is the model's size, not the number of devices",
        )  # fmt: skip


def links() -> Iterator[Row]:
    yield (
        "InfiniBand 400 is 400 GB/s", "Gb and GB mixed", f"{cluster_of(16).tiers[1].gbps.value:.1f} GB/s for each port",
        "400 Gb/s are 50 GB/s, of which large messages reach 95%; NVLink's 900 GB/s are both directions together",
    )  # fmt: skip
    shape = shape_of("llama3-8b")
    layout = Layout(tp=8, sp=True, seq=8192, n_micro=8)
    pcie, nvlink = (simulate(shape, layout, Cluster.parse(text), SOFT) for text in ("8 l40s", "8 h100-sxm-80gb"))
    share = [f.parts["tensor, context and expert communication"] / f.step_s for f in (pcie, nvlink)]
    yield (
        "PCIe is unusable for tp", "—", f"{share[0]:.0%} of a step of 8B at tp=8 on L40S is waiting, {share[1]:.0%} on NVLink",
        "the measured L40S node reaches 1 GB/s at large sizes, which is a poor one",
    )  # fmt: skip
    big = shape_of("llama-3-70b")
    base = Layout(seq=8192, zero=3, shard=32, recompute="full")
    full, hybrid = (
        simulate(big, lay, cluster_of(32), SOFT).step_s for lay in (base, base.with_(zero=3, shard=8, replicas=4))
    )
    yield (
        "hybrid sharding is 1.3 to 1.6 times as fast as ZeRO-3 on 32 GPUs", "—", f"{full / hybrid:.2f} times as fast",
        "70B, one sample of 8192 tokens: gathers hide behind so much work; and states over 8 ranks alone do not fit",
    )  # fmt: skip
    size = 2.0 * 7e9
    ratio = [
        Wire(Cluster.parse(f"4x8 {DEVICE}, {link}")).collective("all_reduce", RankGroup(32), size)
        for link in ("eth-25", "ib-400")
    ]
    yield (
        "Ethernet is 20 times slower", "—", f"{ratio[0] / ratio[1]:.0f} times, 25 Gb/s a device against 400",
        "an all-reduce of 7B in 16 bits over 32 H100; the ratio is that of the ports, whatever they are called",
    )  # fmt: skip
    b, s, h = 1, 8192, 8192
    yield (
        "a pipeline sends batch x hidden x 2 bytes", "one vector for each sample", f"{2 * b * s * h / 1e6:.0f} MB for batch 1 at {s} tokens",
        "the sequence is left out: batch x sequence x hidden x 2 bytes",
    )  # fmt: skip
    yield (
        "in backward, layer N+1 is fetched while layer N computes", "forward's order", "layer N-1", "backward runs from the last layer to the first",
    )  # fmt: skip
    racks = [
        search(decoder(shape_of("llama3-405b"), machine, SOFT, 288, 8192, "bf16"), machine, limits).best
        for machine in (Cluster.parse("72 gb200"),)
        for limits in (Constraints(most=(("pp", 1), ("cp", 1), ("tp", 8))), Constraints(most=(("cp", 1), ("tp", 8)), fixed=(("pp", 9),)))
    ]  # fmt: skip
    yield (
        "in an NVL72, tp against pp is moot below 500B", "—",
        f"405B on 72 GB200: {racks[0].forecast.step_s:.3g} s without a pipeline, {racks[1].forecast.step_s:.3g} s with pp=9",
        f"`{racks[0].plan}` and `{racks[1].plan}`",
    )  # fmt: skip


def sizes() -> Iterator[Row]:
    for name, quoted, devices in (("llama-2-7b", "under 7B use DDP", 8), ("qwen2.5-32b", "beyond 30B use 3D", 64)):
        best = searched(name, devices, 8 * devices, most=(("cp", 1),)).best
        yield (
            quoted, "no source", f"{name} on {devices} H100: `{best.plan}`",
            f"{best.family}, {best.forecast.mfu:.0%} MFU: what memory asks for, not a size",
        )  # fmt: skip


def decisions() -> Iterator[tuple[str, str, str, str]]:
    """(situation, usual advice, what plan answers, how to start it)."""
    for situation, advice, name, devices, batch, seq, limits in (
        ("the model fits on one GPU", "DDP", "llama-3.2-1b", 8, 256, 4096, {}),
        ("it fits only when sharded", "FSDP or ZeRO-3", "llama3-8b", 8, 64, 4096, {}),
        ("one node, and a model much too large for one of its GPUs", "tp inside the node", "qwen2.5-32b", 8, 64, 4096, {}),
        ("several nodes", "tp, pp and data ranks (3D)", "llama3-405b", 512, 512, 8192, {}),
        ("the input is too large", "context or domain parallelism", "llama3-8b", 8, 8, 131072, {}),
        ("the budget is one node", "offload, LoRA, a smaller model", "qwen2.5-14b", 8, 64, 4096, {}),
    ):  # fmt: skip
        what = f"{situation} ({name}, {devices} H100, {batch} samples of {seq} tokens)"
        try:
            best = searched(name, devices, batch, seq, **limits).best
        except InputError as error:
            yield what, advice, f"none: {str(error).split(';')[0].split(': the nearest')[0]}", "—"
            continue
        start = start_line(f"shardwise train MODULE:TASK --plan '{best.plan}'", best.plan)
        yield (
            what, advice, f"{best.family}: `{best.plan}`, {best.forecast.mfu:.0%} MFU, {best.forecast.needed_bytes / 1e9:.0f} GB",
            f"`{start}`",
        )  # fmt: skip
    yield "inference only", "tp inside the node", "not planned: a forecast is of training steps", "—"
