"""The cells of a table of published runs: text, whole numbers, real numbers; or why a row is not scored."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Beyond these a simulation takes minutes, and no run of the field is
MOST = {"n_gpus": 10**6, "layers": 2000, "pp": 1024, "global_batch": 10**6, "tp": 1024, "cp": 1024, "vpp": 256}


class Skip(Exception):
    """Why a row is not scored."""


class Row(dict[str, str]):
    """A row of which a missing column and an empty cell are the same; columns without a name are dropped."""

    def __init__(self, cells: Mapping[str | None, object]) -> None:
        super().__init__({k.strip().lower(): str(v or "").strip() for k, v in cells.items() if isinstance(k, str)})

    def __missing__(self, key: str) -> str:
        return ""


def number(row: Mapping[str, str], key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of a cell, or the default where it is empty."""
    text = row[key]
    if text in ("", "n/a"):
        if default is None:
            raise Skip(f"{key} is not published")
        return default
    found = re.fullmatch(r"(\d+)(\.0)?", text)
    if not found:
        raise Skip(f"{key} is not one number: {text!r}")
    if not least <= int(found[1]) <= MOST.get(key, 10**9):
        raise Skip(f"{key} is outside what is simulated ({least} to {MOST.get(key, 10**9)}): {text}")
    return int(found[1])


def real(row: Mapping[str, str], key: str) -> float:
    """A positive number of a cell that is not empty."""
    text = row[key]
    try:
        value = float(text)
    except ValueError:
        raise Skip(f"{key} is not one number: {text!r}") from None
    if not 0 < value < float("inf"):
        raise Skip(f"{key} is not a positive number: {text!r}")
    return value
