"""`to_yaml`: writes mappings, lists and plain values as YAML, with strings quoted as in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"(?!(?:on|off|yes|no|y|n|true|false|null)$)[A-Za-z_][\w./-]*", re.IGNORECASE)


def to_yaml(value: Any, indent: int = 0) -> str:
    """Returns a mapping or list as YAML in block style; a string of several lines becomes a literal block.

    indent   level of indentation, two spaces each
    """
    return "\n".join(_lines(value, indent)) + "\n"


def _lines(value: Any, indent: int) -> list[str]:
    """Returns the lines of a mapping or list, in block style at this level of indentation."""
    pad, lines = "  " * indent, []
    if isinstance(value, dict):
        for key, inner in value.items():
            # unquoted, some keys would be read as a number or a truth value
            lines += _entry(f"{pad}{key if _PLAIN.fullmatch(key) else json.dumps(key)}:", inner, indent)
        return lines
    for inner in value:
        # the first key of a mapping in a list is on the line of its dash
        if isinstance(inner, dict) and inner:
            first, *rest = _lines(inner, indent + 1)
            lines += [f"{pad}- {first.lstrip()}", *rest]
        else:
            lines += _entry(f"{pad}-", inner, indent)
    return lines


def _entry(head: str, value: Any, indent: int) -> list[str]:
    """Returns the lines of one value after its key or dash (`head`)."""
    if isinstance(value, dict | list) and value:
        return [head, *_lines(value, indent + 1)]
    # a literal block, so that the text is readable
    if isinstance(value, str) and "\n" in value:
        pad = "  " * (indent + 1)
        # indentation indicator 2 if the first line is itself indented; "-" if the text ends without a newline, "+" if
        # with several
        text = value.rstrip("\n")
        ends = len(value) - len(text)
        mark = f"{head} |{2 if text[:1].isspace() else ''}{'-' if not ends else '+' if ends > 1 else ''}"
        lines = [*text.split("\n"), *[""] * (ends - 1)]
        return [mark, *(f"{pad}{line}" if line else "" for line in lines)]
    return [f"{head} {json.dumps(value, ensure_ascii=False)}"]
