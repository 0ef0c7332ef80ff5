"""Plant every bug (or those whose names, places or tasks hold a word) and tell what caught it. `--write`: the table.

python tests/mutations/run.py [WORD ...] [--from=NUMBER] [--write]
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "tasks", "kit")]

from mutations.plant import Bug, BuggyPool  # noqa: E402
from mutations.published import PUBLISHED, link  # noqa: E402
from shardwise import verify  # noqa: E402
from shardwise.config import Given, load  # noqa: E402
from shardwise.errors import ShardwiseError  # noqa: E402
from shardwise.layout import Plan  # noqa: E402
from shardwise.proof.outcome import KINDS, Parity  # noqa: E402
from shardwise.proof.verify_run import verify_run  # noqa: E402
from shardwise.ranks import RankPool  # noqa: E402

FAILS, CHECK = "the run fails: ", "check:"
PROGRAM_BAR = 1e-8  # of float64, relative
TABLE = ROOT / "docs" / "tables" / "mutations.md"
COLUMNS = 6  # of the table, that a run fills


@dataclass
class Found:
    """What became of a bug. `caught`: by what, "" where nothing did; `error`: the largest, over its bar's kind."""

    bug: Bug
    caught: str
    error: float | None
    ran: int
    first: str = ""  # where the plan was told to differ first

    @property
    def fine(self) -> bool:
        """Whether it was caught, and ran at all."""
        return bool(self.caught) and self.ran > 0


def try_bug(bug: Bug, pool: Any) -> Found:
    """Plant it, and look whether the proof calls the plan equal."""
    buggy = BuggyPool(pool, bug)
    try:
        if bug.task.startswith(CHECK):
            return Found(bug, *_check_fails(bug, buggy), buggy.ran)
        if bug.task.endswith(".py"):
            return Found(bug, *_script_differs(bug, buggy), buggy.ran)
        if Plan.parse(bug.plan).compile:
            return Found(bug, *_program_differs(bug, buggy), buggy.ran)
        parity = _proof(bug, buggy)
    except ShardwiseError as error:
        first = str(error).splitlines()[0]
        slip = any(
            kind in first for kind in ("NameError", "AttributeError", "NotPlanted")
        )  # the bug's own text is wrong
        return Found(bug, "" if slip else FAILS + first, None, buggy.ran)
    return Found(bug, *_caught(parity), buggy.ran, parity.first.text() if parity.first is not None else "")


def _check_fails(bug: Bug, pool: BuggyPool) -> tuple[str, float | None]:
    """What of a run's files is not as it should be, and the largest relative difference."""
    import mutations.checks as checks

    runs = pool.run(getattr(checks, bug.task.removeprefix(CHECK)), Plan.parse(bug.plan).world_size, timeout_s=60)
    errors = [(error, kind) for run in runs for kind, error in run.items() if error > checks.BAR]
    return ", ".join(dict.fromkeys(kind for _, kind in errors)), max((error for error, _ in errors), default=None)


_ALONE: dict[str, dict[str, Any]] = {}  # scripts as they are, in one process


def _program_differs(bug: Bug, pool: BuggyPool) -> tuple[str, float | None]:
    """What of a compiled run, which a proof leaves out, differs from one process, and the largest difference."""
    import compiled_runs as programs

    module, _, name = bug.task.partition(":")
    make = getattr(importlib.import_module(module), name)
    wanted = programs.curve(make, "accumulate=1", "eager")[0]
    errors: dict[str, float] = {}
    for found, _, _ in pool.run(programs.curve, Plan.parse(bug.plan).world_size, make, bug.plan, "aot_eager",
                                timeout_s=300):  # fmt: skip
        pairs = [("loss", *map(torch.tensor, (found[0], wanted[0])))]
        for kind, mine, alone in zip(("gradient", "parameter"), found[2:], wanted[2:], strict=True):
            pairs += [(kind, mine[key], one) for key, one in alone.items()]
        for kind, a, b in pairs:
            errors[kind] = max(errors.get(kind, 0.0), float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)))
    exceeded = {kind: error for kind, error in errors.items() if error > PROGRAM_BAR}
    return ", ".join(exceeded), max(exceeded.values(), default=None)


def _script_differs(bug: Bug, pool: BuggyPool) -> tuple[str, float | None]:
    """What of a prepared script differs from the script alone on any rank, and the largest relative difference."""
    import changed_scripts as scripts

    name = Path(bug.task).stem
    if name not in _ALONE:
        (_ALONE[name],) = pool.pool.run(scripts.run_script, 1, str(scripts.SCRIPTS / f"{name}.py"))
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(scripts.changed(name, bug.plan))
        runs = pool.run(scripts.run_script, Plan.parse(bug.plan).world_size, str(path), timeout_s=60)
    errors = [(error, kind) for run in runs for kind, error in _apart(run, _ALONE[name]).items() if error > scripts.BAR]
    return ", ".join(dict.fromkeys(kind for _, kind in errors)), max((error for error, _ in errors), default=None)


