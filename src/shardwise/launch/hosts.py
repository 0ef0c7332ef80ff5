"""A list of hosts: a script that starts torchrun on each over ssh, and passes a stop on to the first host's ranks.

    this machine --ssh--> host 0: agent, ranks 0 to 7
                 --ssh--> host 1: agent, ranks 8 to 15
    SIGTERM or Ctrl-C --> host 0's ranks: all ranks save, and end with 75

The hosts must share the folder in which this is called, and allow ssh without a password.
"""

from __future__ import annotations

import shlex

from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob
from shardwise.launch.lines import AGENT, header, host_line, setup_lines, wait_for_all

SSH = "ssh -o BatchMode=yes"


def address_of(host: str) -> str:
    """Returns the name or address in "USER@HOST" or "HOST"."""
    return host.rpartition("@")[2]


def _render(job: LaunchJob) -> dict[str, str]:
    """Returns {file name: text} of a script that starts each host's ranks over ssh, and passes a stop to the first."""
    agent = f"/tmp/shardwise-{job.name}.pid"
    lines = ["#!/bin/bash", header(job), "# on each host: the same folder, and ssh without a password", "ranks=()"]
    send = "".join(f" -o SendEnv={name}" for name in job.passed)
    for node, host in enumerate(job.hosts):
        note = [f"echo $$ > {agent}"] if node == 0 else []
        start = f"exec {host_line(job, str(node), address_of(job.hosts[0]), AGENT)}"
        remote = " && ".join([f"cd {shlex.quote(job.work_folder)}", *setup_lines(job), *note, start])
        lines += [f"{SSH}{send} {shlex.quote(host)} {shlex.quote(remote)} &", "ranks+=($!)"]
    stop = shlex.quote(f'kill -TERM "$(cat {agent})"')
    lines += [
        f"stop() {{ {SSH} {shlex.quote(job.hosts[0])} {stop}; }}",
        "trap stop TERM INT",
        *wait_for_all(),
        'exit "$code"',
    ]
    return {f"{job.name}.sh": "\n".join(lines) + "\n"}


ENGINE = LaunchEngine(
    "hosts",
    _render,
    lambda job, path: ["bash", path],
    takes=("hosts",),
    needs=(("hosts", "one for each node, such as --host node0 --host node1"),),
    waits=True,
)
