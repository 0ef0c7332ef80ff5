"""Writes the metrics file: one JSON object a line, flushed at once, steps from 1.

Filled by training/loop, shown by report.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import RunError
from shardwise.observe.sinks import Sink, numbers_of


class MetricsFile:
    """Writer of `metrics.jsonl`, which passes the numbers to `sinks` too."""

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self._path, self._file = path, path.open("a", encoding="utf-8")
        self._sinks = sinks

    def write(self, record: dict[str, Any]) -> None:
        """Writes one line; a number that is not finite becomes null, since JSON cannot hold it.

        record  {name: value} with "step"
        Raises `RunError` if the folder was moved or deleted, since nobody would find what the open file takes.
        """
        self._refuse_lost()
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(int(record["step"]), numbers_of(record))

    def _refuse_lost(self) -> None:
        """Raises `RunError` if the open file is no longer the one in the run's folder."""
        there = self._path.stat() if self._path.exists() else None
        ours = os.fstat(self._file.fileno())
        if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            folder = self._path.parent
            raise RunError(
                f"the run's folder {folder} was moved or deleted while the run went on, and what it writes would be "
                f"lost. Move it back, then go on from its last checkpoint: shardwise train --resume {folder}"
            )

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def finite(value: Any) -> Any:
    """Returns the value with each number that is not finite replaced by None, in dicts and lists too."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    # JSON has no NaN and no infinity
    return None if isinstance(value, float) and not math.isfinite(value) else value
