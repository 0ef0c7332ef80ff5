"""Links between nodes: how a forecast reads what was measured there, and a probe of two nodes."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster import Cluster, Figure, Tier
from shardwise.costs.layout import of_plan
from shardwise.costs.software import software
from shardwise.costs.wire import RankGroup, Wire
from shardwise.device import host_memory
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.measure.between_nodes import groups
from shardwise.measure.machine import text
from shardwise.planner.traced_layouts import traced_subject
from shardwise.ranks import launchers, nodes_of

SIZES = (1024, 65536, 2**20, 2**24)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def made_us(nodes: int, each: int, size: int) -> float:
    """Something that grows with each of the three."""
    return 50.0 * nodes + 10.0 * each + size / 200.0 * (1 + 0.1 * nodes) / each


BETWEEN = tuple(
    (op, nodes, each, size, made_us(nodes, each, size))
    for op in OPS for nodes in (2, 4) for each in (1, 4) for size in SIZES
) + tuple(("send", 2, 1, size, 80.0 + size / 500.0) for size in SIZES)  # fmt: skip


def probed(nodes: int = 4, between: tuple = BETWEEN) -> Cluster:
    """Nodes of four CPU ranks whose links were measured."""
    base = Cluster.parse("4 l40s")
    device = replace(base.device, kind="cpu", table="")

    def measured(value: float) -> Figure:
        return Figure(value, "measured", "probe")

    tiers = (Tier("shared-memory", 4, measured(6.0), measured(200.0)),
             Tier("network", nodes, measured(0.5), measured(80.0)))  # fmt: skip
    collectives = tuple((op, ranks, size, 20.0 + size / 6000.0) for op in OPS for ranks in (2, 4) for size in SIZES)
    return Cluster(device, tiers, "probed", collectives, between)


@pytest.mark.parametrize("op", OPS)
def test_a_group_that_was_measured_has_its_row(op: str) -> None:
    wire = Wire(probed())
    for nodes in (2, 4):
        for size in SIZES:
            assert wire.collective(op, RankGroup(nodes, 4), size) == pytest.approx(1e-6 * made_us(nodes, 1, size))
            assert wire.collective(op, RankGroup(4 * nodes, 1), size) == pytest.approx(1e-6 * made_us(nodes, 4, size))
    assert wire.collective(op, RankGroup(4, 1), 1024) < 1e-4, "inside a node nothing has changed"
    assert wire.basis(op, RankGroup(2, 4)) == "measured: network between 2 nodes, 1 rank(s) of each"
    assert wire.basis(op, RankGroup(4, 1)).startswith("measured: measured here")


def test_between_the_rows_times_grow_with_bytes_and_with_nodes() -> None:
    wire = Wire(probed())
    over_bytes = [wire.collective("all_reduce", RankGroup(2, 4), size) for size in range(1024, 2**20, 2**15)]
    assert over_bytes == sorted(over_bytes)
    over_nodes = [wire.collective("all_gather", RankGroup(nodes, 4), 2**18) for nodes in (2, 3, 4)]
    assert over_nodes == sorted(over_nodes) and len(set(over_nodes)) == 3
    over_ranks = [wire.collective("all_gather", RankGroup(2 * each, 4 // each), 2**24) for each in (1, 2, 4)]
    assert over_ranks == sorted(over_ranks, reverse=True), "more ranks of a node, more of its links"
    assert wire.basis("all_gather", RankGroup(3, 4)).endswith(", read between 2 and 4 nodes")
    assert wire.basis("all_gather", RankGroup(4, 2)).endswith(", read between 1 and 4 rank(s) a node")


def test_beyond_the_rows_the_nearest_is_scaled() -> None:
    wire = Wire(probed(nodes=16))
    for op in OPS:
        four, eight, sixteen = (wire.collective(op, RankGroup(nodes, 4), 2**20) for nodes in (4, 8, 16))
        assert four < eight < sixteen
        assert wire.basis(op, RankGroup(16, 4)).endswith("between 16 nodes, 1 rank(s) of each, scaled from 4 nodes")
    small = wire.collective("all_reduce", RankGroup(16, 4), 8)
    assert small == pytest.approx(1e-6 * made_us(4, 1, 1024) * math.log2(16) / math.log2(4)), "a tree's hops"


def test_messages_read_their_rows_and_without_them_the_measured_tier() -> None:
    wire = Wire(probed())
    assert wire.send(2**20, 3, 4) == pytest.approx(1e-6 * (80 + 2**20 / 500))
    plain = Wire(probed(between=()))
    assert plain.send(2**20, 3, 4) == pytest.approx(80e-6 + 2**20 / 0.5e9)
    assert plain.send(2**20, 2, 3) == wire.send(2**20, 2, 3)
    assert plain.basis("all_reduce", RankGroup(2, 4)).startswith("formula: network")


def test_an_op_without_rows_and_an_outer_tier_keep_the_formula() -> None:
    few = Wire(probed(between=tuple(row for row in BETWEEN if row[0] == "all_reduce")))
    assert few.basis("all_gather", RankGroup(2, 4)).startswith("formula")
    assert few.basis("all_reduce", RankGroup(2, 4)).startswith("measured")
    cluster = probed(nodes=2)
    racks = replace(cluster, tiers=(*cluster.tiers, replace(cluster.tiers[1], name="racks", count=2)))
    assert Wire(racks).basis("all_reduce", RankGroup(2, 8)).startswith("formula: racks")


def test_a_file_keeps_the_rows_and_one_without_them_still_reads() -> None:
    cluster = probed()
    again = Cluster.from_dict(tomllib.loads(cluster.to_toml()))
    assert again.between == cluster.between and again == cluster
    data = cluster.as_dict()
    del data["between"]
    assert Cluster.from_dict(data).between == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["all_reduce", 2, 1, 1024, -3.0], r"between\[1\]: -3.0 is not a float above 0"),
        (["all_reduce", 2, 1, 1024, math.nan], r"between\[1\]: nan is not"),
        (["all_reduce", 2, 1024, 3.0], r"between\[1\] must have 5 cells"),
        (["all_reduce", 2.5, 1, 1024, 3.0], r"between\[1\]: 2.5 is not a int"),
        (["all_reduce", 2, 0, 1024, 3.0], r"between\[1\]: 0 is not a int"),
        (["all_reduce", 1, 4, 1024, 3.0], r"between\[1\]: 1 is not a number of nodes .* at least 2"),
        (["all_reduced", 2, 1, 1024, 3.0], r"between\[1\]: unknown op 'all_reduced'; did you mean 'all_reduce'"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(row: list, words: str) -> None:
    data = copy.deepcopy(probed().as_dict())
    data["between"] = [data["between"][0], row]
    with pytest.raises(InputError, match=words):
        Cluster.from_dict(data, "cluster.toml")


def test_data_ranks_across_nodes_are_forecast_by_the_rows() -> None:
    from shardwise.measure.reference_modules import reference_task

    def of(cluster: Cluster, plan: str):
        layout = of_plan(Plan.parse(plan), global_batch=16, seq=1, uneven=True)
        micro = (layout.micro_batch, layout.micro_batch)
        task = reference_task(2, 1, 16)
        subject = traced_subject(task, cluster, software("shardwise"), 16, "fp32", ("none",), micro)
        return subject.simulate(layout)

    slow = tuple((*row[:-1], 100 * row[-1]) for row in BETWEEN)
    for plan in ("dp_replicate=8", "dp_shard=8,zero=3", "tp=4,dp_replicate=2"):
        fast, slower = of(probed(), plan), of(probed(between=slow), plan)
        assert fast.basis["data ranks"].startswith("measured: network between 2 nodes")
        assert slower.step_s > 2 * fast.step_s, plan
    inside = [of(each, "dp_replicate=4").step_s for each in (probed(), probed(between=slow))]
    assert inside[0] == inside[1]


# --- which ranks share a node


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [[0, 1], [2, 3]]),
        ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [[0, 1], [2, 3]]),  # as the launcher says, whatever their names
        ([("a", None), ("a", None), ("b", None), ("b", None)], [[0, 1], [2, 3]]),
        ([("a", 0), ("b", 0), ("c", 0)], [[0], [1], [2]]),
        ([("a", 0), ("a", 1), ("a", 2)], [[0, 1, 2]]),
        ([("a", None)], [[0]]),
    ],
)
def test_ranks_of_a_node(told: list, expected: list) -> None:
    assert nodes_of(told) == expected


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([("a", 0), ("a", 1), ("b", 0)], "the nodes have 2, 1 ranks, .* start the same number on every host"),
        ([("a", None), ("b", None), ("b", None)], "the nodes have 1, 2 ranks"),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], "do not follow each other.*--distribution=block"),
        ([("a", None), ("b", None), ("a", None), ("b", None)], "do not follow each other"),
    ],
)
def test_unequal_nodes_and_ranks_dealt_in_turns_are_refused(told: list, words: str) -> None:
    with pytest.raises(InputError, match=words):
        nodes_of(told)


def test_groups_between_nodes() -> None:
    nodes = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(nodes, 2, 1) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(nodes, 2, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(nodes, 4, 1) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups([[0], [1]], 2, 1) == [[0, 1]]


# --- a probe of two nodes, which are two pairs of processes here

SHORT = """
import os
import sys
from functools import partial

