"""torchrun: a script to run on each host; hosts find each other at the first one's address."""

from __future__ import annotations

from shardwise.errors import InputError
from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob
from shardwise.launch.lines import host_script


def _render(job: LaunchJob) -> dict[str, str]:
    use = f"# on each of {job.nodes} hosts, in one folder: bash {job.name}.sh NUMBER_OF_HOST NAME_OF_HOST_0"
    return {f"{job.name}.sh": host_script(job, ("torchrun",), (use,) if job.nodes > 1 else ())}


def _submit(job: LaunchJob, path: str) -> list[str]:
    """Returns the words that run the script on this host; `InputError` for a job of several hosts."""
    if job.nodes > 1:
        raise InputError(
            f"torchrun starts the ranks of one host, and the job has {job.nodes}: run bash {path} NUMBER HOST0 on "
            "each, or let --on hosts do so over ssh"
        )
    return ["bash", path]


ENGINE = LaunchEngine("torchrun", _render, _submit, waits=True)
