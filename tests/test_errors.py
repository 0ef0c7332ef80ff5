"""Every exception that the package raises has a sentence: one that leaves it by mistake tells something."""

from __future__ import annotations

import ast
from pathlib import Path

import shardwise

SOURCES = sorted(Path(shardwise.__file__).parent.rglob("*.py"))
# what Python, a signal or a proof of ours means by the class alone, and catches by it
WORDLESS = {"StopIteration", "NotImplementedError", "KeyboardInterrupt", "Enough", "NoLine", "_Terminated"}


def _wordless(file: Path) -> list[str]:
    """Returns `file:line: class` of each exception that is raised there without a word."""
    caught = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
    bare = [node for node in caught if isinstance(node.exc, ast.Name) and node.exc.id.lstrip("_")[:1].isupper()]
    called = [node for node in caught if isinstance(node.exc, ast.Call) and not (node.exc.args or node.exc.keywords)]
    names = [(node, ast.unparse(node.exc).removesuffix("()")) for node in (*bare, *called) if node.exc is not None]
    return [f"{file.name}:{node.lineno}: {name}" for node, name in names if name not in WORDLESS and not name.islower()]


def test_every_exception_is_raised_with_words() -> None:
    assert [line for file in SOURCES for line in _wordless(file)] == []