def _apart(run: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """Relative differences of losses, weights, and what the script told at its end."""
    found = {"loss": max(abs(a - b) / abs(b) for a, b in zip(run["losses"], alone["losses"], strict=True))}
    for kind, of in (("parameter", "weights"), ("told at the end", "told")):
        pairs = [(run[of][key], one) for key, one in alone[of].items() if isinstance(one, torch.Tensor)]
        errors = [float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs if b.numel()]
        found[kind] = max(errors, default=0.0)
    return found


def _proof(bug: Bug, pool: Any) -> Parity:
    file, *changes = bug.task.split()  # of a configuration: some of its values otherwise, "train.seed=3"
    if file.endswith(".py"):
        import changed_scripts as scripts

        from shardwise.scripts.proof.verify_script import verify_script

        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            path = Path(folder) / file
            text = scripts.changed(path.stem, bug.plan)
            for change in changes:
                text = text.replace(*change.split("=", 1))
            path.write_text(text)
            return verify_script(path, plan=bug.plan, pool=pool, timeout_s=200)
    if not file.endswith(".toml"):
        return verify(bug.task, bug.plan, pool=pool, timeout_s=60, **bug.options)
    effective = load(ROOT / "tests" / file, changes, [Given("plan", bug.plan, "the bug")])
    return verify_run(effective, pool=pool, timeout_s=60, **bug.options)


def _caught(parity: Parity) -> tuple[str, float | None]:
    if parity.refused:
        return "refused before the first step", None
    if parity.parity:
        return "", None
    further = next((proof for proof in parity.further if not proof.parity), None)
    if further is not None and replace(parity, further=[]).parity:
        told, error = _caught(further)
        return f"in {further.precision}: {told}", error
    exceeded = [(parity.loss_error, "loss")] if (parity.loss_error or 0) > parity.bars["loss"] else []
    exceeded += [
        (error, kind) for kind in KINDS for name, error in parity.errors(kind).items() if error > parity.bar(kind, name)
    ]
    if not exceeded and (parity.norm_error or 0) > parity.bars["norm"]:
        exceeded = [(parity.norm_error, "norm")]
    if exceeded:
        kinds = dict.fromkeys(kind for _, kind in exceeded)
        return ", ".join(kinds), max(error for error, _ in exceeded)
    return "different: " + parity.differences[0] if parity.differences else "not proven", None


def main(args: list[str]) -> int:
    """Exit code 1 where a bug was not caught, or never ran."""
    from mutations.bugs import BUGS

    words = [arg for arg in args if not arg.startswith("--")]
    first = next((int(arg.partition("=")[2]) for arg in args if arg.startswith("--from=")), 1)
    chosen = [
        bug
        for bug in BUGS[first - 1 :]
        if not words or any(word in f"{bug.name} {bug.where} {bug.task}" for word in words)
    ]
    found = []
    with RankPool(quiet=True) as pool:
        for number, bug in enumerate(chosen, 1):
            start = time.monotonic()
            one = try_bug(bug, pool)
            found.append(one)
            told = f"{one.caught or 'NOT CAUGHT'}{'' if one.error is None else f' {one.error:.1e}'}"
            told += f" | {one.first}" if one.first else ""
            ran = "" if one.fine or not one.caught else " BUT NEVER RAN"
            print(f"{number}/{len(chosen)} {bug.room}: {bug.name} [{bug.plan}]: {told}{ran}"
                  f" ({time.monotonic() - start:.1f} s)", flush=True)  # fmt: skip
    bad = [one.bug.name for one in found if not one.fine]
    print(f"{len(found) - len(bad)} of {len(found)} caught" + (f"; not: {', '.join(bad)}" if bad else ""))
    if "--write" in args and not bad:
        TABLE.write_text(table(found, TABLE.read_text()))
    return 1 if bad else 0


def table(found: list[Found], before: str) -> str:
    """The page of the docs; of bugs that were not tried now, the rows that it had `before`."""
    from mutations.bugs import BUGS

    cells = [line.strip("| ").split(" | ") for line in before.splitlines() if line.startswith("| `")]
    rows = {row[1]: row[:COLUMNS] for row in cells}
    for one in found:
        error = "" if one.error is None else f"{one.error:.1e}"
        row = [f"`{one.bug.room}`", one.bug.name, f"`{one.bug.plan}`", one.caught, error, one.first]
        rows[one.bug.name] = [cell.replace("|", "/") for cell in row]
    rows = {name: [*row, *[""] * (COLUMNS - len(row)), link(name)] for name, row in rows.items()}
    kept = [f"| {' | '.join(rows[bug.name])} |" for bug in BUGS if bug.name in rows]
    others = sum(bug.name in PUBLISHED for bug in BUGS)
    lines = [
        "# Planted bugs",
        "",
        f"*Written by `make test-mutations`.* Each of these {len(kept)} bugs is one changed place in the package,",
        "planted in the ranks while `verify` runs, of a task or of a configuration, or a script under `prepare`, or a",
        "compiled run, which a proof leaves out, is compared with one process, or adapters' files with who reads them.",
        f"{others} are mistakes that others had: the last column links a public thread that describes the same one.",
        "",
        "| room | bug | plan | caught by | largest error | told to differ first | as others had it |",
        "|---|---|---|---|---|---|---|",
        *kept,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
