"""A bug as a change of source text in one function, planted while a proof runs, in the ranks alone or everywhere.

The function's code object is replaced in place, so that whoever holds the function meets the bug. The changed
statements count how often they ran: a bug that never ran was not tested.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import importlib
import inspect
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch.distributed as dist

HIT = "__planted_bug_ran__"


class NotPlanted(Exception):
    """The place of a bug is not as the bug says."""


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    name    what is wrong, in a few words
    where   "shardwise.engine.normalise:normalise", or "module:Class.method"
    old     text in the function's source, there once; `new` takes its place
    task    "module:name" of a task, and `plan`, under which it must be caught
    ranks   those that have the bug; None: all
    options of `verify`
    """

    name: str
    where: str
    old: str
    new: str
    task: str
    plan: str
    ranks: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def room(self) -> str:
        """Where it lies, for tables."""
        return self.where.partition(":")[0].removeprefix("shardwise.")


@contextmanager
def planted(bug: Bug) -> Iterator[Callable[[], int]]:
    """The bug in this process, inside; yields how often its statements ran so far."""
    function = _function(bug.where)
    before = function.__code__
    ran = [0]

    def count() -> None:
        ran[0] += 1

    function.__code__ = _changed(function, bug)
    function.__globals__[HIT] = count
    _forget(bug)
    try:
        yield lambda: ran[0]
    finally:
        function.__code__ = before
        del function.__globals__[HIT]
        _forget(bug)


def _forget(bug: Bug) -> None:
    """Forget what the bug's module has remembered, without it or with it."""
    for value in (_found(bug.where), *vars(importlib.import_module(bug.where.partition(":")[0])).values()):
        if isinstance(value, _lru_cache_wrapper):
            value.cache_clear()


def run_planted(bug: Bug, folder: str, function: Callable[..., Any], args: tuple) -> Any:
    """On a rank: the function's result with the bug planted; how often it ran is written into the folder."""
    if bug.ranks is not None and dist.get_rank() not in bug.ranks:
        return function(*args)
    with planted(bug) as ran:
        try:
            return function(*args)
        finally:
            (Path(folder) / str(dist.get_rank())).write_text(str(ran()))


class BuggyPool:
    """A pool whose ranks have a bug while they run."""

    def __init__(self, pool: Any, bug: Bug):
        self.pool, self.bug, self.ran = pool, bug, 0

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """`RankPool.run` with the bug planted."""
        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            try:
                return self.pool.run(run_planted, world_size, self.bug, folder, function, args, timeout_s=timeout_s)
            finally:
                self.ran += sum(int(told.read_text()) for told in Path(folder).iterdir())


def _found(where: str) -> Any:
    module_name, _, path = where.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        if isinstance(found, property):
            found = found.fget
        if isinstance(found, cached_property):
            found = found.func
    return found


def _function(where: str) -> FunctionType:
    found = inspect.unwrap(_found(where))
    if not isinstance(found, FunctionType):
        raise NotPlanted(f"{where} is not a function")
    return found


def _changed(function: FunctionType, bug: Bug) -> CodeType:
    """The function's code with the bug's text, each changed statement preceded by a count."""
    lines, _ = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    if source.count(bug.old) != 1:
        raise NotPlanted(f"{bug.name}: {bug.old!r} stands {source.count(bug.old)} times in {bug.where}")
    start = source.index(bug.old)
    first = source.count("\n", 0, start) + 1
    last = first + bug.new.count("\n")
    source = source.replace(bug.old, bug.new)
    tree = ast.parse(source)
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    _Marks(first, last).mark(definition)
    free = function.__code__.co_freevars
    if free:  # a function inside another that has these names
        arguments = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
        body = [definition, ast.Return(ast.Name(definition.name, ast.Load()))]
        tree.body = [ast.FunctionDef("made", arguments, body, [], None)]
    compiled = compile(
        ast.fix_missing_locations(tree), f"<{bug.name}>", "exec", __future__.annotations.compiler_flag, True
    )
    code = _code_in(compiled, "made") if free else compiled
    changed = _code_in(code, definition.name)
    if changed.co_freevars != free:
        raise NotPlanted(f"{bug.name}: the bug changes the names it closes over")
    if unknown := sorted(_names(changed) - {HIT} - function.__globals__.keys() - vars(builtins).keys()):
        raise NotPlanted(f"{bug.name}: nothing in {bug.where} has the name {unknown[0]}")
    return changed


def _names(code: CodeType) -> set[str]:
    """Names that a function looks up in its module."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    own = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return own.union(*map(_names, inner))


def _code_in(code: CodeType, name: str) -> CodeType:
    return next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)


class _Marks:
    """Puts a count before the innermost statements that lie on some lines."""

    def __init__(self, first: int, last: int):
        self.first, self.last, self.marked = first, last, 0

    def mark(self, definition: ast.FunctionDef) -> None:
        """Change the definition."""
        self._body(definition)
        if not self.marked:
            raise NotPlanted("the changed lines hold no statement")

    def _body(self, node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [each for one in statements for each in self._with_count(one)])
        for handler in getattr(node, "handlers", []):
            self._body(handler)

    def _with_count(self, statement: ast.stmt) -> list[ast.stmt]:
        before = self.marked
        self._body(statement)
        assert statement.end_lineno is not None
        if self.marked > before or statement.lineno > self.last or statement.end_lineno < self.first:
            return [statement]
        self.marked += 1
        return [ast.Expr(ast.Call(ast.Name(HIT, ast.Load()), [], [])), statement]
