"""What is asked of the host: its memory, as Linux tells it of the host and of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.device import host_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


NEW = {
    "proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": "512000\n",
    "sys/fs/cgroup/job/memory.current": "400000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 300000\ninactive_file 60000\nactive_file 40000\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n", "sys/fs/cgroup/job/step/memory.current": "1000\n",
}  # fmt: skip
OLD = {
    "proc/self/cgroup": "4:memory:/job\n3:cpu:/other\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "512000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "300000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({}, (None, None)),
        ({"proc/meminfo": MEMINFO}, (1_024_000, 614_400)),
        ({"proc/meminfo": MEMINFO} | NEW, (512_000, 212_000)),  # of the group around this one, its cache left out
        ({"proc/meminfo": MEMINFO} | OLD, (512_000, 212_000)),
        # a job's files where its own path is not to be seen, as in a container
        (
            {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/memory.max": "2048\n"},
            (2048, 2048),
        ),
    ],
)
def test_the_host_has_what_its_control_groups_leave(texts: dict[str, str], expected: tuple, tmp_path: Path) -> None:
    assert host_memory(files(tmp_path, texts)) == expected
