"""SkyPilot: a managed job, which resumes from its checkpoint after nodes were preempted.

    sky jobs launch --> nodes --> the same lines on each, with SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS --> agent
    nodes were preempted, or ranks end with 75 --> SkyPilot recovers the job: the same lines again, the same volume

SkyPilot chooses nodes by place and price; it asks before it takes them, unless `--yes` is given.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import InputError, Stopped
from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob
from shardwise.launch.lines import AGENT, header, host_line
from shardwise.launch.yaml import to_yaml

RESTARTS = 3
NODE_RANK, FIRST = '"$SKYPILOT_NODE_RANK"', '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'


def _render(job: LaunchJob) -> dict[str, str]:
    """Returns {file name: YAML text} of a managed job."""
    recovery = {"max_restarts_on_errors": RESTARTS, "recover_on_exit_codes": [Stopped.exit_code]}
    # a run that can be resumed is started again after failures, and if it has saved and stopped
    resources: dict[str, Any] = {**_accelerators(job), **({"job_recovery": recovery} if job.goes_on else {})}
    if job.cpus_per_rank:
        resources["cpus"] = f"{job.per_node * job.cpus_per_rank}+"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        # an empty section would override the engine's defaults
        **({"resources": resources} if resources else {}),
        **_mounts(job),
        **({"envs": job.written} if job.written else {}),
        **({"secrets": dict.fromkeys(job.passed)} if job.passed else {}),
        **({"setup": job.setup} if job.setup else {}),
        "run": f"exec {host_line(job, NODE_RANK, FIRST, AGENT)}\n",
    }
    return {f"{job.name}.sky.yaml": f"{header(job)}\n{to_yaml(task)}"}


def _accelerators(job: LaunchJob) -> dict[str, Any]:
    """Returns {"accelerators": "H100:8"}, with SkyPilot's name; {} for CPUs, `InputError` if no device is known."""
    if not job.accelerated:
        return {}
    name = job.accelerator or job.device_name.partition("-")[0].upper()
    if not name:
        raise InputError("sky needs the accelerator: give --cluster, or SkyPilot's own name, --accelerator H100")
    return {"accelerators": f"{name}:{job.per_node}"}


def _mounts(job: LaunchJob) -> dict[str, Any]:
    """Returns the entry of the YAML that mounts a volume or a bucket at the folder of runs.

    Raises `InputError` for a bucket on several nodes.
    """
    assert job.volume is not None
    if "://" not in job.volume:
        return {"volumes": {job.folder: job.volume}}
    if job.nodes > 1:
        raise InputError(
            f"--volume {job.volume} on {job.nodes} nodes: each would write into a cache of its own, and ranks meet in "
            "the folder: give the name of a volume that all nodes mount (sky volumes apply)"
        )
    return {"file_mounts": {job.folder: {"source": job.volume, "mode": "MOUNT_CACHED"}}}


def _submit(job: LaunchJob, path: str) -> list[str]:
    secrets = [word for name in job.passed for word in ("--secret", name)]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name, *secrets, path]


def _remarks(job: LaunchJob) -> list[str]:
    return [] if job.setup else ["nothing is installed on the nodes: --setup 'pip install ...', or --image"]


ENGINE = LaunchEngine(
    "sky",
    _render,
    _submit,
    takes=("image", "volume", "accelerator"),
    needs=(("volume", "a volume of SkyPilot, or of one node a bucket (--volume s3://NAME): else what is saved ends "
                      "with the nodes"),),
    status="sky jobs queue",
    follow="sky jobs logs --name {name}",
    stop="sky jobs cancel --name {name}",
    remarks=_remarks,
)  # fmt: skip
