"""Work out again what an expression in a script comes to where there are more samples: min(len(x), 6) of 4 and of 8.

A number that is no multiple of the samples (at most six of them, a quarter and at least one) grows otherwise than they
do. What it is made of is taken when it is used: tensors' rows, and numbers by name.

What this does not do: follow names that are assigned to more than once, and calls other than those of numbers alone.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

Amount = Callable[[float], float]  # of how many times as many samples
Names = Mapping[str, list[ast.AST | None]]
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "int": int, "float": float, "round": round, "abs": abs,
    "ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt,
}  # fmt: skip
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_DEEP = 12  # expressions in one another


def amounts_in(parts: tuple[ast.AST, ...], names: Names, look_up: Callable[[ast.AST], Any]) -> dict[float, Amount]:
    """Returns, by what they come to now, the numbers among a call's arguments that tensors' rows are counted for.

    look_up     gives the value of a name, or of an attribute of one, where the expression stands
    """
    found: dict[float, Amount] = {}
    for part in parts:
        for one in _leaves(part):
            amount = _amount(one, names, look_up, _DEEP)
            if amount is not None:
                try:
                    now = amount(1.0)
                except (ArithmeticError, TypeError, ValueError):
                    continue
                found[now] = amount
    return found


def of_numbers(node: ast.Call) -> str:
    """Returns which function of numbers a call is of; "" for another."""
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    of_math = isinstance(node.func, ast.Name) or getattr(getattr(node.func, "value", None), "id", "") == "math"
    return name if of_math and name in OF_NUMBERS and not node.keywords else ""


def _leaves(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Slice | ast.Tuple | ast.List):
        return [leaf for one in ast.iter_child_nodes(node) for leaf in _leaves(one)]
    return [node] if isinstance(node, ast.expr) else []


def _amount(node: ast.AST | None, names: Names, look_up: Callable[[ast.AST], Any], deep: int) -> Amount | None:
    if node is None or not deep:
        return None
    if isinstance(node, ast.Constant):
        return _fixed(node.value)
    if isinstance(node, ast.Name):
        values = names.get(node.id, [])
        made = _amount(values[0], names, look_up, deep - 1) if len(values) == 1 else None
        return made or _fixed(look_up(node))
    if isinstance(node, ast.Attribute):
        return _fixed(look_up(node))
    function, given = _call(node)
    if function is None:
        return _rows(node, look_up)
    inner = [_amount(one, names, look_up, deep - 1) for one in given]
    if any(one is None for one in inner):
        return None
    return lambda times: function(*(one(times) for one in inner if one is not None))


def _call(node: ast.AST) -> tuple[Callable[..., Any] | None, list[ast.AST]]:
    """The function of numbers that an expression is, and what it is given."""
    if isinstance(node, ast.BinOp):
        return _OPERATIONS.get(type(node.op)), [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return _OPERATIONS.get(type(node.op)), [node.operand]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _OPERATIONS.get(type(node.ops[0])), [node.left, *node.comparators]
    if isinstance(node, ast.IfExp):
        return (lambda test, one, other: one if test else other), [node.test, node.body, node.orelse]
    name = of_numbers(node) if isinstance(node, ast.Call) else ""
    return OF_NUMBERS.get(name), list(getattr(node, "args", []))


def _rows(node: ast.AST, look_up: Callable[[ast.AST], Any]) -> Amount | None:
    """Returns what len(x), x.size(0) or x.shape[0] would tell with more samples; None for another expression."""
    of = counted(node)
    held = look_up(of) if of is not None else None
    if not (isinstance(held, torch.Tensor) and held.dim()):
        return None
    rows = len(held)
    return lambda times: round(rows * times)


def counted(node: ast.AST) -> ast.AST | None:
    """Returns the expression whose rows another counts: x of len(x), x.size(0), x.shape[0], x.size()[0]."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.args[0] if node.func.id == "len" and node.args else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        return node.func.value if len(node.args) == 1 and is_zero(node.args[0]) else None
    if isinstance(node, ast.Subscript) and is_shape(node.value) and is_zero(node.slice):
        return node.value.func.value if isinstance(node.value, ast.Call) else node.value.value  # type: ignore[attr-defined]
    return None


def is_shape(node: ast.AST) -> bool:
    """Returns whether an expression is the shape of something."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "size" and not node.args
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def is_zero(node: Any) -> bool:
    """Returns whether an expression is the number 0."""
    return isinstance(node, ast.Constant) and node.value == 0


def _fixed(value: Any) -> Amount | None:
    return (lambda _: value) if isinstance(value, int | float) and not isinstance(value, bool) else None
