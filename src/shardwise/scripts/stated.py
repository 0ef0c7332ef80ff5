"""Tell where a number that an operation is given comes from: written in the script, a count of samples, or unknown.

    e[:4]       4 stands there: as many of a rank's samples as of all
    e[:K]       likewise where the file says K = 4, and nothing else of K
    e[:len(x)]  counts samples; so does n where the file says n = len(x) or b, c = x.shape, or n = min(len(x), 6)
    e[:k]       an argument, an attribute: unknown

Read from the text of the expression under way. Where there is no text, every number is unknown.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from shardwise.scripts.amounts import Amount, amounts_in, counted, is_shape, of_numbers
from shardwise.scripts.saying import frame_of_script


@dataclass(frozen=True)
class Stated:
    """The numbers that stand in an expression, without their signs; whether it counts rows of tensors; whether it has
    names of unknown making; of what it counts the rows; how many those are now, where known; by what they come to
    now, the numbers that would be others with more samples; and the arguments themselves."""

    written: frozenset[float] = frozenset()
    counts: bool = False
    unknown: bool = True
    counted: tuple[ast.AST, ...] = ()
    lengths: frozenset[int] = frozenset()
    amounts: Mapping[float, Amount] = field(default_factory=dict)
    parts: tuple[ast.AST, ...] = ()

    def of(self, number: float) -> str:
        """Returns where a number comes from: "counts", "written", or "" for unknown."""
        if abs(float(number)) in self.written:
            return "" if self.counts else "written"
        return "counts" if self.counts else ""

    def may_be_of(self, samples: int) -> bool:
        """Returns whether it counts rows of what has as many as there are samples, or some for each; len(data) not."""
        near = range(samples, _MOST_VIEWS * samples + 1, max(1, samples))
        return self.counts and (not self.lengths or any(one in near for one in self.lengths))


_MOST_VIEWS = 8  # rows for each sample
NOTHING = Stated()
_FILES = ("all_samples", "complexes", "cut_weights", "draws", "guard", "kept", "saying", "stated", "tape")
_PASSAGES = tuple(str(Path(__file__).with_name(f"{name}.py")) for name in _FILES)  # which call what a script calls


def stated() -> Stated | None:
    """Returns what the script's expression that calls the operation under way says of the numbers it is given; None
    where the engine calls it."""
    frame = frame_of_script(*_PASSAGES)
    if frame is None:
        return None
    found = _stated(frame.f_code, frame.f_lasti)
    held = [_value(one, frame) for one in found.counted]
    if not held or any(one is None for one in held):
        return found
    rows = frozenset(len(one) for one in held if isinstance(one, torch.Tensor) and one.dim())
    names = _names(frame.f_code.co_filename, frame.f_code.co_firstlineno)
    amounts = amounts_in(found.parts, names, lambda node: _value(node, frame))
    return replace(found, counts=bool(rows), unknown=found.unknown or not rows, lengths=rows, amounts=amounts)


def _value(node: ast.AST, frame: Any) -> Any:
    """Returns the value of a name, or of an attribute of one, in a frame; None where it is not found."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), "__dict__", {}).get(node.attr)
    return None


def asks() -> bool:
    """Returns whether the script itself, and not the engine for it, calls the operation under way."""
    return frame_of_script(*_PASSAGES) is not None


@lru_cache(maxsize=4096)
def _stated(code: CodeType, at: int) -> Stated:
    node = _expression(code, at)
    parts = _arguments(node) if node is not None else None
    if parts is None:
        return NOTHING
    names = _names(code.co_filename, code.co_firstlineno)
    written, unknown, counted = set[float](), False, list[ast.AST]()
    for part in parts:
        _counts(part, names, counted)
        for one in ast.walk(part):
            values: list[ast.AST | None] = names.get(one.id, [None]) if isinstance(one, ast.Name) else [one]
            known = [number for value in values if (number := _written(value)) is not None]
            written |= set(known)
            unknown |= isinstance(one, ast.Attribute | ast.Call)
            unknown |= isinstance(one, ast.Name) and not all(map(_is_constant, values))
    return Stated(frozenset(written), bool(counted), unknown, tuple(counted), parts=tuple(parts))


