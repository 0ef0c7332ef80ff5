"""Reads text files: one text, or records (JSON lines, a JSON array, a table of parquet), plain or compressed by gzip.

    chat.jsonl  {"messages": ...}    records: an object a line
    chat.json   [{...}, {...}]       records: the array's objects
    chat.parquet                     records: its rows, without the columns that are null in a row
    prose.txt                        one text, "\\r\\n" read as "\\n"

The kind of a file is recognised by its first bytes (gzip, parquet, a JSON object in its first line), or its ending.

What this does not do: stream. A file is in memory while it is read.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.errors import InputError

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
Records = list[tuple[str, dict[str, Any]]]  # (place of a record, such as "FILE:3", for messages; the record)


def text_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Returns the files that paths, patterns ("texts/*.txt") and folders name; `InputError` if one names none."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        names = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else [str(path)]
        if not names:
            raise InputError(f"no file is named {path}")
        for name in map(Path, names):
            if not name.exists():
                raise InputError(f"{name}: there is no such file")
            found += _of_folder(name) if name.is_dir() else [name]
    return found


def _of_folder(folder: Path) -> list[Path]:
    """Returns a folder's files if all have the same ending; `InputError` if not, since some may not be examples."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    endings = Counter("".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix for path in files)
    if len(endings) == 1:
        return files
    inside = ", ".join(f"{count} {ending or 'without an ending'}" for ending, count in endings.items())
    folders = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())[:8])
    held = inside or (f"folders: {folders}" if folders else "nothing")
    raise InputError(f"{folder} is a folder that holds {held}: name the files to read, as '{folder}/*.jsonl'")


def contents(path: Path, wanted: str) -> str | Records:
    """Returns a file's text, or its records as a list of (place, record).

    wanted   describes a record, for messages

    Raises `InputError`, with the file and the line, for a file that is neither.
    """
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw.startswith(GZIP) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if raw.startswith(PARQUET):
        return [(f"{path}, row {number}", row) for number, row in enumerate(_rows(path, raw), 1)]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start} is not UTF-8 text: {error.reason}; write it as UTF-8, or unpack it"
        ) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if path.with_suffix("" if path.suffix == ".gz" else path.suffix).suffix in JSON_ENDINGS or _begins_with_one(text):
        return _array(path, text, wanted) if text.lstrip().startswith("[") else _lines(path, text, wanted)
    return text


def _begins_with_one(text: str) -> bool:
    """Whether the first line that is not empty is a JSON object, as in JSON lines under another ending."""
    first = text.lstrip().split("\n", 1)[0]
    if not first.startswith("{"):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _lines(path: Path, text: str, wanted: str) -> Records:
    numbered = ((f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return [(where, _object(where, _parsed(where, line, f"{wanted} on each line"), wanted)) for where, line in numbered]


def _array(path: Path, text: str, wanted: str) -> Records:
    values = _parsed(str(path), text, f"{wanted} in an array, or on each line")
    places = [(f"{path}, element {number}", value) for number, value in enumerate(values, 1)]
    return [(where, _object(where, value, wanted)) for where, value in places]


def _parsed(where: str, text: str, wanted: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}; {wanted}") from None


def _object(where: str, value: Any, wanted: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: a {type(value).__name__}; {wanted}")
    return value


def _rows(path: Path, raw: bytes) -> list[dict[str, Any]]:
    """Returns a parquet file's rows as dicts without null values, which stand for keys that a row lacks.

    Raises `InputError` if pyarrow is not installed or the file is damaged.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(f"reading {path} needs pyarrow ({error}): pip install pyarrow") from error
    try:
        return _without_nulls(parquet.read_table(io.BytesIO(raw)).to_pylist())
    except (OSError, ValueError) as error:  # pyarrow's own are these
        raise InputError(f"{path} cannot be read: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
