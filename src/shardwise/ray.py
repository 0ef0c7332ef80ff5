"""Runs training under Ray Train: `trainer` returns a `TorchTrainer`, each of whose workers starts one rank.

    TorchTrainer --> N workers --> each starts the command, with torchrun's variables for its rank
    rank 0 --pipe--> its worker --> all workers: ray.train.report(metrics, path of the newest checkpoint)
    a worker or a node is lost, or ranks end with 75 --> the workers start again, on the nodes there are
    Ray is about to preempt a node --> the ranks are asked to save and stop

Ray Train sorts workers node by node, so ranks are placed as plans assume. A run's checkpoints stay where the run writes
them; Ray gets a small file with their path, and the same command resumes from the newest.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint import publish
from shardwise.checkpoint.remote import place
from shardwise.errors import InputError, RunError, Stopped
from shardwise.layout import Plan, check
from shardwise.observe.engine_sinks import RAY_PIPE

FAILURES = 3  # restarts of the workers after errors
SAVED_TEXT = "stopped and saved"
POINTER = "shardwise.json"  # file in Ray's checkpoint: {"path": folder of our checkpoint, "step": steps done}
POLL_S = 0.5
LAST_WORD_S = 5.0  # seconds to wait for the pipe's end, which a child of the rank may keep open


def trainer(
    task: str,
    plan: str | Plan,
    *,
    arguments: Sequence[str] = (),
    min_ranks: int | None = None,
    out: str = "runs",
    name: str = "shardwise",
    **options: Any,
) -> Any:
    """Returns a `ray.train.torch.TorchTrainer` that trains a task or a configuration under a plan.

    task       as `shardwise train` takes it: "file.py:task", a built-in task, path of a configuration, on all nodes
    plan       a `Plan` or its text; there is one worker for each rank
    arguments  further words for `shardwise train`
    min_ranks  least number of workers with which to continue if nodes are lost, under a smaller plan; None: all
    out        folder of the runs, which all nodes share; the job's runs are in `out`/`name`
    options    further arguments of `command_trainer`

    Raises `InputError` for a misspelt plan, `RefusedPlan` for one that is refused.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    check(parsed)
    workers: int | tuple[int, int] = parsed.world_size
    words = ["--plan", str(parsed), "--resume", "auto", "--set", f"train.out={out}/{name}"]
    if min_ranks is not None:
        workers = (min_ranks, parsed.world_size)
        words += ["--set", f"train.min_ranks={min_ranks}"]
    command = ["shardwise", "train", task, *words, *arguments]
    return command_trainer(command, workers, name=name, folder=f"{out}/ray", **options)


def command_trainer(
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

    command    words of the command
    workers    number of workers; (least, most) for a run that continues with fewer (train.min_ranks)
    gpus       Whether each worker asks for a GPU; `cpus`: CPUs that it asks for
    name       of the job in Ray
    folder     folder of Ray's own results; the command says where its runs lie
    variables  environment variables of the ranks, by name; None: none
    passed     names of variables whose values are taken from this process; `InputError` if one is not set
    failures   restarts of the workers after errors; restarts after a preempted node are not counted
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
        torch_config=TorchConfig(backend="gloo"),  # the workers' own group, which needs no device
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpus, resources_per_worker={"CPU": cpus, **({"GPU": 1} if gpus else {})}
        ),
        run_config=RunConfig(
            name=name, storage_path=os.path.abspath(folder), failure_config=FailureConfig(max_failures=failures)
        ),
    )


def run_rank(config: dict[str, Any]) -> None:
    """Runs the command as this worker's rank and reports its metrics, until it ends. Called on each worker.

    config   {"command": words, "variables": {name: value}}

    Raises `RunError` if it fails or has stopped.
    """
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    rank = context.get_world_rank()
    address, port = broadcast_from_rank_zero((ray.util.get_node_ip_address(), _free_port()))
    here = {
        "RANK": rank, "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(), "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": address, "MASTER_PORT": port,
    }  # fmt: skip
    records, pipe = Records.open() if rank == 0 else (None, None)
    if pipe is not None:
        here[RAY_PIPE] = pipe
    environ = {**os.environ, **config["variables"], **{name: str(value) for name, value in here.items()}}
    process = subprocess.Popen(
        config["command"], env=environ, preexec_fn=_end_with_worker, pass_fds=() if pipe is None else (pipe,)
    )
    if pipe is not None:
        os.close(pipe)
    _follow(process, rank, records)


