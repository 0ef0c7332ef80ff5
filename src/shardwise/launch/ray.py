"""Ray: an entry point around `shardwise.ray.command_trainer`, whose workers each start one rank.

ray job submit --> entry point --> TorchTrainer: N workers --> each starts the command, with a rank's variables
"""

from __future__ import annotations

import json

from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob

FAILURES = 3  # restarts of the workers after errors


def _render(job: LaunchJob) -> dict[str, str]:
    """Returns {file name: text} of a Python script that runs the command on Ray Train's workers."""
    words = {
        "workers": job.ranks, "gpus": job.accelerated, "cpus": job.cpus_per_rank or 1, "name": f"{job.name}-ray",
        "folder": job.folder, "variables": job.written, "passed": job.passed,
        "failures": FAILURES if job.goes_on else 0,
    }  # fmt: skip
    lines = [
        f'"""{job.what}; written by shardwise launch."""',
        "",
        "from shardwise.ray import command_trainer",
        "",
        f"COMMAND = {json.dumps(list(job.command), ensure_ascii=False)}",
        "",
        'if __name__ == "__main__":',
        "    command_trainer(",
        "        COMMAND,",
        *(f"        {name}={value!r}," for name, value in words.items()),
        "    ).fit()",
    ]
    return {f"{job.name}_ray.py": "\n".join(lines) + "\n"}


def _submit(job: LaunchJob, path: str) -> list[str]:
    return ["ray", "job", "submit", "--working-dir", ".", "--", "python", path]


ENGINE = LaunchEngine("ray", _render, _submit, waits=True)
