"""The metrics file: a JSON object a line, written at once. A step's numbers: speed, training/loop; charts: report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.observe.sinks import Sink, numbers_of


class MetricsFile:
    """Writer of `metrics.jsonl`, which hands numbers to the sinks too."""

    def __init__(self, path: Path, sinks: Sequence[Sink] = ()) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._sinks = sinks

    def write(self, record: dict[str, Any]) -> None:
        """Write one line. A number that is not finite becomes null, for JSON has no name for it."""
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(int(record["step"]), numbers_of(record))

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def finite(value: Any) -> Any:
    """Returns the value with every number that is not finite replaced by None, in dicts and lists too."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
