"""The process that watches the ranks of one host, if a launcher started these. Without torch.

    join -> each rank: record-N, stacks-N in a folder in memory; the first of them starts this process
    here -> looks twice a second; on a hang: one report on stderr with all stacks, then the ranks are ended
         -> when all ranks have ended: the folder is removed, and this process ends

If a rank has died, its launcher is given a while to end the others before this does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from shardwise.guard.diagnose import Deadlines, Finding, RankWatch
from shardwise.guard.records import DONE, Reader
from shardwise.guard.stacks import collect, process_state, readable

LOOK_S = 0.5  # seconds between two looks at the records
LAUNCHER_S = 15.0  # seconds after a death for the launcher to end the others
TERM_S = 3.0  # seconds between SIGTERM and SIGKILL
_PROGRAM = "import sys; from shardwise.guard.watcher import serve; serve(sys.argv[1], sys.argv[2])"


def start(folder: str, deadlines: Deadlines | None) -> None:
    """Starts the watcher's process for the ranks with records in `folder`.

    deadlines  None: only hangs that are certain end the ranks
    """
    limits = json.dumps(None if deadlines is None else asdict(deadlines))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, folder, limits],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip


def serve(folder: str, deadlines: str) -> None:
    """Runs the watcher's process: looks at the records until all ranks have ended; reports a hang and ends them.

    folder     of the records, which is removed at the end
    deadlines  JSON of `Deadlines`, or "null"
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the watcher ends with its ranks alone
    limits = json.loads(deadlines)
    readers: dict[int, Reader] = {}
    watch = RankWatch(readers, None if limits is None else Deadlines(**limits))
    until = time.monotonic() + 60.0  # for the first rank to come
    try:
        while True:
            time.sleep(LOOK_S)
            _add_new(Path(folder), readers)
            ranks = watch.see()
            alive = {rank: seen.pid for rank, seen in ranks.items() if _lives(seen.pid)}
            if not alive and (ranks or time.monotonic() > until):
                return
            finding = watch.look(time.monotonic(), set(ranks) - set(alive))
            died = {rank for rank, seen in ranks.items() if rank not in alive and seen.state != DONE}
            # after a death the others hang; the launcher gets time to end them, and says why itself
            if finding is not None and died and not _still_there(alive):
                return
            if finding is not None:
                _report(finding, alive, Path(folder))
                _end(alive)
                return
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _add_new(folder: Path, readers: dict[int, Reader]) -> None:
    """Opens the records that have appeared since the last look, into `readers` by rank."""
    for path in folder.glob("record-*"):
        rank = int(path.name.partition("-")[2])
        if rank not in readers:
            readers[rank] = Reader(path)


def _lives(pid: int) -> bool:
    """Whether a process runs: it is there and has not ended."""
    return process_state(pid) not in ("", "Z", "X")


def _still_there(alive: dict[int, int]) -> bool:
    """Whether any of these processes (rank -> pid) still runs after `LAUNCHER_S`."""
    until = time.monotonic() + LAUNCHER_S
    while time.monotonic() < until:
        if not any(map(_lives, alive.values())):
            return False
        time.sleep(LOOK_S)
    return True


def _report(finding: Finding, alive: dict[int, int], folder: Path) -> None:
    """Writes one report on stderr: the finding, and each rank's stack."""
    files = {rank: folder / f"stacks-{rank}" for rank in alive}

    def dump(rank: int) -> str:
        return files[rank].read_text(errors="replace") if files[rank].exists() else ""

    collect(alive, dump)
    lines = [f"shardwise: this run hangs: {finding.text()}"]
    for rank in sorted(files):
        text = readable(dump(rank), (), ("in _beats",), ("shardwise/comm/recording.py",))
        lines.append(f"rank {rank} was here:\n{text or '(no Python stack: the rank did not answer)'}")
    sys.stderr.write("\n" + "\n".join(lines) + "\n")
    sys.stderr.flush()


def _end(alive: dict[int, int]) -> None:
    """Send SIGTERM, then SIGKILL, to the ranks of this host."""
    # TERM first, which lets a rank say where it was; KILL for what does not answer
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in alive.values():
            if _lives(pid):
                # the process may end between `_lives` and the signal
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        until = time.monotonic() + TERM_S
        while time.monotonic() < until and any(map(_lives, alive.values())):
            time.sleep(0.05)
