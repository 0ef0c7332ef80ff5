"""A run under Ray Train, on node processes of this machine: what is told, a node that is killed, fewer workers."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from two_hosts import clean

from shardwise.cli.main import call
from shardwise.launch.agent import children

ray = pytest.importorskip("ray", reason="needs Ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

from shardwise.ray import POINTER, trainer  # noqa: E402

PLANS = {"dp_shard=3,zero=2,deterministic=true": 2, "dp_shard=2,zero=2,deterministic=true": None}  # fewest workers
STEPS, EVERY = 40, 5
WORDS = ["--steps", str(STEPS), "--set", f"train.checkpoint_every={EVERY}", "--set", "train.checkpoint_keep=2"]
MEMORY = 80 * 2**20
pytestmark = pytest.mark.long


class Nodes:
    """A cluster of a head, on which the run is controlled, and nodes of one CPU each."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "object_store_memory": MEMORY}
        self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list = []

    def be(self, count: int) -> None:
        while len(self.nodes) < count:
            with suppress(TimeoutError):  # of a machine that has much else to do
                self.nodes.append(self.cluster.add_node(num_cpus=1, object_store_memory=MEMORY))

    def with_ranks(self) -> list[int]:
        """The nodes of which a worker has started a rank."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self.nodes]
        return [at for at, raylet in enumerate(raylets) if any(map(children, children(raylet)))]

    def kill(self, at: int) -> None:
        self.cluster.remove_node(self.nodes.pop(at), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    # others' memory is no reason to end these nodes
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clean(RAY_memory_monitor_refresh_ms="0").items():
            patch.setenv(name, value)
        made = Nodes()
        try:
            made.be(3)
            ray.init(address=made.cluster.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.cluster.shutdown()


def weights(folder: Path) -> str:
    [path] = folder.rglob("model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def steps_of(folder: Path) -> list[int]:
    """The steps of a run's records that have a loss of training."""
    [path] = folder.glob("*/metrics.jsonl")
    records = map(json.loads, path.read_text().splitlines())
    return [record["step"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights that each plan ends with."""
    ends = {}
    for plan in PLANS:
        folder = tmp_path_factory.mktemp("undisturbed")
        assert call(["train", "digits", "--plan", plan, *WORDS, "--set", f"train.out={folder}"]) == 0
        ends[plan] = weights(folder)
    return ends


def test_metrics_and_checkpoints_are_told_to_ray(nodes: Nodes, undisturbed: dict[str, str], tmp_path: Path) -> None:
    plan = list(PLANS)[1]
    result = trainer("digits", plan, arguments=WORDS, out=str(tmp_path), name="told", gpus=False).fit()
    assert weights(tmp_path / "told") == undisturbed[plan]
    assert result.metrics["step"] == STEPS and result.metrics["loss"] > 0
    [run] = (tmp_path / "told").iterdir()
    with result.checkpoint.as_directory() as folder:
        pointer = json.loads((Path(folder) / POINTER).read_text())
    assert Path(pointer["path"]).parent == run / "checkpoints" and Path(pointer["path"]).is_dir()
    assert pointer["step"] > STEPS // 2


@pytest.mark.parametrize("seed", range(10))
def test_a_killed_node_costs_no_sample(seed: int, nodes: Nodes, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """One of three nodes is killed at a random step: three ranks go on as two; two ranks, with the third node."""
    nodes.be(3)
    draw = random.Random(seed)
    plan, fewer = list(PLANS.items())[seed % 2]
    at = draw.randrange(2, STEPS - 2)
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 400
        while time.monotonic() < until:
            lines = [line for path in tmp_path.glob("run/*/metrics.jsonl") for line in path.read_text().splitlines()]
            if len(lines) >= at:
                killed.append(len(lines))
                nodes.kill(draw.choice(nodes.with_ranks()))
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    result = trainer("digits", plan, arguments=WORDS, min_ranks=fewer, out=str(tmp_path), name="run", gpus=False).fit()
    thread.join(10)
    assert killed and killed[0] < STEPS, "the node was killed in mid-run"
    assert result.error is None and result.metrics["step"] == STEPS
    assert steps_of(tmp_path / "run") == list(range(1, STEPS + 1))
    assert weights(tmp_path / "run") == undisturbed[plan]
    sys.stderr.write(f"\nseed {seed}: killed after record {killed[0]}; {plan}, at least {fewer or 'as many'} workers\n")
