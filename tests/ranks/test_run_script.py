"""`shardwise run`: a script on local ranks equals what torchrun gives, and the cause of a failure is the last line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.main import call
from shardwise.errors import InputError
from shardwise.ranks.launchers import find
from shardwise.ranks.script import cause_of, of_script

SCRIPTS = Path(__file__).parents[1] / "tasks" / "scripts"
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shardwise

torch.distributed.init_process_group("gloo")  # as scripts for torchrun do
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(32, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8, num_workers=1)  # forked, without a main guard
seen = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
prepared = shardwise.prepare(model, optimizer, loader, plan="dp_replicate=2")
model, optimizer, loader = prepared
losses = []
for a, b in loader:
    loss = nn.functional.mse_loss(model(a), b)
    optimizer.zero_grad()
    prepared.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    if len(losses) == 2 and torch.distributed.get_rank() == 1:
        if "--fail" in sys.argv:
            raise ValueError("rank one has had enough")
        if "--exit" in sys.argv:
            sys.exit(3)
        if "--abort" in sys.argv:
            os.abort()
        if "--leave" in sys.argv:
            sys.exit(0)
    if "--nan" in sys.argv and len(losses) == 2:
        prepared.backward(nn.functional.mse_loss(model(a), b) * float("nan"))
        optimizer.step()
if "--alone" in sys.argv:
    if torch.distributed.get_rank() == 0:
        prepared.save_weights("alone.safetensors")
    sys.exit(0)
state = prepared.state_dict()
if torch.distributed.get_rank() == 0:
    total = sum(value.sum().item() for value in state.values())
    Path(sys.argv[1]).write_text(json.dumps({"losses": losses, "weights": total, "seen": seen}))
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_runs_on_local_ranks_that_its_environment_hides(folder):
    assert call(["run", "--nproc", "2", "script.py", "out.json"]) == 0
    found = json.loads((folder / "out.json").read_text())
    assert len(found["losses"]) == 4 and found["seen"] == {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None}


def test_lines_of_ranks_are_whole_in_a_pipe(tmp_path):
    script = tmp_path / "prints.py"
    script.write_text("import os\nfor number in range(300): print('x' * 99)\nprint('last'); os._exit(0)")
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a print is two writes then
    command = [sys.executable, "-m", "shardwise", "run", script]
    ran = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, env=unbuffered)
    lines = ran.stdout.decode().splitlines()
    assert set(lines) == {"x" * 99, "last"} and "last" in lines


def test_a_failing_rank_is_told_once_and_its_cause_last(folder, capfd):
    assert call(["run", "--nproc", "2", "--show-ranks", "script.py", "out.json", "--fail"]) == 1
    err = capfd.readouterr().err
    lines = err.strip().splitlines()
    told = r"shardwise: run: rank 1 of 2 failed: ValueError: rank one has had enough \[script.py, line \d+: raise.*\]"
    assert re.fullmatch(told, lines[-1])
    assert err.count("Traceback") == 1 and "worker.py" not in err and "runpy" not in err
    assert any("script.py" in line and "line" in line for line in lines)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("--exit", "shardwise: run: rank 1 of 2 failed: script.py ended itself: sys.exit(3)"),
        ("--abort", "shardwise: `script.py` failed on 2 ranks. rank 1: died of SIGABRT"),
        ("--leave", "starting again would come to the same place"),
    ],
)
def test_a_rank_that_ends_is_the_last_word(how, told, folder, capfd):
    assert call(["run", "--nproc", "2", "script.py", "out.json", how]) == 1
    err = capfd.readouterr().err
    assert err.strip().splitlines()[-1].startswith(told)
    assert "Traceback" not in err and "run_script" not in err[err.rindex("shardwise: ") :]
    assert how != "--abort" or re.search(r"rank 1 was here:\n.*Aborted\n\n.*\n.*script.py\", line \d+", err), err


def test_an_error_of_ours_that_names_the_line_is_told_without_frames(folder, capfd):
    (folder / "plain.py").write_text(SCRIPT.replace("prepared.backward(loss)", "loss.backward()"))
    assert call(["run", "--nproc", "2", "plain.py", "out.json"]) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err and "plain.py, line " in err.strip().splitlines()[-1]
    assert "call prepared.backward(loss), of what prepare returns" in err


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("--nan", "is not finite in step 3"),  # an error whose constructor takes more than a message
        ("--alone", "rank 0 comes to save_weights(...)"),  # which waits for a rank that has ended
    ],
)
def test_an_error_is_one_message_at_once(how, words, folder, capfd):
    text = (folder / "script.py").read_text().replace("dp_replicate=2", "dp_shard=2,zero=2")
    (folder / "script.py").write_text(text)
    assert call(["run", "--nproc", "2", "script.py", "out.json", how]) == 1
    err = capfd.readouterr().err
    last = err.strip().splitlines()[-1]
    assert re.match(rf"shardwise: run: rank \d of 2 failed: .*{re.escape(words)}", last) and "script.py, line" in last
    assert "Traceback" not in err and (how != "--alone" or "rank 1 has ended" in last)


def test_options_behind_the_script_are_the_script_s_own_and_told(folder, capfd):
    (folder / "short.py").write_text("import sys; print(sys.argv[1:])\n")
    assert call(["run", "--nproc", "1", "short.py", "--nproc", "4"]) == 0
    out, err = capfd.readouterr()
    assert "['--nproc', '4']" in out and "--nproc stands behind short.py" in err


def test_a_script_that_asks_for_no_plan_is_told_so(folder):
    """In a process of its own: ranks of the tests share one that has imported all of shardwise."""
    (folder / "plain.py").write_text("print('trained')\n")
    command = [sys.executable, "-m", "shardwise", "run", "--nproc", "2", "plain.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("trained") == 2  # whose lines may run together
    told = "plain.py ended without shardwise.prepare or parallelize: each of 2 ranks did all of its work"
    assert done.stderr.count(told) == 1


@pytest.mark.long
def test_a_script_gives_what_torchrun_gives(folder):
    assert call(["run", "--nproc", "2", "--show-ranks", "script.py", "run.json"]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py", "torchrun.json"]
    subprocess.run(command, check=True, cwd=folder, capture_output=True, timeout=120, env={**os.environ})
    ours, theirs = (json.loads((folder / name).read_text()) for name in ("run.json", "torchrun.json"))
    assert ours == theirs


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_scripts_of_the_table_run(path, folder):
    """As one rank, where every script is what `python` makes of it."""
    assert call(["run", "--nproc", "1", str(path)]) == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["run", "scrpt.py"], "; did you mean 'script.py'?"),
        (["run"], "Missing argument 'SCRIPT.py'"),
        (["run", "--nproc", "0", "script.py"], "'--nproc'"),
    ],
)
def test_a_mistake_is_one_message(args, told, folder, capfd):
    assert call(args) == 2
    assert told in capfd.readouterr().err.strip().splitlines()[-1]


def test_ranks_of_a_launcher_are_not_started_again(folder, monkeypatch, capfd):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert call(["run", "script.py"]) == 2
    assert "torchrun has started 2 ranks already: give it the script itself" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch"),
        ({"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}, "deepspeed"),
        ({}, "torchrun"),
    ],
)
def test_launchers_with_the_variables_of_torchrun_are_called_by_their_name(more, name):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
    place = find({**environ, **more})
    assert place is not None and place.named == name and place.launcher == "torchrun"


def test_one_process_of_accelerate_is_one_process():
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert find({**master, "ACCELERATE_MIXED_PRECISION": "no"}) is None
    with pytest.raises(InputError, match="but not RANK, WORLD_SIZE"):
        find(master)


TRACE = """Traceback (most recent call last):
  File "{ours}/ranks/worker.py", line 3, in work
    run()
  File "train.py", line 9, in <module>
    loss = model(x)
           ^^^^^^^^
  File "/lib/torch/nn/modules/module.py", line 1776, in _wrapped_call_impl
    return self._compiled_call_impl(*args, **kwargs)
  File "{ours}/scripts/entries.py", line 1, in call
    return module._call_impl(*args, **kwargs)
  File "/lib/torch/nn/modules/module.py", line 1790, in _call_impl
    return forward_call(*args, **kwargs)
  File "train.py", line 5, in forward
    return self.a(x)
  File "/lib/torch/_ops.py", line 875, in __call__
    return self._op(*args, **kwargs)
RuntimeError: mat1 and mat2
""".format(ours=Path(shardwise.__file__).parent)


def test_a_traceback_of_the_script_is_told_without_ours():
    shown = of_script(TRACE, "train.py")
    assert str(Path(shardwise.__file__).parent) not in shown and "line 1790" not in shown and "worker" not in shown
    assert shown.count("File") == 4 and "line 1776" in shown and "_ops.py" in shown and shown.endswith("mat1 and mat2")
    assert cause_of(TRACE, "train.py") == "RuntimeError: mat1 and mat2 [train.py, line 5: return self.a(x)]"
