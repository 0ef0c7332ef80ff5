"""Every command on every page is one that this version reads; those that are quick are run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from test_docs import PAGES, ROOT, runnable

from shardwise.cli.main import call, main
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.techniques import TECHNIQUES

GENERATED = {"cli.md"}  # its commands are tested where they are written
BY_MISTAKE = ("dp_shrad", "PMI_SIZE", "WORLD_SIZE=8 mpirun")  # shown with the message that they are answered by
QUICK = (
    ["config"],
    ["show", "schedule"],
    ["show", "ranks"],
    ["show", "ring"],
    ["simulate"],
    ["compare"],
    ["completion"],
)
NEEDS = (".toml", ".py", ".json", "MODULE", "runs/", "tests/", "--measure", "RUN", "$")


def blocks(page: Path) -> Iterator[str]:
    """The text of a page's blocks of console and shell."""
    yield from re.findall(r"^```(?:console|sh|bash|text)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[tuple[list[str], str]]:
    """The words of each shardwise command on a page, without launchers, comments and what they are piped into; and the
    message that it is shown to be refused with."""
    for block in blocks(page):
        lines = block.replace("\\\n", " ").splitlines()
        for line, answer in zip(lines, [*lines[1:], ""], strict=True):
            line = line.removeprefix("$ ")
            place = re.match(r"(?:[A-Z_]+=\S+ )*(?:[^#|>]*\s)?shardwise (?=[a-z-])", line)
            started = re.match(r"(?:[A-Z_]+=\S+ )*(?:\$ )?(?:torchrun|srun|mpirun|mpiexec|eval|shardwise)\b", line)
            if place is None or started is None or any(word in line for word in BY_MISTAKE):
                continue
            words = shlex.split(re.split(r"\s[|>]\s|\s2>|\s&$|\)\"", line[place.end() :])[0], comments=True)
            yield words, answer if answer.startswith("shardwise: ") else ""


SHOWN = [(page, *found) for page in PAGES if page.name not in GENERATED for found in commands(page)]
ALL = [(page, words) for page, words, _ in SHOWN]
each = pytest.mark.parametrize(
    ("page", "words"), ALL, ids=[f"{page.name}: {' '.join(words)[:60]}" for page, words in ALL]
)


def test_there_are_many():
    assert len(ALL) > 60


@each
def test_a_command_on_a_page_is_one_that_is_read(page, words):
    command: click.Command = main
    if words[0].startswith("-"):
        return
    context = main.make_context("shardwise", [words[0]], resilient_parsing=True)
    rest = list(words)
    while isinstance(command, click.Group):
        assert rest and rest[0] in command.commands, f"{page.name}: shardwise {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    files = [param for param in command.params if param.callback is not None]
    for param in files:
        param.callback, param.kept = None, param.callback  # type: ignore[attr-defined]
    try:
        command.make_context("shardwise", rest, parent=context)
    except InputError as error:
        pytest.fail(f"{page.name}: {error}")
    finally:
        for param in files:
            param.callback = param.kept  # type: ignore[attr-defined]


def of_the_reader(words: list[str]) -> bool:
    """Whether a command needs what its reader has: files, or a module of tasks."""
    tasks = [word.partition(":")[0] for word in words if re.fullmatch(r"[\w.]+:\w+", word)]
    return any(need in word for need in NEEDS for word in words) or any(find_spec(module) is None for module in tasks)


def quick(words: list[str]) -> bool:
    return any(words[: len(start)] == start for start in QUICK) and not of_the_reader(words)


RUN = list(dict.fromkeys(shlex.join(words) for _, words in ALL if quick(words)))


@pytest.mark.parametrize("line", RUN)
def test_a_quick_command_on_a_page_runs(line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    assert call(words) in (0, 3), line  # 3: what does not fit, shown as such


def test_what_the_readme_shows_of_its_module_runs_from_proof_to_report(tmp_path, monkeypatch, pool, capfd):
    from shardwise.proof import parity

    page = ROOT / "README.md"
    ((name, code),) = runnable(page).items()
    ours = f"readme_{name}"  # ranks of the pool know the name of the page from another test
    (tmp_path / ours).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parity, "verify", partial(parity.verify, pool=pool))
    ran = []
    for words, _ in commands(page):
        if not of_the_reader(words):
            continue  # tested below
        if "runs/NAME" in words:
            words = [words[0], str(next(tmp_path.glob("runs/*")))]
        words = [
            "2" if before == "--steps" else word.replace(name, ours)
            for before, word in zip(["", *words], words, strict=False)
        ]
        assert call(words) == 0, capfd.readouterr().err
        ran.append(words[0])
    sys.modules.pop(Path(ours).stem, None)
    assert ran == ["verify", "plan", "train", "report"] and list(tmp_path.glob("runs/*/report.html"))


SLOW = {
    shlex.join(words): answer
    for _, words, answer in SHOWN
    if words[0] in ("verify", "plan") and not of_the_reader(words)
}


@pytest.mark.long
@pytest.mark.parametrize(("line", "answer"), SLOW.items(), ids=SLOW)
def test_a_slow_command_on_a_page_answers_as_shown(line, answer, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code = call(shlex.split(line))
    if answer:
        assert code in (1, 2, 3) and answer in capfd.readouterr().err
    else:
        assert code in (0, 3), line


def test_the_table_of_techniques_has_every_page_of_one_and_plans_that_are_plans():
    of_no_layout = {"batchnorm", "precision", "randomness", "weights", "optimizers", "deterministic"}
    beside = {"README", "table", *of_no_layout}
    pages = {path.stem for path in (ROOT / "docs" / "techniques").glob("*.md")} - beside
    assert pages == {row.page for row in TECHNIQUES}
    for row in TECHNIQUES:
        assert Plan.parse(row.plan).world_size == 8
