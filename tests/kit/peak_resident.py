"""The most memory that a process had resident while something ran, beyond what it had before. Linux."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class PeakResident:
    """Context; `added` is in bytes, afterwards. Of this process from here on: what earlier tests took is no part."""

    added = 0

    def __enter__(self) -> PeakResident:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.added = _status("VmHWM") - self._before


def _status(key: str) -> int:
    """Returns a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
