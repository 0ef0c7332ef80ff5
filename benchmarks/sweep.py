"""Model types of transformers, classes of torch.nn, modules of other libraries under five plans: proven or refused.

python benchmarks/sweep.py                         # goes on where it stopped; cells in build/sweep.jsonl
python benchmarks/sweep.py --seconds 600 --kind nn # for so long, classes of torch.nn alone
python benchmarks/sweep.py --again wrong,crash,blame   # these outcomes again
python benchmarks/sweep.py --kind hf --sample 60 --seed 4  # so many of them, drawn by a seed, which is printed
python benchmarks/sweep.py --write                 # docs/tables/sweep.md of the cells that are there

    equal    loss, gradients, parameters and buffers of two steps are those of one process, in float64
    refused  before the first step, with the mechanism (or in it, where ranks are seen to take different branches)
    wrong    it ran, and differs
    crash    anything else that was raised on a rank, or nothing in time
    blame    the task was said to be wrong, though it had run in one process
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

import library_tasks  # noqa: E402
import sweep_tasks  # noqa: E402

from shardwise.errors import InputError, RunError  # noqa: E402
from shardwise.proof.parity import verify  # noqa: E402
from shardwise.ranks import RankPool  # noqa: E402

PLANS = ["dp_replicate=2", "dp_shard=2,zero=3", "tp=2", "pp=2", "tp=2,pp=2"]
OUTCOMES = ["equal", "refused", "unproven", "wrong", "crash", "blame"]
TABLE = ROOT / "docs" / "tables" / "sweep.md"
Cells = dict[tuple[str, str], dict[str, Any]]  # (module, plan) -> its line; plan "" holds the recipe


def cell(name: str, recipe: sweep_tasks.Recipe, plan: str, pool: RankPool, timeout_s: float = 300) -> tuple[str, str]:
    """(outcome, reason) of one module under one plan."""
    try:
        parity = verify(partial(sweep_tasks.made, name, recipe), plan, pool=pool, timeout_s=timeout_s)
    except InputError as error:
        return "blame", str(error)
    except Exception as error:
        shown = str(error).splitlines() or [""]
        last = shown[-1] if isinstance(error, RunError) else ""
        if "a branch differs between ranks" in shown[0]:
            return "refused", shown[0]
        return "crash", f"{type(error).__name__}: {shown[0]} {last}"
    if parity.refused:
        return "refused", parity.refused
    if parity.equal and parity.unproven:
        return "unproven", parity.unproven[0]
    return ("equal", "") if parity.parity else ("wrong", parity.text())


def modules(kind: str) -> list[str]:
    """Names of modules: classes of torch.nn, then, shuffled, transformers' image models, then its others."""
    names = [f"nn:{name}" for name in sweep_tasks.classes()] if kind in ("", "nn") else []
    names += [f"lib:{name}" for name in library_tasks.LIBRARIES] if kind in ("", "lib") else []
    if kind in ("", "hf"):
        types = sweep_tasks.model_types()
        random.Random(0).shuffle(types)  # so that what is done by any time is a fair sample
        pictures = [name for name in types if sweep_tasks.sees_pictures(name)]
        names += [f"hf:{name}" for name in (*pictures, *(name for name in types if name not in pictures))]
    return names


def read(path: Path) -> Cells:
    """The finished cells of a JSON-lines file; the last line of a cell counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["module"], row["plan"]): row for row in rows}


def missing(names: list[str], cells: Cells, again: list[str]) -> Iterator[tuple[str, str]]:
    """Cells that are not finished, and those whose outcome is among `again`."""
    for name in names:
        for plan in ("", *PLANS):
            row = cells.get((name, plan))
            if row is None or row["outcome"] in again:
                yield name, plan


def run(path: Path, names: list[str], seconds: float, again: list[str]) -> None:
    """Run what is missing, one line of the file each, until the time is over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells, until = read(path), time.monotonic() + seconds
    with RankPool(quiet=True) as pool, path.open("a", encoding="utf-8") as file:
        for name, plan in list(missing(names, cells, again)):
            if time.monotonic() > until:
                return
            start, recipe = time.monotonic(), cells.get((name, ""), {}).get("recipe")
            if plan == "":
                recipe, reason = sweep_tasks.found(name)
                outcome = "found" if recipe is not None else "none"
            elif recipe is None:
                continue
            else:
                outcome, reason = cell(name, tuple(recipe), plan, pool)
            row = {"module": name, "plan": plan, "outcome": outcome, "reason": reason[:600], "recipe": recipe,
                   "seconds": round(time.monotonic() - start, 1)}  # fmt: skip
            cells[name, plan] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(name, plan, outcome, reason[:160].replace("\n", " "), flush=True)


