"""`LaunchJob`: what each rank runs, on how many nodes; `make` refuses numbers that do not agree, before any file is."""

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

PORT = 29500  # torchrun's own
USUAL_NODE = 8  # devices of a node where nothing tells
SECRET = re.compile(r"(?i)(key|token|secret|passw|credential|auth|cookie)")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
MOST_NAME = 50  # Kubernetes allows 63, with what it adds itself


@dataclass(frozen=True)
class LaunchJob:
    """One job of an engine.

    command      what each rank runs
    nodes        how many hosts
    per_node     ranks on each, one for each device
    folder       where its runs and checkpoints lie; hosts share it
    accelerated  each rank has an accelerator of its own, which the engine is asked for
    device_name  of the catalogue, such as h100-sxm-80gb; "" where no cluster was given
    minutes      the engine's time limit; None: the engine's own
    queue        a partition or queue; account: who pays
    image        of containers, where the engine needs one
    hosts        their names or addresses, where the engine does not find them itself
    setup        a line of shell that makes the command's program available
    variables    of the environment: (name, value), or (name, None) for one whose value is never written
    extra        words for the engine as they are
    volume       what holds `folder` where hosts have no folder of their own to share: a claim, a volume, a bucket
    accelerator  the engine's own name of the device, where it is not ours
    goes_on      the same command goes on with its run, so that the job may be started again
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
        """Returns how many processes the job has."""
        return self.nodes * self.per_node

    @property
    def shell(self) -> str:
        """Returns the ranks' command as one line of shell."""
        return shlex.join(self.command)

    @property
    def written(self) -> dict[str, str]:
        """Returns {variable: value} of those whose values may be written into a file."""
        return {name: value for name, value in self.variables if value is not None}

    @property
    def passed(self) -> list[str]:
        """Returns the names of variables that are handed on without their values being written."""
        return [name for name, value in self.variables if value is None]

    @property
    def what(self) -> str:
        """Returns one line on the job: its name, plan, nodes and ranks."""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.name}: plan {self.plan}, {nodes} of {self.per_node} rank(s)"


def grid(plan: Plan, nodes: int | None, per_node: int | None, cluster: Cluster | None = None) -> tuple[int, int]:
    """Returns (nodes, ranks on each) for a plan; `InputError` where plan, nodes and cluster do not agree.

    Without `per_node` a node has the cluster's devices, else as many ranks as `nodes` leave, at most 8.
    """
    world = plan.world_size
    # the innermost tier is a node's devices; of a cluster of one node all of them
    devices = None if cluster is None else (cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size)
    if cluster is not None and world > cluster.world_size:
        raise InputError(f"plan {plan} has {world} ranks, and {cluster} has {cluster.world_size} devices: {_SMALLER}")
    # nodes as asked for, if ranks divide over them
    if per_node is None and nodes is not None and world % nodes == 0:
        per_node = world // nodes
    # else a node's devices, which every cluster text names
    if per_node is None:
        per_node = min(world, devices or USUAL_NODE)
    # a rank has a device of its own
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
    """Returns the job's name: as asked (`InputError` unless every engine takes it), else made from the target."""
    # what the user chose must be taken everywhere, since the command to ask about the job has it too
    if asked is not None:
        if not _NAME.fullmatch(asked) or len(asked) > MOST_NAME:
            raise InputError(
                f"--name {asked!r}: every engine takes small letters, digits and '-' between them, at most {MOST_NAME}"
            )
        return asked
    # "file.py:task" and "module:task"; a .toml or .py of a task is its name
    stem, _, task = target.rpartition(":") if not target.endswith((".py", ".toml")) else (target, "", "")
    words = f"{Path(stem).stem}-{task}" if stem and task else Path(target).stem
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:MOST_NAME].strip("-")
    return name or "shardwise"


def variables_of(words: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Returns the variables of `NAME` and `NAME=VALUE`; `InputError` for a secret's value, and for bad names."""
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
