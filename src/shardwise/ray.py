"""Ray Train as the engine of a run: `trainer` gives its `TorchTrainer`, each of whose workers starts one rank.

    TorchTrainer --> N workers --> each starts the command, with a rank's variables (torchrun's)
    rank 0 --pipe--> its worker --> all workers: ray.train.report(metrics, where the newest checkpoint lies)
    a worker or a node that is lost, or ranks that end with 75 --> the group starts again, on the workers there are
    a node that Ray is about to take away --> its ranks are asked to save and stop

Workers follow each other node by node, as Ray Train sorts them, so ranks lie as plans lay them out. A run's checkpoints
stay where the run writes them: Ray is given a file that says where, and the same command goes on from the newest.
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

FAILURES = 3
SAVED_TEXT = "stopped and saved"
POINTER = "shardwise.json"  # in a checkpoint of Ray's: {"path": folder of ours, "step": steps done}
POLL_S = 0.5
LAST_WORD_S = 5.0  # something that the rank started may still have the pipe


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

    task       what `shardwise train` takes: "file.py:task", a built-in one, a configuration's path; all nodes have it
    plan       one worker for each rank
    arguments  more words of `shardwise train`
    min_ranks  go on with as few workers, under a smaller plan and the same order of samples, where nodes are lost
    out        folder of the runs, which all nodes share; the job's run lies in `out`/`name`
    options    those of `command_trainer`

    Raises `InputError`, `RefusedPlan` for a plan that is misspelt or refused.
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

    workers    how many; (least, most) for a run that goes on with fewer (train.min_ranks)
    gpus       each worker asks for one, and for `cpus`
    folder     of Ray's own results; what is trained lies where the command says
    variables  of the ranks' environment; `passed`: names whose values are those of this process, else `InputError`
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
    """Run the command as this worker's rank, reporting what it says, until it ends.

    Raises `RunError` where it fails or has stopped.
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
    """Report rank 0's records on all workers until its process ends, then wait for this rank's. Collective."""
    from ray.train import report
    from ray.train.collective import broadcast_from_rank_zero

    asked = False
    while True:
        _raise_failed(rank, process.poll())
        # only rank 0 has records: it tells the others when the run has ended
        ended = records is not None and process.poll() is not None
        # what the run wrote last must not be lost
        if records is not None and ended:
            records.drain()
        metrics = records.take() if records is not None else {}
        news, over = broadcast_from_rank_zero((bool(metrics), ended))
        # every worker calls report, whoever has numbers
        if news:
            _report(report, metrics, records)
        if over:
            break
        # once: the run saves and ends by itself
        if not asked and _is_taken_away():
            process.send_signal(signal.SIGUSR1)
            asked = True
        time.sleep(POLL_S)
    # the process may have ended after the last report
    _raise_failed(rank, process.wait())


def _report(report: Any, metrics: dict[str, Any], records: Records | None) -> None:
    """Report metrics, and of rank 0 where a checkpoint lies that was not reported before. Collective."""
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
    """Returns whether Ray is about to lose a node of this group, where this version tells. Collective."""
    from ray import train

    asked = getattr(train, "get_preemption_info", None)
    return asked is not None and asked() is not None


def _raise_failed(rank: int, code: int | None) -> None:
    if code == Stopped.exit_code:
        raise RunError(f"rank {rank} {SAVED_TEXT}: the group starts again from there")
    if code:
        raise RunError(f"rank {rank} ended with {code}: its own output says why")


class Records:
    """What rank 0 says of its run, read by a thread: the newest metrics, and where its checkpoints lie."""

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
        """Returns records, and the number of the file that the rank is to write."""
        read, write = os.pipe()
        return cls(read), write

    def _read(self) -> None:
        """Take over what the run writes, line by line, until it ends."""
        for line in self._file:
            record = json.loads(line)
            with self._lock:
                self._folder = record.pop("checkpoints", self._folder)
                self._new = {**self._new, **record}

    def drain(self) -> None:
        """Wait until all is read that a rank, which has ended, has written."""
        self._thread.join(LAST_WORD_S)

    def take(self) -> dict[str, Any]:
        """Returns the newest value of each metric since the last call; {} where there is nothing new."""
        with self._lock:
            new, self._new = self._new, {}
        return new

    def new_checkpoint(self) -> Path | None:
        """Returns the newest checkpoint; None where there is none, or it was returned before."""
        newest = None if self._folder is None else next(iter(publish.scan(place(self._folder))), None)
        if newest is None or newest == self._reported:
            return None
        self._reported = newest
        return newest


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _end_with_worker() -> None:
    """Have Linux end this process with the worker that started it: Ray ends a worker without a word."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of sys/prctl.h
