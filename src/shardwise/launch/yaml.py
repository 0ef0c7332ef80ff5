"""`to_yaml`: mappings, lists and plain values as YAML, strings quoted as in JSON, which YAML reads alike."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"(?!(?:on|off|yes|no|y|n|true|false|null)$)[A-Za-z_][\w./-]*", re.IGNORECASE)


def to_yaml(value: Any, indent: int = 0) -> str:
    """Returns YAML in block style; a string of several lines becomes a literal block."""
    return "\n".join(_lines(value, indent)) + "\n"


def _lines(value: Any, indent: int) -> list[str]:
    """Returns the lines of a mapping or list, in block style."""
    pad, lines = "  " * indent, []
    if isinstance(value, dict):
        for key, inner in value.items():
            # a plain key would be read as a number or a truth value by YAML's rules
            lines += _entry(f"{pad}{key if _PLAIN.fullmatch(key) else json.dumps(key)}:", inner, indent)
        return lines
    for inner in value:
        # a mapping in a list begins on the line of its dash
        if isinstance(inner, dict) and inner:
            first, *rest = _lines(inner, indent + 1)
            lines += [f"{pad}- {first.lstrip()}", *rest]
        else:
            lines += _entry(f"{pad}-", inner, indent)
    return lines


def _entry(head: str, value: Any, indent: int) -> list[str]:
    """Returns the lines of one value behind its key or dash (`head`)."""
    if isinstance(value, dict | list) and value:
        return [head, *_lines(value, indent + 1)]
    # as a literal block, so that the text is readable
    if isinstance(value, str) and "\n" in value:
        pad = "  " * (indent + 1)
        # how far its lines are indented, which a first line that is indented itself would hide, and whether it ends in
        # a line's end: one is taken for granted, none and several are said
        text = value.rstrip("\n")
        ends = len(value) - len(text)
        mark = f"{head} |{2 if text[:1].isspace() else ''}{'-' if not ends else '+' if ends > 1 else ''}"
        lines = [*text.split("\n"), *[""] * (ends - 1)]
        return [mark, *(f"{pad}{line}" if line else "" for line in lines)]
    return [f"{head} {json.dumps(value, ensure_ascii=False)}"]
