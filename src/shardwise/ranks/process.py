"""`RankProcess`, the caller's handle on one rank's process, and checks before ranks are started."""

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
LEAST_RANK_BYTES = 32 * 2**20  # private memory of a rank without a model: a process group and empty tensors
OWN_FILES, FILES_OF_A_RANK = 32, 5  # open files of the starting process: counted 9 of its own, and 5 for each rank
STARTED_BY_IMPORT = 96  # exit code of a rank whose import of the script started ranks
_WORKER_FILE = str(Path(serve.__code__.co_filename))


class RankProcess:
    """A handle on one rank process, which is started when an instance is made.

    name             name of the process
    output, errors   file descriptors for its stdout and stderr
    imports          module of the function that it will run; one of shardwise's is imported once for the first ranks

    Raises `InputError` as `refuse_where_impossible`, `RunError` if processes cannot be forked.
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
        """Whether the idle process is alive. It sends nothing unasked, so a readable channel means that it ended."""
        return not self.channel.poll() and self.process.exitcode is None

    def wait_ready(self, until: float) -> bool:
        """Waits until the process is ready; returns False if it died or `until` (monotonic clock) has passed."""
        return self._expect(READY, until)

    def wait_idle(self, until: float) -> bool:
        """Waits until the process has cleaned up after a job; returns False if it ended or `until` has passed."""
        return self._expect(IDLE, until)

    def _expect(self, word: bytes, until: float) -> bool:
        try:
            return self.channel.poll(max(0.0, until - time.monotonic())) and self.channel.recv_bytes() == word
        except (EOFError, OSError):
            return False

    def send_job(self, job: RankCall) -> None:
        self.say(pickle.dumps(job))

    def say(self, message: bytes) -> None:
        """Sends a message; does nothing if the rank has ended, which shows when its answer is awaited."""
        try:
            self.channel.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def read_report(self) -> Report | None:
        """Returns the next report in the channel (waits for it); None if the process ended without one."""
        try:
            return pickle.loads(self.channel.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """Returns the exit code, -N for signal N; None if the process is alive after `wait_s` seconds."""
        self.process.join(wait_s)
        return self.process.exitcode

    def dump(self) -> str:
        """Returns the text of all stacks that the process has written into its stack file so far."""
        size = os.fstat(self._stacks.fileno()).st_size
        return os.pread(self._stacks.fileno(), size, 0).decode(errors="replace")

    def stack(self) -> str:
        """Returns the stacks of `dump` in readable form, without frames and threads of shardwise's worker."""
        return readable(self.dump(), (_WORKER_FILE,), ("in _end_with_caller",), ("shardwise/comm/recording.py",))

    def crash(self) -> str:
        """Returns the stack of the process's crash (a segmentation fault, an abort); "" if it did not crash."""
        return readable(crash_in(self.dump()), (_WORKER_FILE,))

    def ask_to_stop(self) -> None:
        """Sends SIGUSR2, which asks the job to end by itself if it listens for that signal."""
        self._signal(signal.SIGUSR2)

    def end_at_once(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process, waits up to 10 s for its end, and closes the caller's files."""
        self._signal(signal.SIGKILL)
        self.process.join(10)
        self.dispose()

    def dispose(self) -> None:
        """Closes the channel and the stack file; an idle process ends when its channel is closed."""
        self.channel.close()
        self._stacks.close()

    def _signal(self, number: int) -> None:
        """Sends the signal `number` to the process, unless it has ended."""
        if self.process.exitcode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def _start_fork_server() -> None:
    """Starts Python's fork server, which forks ranks, with Ctrl-C and SIGTERM blocked; does nothing if it runs.

    `timeout` sends SIGTERM to the whole process group; a fork server that ended by it would take the exit codes of
    ranks with it. Signals are blocked before the start, and the mask is inherited, since the fork server ignores Ctrl-C
    only after its imports. The resource tracker is started first, since starting it unblocks the signals. It removes
    what ended ranks leave behind (semaphores of a loader's workers); its warning would follow the message of the cause.
    """
    sys.warnoptions.append(TIDIED)  # the tracker inherits this process's warning options
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
    """Raises `InputError` if this machine's memory is less than `ranks` times `LEAST_RANK_BYTES`.

    what, remedy   parts of the message: what is started, and what to do
    """
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks * LEAST_RANK_BYTES > here:
        raise InputError(
            f"{ranks} {what} are more than this machine holds: {here / 2**30:.0f} GiB of memory are enough for "
            f"{here // LEAST_RANK_BYTES} with nothing in them: {remedy}"
        )


def allow_files(ranks: int) -> None:
    """Sets the limit of open files of this process and its ranks to the hard limit, since each rank connects to all.

    Raises `InputError` if the hard limit is lower than what this process opens for so many ranks.
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
    """Returns a sentence that names the user's files that shadow modules of Python's library; "" if none does."""
    # the user's own folders: the installation's modules are what would be hidden
    folders = {Path(each or ".").resolve() for each in sys.path if not each.startswith((sys.prefix, sys.base_prefix))}
    files = [file for folder in sorted(folders) for file in sorted(folder.glob("*.py"))]
    hiding = [str(file) for file in files if file.stem in sys.stdlib_module_names]
    return f". {', '.join(hiding)} stands before a module of Python's own: give it another name" if hiding else ""


def leave_where_imported(said: str = "") -> None:
    """Ends this process if it is a spawned child that is still importing the script; `said` is written to stderr.

    Otherwise a script without `if __name__ == "__main__":` would start ranks within ranks.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(said)
        sys.stderr.flush()
        os._exit(STARTED_BY_IMPORT)


def refuse_where_impossible() -> None:
    """Raises `InputError` if there is no fork server or the program is read from stdin.

    Ends this process if it is a rank that is still importing the script.
    """
    leave_where_imported()  # the process that started this one reports it, once
    if "forkserver" not in multiprocessing.get_all_start_methods():
        raise InputError(f"ranks are started by a fork server, which Python does not offer on {sys.platform}")
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main == "<stdin>":  # a rank would import it by this name
        raise InputError(
            "the program is read from standard input, and ranks cannot import it from there: save it as a file, with "
            'what it runs under `if __name__ == "__main__":`'
        )
