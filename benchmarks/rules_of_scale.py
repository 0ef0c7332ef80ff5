# ruff: noqa: E501 - rows of a table are prose
"""Rules of thumb about clusters, and the usual table of decisions beside what `plan` answers; for rules_of_thumb.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.cluster import Cluster, Figure, model
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES
from shardwise.costs.shapes import Shape
from shardwise.costs.software import STATES, software
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


def any_fits(name: str, devices: int, seq: int = 4096, device: str = DEVICE, samples: int = 16) -> bool:
    """Whether a plan fits so many devices, at so many samples for each."""
    machine = cluster_of(devices, device)
    subject = decoder(shape_of(name), machine, SOFT, samples * devices, seq, "bf16")
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
    room = cluster_of(16384).device.memory_bytes
    held = [f"{m.needed_bytes / 1e9:.0f} GB{'' if m.fits(room) else ', which does not fit 80'}" for m in meta]
    yield (
        "Llama 3 405B ran as 8 x 8 x 256, and as 8 x 16 x 128", "both are quoted; the paper's table says 8 x 16 x 128",
        f"{meta[0].step_s:.2f} and {meta[1].step_s:.2f} s a step, {held[0]}, and {held[1]}", "tp x pp x dp on 16,384 H100, 16M tokens, selective recompute, one layer or two in a stage",
    )  # fmt: skip
    for who, devices in (("DDP", 100), ("FSDP", 1000), ("DeepSpeed", 10_000), ("3D", 100_000)):
        world = devices // 8 * 8
        yield (
            f"{who} up to {devices:,} GPUs", "no source", f"{world:,} H100: {_by_family('llama-3.2-1b', world)}; {_by_family('llama3-8b', world)}",
            "a step, and MFU, of one sample of 8192 tokens for each device; what limits replicas is the model's size, not the number of devices",
        )  # fmt: skip


def _by_family(name: str, world: int) -> str:
    """The best plan of each family, in words; DeepSpeed's here is ZeRO-3, as FSDP's."""
    told = []
    for label, limits in (
        ("DDP", {"most": NO_MODEL_AXES, "fixed": (("dp_shard", 1),)}),
        ("ZeRO-3", {"most": NO_MODEL_AXES, "fixed": (("zero", 3),)}),
        ("3D", {"most": (("tp", 8), ("pp", 8), ("cp", 1)), "fixed": (("tp", 2), ("pp", 2))}),
    ):
        try:
            best = searched(name, world, world, 8192, **limits).best.forecast
            told.append(f"{label} {best.step_s * 1e3:.0f} ms ({best.mfu:.0%})")
        except InputError:
            told.append(f"{label} does not fit")
    return f"{name} {', '.join(told)}"


def links() -> Iterator[Row]:
    yield (
        "InfiniBand 400 is 400 GB/s", "Gb and GB mixed", f"{cluster_of(16).tiers[1].gbps.value:.1f} GB/s for each port",
        "400 Gb/s are 50 GB/s, of which large messages reach 95%; NVLink's 900 GB/s are both directions together",
    )  # fmt: skip
    shape = shape_of("llama3-8b")
    layout = Layout(tp=8, sp=True, seq=8192, n_micro=8)
    slow, fast = Cluster.parse("8 l40s"), Cluster.parse("8 h100-sxm-80gb")
    size = 2.0**29
    rate = 2 * 7 / 8 * size / Wire(slow).collective("all_reduce", RankGroup(8, 1), size) / 1e9
    waits = [_waiting(shape, layout, machine) for machine in (slow, _by_port(slow, 32.0), _by_port(slow, 64.0), fast)]
    yield (
        "PCIe is unusable for tp", "—",
        f"waiting, of a step of 8B at tp=8 with 8192 tokens: {waits[0]:.0%} on L40S as one node was measured ({rate:.1f} GB/s), {waits[1]:.0%} and {waits[2]:.0%} on L40S at 32 and 64 GB/s each way, {waits[3]:.0%} on H100 over NVLink",
        "it hangs on the rate that the node reaches, and on the device's: 32 GB/s each way is PCIe 4 with 16 lanes, 64 is PCIe 5; the measured node is a poor one",
    )  # fmt: skip
    yield from _against_ddp()
    size = 2.0 * 7e9
    ratio = [
        Wire(Cluster.parse(f"4x8 {DEVICE}, {link}")).collective("all_reduce", RankGroup(32), size)
        for link in ("eth-25", "ib-400")
    ]
    yield (
        "Ethernet is slower than InfiniBand", "no figure", f"{ratio[0] / ratio[1]:.0f} times the time over 25 Gb/s a device as over 400",
        "an all-reduce of 7B in 16 bits over 32 H100; the ratio is that of the ports, and of how much of each large messages reach, whatever they are called",
    )  # fmt: skip
    b, s, h = 1, 8192, 8192
    yield (
        "a pipeline sends batch x hidden x 2 bytes", "one vector for each sample", f"{2 * b * s * h / 1e6:.0f} MB for batch 1 at {s} tokens",
        "the sequence is left out: batch x sequence x hidden x 2 bytes",
    )  # fmt: skip
    yield (
        "the all-reduce of layer N overlaps the compute of layer N+1", "forward's order", "of layer N-1", "gradients come in backward, which runs from the last layer to the first",
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


def _by_port(machine: Cluster, gbps: float) -> Cluster:
    """The same devices, their link a port of so many GB/s each way in place of what was measured on one node."""
    port = replace(machine.tiers[0], gbps=Figure(gbps, "assumed", "the port's rate"))
    return replace(machine, device=replace(machine.device, table=""), tiers=(port,))


def _waiting(shape: Shape, layout: Layout, machine: Cluster) -> float:
    forecast = simulate(shape, layout, machine, SOFT)
    return forecast.parts["tensor, context and expert communication"] / forecast.step_s


def _against_ddp() -> Iterator[Row]:
    """What sharding costs against replicas, and hybrid against full sharding, over a fast link and a slow one."""
    small, middle = shape_of("llama-3.2-1b"), shape_of("llama3-8b")
    counts = (1, 4, 16)

    def steps(shape: Shape, link: str, recompute: str, **layout: Any) -> list[float]:
        base = Layout(seq=4096, recompute=recompute, **layout)
        return [simulate(shape, base.with_(n_micro=n), cluster_of(32, link=link), SOFT).step_s for n in counts]

    def over(these: list[float], those: list[float]) -> str:
        return ", ".join(f"{a / b:.2f}" for a, b in zip(these, those, strict=True))

    costs, gains = [], []
    offloaded = ""
    for link in ("ib-400", "eth-25"):
        ddp, full, hybrid = (
            steps(small, link, "none", **k)
            for k in ({"replicas": 32}, {"zero": 3, "shard": 32}, {"zero": 3, "shard": 8, "replicas": 4})
        )
        costs.append(f"{link}: full {over(full, ddp)}; hybrid {over(hybrid, ddp)}")
        offloaded = over(steps(small, link, "none", zero=3, shard=32, offload="optimizer"), ddp)
        full, hybrid = (
            steps(middle, link, "full", **k) for k in ({"zero": 3, "shard": 32}, {"zero": 3, "shard": 8, "replicas": 4})
        )
        gains.append(f"{link}: {over(full, hybrid)}")
    where = "32 H100 in four nodes, 1, 4 and 16 micro-batches of 4096 tokens"
    yield (
        "FSDP, full or hybrid, costs 1.3 to 1.6 times DDP", "—", ". ".join(costs),
        f"1B on {where}; full sharding gathers between nodes for each micro-batch, hybrid sharding inside them",
    )  # fmt: skip
    yield (
        "hybrid sharding is faster than full sharding over slow links", "no figure", f"times as fast, {'. '.join(gains)}",
        f"8B on {where}, everything recomputed; over a fast link gathers hide behind compute",
    )  # fmt: skip
    yield (
        "ZeRO-3 with offload over Ethernet or a poor NVMe is 20 times as slow as DDP", "—", f"{offloaded} times DDP over the same eth-25",
        f"1B on {where}, optimizer on the host; weights on a poor disk, which 20 times would take, are not forecast",
    )  # fmt: skip


def on_one_device() -> Iterator[tuple[str, str, str, str]]:
    """(memory, parameters whose states there is room for, the largest model that fits, the smallest that does not)."""
    names = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b", "gpt-3-2.7b", "llama-3.2-3b", "qwen3-4b", "llama-2-7b")
    for memory, device in (("80 GB", DEVICE), ("40 GB", "a100-sxm-40gb"), ("24 GB", "rtx-4090")):
        machine = cluster_of(1, device)
        room = (machine.device.memory_bytes * (1 - HEADROOM) - CONTEXT_BYTES) / STATES[SOFT.states].total
        fits = [any_fits(name, 1, 2048, device, samples=1) for name in names]
        first = fits.index(False)
        assert not any(fits[first:]), "the names stand in the order of their bytes"
        yield (
            f"{memory} ({device})", f"{room / 1e9:.1f}B parameters",
            *(f"{name}, {shape_of(name).parameters / 1e9:.2f}B" for name in names[first - 1 : first + 1]),
        )  # fmt: skip


def sizes() -> Iterator[Row]:
    for name, quoted, devices in (
        ("llama-2-7b", "under 7B, where it fits on one GPU, use DDP", 8),
        ("qwen2.5-32b", "beyond 30B use 3D", 64),
    ):
        best = searched(name, devices, 8 * devices, most=(("cp", 1),)).best
        note = (
            ""
            if any_fits(name, 1)
            else "; its states do not fit on one GPU of 80 GB, see below for what does"
            if devices == 8
            else ""
        )
        yield (
            quoted, "no source", f"{name} on {devices} H100: `{best.plan}`",
            f"{best.family}, {best.forecast.mfu:.0%} MFU: what memory asks for, not a size{note}",
        )  # fmt: skip


def decisions() -> Iterator[tuple[str, str, str, str, str]]:
    """(situation, usual advice, what plan answers, GPU-hours for 10^9 tokens, how to start it)."""
    for situation, advice, name, devices, batch, seq, limits in (
        ("the model fits on one GPU", "DDP", "llama-3.2-1b", 8, 256, 4096, {}),
        ("it fits only when sharded", "FSDP or ZeRO-3", "llama3-8b", 8, 64, 4096, {}),
        ("one node, and a model much too large for one of its GPUs", "tp inside the node", "qwen2.5-32b", 8, 64, 4096, {}),
        ("70B on 64 GPUs", "FSDP, or tp in the node beside it; torchrun or srun", "llama-3-70b", 64, 128, 8192, {}),
        ("70B on 128 GPUs", "FSDP, or tp in the node beside it; torchrun or srun", "llama-3-70b", 128, 256, 8192, {}),
        ("175B and more", "3D, Megatron's; srun", "gpt-3-175b", 512, 1024, 2048, {}),
        ("several nodes", "tp, pp and data ranks (3D)", "llama3-405b", 512, 512, 8192, {}),
        ("the input is too large", "context or domain parallelism", "llama3-8b", 8, 8, 131072, {}),
        ("the budget is one node", "offload, LoRA, a smaller model", "qwen2.5-14b", 8, 64, 4096, {}),
    ):  # fmt: skip
        what = f"{situation} ({name}, {devices} H100, {batch} samples of {seq} tokens)"
        try:
            best = searched(name, devices, batch, seq, **limits).best
        except InputError as error:
            yield what, advice, f"none: {str(error).split(';')[0].split(': the nearest')[0]}", "—", "—"
            continue
        start = start_line(f"shardwise train MODULE:TASK --plan '{best.plan}'", best.plan)
        yield (
            what, advice, f"{best.family}: `{best.plan}`, {best.forecast.mfu:.0%} MFU, {best.forecast.needed_bytes / 1e9:.0f} GB", f"{devices * 1e9 / best.forecast.tokens_per_s / 3600:,.0f}",
            f"`{start}`",
        )  # fmt: skip
    yield _adapters()
    yield "inference only", "tp inside the node", "not planned: a forecast is of training steps", "—", "—"


def _adapters(rank: int = 16) -> tuple[str, str, str, str, str]:
    """The row for LoRA, by bytes: adapters on every product of a block."""
    s = shape_of("llama3-8b")
    heads, groups, inner = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.ffn
    block = 2 * (s.hidden + heads) + 2 * (s.hidden + groups) + 3 * (s.hidden + inner)
    adapters = rank * s.layers * block
    frozen, trained = 2 * s.parameters, STATES[SOFT.states].total * adapters
    whole = STATES[SOFT.states].total * s.parameters
    return (
        f"a few weights are trained: LoRA (llama3-8b, rank {rank} on every product of a block)", "one GPU, or DDP; FSDP for QLoRA at 70B",
        f"by bytes: {frozen / 1e9:.1f} GB of frozen bf16 weights and {trained / 1e9:.1f} GB of states for {adapters / 1e6:.0f}M adapter weights, in place of {whole / 1e9:.0f} GB: replicas; adapters are a part of the model (peft), and `plan` reads such a task as it is",
        "—", "`shardwise train MODULE:TASK --plan dp_replicate=8,precision=bf16`",
    )  # fmt: skip
