"""`Figure`: a number with its source (measured, published, a formula, assumed, or given by the user)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InputError

KINDS = ("measured", "published", "formula", "assumed", "given")


@dataclass(frozen=True)
class Figure:
    """A number with its source; `kind` is one of KINDS, `source` names the file, data sheet or run."""

    value: float
    kind: str
    source: str

    def __float__(self) -> float:
        return float(self.value)

    @classmethod
    def read(cls, where: str, raw: Any, *, least: float = 0.0) -> Figure:
        """Returns the figure of a TOML value: a bare number (kind "given") or a table {value, kind, source}.

        where  beginning of messages. Raises `InputError` if it is not a finite number above `least`.
        """
        kind, source = "given", "the cluster file"
        if isinstance(raw, dict):
            unknown = sorted(raw.keys() - {"value", "kind", "source"})
            if unknown or "value" not in raw:
                raise InputError(f"{where}: a figure has value, kind and source, got {sorted(raw)}")
            kind, source, raw = raw.get("kind", kind), raw.get("source", source), raw["value"]
        if kind not in KINDS:
            raise InputError(f"{where}: kind is one of {', '.join(KINDS)}, got {kind!r}")
        # bool is a number in Python
        if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw):
            raise InputError(f"{where} must be a number, got {raw!r}")
        if raw <= least:
            raise InputError(f"{where} must be above {least:g}, got {raw!r}")
        return cls(float(raw), str(kind), str(source))

    def as_dict(self) -> dict[str, Any]:
        """Returns {"value", "kind", "source"}, for TOML and JSON."""
        return {"value": self.value, "kind": self.kind, "source": self.source}
