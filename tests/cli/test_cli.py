"""The command line: exit codes, one line for each mistake, and exactly one JSON object with `--json`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from shardwise.cli.answer import Ended
from shardwise.cli.main import call, end, main
from shardwise.errors import RunError

MODULE = """
import shardwise

print("noise of the user's module")
NOT_A_TASK = 3

def needs(size): ...

def breaks():
    raise ValueError("no data here")

def gives_nothing(): ...

def bad_loss():
    return shardwise.Task(model=dict, loss=None, batch=lambda step: None)

def lambdas():
    import torch
    return shardwise.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda y, b: (y.sum(), len(y)),
        inputs=lambda b: ((b,), {}),
        batch=lambda step: torch.ones(4, 2),
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's, with tasks in it, that commands run in."""
    (tmp_path / "mytasks.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def task(:\n")
    (tmp_path / "lacking.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "bad.toml").write_text("[train\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("mytasks", "broken", "lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("mytasks", "broken", "lacking"):
        sys.modules.pop(name, None)


def test_json_in_a_process_of_its_own_is_alone_on_stdout(folder):
    args = [sys.executable, "-m", "shardwise", "verify", "mytasks:breaks", "--plan", "dp_shard=2", "--json"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert json.loads(done.stdout)["world_size"] == 2
    assert "noise" in done.stderr and "Traceback" not in done.stderr


def test_help_and_json_together_are_still_one_object(capfd):
    assert call(["verify", "--help", "--json"]) == 0
    out, err = capfd.readouterr()
    assert "nothing was run" in json.loads(out)["error"]
    assert "Usage" in err


@pytest.mark.parametrize("args", [[], ["--help"], ["train", "--help"], ["verify", "-h"], ["config", "--help"]])
def test_help(args, capfd):
    assert call(args) == 0
    assert "Usage: shardwise" in capfd.readouterr().out


def test_config_shows_values_and_sources(folder, capfd):
    assert call(["config", "--set", "optimizer.lr=3e-4"]) == 0
    assert "# --set" in capfd.readouterr().out
    assert call(["config", "--json", "--set", "optimizer.lr=3e-4"]) == 0
    fields = json.loads(capfd.readouterr().out)
    assert fields["config"]["optimizer"]["lr"] == 3e-4 and fields["sources"] == {"optimizer.lr": "--set"}


def test_the_starter_is_a_configuration(folder, capfd):
    assert call(["config", "--starter"]) == 0
    (folder / "mine.toml").write_text(capfd.readouterr().out)
    assert call(["config", "mine.toml"]) == 0


def test_help_needs_no_torch():
    script = "import sys; from shardwise.cli.main import call; call(['--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


# --- verify, with a stand-in for the proof


class Stub:
    """What `verify` returns, as far as the command looks."""

    refused = None

    def __init__(self, parity: bool) -> None:
        self.parity = parity

    def as_dict(self) -> dict:
        return {"parity": self.parity, "loss_error": float("nan"), "gradient_error": {"w": 0.5}}

    def text(self) -> str:
        return "the table"


@pytest.fixture
def proof(monkeypatch):
    """`proof(result or exception)` makes the command's `verify` return or raise it."""

    def stand_in(result):
        def verify(task, plan, *, steps, seed, shrink, clip_norm, device, say, thorough, pool=None, backend=None):
            assert task == ARGS[1]
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setitem(sys.modules, "shardwise.proof", SimpleNamespace(__path__=[]))
        monkeypatch.setitem(sys.modules, "shardwise.proof.parity", SimpleNamespace(verify=verify))

    return stand_in


ARGS = ["verify", "mytasks:lambdas", "--plan", "dp_shard=2"]


@pytest.mark.parametrize(("parity", "code"), [(True, 0), (False, 1)])
def test_verify_tells_parity(parity, code, folder, proof, capfd):
    proof(Stub(parity))
    assert call(ARGS) == code
    assert "the table" in capfd.readouterr().out
    assert call([*ARGS, "--json"]) == code
    fields = json.loads(capfd.readouterr().out)
    assert fields["parity"] is parity and fields["loss_error"] is None
    assert (fields["plan"], fields["world_size"], fields["buffer_error"]) == ("dp_shard=2,zero=3", 2, {})


def test_a_refusal_found_during_the_proof(folder, proof, capfd):
    stub = Stub(False)
    stub.refused = "its optimizer does not bear pieces"
    proof(stub)
    assert call([*ARGS, "--json"]) == 3
    fields = json.loads(capfd.readouterr().out)
    assert "bear pieces" in fields["refused"] and fields["error"] is None


def test_an_unexpected_exception_is_one_message_and_a_log(folder, proof, capfd):
    proof(ZeroDivisionError("a bug"))
    assert call(ARGS) == 1
    err = capfd.readouterr().err
    assert "ZeroDivisionError: a bug" in err and "Traceback" not in err
    log = err.split("the details are in ")[1].split()[0]
    assert "Traceback" in Path(log).read_text()
    assert call([*ARGS, "--traceback"]) == 1
    assert "Traceback" in capfd.readouterr().err


def test_a_failed_rank_is_one_line_without_its_traceback(folder, proof, capfd):
    error = RunError("`verify` failed on 2 ranks. rank 1: ValueError: x\nTraceback (most recent call last): ...")
    error.remote_traceback = (
        f'Traceback ...\n  File "mine.py", line 7\n  File "{sys.executable}/site-packages/x.py", line 1'
    )
    proof(error)
    assert call(ARGS) == 1
    err = capfd.readouterr().err
    assert "rank 1: ValueError: x (mine.py:7)" in err and "Traceback" not in err


def test_an_interrupted_command(folder, proof, capfd):
    proof(KeyboardInterrupt())
    assert call([*ARGS, "--json"]) == 130
    assert json.loads(capfd.readouterr().out)["error"] == "interrupted, before there was an answer"


def test_a_signal_that_an_import_turned_into_another_error_is_told_as_what_it_was(folder, proof, capfd, monkeypatch):
    monkeypatch.setattr(Ended, "arrived", None)
    with pytest.raises(Ended):
        end(15, None)
    proof(ImportError("cannot load module more than once per process"))
    assert call(ARGS) == 143
    assert capfd.readouterr().err.startswith("shardwise: ended by SIGTERM")


SWALLOWS = """
import os, signal, sys, time
from shardwise.cli import main as door

def swallows(*args, **options):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pass
    time.sleep(30)

door.main.main = swallows
sys.argv = ["shardwise", "verify"]
door.run()
"""


def test_a_signal_whose_exception_was_swallowed_is_raised_again():
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True, timeout=25)
    assert done.returncode == 143 and done.stderr == "shardwise: ended by SIGTERM, before there was an answer\n"


# --- help


def leaves(
    command: click.Command, path: tuple[str, ...] = ("shardwise",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that name it; groups are gone through."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(leaves(main))


def examples(path: tuple[str, ...]) -> list[list[str]]:
    """The words of the lines of a command's help that run it."""
    lines = [line.strip() for line in (COMMANDS[path].help or "").splitlines()]
    start = " ".join(path)
    return [shlex.split(re.split(r"  +| > | [|] ", line)[0])[1:] for line in lines if line.startswith(start)]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_of_each_command_shows_an_example_that_it_reads(path):
    found = examples(path)
    assert found
    for words in found:
        command: click.Command = main
        context = main.make_context("shardwise", [words[0]], resilient_parsing=True)
        while isinstance(command, click.Group):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("shardwise", list(words), parent=context)  # raises for words that it does not take


RUN = (("config",), ("simulate",), ("compare",), ("show", "schedule"), ("show", "ranks"), ("show", "ring"))
QUICK = [path for path in COMMANDS if path[1:] in RUN]


@pytest.mark.parametrize("path", QUICK, ids=" ".join)
def test_the_examples_that_are_quick_run(path, folder, capfd):
    for words in examples(path):
        assert call(words) == 0
        assert capfd.readouterr().out


def test_versions_and_the_device_are_told(capfd):
    assert call(["--version"]) == 0
    assert re.fullmatch(r"shardwise \S+\ntorch \S+, \d+ CPU cores, .+\n", capfd.readouterr().out)


def test_two_ranks_of_the_doctor_say_over_what_they_talk(pool):
    from shardwise.cli.doctor import talk

    rows = pool.run(talk, 2)
    assert [row["sum"] for row in rows] == [3.0, 3.0] and {row["backend"] for row in rows} == {"gloo"}


def test_doctor_looks_at_everything_and_keeps_secrets(monkeypatch, tmp_path):
    from shardwise.cli import doctor

    monkeypatch.setattr(doctor, "_two_ranks", lambda: iter([doctor.Check("two ranks", "", "no")]))
    monkeypatch.setattr(doctor, "_clock", lambda: 1 / 0)
    monkeypatch.setenv("NCCL_AUTH_TOKEN", "hidden")
    monkeypatch.setenv("MASTER_ADDR", "tcp://me:hidden@host")
    monkeypatch.setenv("AWS_SECRET", "hidden")
    said: list[str] = []
    checks = list(doctor.look(tmp_path / "not" / "yet", said.append))
    assert said[0] == "doctor: looking at versions" and said[-1] == "doctor: looking at two ranks"
    assert {"versions", "devices", "host", "open files", "disk", "names"} <= {check.what for check in checks}
    text = doctor.redacted("\n".join(check.found for check in checks))
    assert "hidden" not in text and "NCCL_AUTH_TOKEN=***" in text and "MASTER_ADDR=tcp://***@host" in text
    bad = {check.what: check.problem for check in checks if check.problem}
    assert bad["clock"] == "this could not be looked at" and bad["two ranks"] == "no"
