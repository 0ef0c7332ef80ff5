"""The process that writes a rank's part of a checkpoint (for `save`) while training goes on. Without torch.

It is started once, with a descriptor of the memory file that the rank fills. Each request is a line of JSON, and so is
the answer. When the rank ends, it finishes the save under way and ends too, so a rank that is killed during a save
still leaves the checkpoint if every rank had filled its buffer.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.checkpoint.publish import Work, give_up, write_and_publish
from shardwise.checkpoint.remote import disk_of, place
from shardwise.errors import RunError
from shardwise.guard import points

ALONE_S = 20.0  # how long rank 0's writer waits for the other ranks' once its own rank is gone
_PROGRAM = "import sys; from shardwise.checkpoint.background import serve; serve(int(sys.argv[1]))"


class Writer:
    """A handle on the process that writes this rank's files; `file`: descriptor of the memory that the rank fills."""

    def __init__(self, file: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(file)],
            # in a session of its own: a Ctrl-C or a kill of the ranks' group does not reach a save under way
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(file,), env=environment, start_new_session=True,
        )  # fmt: skip
        self.step: int | None = None  # step of the save under way; None: there is none
        self._work: Work | None = None  # description of the newest save
        self.path = ""  # folder of the last save that succeeded
        self._answer: dict[str, str] | None = None

    def begin(self, work: Work, size_bytes: int) -> None:
        """Starts writing the first `size_bytes` of the memory file as `work` says; `RunError` if the process ended."""
        assert self.process.stdin is not None
        self.step, self._work = work.step, work
        fields = {**asdict(work), "folder": str(work.folder)}
        try:
            self.process.stdin.write(json.dumps({"work": fields, "bytes": size_bytes}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            self._fail(self._given_up(f"its writer has ended ({error.strerror})"))

    def answered(self) -> str:
        """Returns the outcome of the save under way: "" if there is none or it still runs, else "well" or "badly"."""
        assert self.process.stdout is not None
        if self.step is None or not (self._answer or select.select([self.process.stdout], [], [], 0)[0]):
            return ""
        return "badly" if self._read()["error"] else "well"

    def wait(self) -> None:
        """Waits until the save under way has ended, if there is one. Raises `RunError` if it failed."""
        if self.step is None:
            return
        answer, self._answer = self._read(), None
        if answer["error"]:
            self._fail(answer["error"])
        self.step, self.path = None, answer["path"]

    def _read(self) -> dict[str, str]:
        """Returns the writer's answer to the current save, {"error": "" or message, "path"}; waits for it."""
        assert self.process.stdout is not None
        if self._answer is None:
            line = self.process.stdout.readline()
            gone = "" if line else self._given_up(f"its writer left with exit code {self.process.wait()}")
            self._answer = {"error": gone, "path": ""} if gone else json.loads(line)
        return self._answer

    def _given_up(self, why: str) -> str:
        """Marks in the folder that this rank's part will not come, so that no rank waits for it; returns `why`."""
        if self._work is not None:
            give_up(self._work, RunError(why), disk_of(self._work.folder))
        return why

    def _fail(self, why: str) -> None:
        step, self.step = self.step, None
        raise RunError(f"the checkpoint of step {step} was not written: {why}")

    def close(self) -> None:
        """Ends the process; if a save is under way the process ends by itself after it, and is not waited for."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.step is not None:  # a wait would last as long as the disk needs
            return
        self.process.stdout.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(file: int) -> None:
    """Runs the writer process: writes the saves that its rank asks for on stdin, until stdin ends with the rank.

    file   descriptor of the memory that the rank fills

    Each line on stdin is {"work": fields of `Work`, "bytes"}; the answer on stdout is {"error", "path"}.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # its rank decides when to stop
    points.listen_as_asked()
    waiting = _Waiting()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = {"error": "", "path": ""}
        waiting.gone_at = None
        try:
            answer["path"] = str(_write(file, request, waiting))
        except Exception as problem:
            answer["error"] = str(problem) or type(problem).__name__
        try:
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
        except OSError:
            return


def _write(file: int, request: dict[str, Any], waiting: _Waiting) -> Path:
    """Writes one save from the memory file; returns the checkpoint's folder (on ranks but 0: the unfinished one)."""
    work = Work(**{**request["work"], "folder": place(request["work"]["folder"])})
    with mmap.mmap(file, request["bytes"], prot=mmap.PROT_READ) as buffer, memoryview(buffer) as view:
        return write_and_publish(work, [view], disk_of(work.folder), waiting.going)


class _Waiting:
    """Decides how long rank 0's writer waits for other ranks' files: up to `ALONE_S` after its own rank has ended."""

    def __init__(self) -> None:
        self.gone_at: float | None = None

    def going(self) -> bool:
        ready = select.select([sys.stdin.buffer], [], [], 0)[0]
        # a rank sends nothing while a save is under way, so readable means end of file: the rank has ended
        if ready and self.gone_at is None:
            self.gone_at = time.monotonic()
        return self.gone_at is None or time.monotonic() < self.gone_at + ALONE_S
