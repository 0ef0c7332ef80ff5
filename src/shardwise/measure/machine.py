"""`probe`: measures this machine (products, other ops, memory, collectives, disk, the engine) and returns a `Cluster`.

"Products" are matrix products. All ranks measure at the same time, as in a run, and the slowest counts. Each figure
carries its source: measured, by which version, on which day.

    rank 0   products  stream  ops | all_reduce  all_gather  reduce_scatter  all_to_all | disk | steps
    rank 1   products  stream  ops | all_reduce  all_gather  reduce_scatter  all_to_all |      | steps

If a launcher has started ranks, these measure. On several nodes each node measures this by itself, all at the same
time, and then all together measure the links between them (`between_nodes`).

*What this does not do*: probe links between nodes from one node; what the engine adds under plans over several nodes.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from shardwise.cluster import Cluster, Device, Figure, Node, Tier
from shardwise.cluster.cluster import Between
from shardwise.cluster.tables import bus_factor
from shardwise.comm import everybody, gather_json, refuse_shared_devices
from shardwise.device import CPU, device_count, device_name, memory_bytes, on_host, pace_us, synchronize
from shardwise.errors import InputError
from shardwise.measure.between_nodes import between_times
from shardwise.measure.collective_times import collective_times
from shardwise.measure.disk_rate import disk_rate
from shardwise.measure.op_times import convolution_times, op_times, product_times
from shardwise.measure.overheads import fit, step_times
from shardwise.measure.pace import Budget, Pace, over_ranks, slower
from shardwise.progress import Say, silent
from shardwise.ranks import LaunchedPlace, apart, here, join, launch, nodes_of
from shardwise.ranks.launchers import own_device
from shardwise.tiers.scratch import IN_MEMORY, file_system

SIDES = (32, 128, 512, 1024)  # values of m, n and k of products on a CPU
CUDA_SIDES = (512, 1024, 2048, 4096, 8192)  # the same on a GPU
LENGTHS, WIDTHS = (512, 2048, 8192), (64, 128)  # attention on a GPU: positions, widths of a head
BUDGET_S = 0.03  # seconds for one figure, after a first call
LIMIT_S = 600.0  # seconds after which a part of a probe counts as hanging
WHOLE_S, QUICK_S = 120.0, 30.0  # seconds of a probe, and of one with --quick
FIT_S = 12.0, 6.0  # seconds of these (whole, quick) for comparing steps with the sums of their ops
FIGURES = 0.45  # share of the seconds left, once ranks have started, for all but steps; shares of what is left of that:
PRODUCTS, OPS, COLLECTIVES = 0.4, 0.55, 0.8


def seconds(call: Callable[[], Any], device: torch.device, budget_s: float = BUDGET_S) -> float:
    """Returns the median seconds of a call, over 3 to 200 calls in about `budget_s` seconds."""
    call()
    synchronize(device)
    times: list[float] = []
    until = time.perf_counter() + budget_s
    while len(times) < 3 or (time.perf_counter() < until and len(times) < 200):
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times)


def measure(say: Say, budget: Budget) -> dict[str, Any]:
    """Measures everything but steps on one rank; returns {name of the figure: value}. Collective.

    say     called by rank 0 with lines of progress
    budget  of the whole probe, of which the share FIGURES is used here; a slow machine measures fewer sizes
    """
    device = own_device()
    budget = budget.part(FIGURES, device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    say = _of_rank_zero(say)
    figures: dict[str, Any] = {"ranks": ranks, "kind": device.type, "threads": torch.get_num_threads()}
    figures["name"] = device_name(device) or platform.machine() + "-cpu"
    figures["memory"] = _memory_bytes(device) / (ranks if on_host(device) else 1)
    own = pace_us(device)
    pace = Pace(device, None if own is None else over_ranks(own))
    figures["pace"] = pace.reference
    say("probe: products and convolutions by shape")
    figures["products"] = _products(pace, budget.part(PRODUCTS, device))
    say("probe: bandwidth of the memory")
    figures["stream"] = _stream(device)
    say("probe: what an op costs besides its work")
    figures["op"] = pace.seconds(partial(_op, device))
    if on_host(device):  # a GPU's other ops are forecast by bytes and bandwidth
        say("probe: other ops by size")
        figures["ops"] = op_times(pace, budget.part(OPS, device))
    say(f"probe: collectives of {ranks} ranks by size")
    figures["collectives"] = collective_times(device, ranks, pace, budget.part(COLLECTIVES, device))
    figures["host"] = _host(device)
    say("probe: the disk")
    figures["disk"] = disk_rate() if not dist.is_initialized() or dist.get_rank() == 0 else None
    figures["node"] = {"memory": memory_bytes(CPU), "free": _free_bytes()}
    return figures


def _of_rank_zero(say: Say) -> Say:
    return say if not dist.is_initialized() or dist.get_rank() == 0 else silent


def measure_engine(say: Say, reference: float, budget: Budget, quick: bool = False) -> dict[str, Any]:
    """Times steps of reference modules on CPU ranks, where nothing hides the host's overhead. Collective.

    reference   microseconds of the pace at which everything else was measured

    Returns {"steps": [(technique, index of the module, seconds)], "large": [(kind of op, technique, seconds)]}.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    pace = Pace(torch.device("cpu"), reference)
    steps, large = step_times(ranks, pace, _of_rank_zero(say), budget=budget, quick=quick)
    return {"steps": [(name, at, took) for name, times in steps.items() for at, took in enumerate(times)],
            "large": [(*key, took) for key, took in large.items()]}  # fmt: skip


