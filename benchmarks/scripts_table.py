"""Which training scripts equal one process under which plan: `make scripts-table`.

python benchmarks/scripts_table.py --write            # docs/tables/scripts.md
python benchmarks/scripts_table.py --only gan,unet3d --plans "tp=2;dp_replicate=2"

Cells that were found before are kept in --kept, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kit"))

import changed_scripts as scripts  # noqa: E402

from shardwise.errors import InputError  # noqa: E402
from shardwise.ranks import RankPool  # noqa: E402
from shardwise.scripts.proof.verify_script import verify_script  # noqa: E402

PLANS = ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2",
         "dp_replicate=4", "dp_shard=4,zero=1", "dp_shard=4,zero=2", "dp_shard=4,zero=3",
         "tp=2,dp_shard=2", "cp=2", "cp_ulysses=2", "domain=2", "domain=1x2"]  # fmt: skip
NO_DIM = "no dim of the batch can be cut"  # as a sequence, or as a field
TABLE = ROOT / "docs" / "tables" / "scripts.md"


def cell(name: str, plan: str, pool: RankPool, folder: Path) -> tuple[str, str]:
    """(what stands in the cell, the reason where it is refused)."""
    path = folder / f"{name}.py"
    path.write_text(scripts.changed(name, plan))
    try:
        parity = verify_script(path, steps=None, pool=pool, timeout_s=300)
    except InputError as error:
        return "FAILS", str(error).splitlines()[0]
    if parity.refused:
        why = parity.refused.splitlines()[0]
        return ("no such dim", "") if NO_DIM in why else ("refused", why)
    if parity.error:
        return "FAILS", parity.error
    return ("equal", "") if parity.parity else ("NOT EQUAL", parity.cause.text if parity.cause else "")


def as_page(found: dict[str, tuple[str, str]], names: list[str], plans: list[str]) -> str:
    """Markdown: the table, and the reasons below it."""
    numbers: dict[str, int] = {}
    lines = ["| script | " + " | ".join(f"`{plan}`" for plan in plans) + " |", "|---|" + "---|" * len(plans)]
    for name in names:
        cells = []
        for plan in plans:
            what, why = found.get(f"{name} {plan}", ("-", ""))
            number = numbers.setdefault(why, len(numbers) + 1) if why else 0
            cells.append(what if not why else f"{what} ({number})")
        lines.append(f"| {name.replace('_', ' ')} | " + " | ".join(cells) + " |")
    asked = [found[key][0] for key in (f"{name} {plan}" for name in names for plan in plans) if key in found]
    count = ", ".join(f"{asked.count(kind)} {kind}" for kind in dict.fromkeys(asked))
    return "\n".join([
        "# Training scripts under plans",
        "",
        "Made by `make scripts-table`. The scripts stand in `tests/tasks/scripts`, written as people write them; a few "
        "lines of each change, which `tests/kit/changed_scripts.py` names. Each cell is "
        "`shardwise verify SCRIPT.py --plan P --steps all`. *equal*: losses, gradients, weights, buffers and the "
        "optimizer's state of all steps are those of one process, in float64; *refused*: by the sentence below; "
        "*no such dim*: refused, since nothing that the model is given can be cut as a sequence (or as a field).",
        "",
        f"{len(asked)} cells: {count}.",
        "",
        *lines,
        "",
        *[f"{number}. {why}" for why, number in numbers.items()],
        "",
    ])  # fmt: skip


def main() -> None:
    """Find the cells that are asked for and not kept, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--plans", default="")
    parser.add_argument("--kept", default="", help="a JSON file of cells, read and written")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = args.only.split(",") if args.only else list(scripts.CHANGES)
    plans = args.plans.split(";") if args.plans else PLANS
    kept = Path(args.kept) if args.kept else None
    found = {k: tuple(v) for k, v in json.loads(kept.read_text()).items()} if kept and kept.exists() else {}
    started = time.monotonic()
    with RankPool(quiet=True) as pool, tempfile.TemporaryDirectory() as folder:
        for name in names:
            todo = [plan for plan in plans if f"{name} {plan}" not in found]
            if not todo or time.monotonic() - started > args.seconds:
                continue
            for plan in todo:
                found[f"{name} {plan}"] = what = cell(name, plan, pool, Path(folder))
                sys.stderr.write(f"{time.monotonic() - started:5.0f} s  {name} {plan}: {' '.join(what)[:300]}\n")
                if kept:
                    kept.write_text(json.dumps(found))
    page = as_page(found, names, plans)
    if args.write:
        TABLE.write_text(page)
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