import torch.distributed as dist

from shardwise.cli.main import run
from shardwise.measure import between_nodes, collective_times, machine, pace


EACH = int(os.environ["LOCAL_WORLD_SIZE"])


def steps(say, reference, budget, quick):
    assert reference > 0 and dist.get_world_size() == EACH, "a node by itself"
    assert dist.get_rank() == int(os.environ["LOCAL_RANK"])
    return {"steps": [("replicas", at, 0.02 + 0.01 * at) for at in range(3)], "large": []}


def one_rank(rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % EACH)}
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["shardwise", "probe", "-o", f"cluster{rank}.toml", "--json"]
    run()  # ends this process


if __name__ == "__main__":
    sizes = (1024, 2**16)
    collective_times.BYTES = sizes
    collective_times.OFTEN = between_nodes.OFTEN = 4
    machine.pace_us = pace.pace_us = lambda device, rounds=1: 1000.0
    machine._stream, machine.disk_rate = lambda device: 1e10, lambda: 1e9
    machine._op = lambda device: 5.0
    machine._products = lambda pace, budget: machine.product_times((32, 64), pace, budget)
    machine.op_times = lambda pace, budget: [("add", 1e3, 1.0), ("add", 1e6, 50.0)]
    machine.measure_engine = steps
    machine.between_times = partial(machine.between_times, sizes=sizes)
    for rank in range(4):  # all is imported once
        if os.fork() == 0:
            one_rank(rank)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)]
    sys.exit(max(codes, key=abs))
