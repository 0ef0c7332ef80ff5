"""Ctrl-C and SIGTERM in each phase of each command: one message, its exit code, and no process left.

A terminal sends Ctrl-C to every process of the command, `kill` sends SIGTERM to one; so do these tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TASKS = """
import os, sys, time
from shardwise.models import tasks

def said(text):
    sys.stderr.write(text + "\\\\n")
    sys.stderr.flush()

def batch(step):
    said(f"batch {step} of {os.environ.get('RANK', 'one')}")
    time.sleep(float(os.environ.get("TAKES", 0)) if os.environ.get("RANK", "one") in os.environ["SLOW"] else 0)
    return tasks.mlp().batch(step)

def slow():
    return tasks.mlp().with_(batch=batch)
"""
ROWS = """
import torch
from shardwise.models import tasks

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, at):
        batch = tasks.mlp().batch(at)
        return tuple(tensor[0] for tensor in batch)

def rows():
    return tasks.mlp().with_(batch=None, data=Rows())
"""
SCRIPT = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"
VERIFY = ["verify", "slow.py:slow", "--plan", "dp_replicate=2"]
TRAIN = ["train", "slow.py:slow", "--steps", "100000"]
TWO = ["--plan", "dp_shard=2,zero=3"]
CLUSTER = ["--cluster", "1x2 h100-sxm-80gb"]
INTERRUPTED = "shardwise: interrupted, before there was an answer"
UNSAVED = "shardwise: interrupted; nothing was saved that is not in a checkpoint"


When = Callable[[str, Path, int], bool]  # of what it has written, its folder, its process


def says(*words: str) -> When:
    """Whether the command has written these words, in their order."""

    def found(text: str, folder: Path, leader: int) -> bool:
        at = 0
        for word in words:
            at = text.find(word, at) + 1
            if not at:
                return False
        return True

    return found


def steps(text: str, folder: Path, leader: int) -> bool:
    """Whether a run has taken three steps."""
    return any(path.read_text().count("\n") > 2 for path in folder.glob("runs/*/metrics.jsonl"))


def saved(text: str, folder: Path, leader: int) -> bool:
    """Whether a checkpoint is being written; a file is there earlier, to see whether ranks share disks."""
    return any(path.is_dir() for path in folder.glob("runs/*/checkpoints/*"))


def ranks_start(text: str, folder: Path, leader: int) -> bool:
    """Whether the process that forks ranks is there, which first imports what they share."""
    return any("multiprocessing.forkserver" in words for words in session(leader).values())


# what it is called; words; whose batches are slow; when the signal is sent; exit code and last line of Ctrl-C
PHASES = {
    "verify, one process": (VERIFY, "one", says("batch 0 of one"), 130, INTERRUPTED),
    "verify, ranks start": (VERIFY, "", ranks_start, 130, INTERRUPTED),
    "verify, on ranks": (VERIFY, "0", says("batch 0 of 0"), 130, INTERRUPTED),
    "train, first step": (TRAIN, "one", says("batch 0 of one"), 130, UNSAVED),
    "train on ranks, first step": ([*TRAIN, *TWO], "0", says("batch 0 of 0"), 130, UNSAVED),
    "train, steps": (TRAIN, "", steps, 75, "goes on"),
    "train on ranks, steps": ([*TRAIN, *TWO], "", steps, 75, "goes on"),
    "train on ranks, saving": ([*TRAIN, *TWO, "--checkpoint-every", "1"], "", saved, 75, "goes on"),
    "train without checkpoints": ([*TRAIN, *TWO, "--checkpoint-every", "0"], "", steps, 130, UNSAVED),
    "run": (["run", "script.py"], "", says("here"), 130, "shardwise: interrupted; its ranks are ended too"),
    "probe": (["probe", "--quick"], "", says("probe: products"), 130, INTERRUPTED),
    "plan": (["plan", "slow.py:slow", *CLUSTER], "one", says("batch 0 of one"), 130, INTERRUPTED),
    "simulate": (["simulate", "slow.py:slow", *CLUSTER, *TWO], "one", says("batch 0 of one"), 130, INTERRUPTED),
    "compare": (["compare", "slow.py:slow", *CLUSTER, "--plans", "dp_replicate=2", "--measure"], "0",
                says("batch 0 of 0"), 130, INTERRUPTED),
    "doctor": (["doctor"], "", says("doctor: looking at"), 130, INTERRUPTED),
}  # fmt: skip
QUICK = ("verify, ranks start", "train on ranks, first step", "run")


def session(leader: int) -> dict[int, str]:
    """Processes of a session that have not ended, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split() if entry.name.isdecimal() else []
            if fields and int(fields[3]) == leader and fields[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
    return found


def answered(
    words: list[str], slow: str, when: When, number: signal.Signals, folder: Path, takes: str, group: bool = False
) -> tuple[int, str]:
    """Exit code and what was written to stderr by a command that was sent a signal; what it left is ended."""
    (folder / "slow.py").write_text(TASKS)
    (folder / "script.py").write_text(SCRIPT)
    said = folder / "said.txt"
    environ = {**os.environ, "SLOW": slow or "nobody", "TAKES": takes}
    with said.open("wb") as file, subprocess.Popen(
        [sys.executable, "-m", "shardwise", *words], cwd=folder, stdout=file, stderr=file, env=environ,
        start_new_session=True, preexec_fn=_hear_ctrl_c,
    ) as process:  # fmt: skip
        try:
            until = time.monotonic() + 120
            while not when(said.read_text(errors="replace"), folder, process.pid):
                assert process.poll() is None and time.monotonic() < until, said.read_text()
                time.sleep(0.02)
            assert process.poll() is None, "it was over before the signal was sent"
            (os.killpg if group or number == signal.SIGINT else os.kill)(process.pid, number)
            code = process.wait(60)
            while (left := session(process.pid)) and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            left = session(process.pid)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert not left
    return code, said.read_text(errors="replace")


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc, which is Linux's")
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        pytest.param(phase, number, id=f"{phase}-{number.name}", marks=() if quick else pytest.mark.long)
        for phase in PHASES
        for number in (signal.SIGINT, signal.SIGTERM)
        for quick in [phase in QUICK and number == signal.SIGINT]
    ],
)
def test_a_signal_in_a_phase_of_a_command(phase: str, number: signal.Signals, tmp_path: Path) -> None:
    words, slow, when, code, last = PHASES[phase]
    takes = "60"
    if number == signal.SIGTERM and phase == "train on ranks, first step":  # it ends, for a scheduler's next start
        takes, code, last = "1", 75, "goes on"
    elif number == signal.SIGTERM and code == 130:
        code, last = 143, last.replace("interrupted", "ended by SIGTERM")
    got, err = answered(words, slow, when, number, tmp_path, takes)
    assert got == code, err
    assert "Traceback" not in err and err.count("shardwise: ") == 1, err
    assert err.strip().splitlines()[-1].endswith(last)


