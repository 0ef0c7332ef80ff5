"""Shell lines that start a host's ranks with torchrun, or with `agent`, a wrapper of it.

    one host    torchrun --standalone --nproc-per-node 8 --no-python shardwise train ...
    host r      torchrun --nnodes 4 --node-rank r --master-addr HOST0 --master-port 29500 --nproc-per-node 8 ...

Without a node rank and an address, each torchrun would take its own host for the first, at 127.0.0.1.
"""

from __future__ import annotations

import shlex

from shardwise.launch.launch_job import PORT, USUAL_NODE, LaunchJob
from shardwise.layout import Plan

AGENT = ("python", "-m", "shardwise.launch.agent")  # torchrun that passes on signals and exit codes
NODE_RANK, FIRST_HOST = "$NODE_RANK", "$FIRST_HOST"  # shell variables, so that the line is the same on every host


def host_words(nodes: int, per_node: int, node_rank: str, address: str, port: int = PORT) -> list[str]:
    """Returns torchrun's options for one of `nodes` hosts with `per_node` ranks each.

    node_rank   index of the host, or a shell variable; `address`, `port`: of host 0
    """
    if nodes == 1:
        return ["--standalone", "--nproc-per-node", str(per_node), "--no-python"]
    return [
        "--nnodes", str(nodes), "--node-rank", node_rank, "--master-addr", address, "--master-port", str(port),
        "--nproc-per-node", str(per_node), "--no-python",
    ]  # fmt: skip


def host_line(job: LaunchJob, node_rank: str, address: str, program: tuple[str, ...] = ("torchrun",)) -> str:
    """Returns the shell line that starts the ranks of one host.

    node_rank, address   index of the host, and host 0; written unquoted, so they may be shell variables
    program              words of the launcher: torchrun, or `AGENT`
    """
    return " ".join([*program, *host_words(job.nodes, job.per_node, node_rank, address, job.port), job.shell])


def start_line(command: str, plan: Plan, per_node: int = USUAL_NODE) -> str:
    """Returns the shell line that starts a plan: `command` if one host has room for its ranks, else one of torchrun.

    per_node   ranks that a host has room for

    The line of torchrun is run on every host, where NODE_RANK (from 0) and FIRST_HOST (host 0) must be set.
    """
    world = plan.world_size
    if world <= per_node:
        return command
    per_node = max(count for count in range(1, per_node + 1) if world % count == 0)
    return " ".join(["torchrun", *host_words(world // per_node, per_node, NODE_RANK, FIRST_HOST), command])


def start_hint(line: str, plan: Plan, per_node: int = USUAL_NODE) -> list[str]:
    """Returns [a remark] on how to run a line of `start_line` on several hosts; [] for a line of one host."""
    if not line.startswith("torchrun"):
        return []
    nodes = plan.world_size // max(count for count in range(1, per_node + 1) if plan.world_size % count == 0)
    return [
        f"on each of {nodes} hosts, with NODE_RANK 0 to {nodes - 1} and FIRST_HOST, the name of host 0; or as a job: "
        "shardwise launch (docs/launch.md)"
    ]


def header(job: LaunchJob) -> str:
    """Returns the comment line at the top of a file."""
    return f"# {job.what}; written by shardwise launch"


def exports(job: LaunchJob) -> list[str]:
    """Returns shell lines that export the variables whose values may be written."""
    return [f"export {name}={shlex.quote(value)}" for name, value in job.written.items()]


def setup_lines(job: LaunchJob) -> list[str]:
    """Returns the shell lines before the ranks start: the setup, and exported variables."""
    return [*([job.setup] if job.setup else []), *exports(job)]


def host_script(job: LaunchJob, program: tuple[str, ...], before: tuple[str, ...] = ()) -> str:
    """Returns a shell script that starts one host's ranks.

    program   words of the launcher; `before`: lines before the others

    With several hosts the script's arguments are the index of the host and the name of host 0.
    """
    lines = ["#!/bin/bash", header(job), *before]
    if job.nodes > 1:
        lines += [
            f"NODE_RANK=${{1:?which of the hosts this is: 0 to {job.nodes - 1}}}",
            "FIRST_HOST=${2:?the name or address of host 0}",
        ]
    line = host_line(job, f'"{NODE_RANK}"', f'"{FIRST_HOST}"', program)
    return "\n".join([*lines, *setup_lines(job), f"exec {line}"]) + "\n"


def wait_for_all() -> list[str]:
    """Returns bash lines that wait for all processes in the array `ranks` and set `code`.

    `code` becomes the first exit code other than 0 and 75, else 75 if a rank ended so, else 0. A caught signal ends
    `wait` early, so it is repeated while the process lives.
    """
    return [
        "code=0",
        'for rank in "${ranks[@]}"; do',
        "    while true; do",
        "        ended=0",
        '        wait "$rank" || ended=$?',
        '        kill -0 "$rank" 2>/dev/null || break',
        "    done",
        '    if [ "$ended" != 0 ] && { [ "$code" = 0 ] || [ "$code" = 75 ]; }; then code=$ended; fi',
        "done",
    ]
