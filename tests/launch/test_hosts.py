"""Jobs on two hosts of this machine: every line that starts a plan joins them; a job saves and goes on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from two_hosts import Host, NoHosts, clean, finished, linked

from shardwise.cli.main import call
from shardwise.launch.lines import start_line
from shardwise.layout import Plan

PLAN = "dp_shard=2,zero=3"
TRAIN = f"shardwise train digits --plan {PLAN} --steps 3 --set train.out={{out}}"


def weights(folder: Path) -> str:
    [path] = folder.rglob("model.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    assert call(TRAIN.format(out=folder).split()[1:]) == 0
    return weights(folder)


def test_the_line_that_starts_a_plan_joins_two_hosts(hosts: list[Host], plain: str, tmp_path: Path) -> None:
    line = start_line(TRAIN.format(out="there"), Plan.parse(PLAN), per_node=1)
    assert line.startswith("torchrun --nnodes 2")
    ran = finished([
        host.start(["bash", "-c", line], tmp_path, NODE_RANK=str(number), FIRST_HOST=hosts[0].address)
        for number, host in enumerate(hosts)
    ])  # fmt: skip
    assert [code for code, _ in ran] == [0, 0], ran
    assert weights(tmp_path / "there") == plain


@pytest.mark.long
def test_the_lines_for_a_process_on_each_host_start_its_ranks(hosts: list[Host], plain: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```sh\n")[1:]]
    lines = next(block for block in blocks if "SM_HOSTS" in block)
    lines = lines[: lines.rindex("shardwise train")] + TRAIN.format(out="there")
    names = json.dumps([host.address for host in hosts])
    ran = finished([
        host.start(["bash", "-c", lines], tmp_path, SM_HOSTS=names, SM_CURRENT_HOST=host.address, SM_NUM_GPUS="1")
        for host in hosts
    ])  # fmt: skip
    assert [code for code, _ in ran] == [0, 0], ran
    assert weights(tmp_path / "there") == plain


def launched(folder: Path, *words: str) -> list[Path]:
    """The files of `shardwise launch`, written below a folder."""
    command = ["shardwise", "launch", "--setup", ":", "--cpu", "-o", "files", *words]
    ran = subprocess.run(command, cwd=folder, env=clean(), capture_output=True, text=True, timeout=60, input="")
    assert ran.returncode == 2 and "give --yes" in ran.stderr, ran.stderr  # nobody is asked here
    return sorted((folder / "files").iterdir())


def ssh(folder: Path) -> str:
    """A folder with an `ssh` that runs a line in the namespace that has the host's address."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "ssh").write_text("""#!/bin/bash
