"""docs/modules.md: which unusual modules run under which plan, each cell proven in float64 or refused with its reason.

python benchmarks/unusual.py --write                        # every module of tests/tasks/unusual_tasks.py, some minutes
python benchmarks/unusual.py --only gru,capsules --write    # these rows alone, in the page as it is
python benchmarks/unusual.py --again --write                # the cells that are not equal, again
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

import unusual_tasks  # noqa: E402
from cells import Found, cell, rows, share, written  # noqa: E402

from shardwise.ranks import RankPool  # noqa: E402

PLANS = ["dp_replicate=2", "dp_shard=2,zero=3", "tp=2", "pp=2", "tp=2,pp=2", "cp=2", "domain=2"]
PAGE = ROOT / "docs" / "modules.md"
NO_SPACE = "–"
TABLE = "## Every module under every plan"


def cells_of(name: str) -> list[str]:
    """The plans that a module is run under: tiles where its samples have dims of space."""
    return [plan for plan in PLANS if plan != "domain=2" or name in unusual_tasks.SPACE]


def as_page(found: Found) -> str:
    """Markdown: what to know by kind of module, what each module is, the table, the reasons."""
    names = list(unusual_tasks.ALL)
    none = {(name, plan): (NO_SPACE, "") for name in names for plan in PLANS if plan not in cells_of(name)}
    lines, reasons = rows({**found, **none}, names, PLANS)
    described = [f"| {name.replace('_', ' ')} | {unusual_tasks.ALL[name].__doc__} |" for name in names]
    return "\n".join([
        "# Recurrent and other unusual modules", "",
        "Written by `python benchmarks/unusual.py --write` from proofs that it runs: two steps in float64 against one "
        f"process. {share(found, names, PLANS)} cells are equal to one process; the others are refused before the "
        "first step (or in it, where ranks are seen to take different branches) with the reason below the table. "
        f"{_wrong(found)}The modules are written as for one process, without a word on ranks: "
        "`tests/tasks/unusual_tasks.py`.", "",
        "## What to know, by kind of module", "",
        "| your module | what runs, and what to watch |",
        "|---|---|",
        *_kinds(), "",
        "## The modules", "",
        "| module | what is in it |", "|---|---|", *described, "",
        TABLE, "",
        f"{NO_SPACE}: the samples have no dims of space.", "",
        *lines, "",
        *(["Reasons:", "", *reasons, ""] if reasons else []),
    ])  # fmt: skip


def _kinds() -> list[str]:
    """Returns the rows of what to know, which are written in the page itself."""
    known = PAGE.read_text(encoding="utf-8").partition("|---|---|\n")[2]
    return known.partition("\n\n")[0].splitlines()


def _wrong(found: Found) -> str:
    """A sentence on cells where a plan runs and differs; nothing where there are none."""
    wrong = [f"{name.replace('_', ' ')} under `{plan}`" for (name, plan), (what, _) in found.items() if what == "WRONG"]
    told = "WRONG is a plan that runs and differs, which `verify` tells with exit code 1: "
    return f"{told}{', '.join(wrong)}. " if wrong else ""


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names of modules, with commas between")
    parser.add_argument("--again", action="store_true", help="the cells of the page that are not equal, or not there")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    options = parser.parse_args()
    before = written(PAGE.read_text(encoding="utf-8").split(TABLE)[1]) if PAGE.exists() else {}
    names = options.only.split(",") if options.only else list(unusual_tasks.ALL)
    wanted = [(name, plan) for name in names for plan in cells_of(name)]
    if options.again:
        wanted = [each for each in wanted if before.get(each, ("",))[0] != "equal"]
    kept = {each: what for each, what in before.items() if each[0] in unusual_tasks.ALL and what[0] != NO_SPACE}
    found: Found = kept if options.only or options.again else {}
    with RankPool(quiet=True) as pool:
        for place, (name, plan) in enumerate(wanted):
            found[name, plan] = cell(f"unusual_tasks:{name}", plan, pool)
            told = f"{place + 1}/{len(wanted)} {name} {plan}: {' '.join(found[name, plan])[:200]}"
            print(told, file=sys.stderr, flush=True)
            if options.write:  # as it comes, so that what is done by any time is kept
                PAGE.write_text(as_page(found), encoding="utf-8")
    if not options.write:
        print(as_page(found))
    sys.exit(any(what in ("WRONG", "FAILS") for what, _ in found.values()))


if __name__ == "__main__":
    main()
