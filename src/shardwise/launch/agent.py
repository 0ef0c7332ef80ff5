"""`python -m shardwise.launch.agent OPTIONS COMMAND`: torchrun that passes on stop signals and exit code 75.

    SIGTERM, SIGUSR1 --> this process --> SIGUSR1 to each rank of this host, which saves and ends with 75 --> 75

On SIGTERM torchrun itself ends its ranks half a minute later, whether they have saved or not; SIGUSR1 ends it; and its
exit code is 1 whatever the ranks' are. An engine that restarts a job on 75 would not see that it has saved.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import Stopped

LEFT_TO_TORCHRUN = "SIGINT,SIGHUP,SIGQUIT"
ASKED = (signal.SIGTERM, signal.SIGUSR1)
FAILED = 1


def main(words: list[str]) -> int:
    """Runs torchrun with these words; returns the exit code: 0, 75 if all failed ranks had saved and stopped, else 1.

    A rank that dies of SIGUSR1 had not begun and has nothing to save, so it counts as stopped; a signal before ranks
    are started ends this process with 75.
    """
    for number in ASKED:
        signal.signal(number, _nothing_to_save)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    for number in ASKED:
        signal.signal(number, _ask_ranks)
    try:
        torchrun(["--signals-to-handle", LEFT_TO_TORCHRUN, *words])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return Stopped.exit_code if codes <= {Stopped.exit_code, -signal.SIGUSR1} else FAILED
    return 0


def _nothing_to_save(number: int, frame: Any) -> None:
    os._exit(Stopped.exit_code)  # torch may be half imported


def _ask_ranks(number: int, frame: Any) -> None:
    for pid in children(os.getpid()):
        with suppress(ProcessLookupError):  # the process has ended meanwhile
            os.kill(pid, signal.SIGUSR1)


def children(pid: int) -> list[int]:
    """Returns the ids of a process's living children, from /proc (Linux)."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
