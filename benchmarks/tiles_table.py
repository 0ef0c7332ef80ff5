"""Which models of fields run on which grids of tiles, each cell proven in float64 after three steps.

python benchmarks/tiles_table.py                       # all cells, printed
python benchmarks/tiles_table.py --only fno,swin --plans "domain=2;domain=2x2" --write     # these, in the page
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "tasks"))

from cells import Found, cell, rows, share, written  # noqa: E402

from shardwise.ranks import RankPool  # noqa: E402

GRIDS = ["domain=2", "domain=1x3", "domain=2x2", "domain=3x2"]
BESIDE = ["domain=2,dp_replicate=2", "domain=2,dp_shard=2,zero=1", "domain=2,dp_shard=2,zero=2",
          "domain=1x2,dp_shard=2,zero=3", "domain=2,zero=3", "domain=2,accumulate=2", "domain=2,remat=full",
          "domain=2,precision=bf16", "domain=2,domain_depth=3", "domain=2,tp=2", "domain=2,pp=2"]  # fmt: skip
MODELS = {
    "unet_degree_batch": "U-Net, BatchNorm, 181 x 360", "unet_degree_group": "U-Net, GroupNorm, 181 x 360",
    "unet_quarter_group": "U-Net, GroupNorm, 721 x 1440", "unet_batch": "U-Net, BatchNorm, 23 x 37",
    "unet_group": "U-Net, GroupNorm, 23 x 37", "resnet": "ResNet with a stem of stride 2", "unet_3d": "3-D U-Net",
    "swin": "Swin, shifted windows", "vit": "ViT", "fno": "FNO", "convnext": "ConvNeXt (transformers)",
    "segformer": "SegFormer (transformers)", "warped": "pooled with indices, unpooled, grid_sample",
    "rollout": "a rollout of 4 steps", "interpolated": "other grids and a mesh, by tables",
    "axial": "attention along rows, then columns", "bounded": "conditions at the boundary, written in place",
    "frames": "steps of time, a state carried on", "patchwise": "overlapping patches, read by index",
    "plain_stack": "convolutions without norms", "columns": "levels of each cell read by learned queries",
    "scanned": "scans row by row and column by column", "spectra": "a loss of spectra by radius",
}  # fmt: skip
TABLE = ROOT / "docs" / "tables" / "tiles.md"


def as_page(found: Found) -> str:
    """Markdown: cells of models and grids, of models and plans, and the reasons."""
    lines, reasons = rows(found, list(MODELS), GRIDS + BESIDE)
    for name, said in MODELS.items():
        lines = [
            line.replace(f"| {name.replace('_', ' ')} |", f"| {name.replace('_', ' ')} | {said} |") for line in lines
        ]
    head = lines[0].replace("| module |", "| module | |"), "|---" + lines[1]
    return "\n".join([
        "# Models on tiles",
        "",
        "Made by `python benchmarks/tiles_table.py --write`, in several runs. *equal* is loss, every gradient, every "
        "updated parameter and buffer of three steps equal to one process in float64, on ranks whose weights have the "
        "same bits; *refused* is raised before the first step, for the reason below. The models stand in "
        "`tests/tasks/domain_tasks.py`, [what is done on tiles](../techniques/domain.md) on its page.",
        "",
        f"On grids of tiles: {share(found, list(MODELS), GRIDS)} cells equal. Beside other techniques: "
        f"{share(found, list(MODELS), BESIDE)}.",
        "",
        *head,
        *lines[2:],
        "",
        *(reasons and ["Reasons:", "", *reasons, ""]),
    ])  # fmt: skip


def _plain(table: str) -> str:
    """The page's table without its second column, as `written` reads it."""
    lines = [line.split("|") for line in table.splitlines()]
    return "\n".join("|".join(cells[:2] + cells[3:]) if len(cells) > 4 else "|".join(cells) for cells in lines)


def main() -> None:
    """Prove the cells asked for; `--write` puts them into the page, after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--plans", default=";".join(GRIDS + BESIDE))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--missing", action="store_true", help="only cells that the page has not")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after so long")
    args = parser.parse_args()
    found = written(_plain(TABLE.read_text())) if args.write and TABLE.exists() else {}
    found = {place: what for place, what in found.items() if what[0] != "not tried"}
    start, pool = time.monotonic(), RankPool(threads=1, quiet=True)
    for plan in args.plans.split(";"):
        for name in args.only.split(","):
            if (args.missing and (name, plan) in found) or time.monotonic() - start > args.seconds:
                continue
            found[name, plan] = cell(f"domain_tasks:{name}", plan, pool, steps=3)
            print(f"{name:20} {plan:28} {' '.join(found[name, plan])}", flush=True)
            if args.write:
                TABLE.write_text(as_page(found))
    pool.close()


if __name__ == "__main__":
    main()
