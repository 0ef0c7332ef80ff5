"""Backwards are watched in one place, in the order in which their watchers began, and given back as they were."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

import shardwise
from shardwise.trace.backwards import Around, watch_backwards, watching_backwards

SOURCE = Path(shardwise.__file__).parent


def noting(name: str, notes: list[str]) -> Around:
    @contextmanager
    def around(create_graph: bool) -> Iterator[None]:
        notes.append(f"{name}{' with a graph' if create_graph else ''}")
        yield
        notes.append(f"end of {name}")

    def watch(roots: object, create_graph: bool, inputs: object) -> AbstractContextManager[None]:
        return around(create_graph)

    return watch


def test_watchers_end_in_any_order() -> None:
    """A watcher that outlives the context it began in is still told, and what torch calls is its own again after it."""
    plain, notes, x = torch.autograd._engine_run_backward, list[str](), torch.ones(2, requires_grad=True)
    with watching_backwards(noting("context", notes)):
        end = watch_backwards(noting("model", notes))
        torch.autograd.grad(x.square().sum(), x, create_graph=True)
    assert notes == ["model with a graph", "context with a graph", "end of context", "end of model"]
    notes.clear()
    x.sum().backward()
    assert notes == ["model", "end of model"]
    end()
    assert torch.autograd._engine_run_backward is plain


def test_transforms_are_not_told() -> None:
    notes = list[str]()
    with watching_backwards(noting("context", notes)):
        torch.func.grad(lambda x: x.square().sum())(torch.ones(2))
    assert notes == []


def test_one_file_stands_in_for_what_torch_calls() -> None:
    def stands_in(path: Path) -> bool:
        targets = (
            t for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assign) for t in node.targets
        )
        return any(getattr(target, "attr", "") == "_engine_run_backward" for target in targets)

    assert [path.name for path in SOURCE.rglob("*.py") if stands_in(path)] == ["backwards.py"]