def _memory_bytes(device: torch.device) -> float:
    return float(memory_bytes(device) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _products(pace: Pace, budget: Budget) -> list[tuple[str, int, int, int, float]]:
    """Returns rows (dtype or kind, m, n, k, microseconds) of products, and convolutions (CPU) or attention (GPU)."""
    device = pace.device
    if on_host(device):
        return product_times(SIDES, pace, budget.part(0.7)) + convolution_times(pace, budget)
    rows = []
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        for m, n, k in product(CUDA_SIDES, repeat=3):
            a = torch.randn(m, k, device=device, dtype=dtype)
            b = torch.randn(k, n, device=device, dtype=dtype)
            rows.append((name, m, n, k, 1e6 * seconds(partial(torch.matmul, a, b), device, BUDGET_S / 3)))
    return rows + attention_times(device)


def attention_times(
    device: torch.device, lengths: tuple[int, ...] = LENGTHS, widths: tuple[int, ...] = WIDTHS, tokens: int = 2**17
) -> list[tuple[str, int, int, int, float]]:
    """Returns rows ("attention" or "attention_backward", length, heads x samples, width, microseconds), causal, bf16.

    tokens   length times heads times samples, the same for each row
    """
    rows = []
    for width, length in product(widths, lengths):
        # q, k and v have equally many elements in all rows
        heads = max(1, tokens // length)
        shape = (1, heads, length, width)
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
        with torch.no_grad():
            alone = seconds(forward, device)
        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        for name, took in (("attention", alone), ("attention_backward", seconds(backward, device))):
            rows.append((name, length, heads, width, 1e6 * took))
    return rows


def _stream(device: torch.device) -> float:
    """Returns bytes per second of memory, by an addition that reads two tensors and writes one."""
    count = 2**23 if on_host(device) else 2**27
    a, b, out = (torch.randn(count, device=device) for _ in range(3))
    return 3 * 4 * count / seconds(lambda: torch.add(a, b, out=out), device, 0.2)


def _op(device: torch.device) -> float:
    """Returns the mean microseconds of an op in a forward and backward with tiny tensors."""
    from shardwise.measure.reference_modules import reference_task
    from shardwise.rehearsal.step_trace import trace

    task = reference_task()
    assert task.batch is not None
    model, batch = task.model().to(device), task.batch(0).to(device)

    def step() -> None:
        model.zero_grad()
        model(batch).square().sum().backward()

    return 1e6 * seconds(step, device, 0.3) / trace(task, len(batch)).kernels


def _host(device: torch.device) -> float | None:
    """Returns bytes per second from pinned host memory to a GPU; None on a CPU."""
    if on_host(device):
        return None
    here = torch.empty(2**26, pin_memory=True)
    there = torch.empty_like(here, device=device)
    return here.nbytes / seconds(lambda: there.copy_(here, non_blocking=True), device, 0.2)


def _free_bytes() -> int | None:
    """Returns the free bytes of the temporary folder's disk; None if the folder is in memory, so no tier."""
    folder = Path(tempfile.gettempdir())
    return None if file_system(folder) in IN_MEMORY else shutil.disk_usage(folder).free


def probe(ranks: int | None = None, say: Say = silent, *, quick: bool = False) -> Cluster:
    """Measures this machine with several ranks at the same time and returns it as a `Cluster`.

    ranks  number of ranks; None: one for each CUDA device, or two on a CPU
    say    called with lines of progress, by rank 0 too, so it has to be a function that can be pickled
    quick  whether fewer reference modules are timed, and only once

    If a launcher has started ranks, these measure, and on several hosts the links between them too. The call is then
    collective and returns the same `Cluster` on every rank; process groups made before are gone afterwards.

    A slow machine measures fewer sizes and steps, so that a probe takes `WHOLE_S` or `QUICK_S` seconds. Raises
    `InputError` if hosts have unequal numbers of ranks, or the ranks of a host are not consecutive.
    """
    budget = Budget((QUICK_S if quick else WHOLE_S) - FIT_S[quick])
    place = here()
    if place is not None:
        return _joined(place, ranks, say, budget, quick)
    say("probe: starting its ranks")
    count = ranks or device_count() or 2
    cluster = _cluster(launch(measure, count, (say, budget), timeout_s=LIMIT_S))
    if cluster.device.pace_us is None:  # a GPU hides the engine's overhead, so it is not timed
        return cluster
    results = launch(measure_engine, count, (say, cluster.device.pace_us.value, budget, quick), timeout_s=LIMIT_S)
    return _with_engine(cluster, results, say)


def _joined(place: LaunchedPlace, ranks: int | None, say: Say, budget: Budget, quick: bool) -> Cluster:
    """Returns the probe by a launcher's ranks, first in each node, then between nodes.

    Raises `InputError` if `ranks` is neither None nor the launcher's number.
    """
    if ranks is not None and ranks != place.world_size:
        raise InputError(
            f"{place.named} started {place.world_size} rank(s), which measure: leave --ranks {ranks} out, or start "
            "as many"
        )
    rank, _ = join(LIMIT_S)
    device, say = own_device(), say if rank == 0 else silent
    refuse_shared_devices(device)
    nodes = nodes_of(gather_json((socket.gethostname(), place.local_rank), everybody(), device))
    mine = next(node for node in nodes if rank in node)

    def on_each_node(function: Callable[..., dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
        """Calls `function` on each rank with its node as the world; returns the results of all ranks."""
        with apart(mine, LIMIT_S) if len(nodes) > 1 else nullcontext():
            result = function(*args)
        return gather_json(result, everybody(), device)

    results = on_each_node(measure, say, budget)
    cluster = _cluster(results)
    pace = cluster.device.pace_us
    steps = None if pace is None else on_each_node(measure_engine, say, pace.value, budget, quick)
    if len(nodes) > 1:
        say(f"probe: collectives and messages between {len(nodes)} nodes by size")
        rows = gather_json(between_times(device, nodes), everybody(), device)
    if rank == 0:  # the other ranks wait, since they share its CPUs
        cluster = cluster if steps is None else _with_engine(cluster, steps, say)
        cluster = cluster if len(nodes) == 1 else _with_links(cluster, len(nodes), rows)
    return Cluster.from_dict(gather_json(cluster.as_dict() if rank == 0 else None, everybody(), device)[0], "probe")


def _cluster(results: list[dict[str, Any]]) -> Cluster:
    """Returns the cluster described by all ranks' figures (`measure`), with the slowest rank's rates."""
    first = results[0]
    nodes = len(results) // first["ranks"]
    where = f"{first['ranks']} rank(s)" if nodes == 1 else f"{nodes} nodes of {first['ranks']} rank(s)"
    source = f"probe on {where}, torch {torch.__version__}, {date.today().isoformat()}"

    def figure(value: float) -> Figure:
        return Figure(float(f"{value:.4g}"), "measured", source)

    products = slower([r["products"] for r in results])
    ops = slower([r["ops"] for r in results]) if "ops" in first else ()
    rates = {"fp32": 0.0, "bf16": 0.0}
    for dtype, m, n, k, us in products:
        if dtype in rates:
            rates[dtype] = max(rates[dtype], 2e-6 * m * n * k / us)
    best = figure(rates["bf16"] or rates["fp32"])  # a CPU without bf16 products computes them in float32
    collectives = slower([r["collectives"] for r in results])
    reduced = [(2 * (p - 1) / p * size / us / 1e3, size, us) for op, p, size, us in collectives if op == "all_reduce"]
    large = [rate for rate, size, _ in reduced if size >= 2**20]  # GB/s of the bus; below, latency dominates
    small = [us for _, _, us in reduced][:1]
    device = Device(
        name=first["name"].lower().replace(" ", "-"),
        bf16_tflops=best,
        fp32_tflops=figure(rates["fp32"]),
        memory_gb=figure(min(r["memory"] for r in results) / 1e9),
        memory_bandwidth_gbps=figure(min(r["stream"] for r in results) / 1e9),
        op_us=figure(max(r["op"] for r in results)),
        pace_us=None if first["pace"] is None else figure(mean(r["pace"] for r in results)),
        disk_gbps=figure(min(r["disk"] for r in results if r["disk"] is not None) / 1e9),
        host_gbps=None if first["host"] is None else figure(min(r["host"] for r in results) / 1e9),
        products=products,
        ops=ops,
        kind="cpu" if first["kind"] == "cpu" else "cuda",
    )
    none = Figure(1.0, "assumed", "one rank: there is no link")
    link = figure(max(large)) if large else none
    wait = figure(small[0]) if small else none
    tier = Tier("shared-memory" if device.kind == "cpu" else "local", first["ranks"], link, wait)
    sizes = {
        name: min((row["node"][name] for row in results if row["node"][name]), default=None)
        for name in ("memory", "free")
    }
    memory, free = (None if size is None else figure(size / 1e9) for size in sizes.values())
    return Cluster(device, (tier,), source, collectives, node=Node(memory, free, devices=first["ranks"]))


def _with_engine(cluster: Cluster, results: list[dict[str, Any]], say: Say) -> Cluster:
    """Returns the cluster with the engine's overheads and factors, fitted to the ranks' `measure_engine` results."""
    say("probe: comparing the steps with the sums of their ops")
    steps: dict[str, list[float]] = {}
    for name, _, took in slower([r["steps"] for r in results]):
        steps.setdefault(name, []).append(took)
    large = {(kind, name): took for kind, name, took in slower([r["large"] for r in results])}
    rows, factors = fit(cluster, steps, large)
    return replace(cluster, device=replace(cluster.device, overheads=rows, factors=factors))


def _with_links(cluster: Cluster, nodes: int, rows_by_rank: list[list[Between]]) -> Cluster:
    """Returns the cluster with a second tier of `nodes` nodes and the slowest rank's times between them."""
    most: dict[tuple[str, int, int, int], float] = {}
    for op, count, per_node, size, us in (row for rows in rows_by_rank for row in rows):
        most[op, count, per_node, size] = max(us, most.get((op, count, per_node, size), 0.0))
    rows = tuple((*key, float(f"{us:.4g}")) for key, us in most.items())
    sends = sorted((size, us) for op, _, _, size, us in rows if op == "send")
    source = f"{cluster.name}: messages of all ranks of a node at once"

    def figure(value: float) -> Figure:
        return Figure(float(f"{value:.4g}"), "measured", source)

    large, took = sends[-1]  # smaller messages may fit in buffers on the way
    rate = figure(large / took / 1e3)
    return replace(cluster, tiers=(*cluster.tiers, Tier("network", nodes, rate, figure(sends[0][1]))), between=rows)


def text(cluster: Cluster) -> str:
    """Returns a probed cluster's figures as text for people."""
    d, tier = cluster.device, cluster.tiers[0]
    nodes = "" if len(cluster.tiers) == 1 else f"{cluster.tiers[1].count} nodes of "
    rate = (d.fp32_tflops or d.bf16_tflops).value
    lines = [
        f"{cluster.name}",
        f"  {nodes}{tier.count} x {d.name}: {rate * 1e3:.4g} GFLOP/s of large fp32 products, "
        f"{d.memory_bandwidth_gbps.value:.3g} GB/s of memory, {d.memory_gb.value:.3g} GB for each rank",
    ]
    # only some devices have these figures
    if d.op_us is not None and d.disk_gbps is not None:
        room = cluster.node.disk_gb
        free = "" if room is None else f", {room.value:.4g} GB free"
        lines.append(f"  an op costs {d.op_us.value:.3g} us besides its work; disk {d.disk_gbps.value:.3g} GB/s{free}")
    if d.factors:
        each = ", ".join(f"{kind} {factor:.3g}" for kind, factor in d.factors)
        lines.append(f"  ops inside a step take times those alone: {each}")
    if tier.count > 1:
        rate, wait = tier.gbps.value, tier.latency_us.value
        lines.append(f"  {tier.name}: {rate:.3g} GB/s of all-reduce, {wait:.3g} us for a small one")
    return "\n".join(lines + _links_text(cluster))


def _links_text(cluster: Cluster) -> list[str]:
    """Returns lines for people on the links between nodes; [] with one node."""
    if not cluster.between:
        return []
    inner, link = cluster.tiers[:2]
    rate, wait, most = link.gbps.value, link.latency_us.value, link.count
    lines = [f"  {link.name}: {rate:.3g} GB/s of messages from each rank, {wait:.3g} us for a small one"]
    for each in sorted({1, inner.count}):
        size, us = max((size, us) for *key, size, us in cluster.between if key == ["all_reduce", most, each])
        rate = bus_factor("all_reduce", most * each) * size / us / 1e3
        lines.append(f"    {rate:.3g} GB/s of all-reduce over {most} nodes, {each} rank(s) of each")
    if inner.count == 1 and cluster.device.overheads:
        lines.append("    a node has one rank: what the engine adds under zero, tp and pp was not measured")
    return lines
