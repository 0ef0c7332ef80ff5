"""The documentation is current: generated pages, links, code, and the plans and tasks that its commands name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from shardwise import Plan, Task, verify
from shardwise.layout import check
from shardwise.ranks import RankPool

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFUSED_ON_PURPOSE = {"domain=2"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    """The text, its code blocks and code words left out."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def runnable(page: Path) -> dict[str, str]:
    """File name -> code of the blocks that the page tells the reader to save."""
    return dict(
        re.findall(r"<!-- runnable: (\S+) -->\n```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    )


def python_blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)):
            yield f"{page.relative_to(ROOT)}#{number}", code


def test_generated_pages_are_current() -> None:
    ran = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path) if path else page
        assert goal.exists(), f"{page.relative_to(ROOT)} links to {target}"
        assert not anchor or anchor in anchors(goal), f"{page.relative_to(ROOT)} links to {target}: no such heading"


def test_every_page_can_be_reached() -> None:
    linked = {ROOT / "README.md"}
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)", without_code(page.read_text()))
        linked |= {(page.parent / target).resolve() for target in targets if ":" not in target}
    tables = ROOT / "docs" / "tables"  # written by benchmarks, linked when there is something to say
    assert not [page.name for page in PAGES if page.parent != tables and page.resolve() not in linked]


@pytest.mark.parametrize(("where", "code"), [pytest.param(*block, id=block[0]) for block in python_blocks()])
def test_code_compiles(where: str, code: str) -> None:
    compile(code, where, "exec")


def test_the_page_on_own_modules_has_every_field_of_a_task() -> None:
    table = (ROOT / "docs" / "own-module.md").read_text()
    assert [field.name for field in fields(Task) if not re.search(rf"^\|.*`{field.name}`.*\|", table, re.M)] == []


@every_page
def test_plans_in_commands_are_plans(page: Path) -> None:
    for text in re.findall(r"--plan[ =]'?(\w+=[\w=,.*|-]+)", page.read_text()):
        plan = Plan.parse(text)
        if text not in REFUSED_ON_PURPOSE:
            check(plan)


@pytest.mark.parametrize(
    ("page", "task", "plan"),
    [
        ("README.md", "mynet:task", "dp_shard=2,zero=3"),
        ("docs/own-module.md", "mytask:task", "dp_shard=2,zero=3"),
        ("docs/tutorial.md", "smoothing:task", "dp_replicate=2"),
        ("docs/techniques/accumulation.md", "extras:task", "dp_shard=2,zero=2,accumulate=2"),
        ("docs/techniques/accumulation.md", "pairs:task", "dp_shard=2,zero=2"),
        ("docs/techniques/optimizers.md", "opts:adafactor", "dp_shard=2,zero=3"),
    ],
)
def test_the_examples_are_equal_to_one_process(
    page: str, task: str, plan: str, pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = runnable(ROOT / page)
    assert f"{task.partition(':')[0]}.py" in files
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        parity = verify(task, plan, steps=1, pool=pool)
    finally:
        for name in files:
            sys.modules.pop(Path(name).stem, None)
    assert parity.parity, parity.text()
