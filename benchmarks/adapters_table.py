"""Which adapters equal one process on which model under which plan, each cell proven in float64 or refused.

python benchmarks/adapters_table.py --write                        # docs/tables/adapters.md, in about an hour
python benchmarks/adapters_table.py --only llama,bert --methods dora --plans "tp=2;pp=2,microbatches=2"
python benchmarks/adapters_table.py --missing --write --seconds 900      # cells that the page has not, for so long
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

from adapter_tasks import METHODS, NAMES, NOT_IN_PEFT, PLANS, adapted  # noqa: E402
from cells import Found, cell, rows, written  # noqa: E402

from shardwise.ranks import RankPool  # noqa: E402

TABLE = ROOT / "docs" / "tables" / "adapters.md"
SAID = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA", "ia3": "IA³", "prompt": "prefix or prompt tuning",
        "norms": "LayerNorm tuning"}  # fmt: skip


def row_of(name: str, method: str) -> str:
    return f"{name}_{method}"


def as_page(found: Found) -> str:
    """Markdown: how many cells of each method are equal, every cell, and the reasons."""
    import peft
    import transformers

    cells = [(name, method) for method in METHODS for name in NAMES if (name, method) not in NOT_IN_PEFT]
    lines, reasons = rows(found, [row_of(*one) for one in cells], PLANS)
    return "\n".join([
        "# Adapters under plans",
        "",
        f"Made by `python benchmarks/adapters_table.py --write`. Small configurations of `transformers` "
        f"({transformers.__version__}) under methods of peft ({peft.__version__}), dropout on: *equal* is loss, every "
        "gradient, every updated parameter and buffer of two steps equal to one process in float64; *refused* is "
        "raised before the first step, for the reason below. The tasks stand in `tests/tasks/adapter_tasks.py`.",
        "",
        "| method | equal | refused | wrong |",
        "|---|---:|---:|---:|",
        *(counted(found, method) for method in METHODS),
        "",
        *lines,
        "",
        *(reasons and ["Reasons:", "", *reasons, ""]),
    ])  # fmt: skip


def counted(found: Found, method: str) -> str:
    """Returns the row of a method: how many of its cells are what."""
    counts = Counter(what for (row, _), (what, _) in found.items() if row.endswith(f"_{method}"))
    wrong = sum(counts.values()) - counts["equal"] - counts["refused"]
    return f"| {SAID[method]} (`{method}`) | {counts['equal']} | {counts['refused']} | {wrong} |"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--plans", default=";".join(PLANS))
    parser.add_argument("--write", action="store_true", help=f"put each cell into {TABLE.name} of docs/tables")
    parser.add_argument("--missing", action="store_true", help="only cells that the page has not")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after so long")
    args = parser.parse_args()
    asked = [
        (name, method, plan)
        for plan in args.plans.split(";")
        for method in args.methods.split(",")
        for name in args.only.split(",")
        if (name, method) not in NOT_IN_PEFT
    ]
    if args.missing:
        asked = [cell for cell in asked if (row_of(*cell[:2]), cell[2]) not in tried()]
        random.Random(0).shuffle(asked)  # where time ends before the cells do, of every kind some
    start, pool = time.monotonic(), RankPool(threads=1, quiet=True)
    worst = 0
    for name, method, plan in asked:
        if time.monotonic() - start > args.seconds:
            break
        result = cell(partial(adapted, name, method), plan, pool)
        worst |= result[0] in ("WRONG", "FAILS")
        print(f"{name:10} {method:8} {plan:22} {' '.join(result)[:400]}", flush=True)
        if args.write:
            TABLE.write_text(as_page(tried() | {(row_of(name, method), plan): result}))
    pool.close()
    sys.exit(worst)


def tried() -> Found:
    """Returns the cells that the page has."""
    cells = written(TABLE.read_text()) if TABLE.exists() else {}
    return {place: result for place, result in cells.items() if result[0] != "not tried"}


if __name__ == "__main__":
    main()
