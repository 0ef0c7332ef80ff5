"""Rate at which a tier's file is read and written, against fio on the same file system, in turn.

    python benchmarks/disk_rate.py [GB] [ROUNDS]

Both read, then write, a file of that size past the page cache: requests of 4 MB, four in flight. Ours is the file of a
rank's state, sub-group by sub-group of 64 MB, as a step moves them but with nothing to compute between; fio has its
own queue of the kernel (libaio). Medians of all rounds, and the median of the rounds' ratios. TMPDIR names the folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from shardwise.measure.disk_rate import file_rates
from shardwise.tiers.disk import REQUEST_BYTES, THREADS
from shardwise.tiers.subgroups import SUBGROUP_BYTES


def of_fio(size: int, folder: str) -> dict[str, float]:
    """Returns bytes a second that fio writes and reads a file of the same size at."""
    path = Path(folder) / "shardwise-fio"
    rates = {}
    try:
        for name in ("write", "read"):
            asked = {
                "name": name, "rw": name, "filename": path, "size": size, "bs": REQUEST_BYTES, "iodepth": THREADS,
                "direct": 1, "ioengine": "libaio", "output-format": "json", "fallocate": "posix",
            }  # fmt: skip
            done = subprocess.run(
                ["fio", *(f"--{key}={value}" for key, value in asked.items())],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            rates[name] = float(json.loads(done.stdout)["jobs"][0][name]["bw_bytes"])
    finally:
        path.unlink(missing_ok=True)
    return rates


def main() -> None:
    size = int(float(sys.argv[1] if sys.argv[1:] else 1) * 2**30) // SUBGROUP_BYTES * SUBGROUP_BYTES
    rounds = int(sys.argv[2]) if sys.argv[2:] else 7
    folder = tempfile.gettempdir()
    pairs = []
    for turn in range(rounds):
        calls = [lambda: file_rates(size // SUBGROUP_BYTES, SUBGROUP_BYTES), lambda: of_fio(size, folder)]
        results = [call() for call in (calls if turn % 2 == 0 else calls[::-1])]
        pairs.append(tuple(results if turn % 2 == 0 else results[::-1]))
        rows = ", ".join(f"{name} {mine[name] / 1e9:.2f} and {its[name] / 1e9:.2f}" for mine, its in pairs[-1:]
                         for name in ("read", "write"))  # fmt: skip
        print(f"  round {turn + 1}: {rows} GB/s", flush=True)
    for name in ("read", "write"):
        mine, its = (median(pair[which][name] for pair in pairs) / 1e9 for which in (0, 1))
        ratio = median(pair[0][name] / pair[1][name] for pair in pairs)
        print(f"{name}: {mine:.2f} GB/s, fio {its:.2f}; ratio of a round {ratio:.2f} (bar 0.9)")


if __name__ == "__main__":
    main()
