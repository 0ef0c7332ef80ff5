"""Two hosts that differ in one thing: it is named, with the host, before the first step."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from two_hosts import Host, NoHosts, finished, linked

from shardwise.launch.lines import start_line
from shardwise.layout import Plan

PLAN = Plan.parse("dp_shard=2,zero=3")
FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
TASK = """
from torch import nn
from shardwise import Task
from shardwise.data import ArraySource

NUMBER = {number}


def task():
    def loss(output, batch):
        return (output - batch["y"]).square().sum(), len(output)

    return Task(model=lambda: nn.Linear(4, 1), data=ArraySource({{"x": "x.npy", "y": "y.npy"}}), loss=loss,
                inputs=lambda batch: ((batch["x"],), {{}}))
"""


def lay(folder: Path, number: int = 0, last: float = 1.0, plan: str = str(PLAN)) -> Path:
    """A host's folder: a task, its data, a plan file."""
    folder.mkdir()
    (folder / "own.py").write_text(TASK.format(number=number))
    x = np.ones((64, 4), dtype=np.float32)
    x[-1] = last
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", np.zeros((64, 1), dtype=np.float32))
    degrees = "\n".join(f"{name} = {value}" for name, _, value in (word.partition("=") for word in plan.split(",")))
    (folder / "plan.toml").write_text(f"[plan]\n{degrees}\n")
    return folder


def other_version(folder: Path) -> Path:
    """A folder in which Python finds another version of numpy's description first; its code stays what it was."""
    (folder / "numpy-0.0.1.dist-info").mkdir(parents=True)
    (folder / "numpy-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    return folder


DIFFER = {
    "version": ({}, "PYTHONPATH", "numpy: "),
    "code": ({"number": 1}, "", "the code of own.py: "),
    "data": ({"last": 2.0}, "", "the last sample of the data: "),
    "plan file": ({"plan": "dp_replicate=2"}, "", "plan: "),
    "interface": ({}, "GLOO_SOCKET_IFNAME", "where lo is the host itself"),
    "clock": ({}, "LD_PRELOAD", "s behind that of"),
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.long] * (what != "data")) for what in DIFFER])
def test_what_differs_is_named_before_the_first_step(what: str, hosts: list[Host], tmp_path: Path) -> None:
    changes, variable, words = DIFFER[what]
    if what == "clock" and FAKETIME is None:
        pytest.skip("needs libfaketime, for another clock on one host")
    folders = [lay(tmp_path / "a"), lay(tmp_path / "b", **changes)]
    environ = {
        "PYTHONPATH": f"{other_version(tmp_path / 'other')}:{os.environ.get('PYTHONPATH', '')}",
        "LD_PRELOAD": str(FAKETIME),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    told = [{}, {variable: environ[variable]} if variable else {}]
    if what == "clock":
        told[1]["FAKETIME"] = "+1h"
    out = f"--set train.out={tmp_path / 'runs'}"  # one folder: it is not what differs
    line = start_line(f"shardwise train own.py:task --plan plan.toml --steps 1 {out}", PLAN, per_node=1)
    ran = finished([
        host.start(["bash", "-c", line], folder, NODE_RANK=str(number), FIRST_HOST=hosts[0].address, **more)
        for number, (host, folder, more) in enumerate(zip(hosts, folders, told, strict=True))
    ])  # fmt: skip
    said = ran[0][1]
    assert words in said and hosts[1].name in said, ran
    if what == "clock":  # told, and no reason to end
        assert ran[0][0] == 0 and said.index(words) < said.index("step 1/1")
    else:
        assert all(code for code, _ in ran) and "step 1/1" not in said


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "without a master"])
def test_hosts_that_have_ipv6_alone_meet(launcher: str, tmp_path: Path) -> None:
    train = f"shardwise train digits --plan {PLAN} --steps 1 --set train.out=there"
    try:
        with linked(network="fd78::{}/64", named=False) as hosts:
            processes = []
            for number, host in enumerate(hosts):
                told = {"NODE_RANK": str(number), "FIRST_HOST": hosts[0].address}
                line = start_line(train, PLAN, per_node=1)
                if launcher != "torchrun":
                    line, told = train, {
                        "OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "x@1",
                        "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                    }  # fmt: skip
                processes.append(host.start(["bash", "-c", line], tmp_path, **told))
            ran = finished(processes)
    except NoHosts as why:
        pytest.skip(str(why))
    assert [code for code, _ in ran] == [0, 0], ran
    assert list((tmp_path / "there").glob("*/model.safetensors"))
