"""The tables that `shardwise show tp` and `show ranks` print."""

from __future__ import annotations

from typing import Any

MEANING = {
    "output": "by outputs",
    "kept": "kept in shares",
    "kept, read once": "kept in shares",
    "input": "by inputs",
    "rows": "by rows",
    "beside": "with its weight",
}


def cuts_table(ranks: int, rows: list[dict[str, Any]], totals: dict[str, Any]) -> str:
    """Returns a table of how tensor parallelism shards each parameter, and a summary, as text.

    rows, totals   as `engine.tensor_cuts.describe` returns them
    """
    width = max(len(row["parameter"]) for row in rows)
    lines = [f"{'parameter':<{width}}  {'shape':<16}  {'cut':<15}  {'dim':>3}  on each rank"]
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        if row["cut"] is None:
            # there may be no reason for a replicated parameter
            why = f" ({row['whole_because']})" if row["whole_because"] else ""
            lines.append(f"{row['parameter']:<{width}}  {shape:<16}  whole{why}")
            continue
        # uneven shards: list each rank's size
        sizes = f"{row['ranks'][0]} each" if len(set(row["ranks"])) == 1 else ", ".join(map(str, row["ranks"]))
        lines.append(f"{row['parameter']:<{width}}  {shape:<16}  {MEANING[row['cut']]:<15}  {row['dim']:>3}  {sizes}")
    share = totals["cut_elements"] / totals["elements"]
    lines.append("")
    lines.append(f"{share:.1%} of {totals['elements']:,} elements are cut over {ranks} ranks")
    for entry in totals["collectives"]:
        # bytes were counted for `samples` samples; per sample they can be scaled
        per_sample = entry["received_bytes"] / totals["samples"]
        lines.append(
            f"{entry['op']:<15} {entry['calls']:>4} calls  {per_sample:>14,.0f} bytes for each sample and micro-batch"
        )
    lines.append("forward and backward; bytes are what one rank receives")
    return "\n".join(lines)


def ranks_table(rows: list[dict[str, Any]], leaving: list[str], most: int = 64) -> str:
    """Returns a table of ranks, nodes, devices and coordinates as text.

    rows, leaving   as `layout.grid.placement` returns them: a dict for each rank; axes whose groups span several nodes
    most            at most so many ranks are listed
    """
    axes = [key for key in rows[0] if key not in ("rank", "node", "device")]
    # an axis of one rank has coordinate 0 everywhere and is left out; of a plan of one rank the last one stays
    used = [axis for axis in axes if any(row[axis] for row in rows)] or axes[-1:]
    columns = ["rank", "node", "device", *used]
    lines = ["  ".join(f"{name:>{max(6, len(name))}}" for name in columns)]
    for row in rows[:most]:
        lines.append("  ".join(f"{row[name]:>{max(6, len(name))}}" for name in columns))
    if len(rows) > most:
        lines.append(f"... and {len(rows) - most} more ranks (--json lists all)")
    lines += [f"note: {axis} leaves its node: its collectives cross the slower link" for axis in leaving]
    return "\n".join(lines)
