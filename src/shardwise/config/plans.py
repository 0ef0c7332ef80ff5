"""Merges the `[plan]` section (a table or a text) from several sources, and checks it key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardwise.config.sources import Given, from_file, problem
from shardwise.errors import InputError, at_home
from shardwise.layout.plan import CHOICES, DEGREES, Plan, mapping_in, missing_comma, nearest_key, no_pair

KNOWN = tuple(field.name for field in fields(Plan))


def merge(items: Sequence[Given], problems: list[str]) -> tuple[Plan, dict[str, str]]:
    """Returns (plan, {"plan.KEY": source}) from values of the keys "plan" and "plan.KEY".

    A later value overrides an earlier one; "plan" (a text, a file) replaces all keys that came before. Wrong values are
    left out of the plan, and mistakes added to `problems`.
    """
    values: dict[str, Given] = {}
    for item in items:
        if item.key == "plan":
            values = {setting.key: setting for setting in _from_text(item, problems)}
        else:
            values[item.key] = item
    good = {}
    for item in values.values():
        complaint = _complaint(item.key.removeprefix("plan."), item.value)
        if complaint:
            problems.append(problem(item.source, item.key, item.value, complaint))
        else:
            good[item.key.removeprefix("plan.")] = item.value
    return Plan.from_dict(good), {key: item.source for key, item in values.items()}


def _from_text(item: Given, problems: list[str]) -> Iterator[Given]:
    """Yields a `Given` for each key of a plan's text (`dp_shard=2,zero=3`), file, mapping, or of a `Plan`."""
    text = mapping_in(item.value)
    if isinstance(text, Mapping):
        yield from (Given(f"plan.{key}", value, item.source) for key, value in text.items())
    elif isinstance(text, Plan):
        for key, value in text.as_dict().items():
            yield Given(f"plan.{key}", value, item.source)
    elif not isinstance(text, str):
        expected = "expected a table, or text such as dp_shard=2,zero=3"
        problems.append(problem(item.source, "plan", text, expected))
    # the path of a plan file is relative to the file that names it
    elif text.strip().endswith(".toml"):
        yield from _from_plan_file(item.folder / at_home(text.strip()), problems)
    # "single" is one process, with no key
    elif text.strip() not in ("", "single"):
        yield from _from_pairs(text, item.source, problems)


def _from_plan_file(path: Path, problems: list[str]) -> Iterator[Given]:
    """Yields a `Given` for each key of a plan file, or of the `[plan]` section of a configuration file."""
    found = from_file(path, problems)
    if any(item.key.startswith("plan.") for item in found):
        found = [item for item in found if item.key.startswith("plan.")]
    else:
        found = [item._replace(key=f"plan.{item.key}") for item in found]
    yield from found


def _from_pairs(text: str, source: str, problems: list[str]) -> Iterator[Given]:
    """Yields a `Given` for each "key=value" of a plan's text; mistakes go into `problems`."""
    missing = missing_comma(text)
    # "dp_shard=2 zero=3" would be read as one value
    if missing is not None:
        problems.append(problem(source, "plan", text, missing))
        return
    seen = set()
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            problems.append(problem(source, "plan", text, no_pair(part.strip(), text)))
        elif key in seen:
            problems.append(problem(source, "plan", text, f"{key} is given twice"))
        else:
            seen.add(key)
            yield Given(f"plan.{key}", _typed(key, value), source)


def _typed(key: str, text: str) -> Any:
    """Returns the value of a key in a plan's text; the text itself if it is wrong, which `_complaint` reports."""
    try:
        return getattr(Plan.parse(f"{key}={text}"), key)
    except InputError:
        return text


def _complaint(key: str, value: Any) -> str | None:
    """Returns what is wrong with a key of a plan or its value, as text; None if nothing is."""
    if key not in KNOWN:
        return f"unknown key{nearest_key(key, str(value))}"
    expected = _expected(key, value)
    if expected is None:
        try:
            Plan.from_dict({key: value})
        except InputError as error:
            return str(error).removeprefix("plan: ")
    return expected


def _expected(key: str, value: Any) -> str | None:
    """Returns a text on what the key expects; None if the value has the expected type."""
    # bool is an int in Python, but zero=true is wrong
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key in DEGREES and not (whole and value >= 1):
        return "expected a whole number of at least 1"
    if key == "zero" and not (whole and 0 <= value <= 3):
        return "expected 0, 1, 2 or 3"
    if key in ("sp", "compile") and not isinstance(value, bool):
        return "expected true or false"
    if key in CHOICES and not isinstance(value, str):
        return f"expected one of {', '.join(CHOICES[key])}"
    if key == "wrap" and not _texts(value):
        return "expected class names or module paths: a text with | between them, or a list of texts"
    return None


def _texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value))
