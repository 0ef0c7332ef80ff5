"""Which modules run under which plan, each cell proven in float64 or refused with its reason: `make coverage-table`.

python benchmarks/coverage.py --write            # docs/tables/coverage.md
python benchmarks/coverage.py --only llama,unet --plans "tp=2;pp=2"
python benchmarks/coverage.py --only llama,unet --plans "cp=2" --write      # these cells alone, in the page as it is
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

import architectures  # noqa: E402
from cells import Found, cell, rows, share, written  # noqa: E402

from shardwise.engine.tensor_cuts import describe  # noqa: E402
from shardwise.layout import Plan  # noqa: E402
from shardwise.ranks import RankPool  # noqa: E402

PLANS = ["tp=2", "tp=2,sp=true", "pp=2", "tp=2,pp=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2,zero=2", "cp=2", "domain=2",
         "domain=2,domain_depth=3"]  # fmt: skip
TABLE = ROOT / "docs" / "tables" / "coverage.md"


def as_page(found: Found, names: list[str], plans: list[str], seconds: float | None) -> str:
    """Markdown: the table, and the reasons below it."""
    lines, reasons = rows(found, names, plans)
    decoders = [f.__name__ for f in architectures.DECODERS if f.__name__ in names]
    others = [name for name in names if name not in decoders]
    asked = [plan for plan in plans if plan in ("tp=2", "pp=2", "tp=2,pp=2", "tp=2,dp_shard=2")]
    import transformers

    return "\n".join([
        "# Modules nobody prepared",
        "",
        "Made by `make coverage-table`. Small configurations of `transformers` architectures "
        f"({transformers.__version__}) and plain modules, under one plan each: *equal* is loss, every gradient, every "
        "updated parameter and buffer of two steps equal to one process in float64; *refused* is raised before the "
        "first step, for the reason below. The modules stand in `tests/tasks/architectures.py`.",
        "",
        f"Decoders under tp, pp, tp with pp, tp with dp_shard: {share(found, decoders, asked)} equal. All cells of the "
        f"others: {share(found, others, plans)}. {len(found)} cells"
        + (f" in {seconds / 60:.0f} minutes." if seconds is not None else "."),
        "",
        *lines,
        "",
        *(reasons and ["Reasons:", "", *reasons, ""]),
    ])  # fmt: skip


CUTS = "## How much `tp` cuts"


def cuts_section(names: list[str]) -> str:
    """Equal is cheap where nothing is cut: the share of each module's elements that `tp` cuts, and what it leaves."""
    lines = [
        CUTS,
        "",
        "| module | `tp=2` | `tp=4` | largest weight left whole by `tp=2`, and why |",
        "|---|---:|---:|---|",
    ]
    for name in names:
        task = getattr(architectures, name)()
        shares, left = [], ""
        for degree in (2, 4):
            rows, totals = describe(task, Plan(tp=degree))
            shares.append(f"{totals['cut_elements'] / totals['elements']:.0%}")
            whole = [row for row in rows if row["cut"] is None]
            if degree == 2 and whole:
                most = max(whole, key=lambda row: math.prod(row["shape"]))
                left = f"`{most['parameter']}`, {'x'.join(map(str, most['shape']))}: {most['whole_because']}"
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(shares)} | {left} |")
    return "\n".join([*lines, ""])


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names of modules, with commas between")
    parser.add_argument("--plans", default=";".join(PLANS))
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} in docs/tables")
    parser.add_argument("--cuts", action="store_true", help="the second table alone, in the place of the file's")
    options = parser.parse_args()
    every = [f.__name__ for f in (*architectures.DECODERS, *architectures.OTHERS)]
    names = [name for name in every if not options.only or name in options.only.split(",")]
    if options.cuts:
        section = cuts_section(names)
        print(section)
        if options.write:
            TABLE.write_text(TABLE.read_text().split(CUTS)[0] + section)
        return
    plans = options.plans.split(";")
    found: Found = {}
    start = time.monotonic()
    with RankPool() as pool:
        for place, (name, plan) in enumerate((n, p) for n in names for p in plans):
            found[name, plan] = cell(f"architectures:{name}", plan, pool)
            print(f"{place + 1}/{len(names) * len(plans)} {name} {plan}: {' '.join(found[name, plan])[:300]}",
                  file=sys.stderr, flush=True)  # fmt: skip
    seconds = time.monotonic() - start
    if options.write and (names != every or plans != PLANS):
        before = TABLE.read_text()
        TABLE.write_text(
            as_page(written(before.split(CUTS)[0]) | found, every, PLANS, None) + "\n" + CUTS + before.split(CUTS)[1]
        )
    else:
        page = as_page(found, names, plans, seconds) + "\n" + cuts_section(names)
        print(page)
        if options.write:
            TABLE.write_text(page)
    sys.exit(any(what in ("WRONG", "FAILS") for what, _ in found.values()))


if __name__ == "__main__":
    main()
