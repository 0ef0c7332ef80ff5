"""Ray: an entry point whose workers each start one rank; `trainer` makes it, from a script of one's own too.

    ray job submit --> entry point --> TorchTrainer: N workers --> each starts the command, with a rank's variables
    a worker or a node that is lost, or ranks that end with 75 --> the group starts again, on the workers there are

Workers follow each other node by node, as Ray Train sorts them, so ranks lie as plans lay them out.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import InputError, RunError, Stopped
from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob

FAILURES = 3
SAVED_TEXT = "stopped and saved"


def _render(job: LaunchJob) -> dict[str, str]:
    words = {
        "workers": job.ranks, "gpus": job.accelerated, "cpus": job.cpus_per_rank or 1, "name": f"{job.name}-ray",
        "folder": job.folder, "variables": job.written, "passed": job.passed,
        "failures": FAILURES if job.goes_on else 0,
    }  # fmt: skip
    lines = [
        f'"""{job.what}; written by shardwise launch."""',
        "",
        "from shardwise.launch.ray import trainer",
        "",
        f"COMMAND = {json.dumps(list(job.command), ensure_ascii=False)}",
        "",
        'if __name__ == "__main__":',
        "    trainer(",
        "        COMMAND,",
        *(f"        {name}={value!r}," for name, value in words.items()),
        "    ).fit()",
    ]
    return {f"{job.name}_ray.py": "\n".join(lines) + "\n"}


def trainer(
    command: Sequence[str],
    workers: int | tuple[int, int],
    *,
    gpus: bool = True,
    cpus: int = 1,
    name: str = "shardwise",
    folder: str = "runs",
    variables: Mapping[str, str] | None = None,
    passed: Sequence[str] = (),
    failures: int = FAILURES,
) -> Any:
    """Returns a `ray.train.torch.TorchTrainer` whose workers each run the command as one rank.

    workers    how many; (least, most) for a run that goes on with fewer (train.min_ranks)
    folder     of Ray's own results; what is trained lies where the command says
    variables  of the ranks' environment; `passed`: names whose values are those of this process
    failures   starts of the group after an error; those after a node that was taken away are not counted
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    missing = [variable for variable in passed if variable not in os.environ]
    if missing:
        raise InputError(f"the environment does not set {', '.join(missing)}, which the ranks are to be given")
    return TorchTrainer(
        run_rank,
        train_loop_config={
            "command": list(command),
            "variables": {**(variables or {}), **{variable: os.environ[variable] for variable in passed}},
        },
        torch_config=TorchConfig(backend="gloo"),  # of the workers themselves, which share a host's devices under it
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpus, resources_per_worker={"CPU": cpus, **({"GPU": 1} if gpus else {})}
        ),
        run_config=RunConfig(
            name=name, storage_path=os.path.abspath(folder), failure_config=FailureConfig(max_failures=failures)
        ),
    )


def run_rank(config: dict[str, Any]) -> None:
    """Run the command as this worker's rank and wait for its end; raises `RunError` where it fails or has stopped."""
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    address, port = broadcast_from_rank_zero((ray.util.get_node_ip_address(), _free_port()))
    here = {
        "RANK": context.get_world_rank(), "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(), "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address, "MASTER_PORT": port,
    }  # fmt: skip
    environ = {**os.environ, **config["variables"], **{name: str(value) for name, value in here.items()}}
    process = subprocess.Popen(config["command"], env=environ, preexec_fn=_end_with_worker)
    code = process.wait()
    if code == Stopped.exit_code:
        raise RunError(f"rank {here['RANK']} {SAVED_TEXT}: the group starts again from there")
    if code:
        raise RunError(f"rank {here['RANK']} ended with {code}: its own output says why")


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _end_with_worker() -> None:
    """Have Linux end this process with the worker that started it: Ray ends a worker without a word."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of sys/prctl.h


def _submit(job: LaunchJob, path: str) -> list[str]:
    return ["ray", "job", "submit", "--working-dir", ".", "--", "python", path]


ENGINE = LaunchEngine("ray", _render, _submit, waits=True)
