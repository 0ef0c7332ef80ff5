"""A rendered job under Slurm, on two virtual nodes of this machine: stopped and requeued, with the undisturbed bits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Timer

import pytest
from two_hosts import clean

PLAN = "dp_shard=2,zero=3"
STEPS = 900
CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4 MaxTime=INFINITE
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a Slurm of two nodes."""
    search = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in ("sbatch", "slurmctld", "slurmd", "munge") if shutil.which(name, path=search) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}, to start a Slurm of two nodes")
    if subprocess.run(["munge", "-n"], capture_output=True, timeout=30).returncode != 0:
        pytest.skip("needs a running munged, by which Slurm's parts know each other")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, ports=free_ports(3), cpus=os.cpu_count()))
    environ = clean(SLURM_CONF=str(conf))
    daemons = []
    try:
        for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]):
            program = str(shutil.which(words[0], path=search))
            out = (folder / f"{words[-1]}.out").open("wb")
            daemons.append(subprocess.Popen([program, *words[1:]], env=environ, stdout=out, stderr=out))
        if not came(lambda: asked(environ, "sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", 40):
            pytest.skip("Slurm's daemons do not come up here: " + asked(environ, "sinfo"))
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)


def free_ports(count: int) -> list[int]:
    """Ports of which the last two follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            first, second = one.getsockname()[1], two.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", second + 1)).close()
            except OSError:
                continue
            return [first, second, second + 1][:count]


def asked(environ: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60).stdout


def came(what: Callable[[], bool], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.3)
    return True


def records(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.glob("runs/digits/*/metrics.jsonl"))


def weights(folder: Path) -> str:
    [path] = folder.rglob("model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.long
@pytest.mark.timeout(540)
def test_a_job_that_is_stopped_and_requeued_has_the_bits_of_one_that_is_not(slurm, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    command = ["shardwise", "launch", "--plan", PLAN, "--nodes", "2", "--cpu", "--on", "slurm", "--setup", ":",
               "--time", "30m", "--yes", "digits", "--", "--steps", str(STEPS)]  # fmt: skip
    subprocess.run(command, cwd=stopped, env=slurm, check=True, timeout=60, capture_output=True)
    job = asked(slurm, "squeue", "-h", "-o", "%A", "-n", "digits").split()[0]
    for number in (1, 2, 3):
        assert came(lambda: records(stopped) >= number * STEPS // 5, 150)  # noqa: B023
        how = ["scancel", "--signal=USR1", "--batch", job] if number < 3 else ["scontrol", "requeue", job]
        subprocess.run(how, env=slurm, check=True, timeout=60)
        assert came(lambda: "PENDING" in asked(slurm, "squeue", "-h", "-j", job, "-o", "%T"), 60), number
        # Slurm lets a requeued job wait for two minutes
        assert came(lambda: not subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm,
                                               capture_output=True, timeout=60).returncode, 60)  # fmt: skip
    assert came(lambda: "JobState=COMPLETED" in asked(slurm, "scontrol", "show", "job", job), 150)
    assert "Restarts=3" in asked(slurm, "scontrol", "show", "job", job)
    subprocess.run(["srun", "-N2", "--ntasks-per-node=1", *["shardwise", "train", "digits", "--plan"], PLAN, "--steps",
                    str(STEPS)], cwd=whole, env=slurm, check=True, timeout=150, capture_output=True)  # fmt: skip
    assert weights(stopped) == weights(whole)


@pytest.mark.long
@pytest.mark.timeout(800)
def test_a_job_that_nears_its_time_limit_saves_and_goes_on(slurm, tmp_path: Path) -> None:
    """Of five minutes the last two are kept for saving, so Slurm itself asks after two or three."""
    command = ["shardwise", "launch", "--plan", PLAN, "--nodes", "2", "--cpu", "--on", "slurm", "--setup", ":",
               "--time", "5m", "--yes", "digits", "--", "--steps", "1000000"]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, env=slurm, check=True, timeout=60, capture_output=True)
    job = asked(slurm, "squeue", "-h", "-o", "%A", "-n", "digits").split()[0]
    assert came(lambda: records(tmp_path) > 0, 150)
    assert came(lambda: "PENDING" in asked(slurm, "squeue", "-h", "-j", job, "-o", "%T"), 260)
    [run] = tmp_path.glob("runs/digits/*")
    saved = json.loads((run / "stopped.json").read_text())["step"]
    assert came(lambda: not subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=slurm,
                                           capture_output=True, timeout=60).returncode, 60)  # fmt: skip
    assert came(lambda: records(tmp_path) > saved + 2, 150)
    assert "Restarts=1" in asked(slurm, "scontrol", "show", "job", job)
    subprocess.run(["scancel", job], env=slurm, check=True, timeout=60)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
    assert steps == list(range(1, len(steps) + 1)) and [run] == list(tmp_path.glob("runs/digits/*"))


def test_a_job_is_asked_for_followed_and_ended(slurm, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('a first line', flush=True)\ntime.sleep(600)\n")
    words = ["shardwise", "launch", "slow.py", "--on", "slurm"]
    plan = ["--plan", PLAN, "--nodes", "2", "--cpu", "--setup", ":", "--time", "30m", "--yes"]
    run = partial(subprocess.run, cwd=tmp_path, env=slurm, text=True, stdout=subprocess.PIPE)
    assert "--status | --follow | --stop" in run([*words, *plan], timeout=60).stdout
    assert "slow" in run([*words, "--status"], timeout=60).stdout
    with subprocess.Popen([*words, "--follow"], cwd=tmp_path, env=slurm, text=True, stdout=subprocess.PIPE) as watching:
        late = Timer(25, watching.kill)
        late.start()
        assert watching.stdout is not None and any("a first line" in line for line in watching.stdout)
        late.cancel()
        assert watching.poll() is None  # it goes on for as long as the job runs
        watching.kill()
    assert run([*words, "--stop"], timeout=60).returncode == 0
    assert came(lambda: "slow" not in asked(slurm, "squeue", "-h", "-n", "slow", "-t", "running"), 60)


def test_a_partition_that_is_not_there_is_told(slurm, tmp_path: Path) -> None:
    command = [
        "shardwise",
        "launch",
        "digits",
        "--plan",
        PLAN,
        "--on",
        "slurm",
        "--partition",
        "nope",
        "--cpu",
        "--yes",
    ]
    ran = subprocess.run(command, cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "slurm did not take the job" in ran.stderr and "invalid partition specified: nope" in ran.stderr
