"""Compact published measurements into the packaged catalogue: `python tools/compact_catalogue.py DIR`.

DIR holds gemm_measured.csv and nccl_measured.csv. What is written to src/shardwise/cluster/data, and how it was made
smaller:

gemm.csv         bf16 matrix products as `gpu,m,n,latencies`: the latencies in microseconds for the k of the header
                 line of that GPU, blank where not measured; same figures, to 4 digits
collectives.csv  half precision, one NVLink domain, the newest NCCL of each GPU, as `gpu,nccl,op,ranks,latencies`:
                 microseconds at the sizes of the header line; rows whose notes say uncertain are left out
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parents[1] / "src" / "shardwise" / "cluster" / "data"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, header: list[str], lines: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(header)
        out.writerows(lines)
    print(f"{path.name}: {len(lines)} rows, {path.stat().st_size} bytes", file=sys.stderr)


def gemm(folder: Path) -> None:
    table: dict[str, dict[tuple[int, int], dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows(folder / "gemm_measured.csv"):
        m, n, k = (int(row[name]) for name in "mnk")
        table[row["gpu"]][m, n][k] = f"{float(row['latency_ms']) * 1000:.4g}"
    lines = []
    for gpu, cells in sorted(table.items()):
        inner = sorted({k for by_k in cells.values() for k in by_k})
        lines.append([gpu, "m", "n", " ".join(map(str, inner))])
        lines += [
            [gpu, str(m), str(n), " ".join(by_k.get(k, "-") for k in inner)] for (m, n), by_k in sorted(cells.items())
        ]
    write(HERE / "gemm.csv", ["gpu", "m", "n", "microseconds"], lines)


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part)


def collectives(folder: Path) -> None:
    kept = [r for r in rows(folder / "nccl_measured.csv") if r["dtype"] == "half" and "uncertain" not in r["notes"]]
    newest: dict[str, str] = {}
    for row in kept:
        newest[row["gpu"]] = max(newest.get(row["gpu"], ""), row["nccl"], key=version)
    table: dict[tuple[str, str, str, int], dict[int, str]] = defaultdict(dict)
    for row in kept:
        if row["nccl"] == newest[row["gpu"]]:
            key = (row["gpu"], row["nccl"], row["op"].replace("alltoall", "all_to_all"), int(row["n_gpus"]))
            table[key][int(row["bytes"])] = f"{float(row['latency_us']):.4g}"
    sizes = sorted({size for by_size in table.values() for size in by_size})
    lines = [["", "", "", "", " ".join(map(str, sizes))]]
    lines += [
        [*map(str, key), " ".join(by_size.get(size, "-") for size in sizes)] for key, by_size in sorted(table.items())
    ]
    write(HERE / "collectives.csv", ["gpu", "nccl", "op", "ranks", "microseconds"], lines)


def main() -> None:
    folder = Path(sys.argv[1])
    HERE.mkdir(parents=True, exist_ok=True)
    for make in (gemm, collectives):
        make(folder)


if __name__ == "__main__":
    main()
