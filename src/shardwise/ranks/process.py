"""The caller's handle on one rank's process: start it, talk to it, ask for its stack, end it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

from shardwise.errors import InputError, RunError
from shardwise.guard.stacks import crash_in, readable
from shardwise.ranks.pool_messages import IDLE, READY, RankCall, Report
from shardwise.ranks.worker import HandedFd, serve

# Imported once in the fork server, shared by every rank. None of these runs a tensor operation on import,
# which matters: a process forked after one would hang in its own.
PRELOAD = [
    "torch",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "shardwise.ranks.worker",
]
START_LIMIT_S = 120.0
TIDIED = "ignore:resource_tracker:UserWarning"
SMALLER = (
    "start a large plan on its own hosts (torchrun, srun, mpirun), prove it in small with `verify --shrink`, or take a "
    "smaller plan here"
)
LEAST_RANK_BYTES = 32 * 2**20  # of its own, beside what all share: a process group, and tensors of no size
OWN_FILES, FILES_OF_A_RANK = 32, 5  # that the process which starts ranks has open; counted: 9, and 5 for each rank
STARTED_BY_IMPORT = 96  # exit code of a rank whose import of the script started ranks
_WORKER_FILE = str(Path(serve.__code__.co_filename))


class RankProcess:
    """One process that runs jobs. `output` and `errors` are file descriptors for its stdout and stderr.

    `imports` names what it will run: if it is one of shardwise's modules, the first ranks share its import.
    Raises `InputError` as `refuse_where_impossible`, `RunError` where processes cannot be forked.
    """

    def __init__(self, name: str, output: int = 1, errors: int = 2, *, imports: str = ""):
        refuse_where_impossible()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, imports] if imports.startswith("shardwise.") else PRELOAD)
        self.channel, theirs = context.Pipe()
        self._stacks = tempfile.TemporaryFile(prefix="shardwise-stacks-")  # noqa: SIM115
        handed = [HandedFd(fd) for fd in (self._stacks.fileno(), output, errors)]
        self.process = context.Process(target=serve, args=(theirs, *handed), name=name, daemon=False)
        try:
            _start_fork_server()
            self.process.start()
        except EOFError:
            raise RunError(f"ranks cannot be forked: the process that does it ended at once{_hidden()}") from None
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    @property
    def connection(self) -> Connection:
        return self.channel

    def is_usable(self) -> bool:
        """Whether the idle process is alive: it sends nothing by itself, so a readable channel means its end."""
        return not self.channel.poll() and self.process.exitcode is None

    def wait_ready(self, until: float) -> bool:
        """Wait until the process says that it is ready; False where it died or `until` (monotonic clock) has passed."""
        return self._expect(READY, until)

    def wait_idle(self, until: float) -> bool:
        """Wait until the process has cleaned up its last job; False where it has ended or `until` has passed."""
        return self._expect(IDLE, until)

    def _expect(self, word: bytes, until: float) -> bool:
        try:
            return self.channel.poll(max(0.0, until - time.monotonic())) and self.channel.recv_bytes() == word
        except (EOFError, OSError):
            return False

    def send_job(self, job: RankCall) -> None:
        self.say(pickle.dumps(job))

    def say(self, message: bytes) -> None:
        """Send a message; a rank that is gone is noticed by whoever waits for its answer."""
        try:
            self.channel.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def read_report(self) -> Report | None:
        """Returns the report that waits in the channel, None when the process ended instead of sending one."""
        try:
            return pickle.loads(self.channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """Returns the exit code, negative for a signal; None if the process is alive after `wait_s`."""
        self.process.join(wait_s)
        return self.process.exitcode

    def dump(self) -> str:
        """Returns the text of all stacks that this process has written so far, when asked for them."""
        size = os.fstat(self._stacks.fileno()).st_size
        return os.pread(self._stacks.fileno(), size, 0).decode(errors="replace")

    def stack(self) -> str:
        """Returns the stacks of `dump` for a reader, without frames of the rank's own machinery."""
        return readable(self.dump(), (_WORKER_FILE,), ("in _end_with_caller",), ("shardwise/comm/recording.py",))

    def crash(self) -> str:
        """Returns the stack of this process's crash (a segmentation fault, an abort); "" where it ended otherwise."""
        return readable(crash_in(self.dump()), (_WORKER_FILE,))

    def ask_to_stop(self) -> None:
        """Request that the job end by itself, where it listens for that (SIGUSR2)."""
        self._signal(signal.SIGUSR2)

    def end_at_once(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process by its pid and close what belongs to it."""
        self._signal(signal.SIGKILL)
        self.process.join(10)
        self.dispose()

    def dispose(self) -> None:
        """Close the caller's ends; an idle process takes this as the end of its service."""
        self.channel.close()
        self._stacks.close()

    def _signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.process.exitcode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def _start_fork_server() -> None:
    """Start the process that forks ranks, where there is none yet; it and they leave Ctrl-C to this one.

    It leaves SIGTERM to this process too: with it would go what is known of the ranks, and `timeout` sends it to all.
    The mask is inherited. Python's fork server ignores the signal only after it has imported what ranks share. The
    tracker of resources is started first, since that lets the signal through again. It removes what ranks that are
    ended leave behind (semaphores of a loader's workers); its warning of them would stand below the message on a cause.
    """
    sys.warnoptions.append(TIDIED)  # which are its words at its start
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(TIDIED)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def refuse_beyond_memory(ranks: int, what: str = "ranks", remedy: str = SMALLER) -> None:
    """Raises `InputError` before more ranks (or `what`) are started than this machine holds with nothing in them."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks * LEAST_RANK_BYTES > here:
        raise InputError(
            f"{ranks} {what} are more than this machine holds: {here / 2**30:.0f} GiB of memory are enough for "
            f"{here // LEAST_RANK_BYTES} with nothing in them: {remedy}"
        )


def allow_files(ranks: int) -> None:
    """Let this process and its ranks open as many files as the system allows: each rank is connected to all others.

    Raises `InputError` where that is fewer than this process opens for so many ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = OWN_FILES + FILES_OF_A_RANK * ranks
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise InputError(
            f"{ranks} ranks take {needed} open files of the process that starts them, which may have {hard}: raise "
            f"the limit (ulimit -n {needed}), or take fewer ranks"
        )


def _hidden() -> str:
    """Returns a sentence on the user's files that hide modules of Python by their names; "" where none does."""
    # the user's own folders: the installation's modules are what would be hidden
    folders = {Path(each or ".").resolve() for each in sys.path if not each.startswith((sys.prefix, sys.base_prefix))}
    files = [file for folder in sorted(folders) for file in sorted(folder.glob("*.py"))]
    hiding = [str(file) for file in files if file.stem in sys.stdlib_module_names]
    return f". {', '.join(hiding)} stands before a module of Python's own: give it another name" if hiding else ""


def leave_where_imported(said: str = "") -> None:
    """End this process where another has spawned it and it imports the script still; `said` goes to its stderr."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(said)
        sys.stderr.flush()
        os._exit(STARTED_BY_IMPORT)


def refuse_where_impossible() -> None:
    """Raises `InputError` without a fork server or for a program on stdin; ends a rank that imports its script."""
    leave_where_imported()  # the process that started this one tells, once
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise InputError(f"ranks are started by a fork server, which Python does not offer on {sys.platform}")
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main == "<stdin>":  # a rank would import it by this name
        raise InputError(
            "the program is read from standard input, and ranks cannot import it from there: save it as a file, with "
            'what it runs under `if __name__ == "__main__":`'
        )