WHILE_IMPORTED = """
import os, signal, sys

class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "shardwise.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Sends())
sys.argv = ["shardwise", "--help"]
from shardwise.__main__ import main
main()
"""


WHILE_IMPORTING = """
import signal
from shardwise.cli import main
for number in (signal.SIGTERM, signal.SIGALRM):
    signal.signal(number, main.end)
try:
    import slow_to_come
except main.Ended:
    print("ended in the import")
try:
    while True:
        signal.pause()
except main.Ended:
    print("ended behind it")
"""


def test_sigterm_while_a_module_is_imported_is_answered_at_once_and_ends_behind_it(tmp_path: Path) -> None:
    (tmp_path / "slow_to_come.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('there')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IMPORTING], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "there\nended behind it\n"
    assert done.stderr == "\nSIGTERM: this ends as soon as what is being imported is there\n"


def test_a_signal_while_the_command_line_is_imported_waits_for_it():
    done = subprocess.run([sys.executable, "-c", WHILE_IMPORTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr == f"{INTERRUPTED}\n"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc, which is Linux's")
def test_sigterm_to_all_before_the_first_step_is_no_failure(tmp_path: Path) -> None:
    """As `timeout` and some schedulers send it: what starts the ranks ends too, and is not to blame."""
    code, err = answered(
        [*TRAIN, *TWO], "0", lambda said, folder, pid: len(session(pid)) > 1, signal.SIGTERM, tmp_path, "1", group=True
    )
    assert code in (143, 75), err
    assert "failed" not in err and "forked" not in err and "Traceback" not in err, err


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc, which is Linux's")
@pytest.mark.parametrize("task", [pytest.param("slow.py:slow", id="batches", marks=pytest.mark.long),
                                  pytest.param("rows.py:rows", id="workers")])  # fmt: skip
def test_sigterm_to_all_amid_the_steps_saves(task: str, tmp_path: Path) -> None:
    """As above: what forks the ranks, and what reads for them, is sent it too."""
    (tmp_path / "rows.py").write_text(ROWS)
    words = ["train", task, "--steps", "100000", *TWO, "--set", f"train.workers={1 if task == 'rows.py:rows' else 0}"]
    code, err = answered(words, "", steps, signal.SIGTERM, tmp_path, "1", group=True)
    assert code == 75, err
    assert "failed" not in err and err.strip().splitlines()[-1].endswith("goes on")
