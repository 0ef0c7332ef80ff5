"""`LaunchJob`: what each rank runs, on how many nodes; `grid` refuses numbers of nodes and ranks that do not agree."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import InputError
from shardwise.layout import Plan

if TYPE_CHECKING:
    from shardwise.cluster import Cluster

PORT = 29500  # torchrun's default
USUAL_NODE = 8  # devices of a node if they are not known
SECRET = re.compile(r"(?i)(key|token|secret|passw|credential|auth|cookie)")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
MOST_NAME = 50  # characters; Kubernetes allows 63 with the suffixes that it adds


@dataclass(frozen=True)
class LaunchJob:
    """One job of an engine (Slurm, Kubernetes, ...).

    name           of the job
    command        words of the command that each rank runs
    nodes          number of hosts; `per_node`: ranks of each, one for each device
    folder         folder of its runs and checkpoints, which hosts share
    accelerated    Whether each rank has an accelerator, which the engine is asked for
    device_name    of the catalogue, such as h100-sxm-80gb; "" if no cluster was given
    cpus_per_rank  CPUs that the engine is asked for; None: its default
    minutes        time limit; None: the engine's own
    queue          partition or queue; `account`: who pays; None: the engine's own
    image          of containers; None: the engine needs none
    hosts          names or addresses, for an engine that does not find them itself
    port           on which hosts meet
    setup          shell lines before the ranks, which make the command's program available
    variables      environment variables: (name, value), or (name, None) if the value must not be written
    extra          further options for the engine, unchanged
    volume         a claim, a volume or a bucket that holds `folder` if hosts share no folder; None: they do
    accelerator    the engine's own name of the device; None: derived from `device_name`
    goes_on        Whether the same command resumes its run, so that the job may be started again
    work_folder    folder in which the ranks are started
    """

    name: str
    command: tuple[str, ...]
    plan: Plan
    nodes: int
    per_node: int
    folder: str
    accelerated: bool = True
    device_name: str = ""
    cpus_per_rank: int | None = None
    minutes: int | None = None
    queue: str | None = None
    account: str | None = None
    image: str | None = None
    hosts: tuple[str, ...] = ()
    port: int = PORT
    setup: str = ""
    variables: tuple[tuple[str, str | None], ...] = ()
    extra: tuple[str, ...] = ()
    volume: str | None = None
    accelerator: str | None = None
    goes_on: bool = True
    work_folder: str = "."

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of the job."""
        return self.nodes * self.per_node

    @property
    def shell(self) -> str:
        """Returns the ranks' command as one line of shell."""
        return shlex.join(self.command)

    @property
    def written(self) -> dict[str, str]:
        """Returns {variable: value} of the variables whose values may be written into a file."""
        return {name: value for name, value in self.variables if value is not None}

    @property
    def passed(self) -> list[str]:
        """Returns the names of variables that are passed on without writing their values."""
        return [name for name, value in self.variables if value is None]

    @property
    def what(self) -> str:
        """Returns a line that describes the job: its name, plan, nodes and ranks."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.name}: plan {self.plan}, {nodes} of {self.per_node} rank(s)"


def grid(plan: Plan, nodes: int | None, per_node: int | None, cluster: Cluster | None = None) -> tuple[int, int]:
    """Returns (number of nodes, ranks of each) for a plan; `InputError` if plan, nodes and cluster do not agree.

    nodes, per_node   as asked for; None: to be chosen
    cluster           gives the devices of a node; None: 8 are assumed

    Without `per_node` the ranks are divided over `nodes`; without both, a node gets as many as it has devices.
    """
    world = plan.world_size
    # the innermost tier has the devices of a node, if there are several tiers
    devices = None if cluster is None else (cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size)
    if cluster is not None and world > cluster.world_size:
        raise InputError(f"plan {plan} has {world} ranks, and {cluster} has {cluster.world_size} devices: {_SMALLER}")
    if per_node is None and nodes is not None and world % nodes == 0:
        per_node = world // nodes
    if per_node is None:
        per_node = min(world, devices or USUAL_NODE)
    # each rank needs a device
    if devices is not None and per_node > devices:
        raise InputError(
            f"{per_node} ranks on a node, and a node of {cluster} has {devices} devices: each rank needs one of its "
            f"own; give --nodes {-(-world // devices)} or more"
        )
    if world % per_node:
        fitting = [count for count in range(1, per_node) if world % count == 0]
        raise InputError(
            f"plan {plan} has {world} ranks, which nodes of {per_node} do not divide: every node of a job has the same "
            f"number; give --per-node {fitting[-1]}, or change a degree of the plan"
        )
    if nodes is not None and nodes * per_node != world:
        raise InputError(
            f"{nodes} node(s) of {per_node} rank(s) are {nodes * per_node} ranks, and plan {plan} has {world}: "
            f"give --nodes {world // per_node}, or change a degree of the plan"
        )
    return world // per_node, per_node


_SMALLER = "`shardwise plan` with this cluster proposes plans that fit"


def job_name(asked: str | None, target: str) -> str:
    """Returns the job's name: `asked` (`InputError` unless all engines accept it), else one made from the target."""
    # a chosen name is never changed, since the user gives it again to ask about the job
    if asked is not None:
        if not _NAME.fullmatch(asked) or len(asked) > MOST_NAME:
            raise InputError(
                f"--name {asked!r}: every engine takes small letters, digits and '-' between them, at most {MOST_NAME}"
            )
        return asked
    # "file.py:task" and "module:task" give "file-task"; a .toml or .py file gives its stem
    stem, _, task = target.rpartition(":") if not target.endswith((".py", ".toml")) else (target, "", "")
    words = f"{Path(stem).stem}-{task}" if stem and task else Path(target).stem
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:MOST_NAME].strip("-")
    return name or "shardwise"


def variables_of(words: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Returns (name, value or None) for each `NAME=VALUE` or `NAME`.

    Raises `InputError` for a wrong name, and for the value of a variable whose name looks like a secret's.
    """
    variables: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"--env {name!r} is not the name of a variable: give NAME or NAME=VALUE")
        if equals and SECRET.search(name):
            raise InputError(
                f"--env {name}=...: its name tells of a secret, whose value would be written into a file: give the "
                f"name alone, --env {name}, and the engine hands on what it is"
            )
        variables[name] = value if equals else None
    return tuple(variables.items())
