"""A hundred mistakes: each is one message that ends in what to do, with its exit code and nothing left running.

The list is in `mistakes.py`. Mistakes that need processes of their own are further down.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from mistakes import FILES, IN_TASKS, IN_WORDS

from shardwise.cli.answer import FIELDS, _code_and_message
from shardwise.cli.main import call
from shardwise.errors import InputError
from shardwise.ranks.process import allow_files

MOST_LETTERS = 700  # of what was wrong and what to do
MOST_LINES = 4  # of a message: a usage line, a title, the message, where the details are
NAMES = {Path(name).stem for name in FILES if name.endswith(".py") and "/" not in name}


@pytest.fixture(scope="module", autouse=True)
def verify_in_the_pool(pool):
    """Proofs use the ranks that the tests share."""
    from shardwise.proof import parity

    before = parity.verify
    parity.verify = partial(before, pool=pool)
    yield
    parity.verify = before


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user's, with tasks in it, that commands run in."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in NAMES:
        sys.modules.pop(name, None)
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def descendants() -> set[int]:
    """Processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def last_line(err: str) -> str:
    """Of the message, without the word on where its details are."""
    lines = err.strip().splitlines()
    return lines[-2] if lines[-1].startswith("the details are in ") else lines[-1]


def check_message(err: str, told: str) -> None:
    """One message, a few lines long, whose last holds `told`."""
    start = err.index("shardwise: ")
    assert told in last_line(err), err
    assert "Traceback" not in err
    assert err.count("shardwise: ") == 1
    assert len(err[start:].strip().splitlines()) <= MOST_LINES
    assert len(last_line(err)) <= MOST_LETTERS


def by_words(rows):
    return pytest.mark.parametrize(("args", "code", "told"), rows, ids=[" ".join(args) for args, _, _ in rows])


@by_words(IN_WORDS + IN_TASKS)
def test_a_mistake_is_one_message_that_ends_in_what_to_do(args, code, told, folder, capfd, pool):
    pool.run(os.getpid, 1)  # its fork server is up
    before = descendants()
    assert call(args) == code
    out, err = capfd.readouterr()
    check_message(err, told)
    assert not out.replace("noise of the user's module", "").strip()  # lines of several processes may mix
    second_step = args[-2:] == ["--steps", "2"]
    assert code == 1 or second_step or not list(folder.glob("runs/*"))  # the folder of a run that began stays
    assert descendants() <= before | set(pool.pids)


@by_words([row for row in IN_WORDS if row[0] not in (["show"], ["checkpoint"])])  # groups have no options
def test_with_json_a_mistake_is_one_object(args, code, told, folder, capfd):
    assert call([*args, "--json"]) == code
    out, _ = capfd.readouterr()
    fields = json.loads(out)
    assert out.count("\n") == 1
    assert told in (fields["refused"] if code == 3 else fields["error"])
    assert (fields["error"] is None) == (code == 3)
    assert set(FIELDS.get(args[0], {})) <= set(fields)


def test_the_list_has_a_hundred_rows():
    rows = [tuple(args) for args, _, _ in IN_WORDS + IN_TASKS]
    assert len(set(rows)) == len(rows) >= 100


@pytest.mark.parametrize("rows", [IN_WORDS])
def test_mistakes_in_words_are_told_before_anything_heavy_is_imported(rows, folder):
    """A misspelt key costs what its words cost: torch is imported for tasks alone."""
    imports = ("mine:", "mone:", "nowhere:", "train.out=old_runs")  # a task, or the room that trains
    quick = [args for args, _, _ in rows if not any(word.startswith(imports) for word in args)]
    imported = (["mine"], ["mone.py:task"], ["nothing_alike.py:task"])
    quick = [args for args in quick if args[0] in ("train", "verify", "config", "show") and args[1:2] not in imported]
    quick = [args for args in quick if "--nproc" not in args]
    script = (
        "import json, sys\nfrom shardwise.cli.main import call\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    call(args)\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules, args\n"
    )
    done = subprocess.run([sys.executable, "-c", script, json.dumps(quick)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]


def test_a_batch_larger_than_the_data_is_told_once(folder, capfd):
    assert call(["train", "mine:few_rows", "--steps", "1"]) == 0
    _, err = capfd.readouterr()
    assert err.count("the data have 10 samples, fewer than a batch of 32: every step takes all 10") == 1
    assert "1 steps of 10 samples" in err


def test_a_task_beside_its_configuration_is_found_from_elsewhere(folder, monkeypatch, capfd):
    (folder / "apart").mkdir()
    (folder / "apart" / "run.toml").write_text('[task]\nname = "../mine.py:good"\n[train]\nsteps = 1\n')
    (folder / "else").mkdir()
    monkeypatch.chdir(folder / "else")
    assert call(["train", "../apart/run.toml"]) == 0


def test_units_too_coarse_or_too_fine_are_told_with_their_cost():
    from torch import nn

    from shardwise.trace.blocks import choose_blocks

    body = nn.Sequential(*[nn.Linear(40, 40) for _ in range(8)])
    model = nn.ModuleDict({"body": body, "head": nn.Linear(40, 2)})
    assert "'body' holds 99% of the model, which zero=3 gathers at once" in choose_blocks(model, ("body",)).warnings[0]
    body = nn.Sequential(*[nn.Linear(4, 4) for _ in range(80)])
    assert "160 small messages" in choose_blocks(nn.Sequential(body), ("Linear",)).warnings[0]
    assert not choose_blocks(nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)]), ("Linear",)).warnings


# --- mistakes that need processes of their own


def shell(command: list[str], folder: Path, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, **environ}
    )