line="${@: -1}" name="${@: -2:1}"
exec ip netns exec "$name" unshare --uts bash -c 'hostname "$0"; eval "$1"' "$name" "$line"
""")
    (programs / "ssh").chmod(0o755)
    return str(programs)


def test_a_job_on_hosts_saves_ends_with_75_and_goes_on(hosts: list[Host], tmp_path: Path) -> None:
    # ssh knows hosts by name; ranks meet at the first one's address
    names = [word for host in hosts for word in ("--host", host.name)]
    [script] = launched(tmp_path, "digits", "--plan", PLAN, "--on", "hosts", *names, "--", "--steps", "100000")
    text = script.read_text().replace(f"--master-addr {hosts[0].name}", f"--master-addr {hosts[0].address}")
    script.write_text(text.replace("--steps 100000", "--steps 100000 --set train.log_every=1"))
    path = f"{ssh(tmp_path)}:{clean()['PATH']}"
    job = subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=clean(PATH=path), text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not list(tmp_path.glob("runs/digits/*/metrics.jsonl")):
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        said = job.communicate(timeout=120)[0]
    finally:
        job.kill()
    assert job.returncode == 75, said
    [run] = tmp_path.glob("runs/digits/*")
    step = json.loads((run / "stopped.json").read_text())["step"]
    script.write_text(script.read_text().replace("--steps 100000", f"--steps {step + 2}"))
    again = subprocess.run(["bash", str(script)], cwd=tmp_path, env=clean(PATH=path), capture_output=True, text=True,
                           timeout=120)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert [path.name for path in tmp_path.glob("runs/digits/*")] == [run.name]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(steps) == set(range(1, step + 3))  # an evaluation has the number of its step


def on_hosts(hosts: list[Host], folder: Path, line: str) -> list[tuple[int, str]]:
    """(exit code, output) of the same line on each host."""
    return finished([
        host.start(["bash", "-c", line], folder, NODE_RANK=str(number), FIRST_HOST=hosts[0].address)
        for number, host in enumerate(hosts)
    ])  # fmt: skip


MORE = ("dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "tp=2", "tp=2,sp=true", "pp=2", "tp=2,remat=full")


@pytest.mark.parametrize("plan", [PLAN, *(pytest.param(plan, marks=pytest.mark.long) for plan in MORE)])
def test_a_proof_over_hosts_is_equal(plan: str, hosts: list[Host], tmp_path: Path) -> None:
    line = start_line(f"shardwise verify digits --plan {plan}", Plan.parse(plan), per_node=1)
    (code, said), (other, _) = on_hosts(hosts, tmp_path, line)
    assert (code, other) == (0, 0), said
    assert "EQUAL to one process" in said


@pytest.mark.long
def test_a_host_that_is_lost_is_named_with_the_command_that_goes_on(hosts: list[Host], tmp_path: Path) -> None:
    train = f"shardwise train digits --plan {PLAN} --steps 100000 --set train.out=there --set train.checkpoint_every=9"
    line = start_line(train, Plan.parse(PLAN), per_node=1)
    ranks = [
        host.start(["bash", "-c", line], tmp_path, NODE_RANK=str(number), FIRST_HOST=hosts[0].address)
        for number, host in enumerate(hosts)
    ]
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not list(tmp_path.glob("there/*/checkpoints/step-*")):
            time.sleep(0.2)
        there = subprocess.run(["ip", "netns", "pids", hosts[1].name], capture_output=True, text=True, timeout=30)
        for pid in there.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        said = ranks[0].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
    assert f"rank 1 on {hosts[1].name}. " in said and "the last checkpoint is there/" in said, said
    assert "--resume there/" in said


@pytest.mark.long
def test_a_run_is_proven_first_over_hosts(hosts: list[Host], tmp_path: Path) -> None:
    line = start_line(f"{TRAIN.format(out='there')} --verify-first", Plan.parse(PLAN), per_node=1)
    (code, said), (other, _) = on_hosts(hosts, tmp_path, line)
    assert (code, other) == (0, 0), said
    assert "EQUAL to a plain loop" in said or "EQUAL" in said
    assert list((tmp_path / "there").glob("*/model.safetensors"))


def test_hosts_are_looked_at_and_axes_measured(hosts: list[Host], tmp_path: Path) -> None:
    line = start_line(f"shardwise doctor --plan {PLAN}", Plan.parse(PLAN), per_node=1)
    (_, said), (_, other) = on_hosts(hosts, tmp_path, line)
    for host in hosts:
        assert host.name in said
    assert "axis dp_shard" in said and "GB/s" in said and "between hosts" in said
    assert "axis dp_shard" not in other


OWN = """
from shardwise.models.tasks import mlp as task  # noqa: F401
WORD = {word!r}
"""


def test_hosts_with_other_code_and_another_folder_are_named(hosts: list[Host], tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "own.py").write_text(OWN.format(word=number))
    line = start_line(f"shardwise train own.py:task --plan {PLAN} --steps 1", Plan.parse(PLAN), per_node=1)

    def said() -> str:
        ran = finished([
            host.start(["bash", "-c", line], folder, NODE_RANK=str(number), FIRST_HOST=hosts[0].address)
            for number, (host, folder) in enumerate(zip(hosts, folders, strict=True))
        ])  # fmt: skip
        assert all(code for code, _ in ran), ran
        return ran[0][1]

    assert "the code of own.py" in (first := said()) and hosts[1].name in first, first
    (folders[1] / "own.py").write_text(OWN.format(word=0))
    assert f"{hosts[1].name} has another" in (second := said()), second


OPEN = "40000-40063"  # the ports between hosts that their firewalls let through, beside that of host 0
FIREWALL = """
table inet narrow {
  chain input {
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
    tcp dport { 29500, PORTS } accept
  }
}
"""


@pytest.mark.long
@pytest.mark.parametrize("ports", [OPEN, "39999"])
def test_hosts_join_through_a_firewall_that_lets_their_own_ports_through(
    ports: str, plain: str, tmp_path: Path
) -> None:
    """Where it does not, all ranks are told within seconds which host does not reach which."""
    try:
        with linked(network="10.79.0.{}/24") as two:
            for host in two:
                narrowed = f"net.ipv4.ip_local_port_range={OPEN.replace('-', ' ')}"
                rules = FIREWALL.replace("PORTS", ports)
                for command, given in ((["sysctl", "-qw", narrowed], ""), (["nft", "-f", "-"], rules)):
                    ran = subprocess.run(host.words(*command), input=given, capture_output=True, text=True, timeout=30)
                    if ran.returncode:
                        pytest.skip(f"{command[0]} does not work in a namespace here: {ran.stderr.strip()}")
            line = start_line(TRAIN.format(out="there"), Plan.parse(PLAN), per_node=1)
            ran = finished([
                host.start(["bash", "-c", line], tmp_path, NODE_RANK=str(number), FIRST_HOST=two[0].address)
                for number, host in enumerate(two)
            ])  # fmt: skip
    except NoHosts as why:
        pytest.skip(str(why))
    if ports == OPEN:
        assert [code for code, _ in ran] == [0, 0], ran
        assert weights(tmp_path / "there") == plain
    else:
        assert [code for code, _ in ran] == [1, 1], ran
        assert all("does not reach" in text and "net.ipv4.ip_local_port_range" in text for _, text in ran), ran
