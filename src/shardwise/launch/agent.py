"""`python -m shardwise.launch.agent OPTIONS COMMAND`: torchrun, whose signals and exit code are those of its ranks.

    SIGTERM, SIGUSR1 --> this process --> SIGUSR1 to each rank of this host: saved, exit code 75 --> 75

torchrun by itself answers SIGTERM by ending its ranks half a minute later, saved or not, dies of SIGUSR1, and ends with
1 whatever its ranks end with; an engine that starts a job again on 75 would not see that it was saved.
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
    """Run torchrun with these words; returns its exit code: 0, 75 where all failed ranks had stopped and saved, else 1.

    A rank that had not begun dies of the signal itself, and has nothing to save; nor has this host before its ranks.
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
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGUSR1)


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started and that are still its own, as Linux tells."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
