"""The command line: exit codes, one line for each mistake, and exactly one JSON object with `--json`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.cli.answer import FIELDS
from shardwise.cli.main import call
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


BAD = [
    (["train", "--set", "train.stepz=3"], 2, "did you mean 'train.steps'?"),
    (["train", "--set", "optimizer.lr"], 2, "expected key=value"),
    (["train", "--set", "plan.dp_shrad=2"], 2, "did you mean 'dp_shard'?"),
    (["train", "--plan", "dp_shard=2,zero=x"], 2, "expected 0, 1, 2 or 3"),
    (["train", "--plan", "nowhere.toml"], 2, "there is no such file"),
    (["train", "--plan", "offload=optimizer"], 3, "offload to host memory is not built yet"),
    (["train", "--plan", "dp_shard=2", "--nproc", "3"], 2, "nproc is 3, but plan dp_shard=2,zero=3 needs 2"),
    (["train", "--nproc", "2"], 2, "nproc is 2, but plan single needs 1"),
    (["train", "--plan", "accumulate=5", "--set", "train.batch_samples=4"], 2, "cannot be split into accumulate=5"),
    (["train", "--plan", "dp_shard=3", "--set", "task.model.hidden=30"], 2, "a multiple of task.model.heads"),
    (["train", "nowhere.toml"], 2, "there is no such file"),
    (["train", "bad.toml"], 2, "is not TOML"),
    (["train", "tex"], 2, "did you mean 'text'?"),
    (["train", "--steps", "0"], 2, "--steps"),
    (["train", "--steps", "2", "--set", "train.steps=3"], 2, "is given by --steps too"),
    (["train", "--stepz", "2"], 2, "No such option"),
    (["train", "--steps", "2", "--set", "schedule.warmup_steps=2"], 2, "does not end within"),
    (["train", "mytask:task"], 2, "there is no module 'mytask'; did you mean 'mytasks'?"),
    (["train", "mytask.py:task"], 2, "there is no file mytask.py; did you mean 'mytasks.py'?"),
    (["train", "mytasks:break"], 2, "did you mean 'breaks'?"),
    (["train", "mytasks:NOT_A_TASK"], 2, "is of type int; expected a Task"),
    (["train", "mytasks:needs"], 2, "takes size"),
    (["train", "mytasks:breaks"], 2, "mytasks.py:10: ValueError: no data here"),
    (["train", "mytasks:gives_nothing"], 2, "returned NoneType"),
    (["train", "mytasks.py:bad_loss"], 2, "Task.loss must be callable"),
    (["train", "broken:task"], 2, "broken.py:1: SyntaxError"),
    (["train", "lacking:task"], 2, "lacking.py:1: ModuleNotFoundError"),
    (["train", "mytasks:lambdas", "--set", "train.batch_samples=3"], 2, "would have no effect on this task"),
    (["train", "mytasks:lambdas", "--set", "train.epochs=3"], 2, "it has no end"),
    (["train", "mytasks:lambdas", "--set", "train.eval_every=3"], 2, "has no `eval_data`"),
    (["verify", "text"], 2, "Missing option '--plan'"),
    (["verify", "text", "--plan", "dp_shrad=2"], 2, "did you mean 'dp_shard'?"),
    (["verify", "text", "--plan", "offload=optimizer"], 3, "offload to host memory is not built yet"),
    (["verify", "nowhere:task", "--plan", "dp_shard=2"], 2, "there is no module 'nowhere'"),
    (["verify", "text", "--plan", "dp_shard=2", "--bogus"], 2, "No such option"),
    (["config", "nowhere.toml"], 2, "there is no such file"),
    (["config", "--starter", "--set", "a=b"], 2, "--starter takes no file"),
    (["trian"], 2, "No such command"),
]


@pytest.mark.parametrize(("args", "code", "told"), BAD, ids=[" ".join(args) for args, _, _ in BAD])
def test_a_mistake_is_one_message_and_an_exit_code(args, code, told, folder, capfd):
    assert call(args) == code
    out, err = capfd.readouterr()
    assert told in err and "Traceback" not in err
    assert "shardwise: " in err and not out.replace("noise of the user's module\n", "")
    assert not list(folder.glob("runs/*"))


@pytest.mark.parametrize(("args", "code", "told"), BAD, ids=[" ".join(args) for args, _, _ in BAD])
def test_with_json_a_mistake_is_one_object(args, code, told, folder, capfd):
    assert call([*args, "--json"]) == code
    out, _ = capfd.readouterr()
    fields = json.loads(out)
    assert out.count("\n") == 1
    assert told in (fields["refused"] if code == 3 else fields["error"])
    assert (fields["error"] is None) == (code == 3)
    assert set(FIELDS.get(args[0], {})) <= set(fields)
    if args[0] == "verify":
        assert fields["parity"] is False


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
        def verify(task, plan, *, steps, seed, shrink, clip_norm):
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
    assert json.loads(capfd.readouterr().out)["error"] == "interrupted"
