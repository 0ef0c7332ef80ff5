"""Two hosts of this machine: network namespaces with a name, an address and a link between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from shardwise.ranks import launchers

NAMES = {name for family in launchers.LAUNCHERS for name in (*family.numbers, *family.job)}
NAMES |= {*launchers.TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"}
BIN = Path(sys.executable).parent
PAIRS = count()  # of this process, which may have several at once
ETC = Path("/etc/netns")  # of files that a namespace has in place of those in /etc


@dataclass(frozen=True)
class Host:
    """A namespace that programs run in, under a host name of their own."""

    name: str
    address: str

    def words(self, *command: str) -> list[str]:
        """The command line that runs a command there."""
        there = ["ip", "netns", "exec", self.name, "unshare", "--uts", "bash", "-c"]
        return [*there, f'hostname {self.name} && exec "$@"', "bash", *command]

    def start(self, command: list[str], folder: Path, **environ: str) -> subprocess.Popen:
        """The running process of a command there; its output is kept together."""
        return subprocess.Popen(self.words(*command), cwd=folder, env=clean(**environ), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def clean(**environ: str) -> dict[str, str]:
    """The environment without a launcher's variables, with this environment's programs first."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{kept['PATH']}"} | environ


class NoHosts(Exception):
    """Hosts cannot be made here."""


@contextmanager
def linked(rate: str | None = None, network: str = "10.78.0.{}/24", *, named: bool = True) -> Iterator[list[Host]]:
    """Context with two hosts and a link between them, of `rate` each way ("100mbit") where it is given.

    named   each knows the other's name and its own; else nobody knows any, and looking one up takes long
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoHosts("needs root and ip, to make two hosts of this one")
    address, _, bits = network.partition("/")
    pair = next(PAIRS)
    made = [Host(f"sl{os.getpid()}{end}{pair}", address.format(at)) for at, end in enumerate("ab", 1)]
    one, two = (host.name for host in made)
    lines = [
        f"ip netns add {one}",
        f"ip netns add {two}",
        f"ip link add {one} netns {one} type veth peer {two} netns {two}",
    ]
    for host in made:
        once = " nodad" * (":" in host.address)  # an IPv6 address is usable at once
        lines += [
            f"ip -n {host.name} addr add {host.address}/{bits} dev {host.name}{once}",
            f"ip -n {host.name} link set lo up",
            f"ip -n {host.name} link set {host.name} up",
        ]
        if rate is not None:
            lines += [f"tc -n {host.name} qdisc add dev {host.name} root tbf rate {rate} burst 128kb latency 300ms"]
    try:
        if named:
            _let_names_be_known(made)
        for line in lines:
            ran = subprocess.run(line.split(), capture_output=True, text=True, timeout=30)
            if ran.returncode != 0:
                raise NoHosts(f"two hosts cannot be made here: {line}: {ran.stderr.strip()}")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, timeout=30)
            shutil.rmtree(ETC / host.name, ignore_errors=True)


def _let_names_be_known(hosts: list[Host]) -> None:
    """Give each host a table of names, with which `ip netns exec` covers /etc/hosts there."""
    text = "\n".join(["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]) + "\n"
    for host in hosts:
        (ETC / host.name).mkdir(parents=True)
        (ETC / host.name / "hosts").write_text(text)


@pytest.fixture(scope="session")
def hosts() -> Iterator[list[Host]]:
    try:
        with linked() as made:
            yield made
    except NoHosts as why:
        pytest.skip(str(why))


def finished(processes: list[subprocess.Popen], timeout_s: float = 150) -> list[tuple[int, str]]:
    """(exit code, output) of each; all are ended."""
    try:
        said = [process.communicate(timeout=timeout_s)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()