SCRIPTS = {
    "a lambda given to launch": (
        "from shardwise.ranks import launch\ndef main(f): ...\nlaunch(main, 2, (lambda: 1,))\n",
        'a task with lambdas can be given by its name, "file.py:task"',
    ),
    "no main guard": (
        "from shardwise.ranks import launch\ndef main(): ...\nlaunch(main, 2)\n",
        'importing it starts ranks: put what it runs under `if __name__ == "__main__":`',
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_that_ranks_cannot_run_is_told_once(what, tmp_path):
    text, told = SCRIPTS[what]
    (tmp_path / "script.py").write_text(text)
    done = shell([sys.executable, "script.py"], tmp_path)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and told in lines[-1]
    assert done.stderr.count("Traceback") == 1 and len(lines) <= 12


def test_a_program_from_standard_input_is_told_before_ranks_start(tmp_path):
    text = "from shardwise import verify\nverify('shardwise.models.tasks:mlp', 'dp_replicate=2')\n"
    done = subprocess.run(
        [sys.executable, "-"], input=text, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert "read from standard input" in last and last.endswith('under `if __name__ == "__main__":`')


def test_a_terminated_command_says_so_and_leaves_nothing(folder):
    args = [sys.executable, "-m", "shardwise", "verify", "text", "--plan", "dp_shard=2"]
    with subprocess.Popen(args, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        while said and not said.startswith("verify: 2 steps"):  # it is loading PyTorch
            said = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert said.startswith("verify: 2 steps") and process.returncode == 143
    assert err.strip().splitlines()[-1] == "shardwise: ended by SIGTERM, before there was an answer"
    assert "Traceback" not in err


def test_a_full_disk_is_told_with_its_folder_and_space(folder, capfd, monkeypatch):
    def full(path: Path, *args, **kwargs):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert call(["train", "mine:good", "--steps", "1", "--set", "train.out=here"]) == 2
    check_message(capfd.readouterr().err, "here takes no files: No space left on device")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    from shardwise.training import loop

    monkeypatch.setattr(loop, "write_json", lambda path, value: full(path))
    assert call(["train", "mine:good", "--steps", "1"]) == 1
    err = capfd.readouterr().err
    assert "MiB free there). Make room, or give another folder with --set train.out=FOLDER" in last_line(err)


def test_closed_streams_and_a_folder_that_is_gone(tmp_path, monkeypatch, capfd):
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m shardwise config <&- >&- 2>&-"], timeout=60)
    assert done.returncode == 0
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert call(["config"]) == 2
    check_message(capfd.readouterr().err, "is gone: go to one that is there")


def test_streams_that_take_nothing_end_no_work(tmp_path):
    program = f"{sys.executable} -m shardwise config"
    full = shell(["bash", "-c", f"{program} > /dev/full"], tmp_path)
    assert full.returncode == 1
    told = "shardwise: done, but the answer cannot be written to stdout: No space left on device"
    assert full.stderr.strip().splitlines()[-1] == told and "Traceback" not in full.stderr
    assert shell(["bash", "-c", f"{program} 2> /dev/full"], tmp_path).returncode == 0


def test_what_a_command_wrote_it_writes_again(folder, capfd):
    for _ in range(2):
        assert call(["show", "schedule", "pp=2", "-o", "mine.svg"]) == 0
    (folder / "mine.svg").write_text("<svg></svg>")
    assert call(["show", "schedule", "pp=2", "-o", "mine.svg"]) == 2
    assert (folder / "mine.svg").read_text() == "<svg></svg>"


def test_a_mapping_is_a_plan_and_a_tilde_the_home_folder(monkeypatch, tmp_path):
    from shardwise.config import Given, load
    from shardwise.layout import Plan

    plan = Plan.parse("dp_shard=2,sp=false")
    assert all(
        Plan.parse(text) == plan for text in ({"dp_shard": 2}, "{'dp_shard': 2}", '{"dp_shard": 2, "sp": false}')
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load(None, ["train.out=~/runs"], [Given("plan", {"dp_shard": 2}, "the plan")])
    assert loaded.plan == plan and loaded.config.train.out == str(tmp_path / "runs")


def test_a_process_opens_as_many_files_as_it_may(monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] // 2, limits[1]))
    try:
        allow_files(2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    with pytest.raises(
        InputError, match=r"64 ranks take 352 .* may have 256: raise the limit \(ulimit -n 352\), or take"
    ):
        allow_files(64)
    _, message = _code_and_message(OSError(errno.EMFILE, "Too many open files"), "verify")
    assert "(ulimit -n), or take fewer ranks" in message


@pytest.mark.long
def test_a_file_that_hides_a_module_of_python_from_ranks_is_named(folder):
    (folder / "json.py").write_text("x = 1\n")
    program = str(Path(sys.executable).parent / "shardwise")
    done = shell([program, "verify", "mine:good", "--plan", "dp_replicate=2"], folder)
    told = f"{folder / 'json.py'} stands before a module of Python's own: give it another name"
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].endswith(told)


def test_torchrun_shows_the_first_cause_once_at_its_end(folder, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    assert call(["train", "--plan", "dp_shrad=2"]) == 2
    assert "shardwise: " not in capfd.readouterr().err
    assert "did you mean 'dp_shard'?" in json.loads((folder / "error.json").read_text())["message"]


@pytest.mark.long
def test_a_wrong_world_size_under_torchrun_is_told_by_torchrun_alone_and_last(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardwise"]
    done = shell([*command, "train", "mine:good", "--plan", "dp_replicate=4"], folder)
    told = "torchrun started 2 rank(s), but plan dp_replicate=4 needs 4"
    lines = done.stderr.strip().splitlines()
    said = [line.strip() for line in lines if told in line]
    assert done.returncode == 1 and any(told in line for line in lines[-3:])
    assert all(re.match(r"traceback\s+: shardwise: ", line) for line in said), "its table has a row for each rank"