def _expression(code: CodeType, at: int) -> ast.AST | None:
    """The expression that an instruction is of, parsed from the text."""
    line, end, column, last = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    if line is None or end is None or column is None or last is None:
        return None
    lines = [text.encode() for text in linecache.getlines(code.co_filename)[line - 1 : end]]
    if not lines:
        return None
    lines[-1] = lines[-1][:last]
    lines[0] = lines[0][column:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b"\n)", mode="eval").body
    except SyntaxError:
        pass
    try:
        return ast.parse(b"".join(lines)).body[0]  # loss /= n
    except (SyntaxError, IndexError):
        return None


def _arguments(node: ast.AST) -> list[ast.AST] | None:
    """What the operation itself is given, not what that was made by."""
    if isinstance(node, ast.Call):
        return [*node.args, *(one.value for one in node.keywords)]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        return [node.value]
    return None


Names = dict[str, list[ast.AST | None]]  # all that is assigned to a name; None for a loop's, an argument, and the like
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@lru_cache(maxsize=256)
def _names(file: str, line: int) -> Names:
    """What the names mean in the function that begins in a line of a file, or in the file itself."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    scopes = [node for node in ast.walk(tree) if isinstance(node, _Scope) and _begins(node) <= line <= node.end_lineno]  # type: ignore[operator]
    found: Names = {}
    for scope in (tree, *scopes):  # those further in come later
        found |= _assigned(scope)
    return found


def _begins(node: Any) -> int:
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])


def _assigned(scope: ast.AST) -> Names:
    """By name, all that is assigned in a scope, but for functions in it."""
    found: Names = {}
    plain: dict[int, ast.AST] = {}  # by the id of a name that is assigned to
    waiting: list[ast.AST] = [scope]
    while waiting:  # a statement comes before what is in it
        node = waiting.pop(0)
        waiting += [one for one in ast.iter_child_nodes(node) if not isinstance(one, _Scope)]
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _assign(target, node.value, plain)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            _assign(node.target, node.value, plain)
        elif isinstance(node, ast.For | ast.comprehension) and _is_range(node.iter):
            plain[id(node.target)] = ast.Tuple(node.iter.args, ast.Load())  # type: ignore[attr-defined]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found.setdefault(node.id, []).append(plain.get(id(node)))
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, []).append(None)
    return found


def _assign(target: ast.AST, value: ast.expr, plain: dict[int, ast.AST]) -> None:
    if isinstance(target, ast.Name):
        plain[id(target)] = value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            _assign(one, other, plain)
    elif isinstance(target, ast.Tuple) and is_shape(value):
        for at, one in enumerate(target.elts):  # b, c = x.shape
            plain[id(one)] = ast.Subscript(value, ast.Constant(at), ast.Load())


def _written(node: ast.AST | None) -> float | None:
    """The number that an expression of numbers alone is: 4, 2 * 8."""
    if isinstance(node, ast.Constant):
        return abs(float(node.value)) if isinstance(node.value, int | float) else None
    if not isinstance(node, ast.BinOp | ast.UnaryOp):
        return None
    parts = [_written(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    of_two = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    return known[0] * known[-1] if of_two else known[0] if isinstance(node, ast.UnaryOp) else None


def _is_constant(node: ast.AST | None) -> bool:
    """Returns whether an expression consists of literal numbers alone."""
    known = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.operator | ast.unaryop | ast.expr_context
    return node is not None and all(isinstance(one, known) for one in ast.walk(node))


def _is_range(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


_HOLDS = (
    ast.BinOp | ast.UnaryOp | ast.Slice | ast.Tuple | ast.List | ast.Starred | ast.IfExp | ast.Compare
)  # what a count may be a part of


def _counts(node: ast.AST, names: Names, found: list[ast.AST], depth: int = 3) -> bool:
    """Whether an expression has the number of a tensor's rows: len(x), x.size(0), x.shape[0], or a name for such; those
    tensors are added to `found`."""
    if isinstance(node, ast.Name):
        values, inner = names.get(node.id, []) if depth else [], list[ast.AST]()
        held = bool(values) and all(one is not None and _counts(one, names, inner, depth - 1) for one in values)
        found += inner if held else []
        return held
    if isinstance(node, ast.IfExp) and not _counts(node.test, names, [], depth):  # any of both may be taken
        both: list[ast.AST] = []
        held = all(_counts(one, names, both, depth) for one in (node.body, node.orelse))
        found += both if held else []
        return held
    if isinstance(node, _HOLDS) or (isinstance(node, ast.Call) and of_numbers(node)):
        every = [_counts(one, names, found, depth) for one in ast.iter_child_nodes(node)]
        return any(every)
    of = counted(node)
    found += [] if of is None else [of]
    return of is not None