"""


def short_probe(folder: Path, each: int) -> tuple[int, list[str], str]:
    """By four ranks of a launcher that says how many are on each node: exit code, stdouts, all stderr."""
    import torch.distributed as dist

    names = {name for family in (launchers.OPENMPI, launchers.PMI, launchers.SLURM)
             for kind in (family.rank, family.size, family.local_rank, family.local_size, family.job)
             for name in kind}  # fmt: skip
    plain = {name: value for name, value in os.environ.items() if name not in names}
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # the launcher's own
    own = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": each, "OMP_NUM_THREADS": 1, "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "two", "TORCHELASTIC_USE_AGENT_STORE": True,
           "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}  # fmt: skip
    (folder / "short.py").write_text(SHORT)
    ran = subprocess.Popen(
        [sys.executable, "short.py"], cwd=folder, start_new_session=True, stderr=subprocess.PIPE, text=True,
        env=plain | {name: str(value) for name, value in own.items()},
    )  # fmt: skip
    try:
        said = ran.communicate(timeout=120)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
    outs, errs = ([(folder / f"{name}{rank}").read_text() for rank in range(4)] for name in ("out", "err"))
    return ran.returncode, outs, "\n".join([said, *errs])


def test_two_nodes_are_measured_each_by_itself_and_between_them(tmp_path: Path) -> None:
    code, outs, said = short_probe(tmp_path, 2)
    assert code == 0, said
    assert [bool(out) for out in outs] == [True, False, False, False], "rank 0 alone answers"
    assert [path.name for path in tmp_path.glob("*.toml")] == ["cluster0.toml"], "and writes"
    cluster = Cluster.from_toml(tmp_path / "cluster0.toml")
    assert Cluster.from_dict(json.loads(outs[0])["cluster"]) == cluster
    assert [tier.count for tier in cluster.tiers] == [2, 2] and cluster.world_size == 4
    assert {row[1] for row in cluster.collectives} == {2}, "groups inside a node"
    link = cluster.tiers[1]
    assert link.name == "network" and link.gbps.kind == link.latency_us.kind == "measured"
    assert link.gbps.source.startswith("probe on 2 nodes of 2 rank(s)")
    assert {row[:3] for row in cluster.between} == {*((op, 2, each) for op in OPS for each in (1, 2)), ("send", 2, 1)}
    assert len(cluster.between) == 2 * 9 and all(row[-1] > 0 for row in cluster.between)
    assert {row[0] for row in cluster.device.overheads} == {"replicas"}
    wire = Wire(cluster)
    for op, nodes, each, size, us in cluster.between:
        if op != "send":
            assert wire.collective(op, RankGroup(nodes * each, 2 // each), size) == pytest.approx(1e-6 * us)
    assert "2 nodes of 2 x" in text(cluster) and "network: " in text(cluster)


@pytest.mark.long
def test_on_one_host_a_launchers_ranks_measure_one_tier(tmp_path: Path) -> None:
    code, outs, said = short_probe(tmp_path, 4)
    assert code == 0, said
    cluster = Cluster.from_toml(tmp_path / "cluster0.toml")
    assert [tier.count for tier in cluster.tiers] == [4] and cluster.between == ()
    assert {row[1] for row in cluster.collectives} == {2, 4}
    memory = cluster.node.memory_gb
    assert cluster.node.devices == 4 and memory is not None and memory.kind == "measured"
    assert memory.value * 1e9 == pytest.approx(host_memory()[0], rel=1e-3), "what all ranks share"
    assert cluster.name.startswith("probe on 4 rank(s)") and outs[1:] == [""] * 3


# --- a link of a known rate, between two hosts that are namespaces of this one

LINK = """
import json
import sys

