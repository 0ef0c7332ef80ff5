"""Reads values with their sources: TOML files with `extends`, `--set key=value`, options of a command.

Everything becomes a list of `Given` (dotted key, value, source), in which later entries override earlier ones.
Mistakes are added to a list of problems, one line each, so that all of them can be reported at once.
"""

from __future__ import annotations

import datetime
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.config.schema import PATHS, Config
from shardwise.errors import at_home, did_you_mean, no_keyboard

SECTIONS = (*Config.model_fields, "plan")
TABLES = (*SECTIONS, "task.model")


class Given(NamedTuple):
    """One value that was set: its dotted key, value, source (a file, an option) and folder."""

    key: str
    value: Any
    source: str
    folder: Path = Path()  # what a path in the value is relative to


def problem(source: str, key: str, value: Any, text: str) -> str:
    """Returns a line on a mistake, such as `base.toml: train.steps = "ten": expected a whole number`."""
    return f"{source}: {key} = {shorten(to_toml(value))}: {text}"


def to_toml(value: Any) -> str:
    """Returns a value as TOML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {to_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    import tomli_w

    try:
        return tomli_w.dumps({"x": value})[len("x = ") :].strip()
    except TypeError:
        return repr(value)


def shorten(text: str, width: int = 60) -> str:
    """Returns the text, shortened in its middle to at most `width` characters."""
    return text if len(text) <= width else text[: width - 20] + " ... " + text[-15:]


def from_file(path: Path, problems: list[str], seen: tuple[Path, ...] = ()) -> list[Given]:
    """Returns the values of a TOML file after those of the file it extends; mistakes go into `problems`.

    seen   files that extend this one, the outermost first, to find circles
    """
    data = _read(path, problems, seen)
    base = data.pop("extends", None)
    inherited: list[Given] = []
    if isinstance(base, str):
        inherited = from_file(path.parent / base, problems, (*seen, path))
    elif base is not None:
        problems.append(problem(str(path), "extends", base, "expected the path of another file, as text"))
    return inherited + from_table(data, str(path), path.parent)


def located(item: Given) -> Given:
    """Returns the value with `~` expanded and paths made absolute, relative to the folder of its source."""
    if isinstance(item.value, str):
        item = item._replace(value=at_home(item.value))
    elif isinstance(item.value, list):
        item = item._replace(value=[at_home(word) if isinstance(word, str) else word for word in item.value])
    if item.key == "task.name":  # a name, or "file.py:name", of which only the file is a path
        return _beside(item)
    if item.key not in PATHS:
        return item
    folder = item.folder.absolute()
    if isinstance(item.value, list):
        return item._replace(value=[str(folder / v) if isinstance(v, str) else v for v in item.value])
    return item._replace(value=str(folder / item.value)) if isinstance(item.value, str) else item


def _beside(item: Given) -> Given:
    """Returns a task's name with the absolute path of its .py file if that is beside the configuration; else as is."""
    if not isinstance(item.value, str) or item.folder == Path():
        return item
    file, colon, task = item.value.rpartition(":")
    beside = (item.folder / file).absolute()
    return item._replace(value=f"{beside}:{task}") if colon and file.endswith(".py") and beside.is_file() else item


def _read(path: Path, problems: list[str], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Returns a TOML file's tables; {} with a problem added if it cannot be read.

    seen   files that extend this one; if `path` is among them, that is a problem
    """
    extended_by = f" (which {seen[-1]} extends)" if seen else ""
    if os.path.realpath(path) in map(os.path.realpath, seen):
        chain = " -> ".join(str(p) for p in (*seen, path))
        problems.append(f"{seen[-1]}: extends goes in a circle: {chain}")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        problems.append(f"{path}{extended_by}: there is no such file{_nearby(path)}")
    except OSError as error:
        problems.append(f"{path}{extended_by}: cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        problems.append(f"{path}{extended_by}: is not UTF-8 text")
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path}{extended_by}: is not TOML: {error}{_other_than_toml(path)}")
    return {}


def _other_than_toml(path: Path) -> str:
    """Returns a remark on what a file that is no TOML looks like (YAML, JSON), to end a message; "" if unknown."""
    lines = [line.partition("#")[0].rstrip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    if any(re.fullmatch(r"[\w.-]+:(\s.*)?", line) for line in lines):
        return "; it looks like YAML: a section is [train], a key steps = 3 (shardwise config --starter)"
    if next(filter(None, lines), "").startswith("{"):
        return "; it looks like JSON: a section is [train], a key steps = 3 (shardwise config --starter)"
    return no_keyboard("".join(lines))


def _nearby(path: Path) -> str:
    try:
        return did_you_mean(path.name, sorted(p.name for p in path.parent.glob("*.toml")))
    except OSError:
        return ""


def from_table(table: Mapping[str, Any], source: str, folder: Path = Path()) -> list[Given]:
    """Returns the values of nested tables, one `Given` for each leaf; `source`, `folder`: of all of them."""
    return [Given(key, value, source, folder) for key, value in _leaves(table)]


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each leaf of a table; an empty table is a leaf, unless it is a section."""
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and (value or dotted in TABLES):
            yield from _leaves(value, dotted + ".")
        else:
            yield dotted, value


def from_overrides(overrides: Sequence[str], problems: list[str]) -> list[Given]:
    """Returns the values of "key=value" texts of `--set`; mistakes go into `problems`.

    A value is read as TOML, a bare word as text.
    """
    items: list[Given] = []
    for text in overrides:
        key, equals, value = (piece.strip() for piece in text.partition("="))
        if not key or not equals or not value:
            problems.append(f"--set {shorten(text)}: expected key=value, such as optimizer.lr=3e-4")
        # "a..b": a key with an empty part would give an obscure error of the schema
        elif not all(key.split(".")):
            problems.append(f"--set {shorten(text)}: {key!r} has an empty part between its dots")
        # it is unclear which of two --set of one key holds
        elif key in [item.key for item in items]:
            problems.append(f"--set {shorten(text)}: {key} is set twice")
        else:
            _append_override(items, problems, key, value)
    return items


def _append_override(items: list[Given], problems: list[str], key: str, text: str) -> None:
    """Adds the value of one `--set` to `items`, one entry for each key if it is a table; a mistake to `problems`."""
    try:
        value = _value(text)
    except ValueError as error:
        problems.append(f"--set {key}={shorten(text)}: {error}")
        return
    table = {key: value} if not isinstance(value, Mapping) else {f"{key}.{k}": v for k, v in value.items()}
    given = from_table(table, "--set")
    # keys of the table may have been set before
    if twice := {item.key for item in given} & {item.key for item in items}:
        problems.append(f"--set {key}={shorten(text)}: {', '.join(sorted(twice))} is set twice")
        return
    items.extend(given)


def _value(text: str) -> Any:
    """Returns the value of a text read as TOML; the text itself for a bare word or a date.

    Raises `ValueError` for a text that begins like a TOML value but is none.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if re.fullmatch(r"\[\s*[\w.-]+(\s*,\s*[\w.-]+)*\s*\]", text):  # a list of bare words, as shells leave one
            return [word.strip() for word in text[1:-1].split(",")]
        # it was meant as TOML; as a bare word, a missing quote would pass unnoticed
        if text[0] in "\"'[{":
            raise ValueError(f"is not a TOML value: {error}") from None
        return text
    value = parsed["value"]
    dates = datetime.date | datetime.time
    return text if len(parsed) != 1 or "\n" in text or isinstance(value, dates) else value