def mechanism(reason: str) -> str:
    """A reason without what is the module's own, so that equal ones can be counted."""
    short = reason.replace("\n", " ")[:220]
    return re.sub(r"\d[\d.e+-]*", "N", re.sub(r"'[^']*'", "'...'", short))


def as_page(cells: Cells) -> str:
    """Markdown: counts, mechanisms, and a row for each module."""
    names = list(dict.fromkeys(name for name, plan in cells if plan == "" and cells[name, plan]["recipe"] is not None))
    lines = [
        "# Modules that nobody chose", "",
        "Made by `python benchmarks/sweep.py --write` from the cells of the last sweep. Every model type of "
        "`transformers` that can be built from a shrunken configuration and called, and every class of `torch.nn` "
        "(between linear layers) that can be constructed and called by trying arguments, and small modules of other "
        "libraries (`tests/tasks/library_tasks.py`): two steps in float64 against one process. *unproven*: one process "
        "does not agree with itself when its weights move by one epsilon. *blame* counts messages that call the task "
        "wrong though it ran in one process.", "",
    ]  # fmt: skip
    for kind, title in (("nn:", "`torch.nn`"), ("hf:", "`transformers`"), ("lib:", "other libraries")):
        mine = [name for name in names if name.startswith(kind)]
        if not mine:
            continue
        none = [name for name, plan in cells if plan == "" and name.startswith(kind) and name not in mine]
        left = len(modules(kind.strip(":"))) - len(mine) - len(none)
        lines += [f"{title}: {len(mine)} modules; {len(none)} more that the last sweep came to could not be built or "
                  f"called by trying, and {left} others have no row.", "",
                  f"| plan | {' | '.join(OUTCOMES)} | share equal |",
                  "|---|" + "---:|" * (len(OUTCOMES) + 1)]  # fmt: skip
        for plan in PLANS:
            counts = Counter(cells[name, plan]["outcome"] for name in mine if (name, plan) in cells)
            share = counts["equal"] / max(1, sum(counts.values()))
            lines.append(f"| `{plan}` | " + " | ".join(str(counts[o]) for o in OUTCOMES) + f" | {share:.0%} |")
        lines.append("")
    reasons = Counter((row["outcome"], mechanism(row["reason"])) for (_, plan), row in cells.items()
                      if plan and row["outcome"] != "equal")  # fmt: skip
    lines += ["Why not equal, by mechanism:", "", "| cells | outcome | reason |", "|---:|---|---|"]
    lines += [
        f"| {count} | {outcome} | {reason.replace('|', '/')} |" for (outcome, reason), count in reasons.most_common()
    ]
    lines += [
        "",
        "| module | recipe | " + " | ".join(f"`{plan}`" for plan in PLANS) + " |",
        "|---|---|" + "---|" * len(PLANS),
    ]
    for name in sorted(names):
        found = [cells.get((name, plan), {}).get("outcome", "") for plan in PLANS]
        lines.append(f"| {name} | {'/'.join(map(str, cells[name, '']['recipe']))} | {' | '.join(found)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=Path, default=ROOT / "build" / "sweep.jsonl", help="finished cells")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--kind", default="", choices=["", "nn", "hf", "lib"])
    parser.add_argument("--sample", type=int, default=0, help="that many modules, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="names (nn:GELU,hf:llama), with commas between")
    parser.add_argument("--again", default="", help="outcomes to run again, with commas between")
    parser.add_argument("--write", action="store_true", help=f"write docs/tables/{TABLE.name}, and run nothing")
    options = parser.parse_args()
    if options.write:
        TABLE.write_text(as_page(read(options.cells)), encoding="utf-8")
        return
    names = options.only.split(",") if options.only else modules(options.kind)
    if options.sample:
        names = random.Random(options.seed).sample(sorted(names), min(options.sample, len(names)))
        print(f"{len(names)} modules drawn by seed {options.seed}: {','.join(names)}", flush=True)
    run(options.cells, names, options.seconds, options.again.split(",") if options.again else [])


if __name__ == "__main__":
    main()
