"""Jobs of Kubernetes and SkyPilot, played on two hosts: what their engines start, end and start again is done here.

From the rendered file come the command of each node, its environment as the engine documents it, and the rules by which
the engine starts a job again; from here come the signals. No engine runs.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from two_hosts import ETC, Host, clean, finished

from shardwise.cli.main import call

yaml = pytest.importorskip("yaml", reason="needs PyYAML to read YAML")

PLAN, STEPS = "dp_shard=2,zero=3", 40
WORDS = ["--steps", str(STEPS), "--set", "train.checkpoint_every=4"]
GRACE_S = 120
METRICS = "runs/digits/*/metrics.jsonl"
pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert call(["train", "digits", "--plan", PLAN, *WORDS, "--set", f"train.out={folder}"]) == 0
    return weights(folder)


def weights(folder: Path) -> str:
    [path] = folder.rglob("model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rendered(folder: Path, engine: str, *options: str) -> dict[str, str]:
    """The files of `shardwise launch`, by name."""
    command = ["shardwise", "launch", "digits", "--plan", PLAN, "--nodes", "2", "--cpu", "--on", engine, "--folder",
               str(folder / "runs"), "-o", str(folder / "files"), *options, "--", *WORDS]  # fmt: skip
    subprocess.run(command, cwd=folder, env=clean(), capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
    return {path.name: path.read_text() for path in (folder / "files").iterdir()}


def records(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.glob(METRICS))


def wait_for(folder: Path, count: int, nodes: list[subprocess.Popen]) -> None:
    until, began = time.monotonic() + 200, time.time()
    while records(folder) < count or not any(path.stat().st_mtime > began for path in folder.glob(METRICS)):
        assert time.monotonic() < until and all(node.poll() is None for node in nodes), said(nodes)
        time.sleep(0.1)


def said(nodes: list[subprocess.Popen]) -> list[str]:
    return [text for _, text in finished(nodes, 30)]


def end(nodes: list[subprocess.Popen]) -> list[int]:
    """Ask what still runs to end, as engines do, then end it; the exit codes."""
    for node in nodes:
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
    return [code for code, _ in finished(nodes, GRACE_S)]


def vanish(host: Host, node: subprocess.Popen) -> None:
    """End everything on a host without a word."""
    there = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, timeout=30)
    for pid in there.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    node.wait(30)


def evict(node: subprocess.Popen) -> None:
    """Ask a pod to end, and wait for it: its grace is longer than a save."""
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=GRACE_S)


def run_to_the_end(start: Callable[[], list[subprocess.Popen]], stops: list, again: Callable, folder: Path) -> None:
    """Start the nodes, stop them by each of `stops` in mid-run, and start them where `again` says so; then the rest."""
    for number, (stop, at) in enumerate(stops, 1):
        nodes = start()
        wait_for(folder, number * STEPS // 5, nodes)
        stop(nodes)
        disrupted = nodes[at]
        codes = end(nodes)
        assert again(codes, nodes.index(disrupted)), codes
    assert [code for code, _ in finished(start(), 200)] == [0, 0]


# --- Kubernetes


@pytest.fixture
def names(hosts: list[Host]) -> list[str]:
    """The pods' names, which each host resolves as a cluster's name server does."""
    pods = [f"digits-node-0-{number}.digits" for number in range(2)]
    for host in hosts:
        with (ETC / host.name / "hosts").open("a") as table:
            table.writelines(f"{there.address} {pod}\n" for there, pod in zip(hosts, pods, strict=True))
    return pods


def starts_again(job_set: dict[str, Any], codes: list[int], disrupted: int) -> bool:
    """Whether the job set starts again without counting it, by its rules, where a pod was taken away."""
    [replicated] = job_set["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["backoffLimit"] == 0
    reason = "BackoffLimitExceeded"
    for rule in spec["podFailurePolicy"]["rules"]:  # the first that fits a pod decides
        fits = {
            "onPodConditions": any(one["type"] == "DisruptionTarget" for one in rule.get("onPodConditions", [])),
            "onExitCodes": any(code in rule.get("onExitCodes", {}).get("values", []) for code in codes),
        }
        if rule["action"] == "FailJob" and any(fits.values()) and (disrupted >= 0 or fits["onExitCodes"]):
            reason = "PodFailurePolicy"
            break
    rules = job_set["failurePolicy"]["rules"]
    return any(
        rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and reason in rule["onJobFailureReasons"]
        for rule in rules
    )


def pet(trainer: dict[str, Any], number: int, first: str) -> dict[str, str]:
    """What the controller of TrainJobs tells torchrun, by the names after PET_."""
    return {"NNODES": str(trainer["numNodes"]), "NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "NODE_RANK": str(number), "MASTER_ADDR": first, "MASTER_PORT": "29400"}  # fmt: skip


def stops_of(hosts: list[Host]) -> list:
    """A pod is evicted, the other one is, and a node is lost: (what is done to all nodes, which is hit)."""
    return [
        (lambda nodes: evict(nodes[0]), 0),
        (lambda nodes: evict(nodes[1]), 1),
        (lambda nodes: vanish(hosts[1], nodes[1]), 1),
    ]


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_pods_that_are_taken_away_leave_the_undisturbed_bits(
    kind: str, hosts: list[Host], names: list[str], undisturbed: str, tmp_path: Path
) -> None:
    text = rendered(tmp_path, "k8s", "--image", "x", "--volume", "claim")[f"digits-{kind}.yaml"]
    documents = list(yaml.safe_load_all(text))
    job_set = documents[0]["spec"]["template"]["spec"] if kind == "trainjob" else documents[0]["spec"]
    [container] = job_set["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    command = documents[1]["spec"]["trainer"]["command"] if kind == "trainjob" else container["command"]

    def start() -> list[subprocess.Popen]:
        pods = []
        for number, host in enumerate(hosts):
            variables = {"JOB_COMPLETION_INDEX": str(number)}
            if kind == "trainjob":
                trainer = documents[1]["spec"]["trainer"]
                variables |= {f"PET_{name}": value for name, value in pet(trainer, number, names[0]).items()}
            words = [word.replace("$(JOB_COMPLETION_INDEX)", str(number)).replace("$$(", "$(") for word in command]
            pods.append(host.start(words, tmp_path, **variables))
        return pods

    run_to_the_end(start, stops_of(hosts), lambda codes, at: starts_again(job_set, codes, at), tmp_path)
    assert weights(tmp_path / "runs") == undisturbed


# --- SkyPilot


def test_nodes_of_skypilot_that_are_taken_away_leave_the_undisturbed_bits(
    hosts: list[Host], undisturbed: str, tmp_path: Path
) -> None:
    [text] = rendered(tmp_path, "sky", "--volume", "shared").values()
    task = yaml.safe_load(text)
    assert task["volumes"] == {str(tmp_path / "runs"): "shared"}

    def start() -> list[subprocess.Popen]:
        told = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "\n".join(host.address for host in hosts)}
        words = ["bash", "-c", task["run"]]
        return [host.start(words, tmp_path, SKYPILOT_NODE_RANK=str(at), **told) for at, host in enumerate(hosts)]

    def again(codes: list[int], at: int) -> bool:
        """A node that is lost is always replaced; a job that failed, by its exit codes."""
        return codes[at] == -signal.SIGKILL or recovers(task, codes)

    run_to_the_end(start, stops_of(hosts), again, tmp_path)
    assert weights(tmp_path / "runs") == undisturbed


def recovers(task: dict[str, Any], codes: list[int]) -> bool:
    """Whether SkyPilot starts the task again after these exit codes, by its own rule where it is installed."""
    listed = task["resources"]["job_recovery"]["recover_on_exit_codes"]
    try:
        from sky.jobs.recovery_strategy import StrategyExecutor
    except ImportError:
        return any(code in listed for code in codes)
    executor = object.__new__(StrategyExecutor)
    executor.recover_on_exit_codes, executor.restart_cnt_on_failure, executor.max_restarts_on_errors = listed, 0, 0
    return StrategyExecutor.should_restart_on_failure(executor, exit_codes=codes)