def _follow(process: subprocess.Popen[bytes], rank: int, records: Records | None) -> None:
    """Reports rank 0's records on all workers until its process ends, then waits for this rank's process. Collective.

    records   of rank 0's run; None on other workers

    Raises `RunError` if this rank's process fails or has stopped.
    """
    from ray.train import report
    from ray.train.collective import broadcast_from_rank_zero

    asked = False
    while True:
        _raise_failed(rank, process.poll())
        # rank 0 decides for all workers when the run has ended
        ended = records is not None and process.poll() is not None
        # records that the run wrote last must not be lost
        if records is not None and ended:
            records.drain()
        metrics = records.take() if records is not None else {}
        news, over = broadcast_from_rank_zero((bool(metrics), ended))
        # every worker has to call report
        if news:
            _report(report, metrics, records)
        if over:
            break
        # one signal suffices, after which the run saves and ends
        if not asked and _is_taken_away():
            process.send_signal(signal.SIGUSR1)
            asked = True
        time.sleep(POLL_S)
    # the process may have ended after the last report
    _raise_failed(rank, process.wait())


def _report(report: Any, metrics: dict[str, Any], records: Records | None) -> None:
    """Reports metrics to Ray, on rank 0 with the path of a checkpoint that was not reported before. Collective.

    report   `ray.train.report`
    """
    from ray.train import Checkpoint

    newest = None if records is None else records.new_checkpoint()
    if newest is None:
        report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({"path": str(newest), "step": publish.step_of(newest)})
        (Path(folder) / POINTER).write_text(text, encoding="utf-8")
        report(metrics, checkpoint=Checkpoint.from_directory(folder))


def _is_taken_away() -> bool:
    """Whether Ray is about to preempt a node of these workers; False if this version of Ray cannot tell. Collective."""
    from ray import train

    asked = getattr(train, "get_preemption_info", None)
    return asked is not None and asked() is not None


def _raise_failed(rank: int, code: int | None) -> None:
    if code == Stopped.exit_code:
        raise RunError(f"rank {rank} {SAVED_TEXT}: the group starts again from there")
    if code:
        raise RunError(f"rank {rank} ended with {code}: its own output says why")


class Records:
    """The records that rank 0 writes into a pipe, read by a thread: newest metrics, and the folder of checkpoints."""

    def __init__(self, pipe: int) -> None:
        self._file = os.fdopen(pipe, encoding="utf-8")
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._new: dict[str, Any] = {}
        self._reported: Path | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @classmethod
    def open(cls) -> tuple[Records, int]:
        """Returns (new records, file descriptor into which the rank has to write them as JSON lines)."""
        read, write = os.pipe()
        return cls(read), write

    def _read(self) -> None:
        """Reads the pipe line by line until it ends; runs in the thread."""
        for line in self._file:
            record = json.loads(line)
            with self._lock:
                self._folder = record.pop("checkpoints", self._folder)
                self._new = {**self._new, **record}

    def drain(self) -> None:
        """Waits, at most `LAST_WORD_S` seconds, until the pipe is read to its end; called after the rank has ended."""
        self._thread.join(LAST_WORD_S)

    def take(self) -> dict[str, Any]:
        """Returns {metric: newest value} of what came since the last call; {} if nothing did."""
        with self._lock:
            new, self._new = self._new, {}
        return new

    def new_checkpoint(self) -> Path | None:
        """Returns the path of the newest checkpoint; None if there is none or it was returned before."""
        newest = None if self._folder is None else next(iter(publish.scan(place(self._folder))), None)
        if newest is None or newest == self._reported:
            return None
        self._reported = newest
        return newest


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _end_with_worker() -> None:
    """Makes Linux kill this process when the worker that started it ends, since Ray kills workers without notice."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of sys/prctl.h