from shardwise.comm import everybody, gather_json
from shardwise.ranks.launchers import own_device
from shardwise.measure.between_nodes import between_times
from shardwise.ranks import join, leave

if __name__ == "__main__":
    rank, _ = join()
    device = own_device()
    rows = gather_json(between_times(device, [[0], [1]], (1024, 2**22)), everybody(), device)
    if rank == 0:
        print(json.dumps(rows[0]))
    leave(0)
"""
MBIT = 100


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces, a link of MBIT between their interfaces, which have the namespaces' names."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        pytest.skip("needs root, ip and tc, to make two hosts of this one")
    names = [f"sw{os.getpid()}{end}" for end in "ab"]
    lines = [f"ip netns add {name}" for name in names]
    lines += ["ip link add {0} netns {0} type veth peer name {1} netns {1}".format(*names)]
    for at, name in enumerate(names):
        lines += [f"ip -n {name} addr add 10.77.0.{at + 1}/24 dev {name}", f"ip -n {name} link set {name} up",
                  f"ip netns exec {name} tc qdisc add dev {name} root tbf rate {MBIT}mbit burst 64kb latency 50ms",
                  f"ip -n {name} link set lo up"]  # fmt: skip
    try:
        for line in lines:
            ran = subprocess.run(line.split(), capture_output=True, text=True, timeout=30)
            if ran.returncode != 0:
                pytest.skip(f"two hosts cannot be made here: {line}: {ran.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


@pytest.mark.long
def test_the_rate_of_a_throttled_link_is_found(hosts: list[str], tmp_path: Path) -> None:
    (tmp_path / "link.py").write_text(LINK)
    ranks = []
    try:
        for rank, name in enumerate(hosts):  # each namespace has all ports to itself
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.77.0.1",
                   "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}  # fmt: skip
            ranks.append(subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "link.py"], cwd=tmp_path, env=os.environ | own,
                stdout=subprocess.PIPE, text=True,
            ))  # fmt: skip
        told = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    rows = {(op, size): us for op, _, _, size, us in json.loads(told[0])}
    wire_us = 2**22 / (MBIT / 8)  # of all bits; a little of them is headers
    assert rows["send", 2**22] == pytest.approx(wire_us, rel=0.25)
    assert 0.8 * wire_us / 2 < rows["all_gather", 2**22] < wire_us, "each sends half"
    assert rows["all_reduce", 2**22] > rows["all_gather", 2**22]
