"""Prints notices once, on rank 0, and adds to errors the script's own line in which they arose."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError, ShardwiseError, Stopped, did_you_mean

_OURS = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (shardwise, torch))


class Notices:
    """Prints each notice once, on rank 0's standard error."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._said: set[str] = set()

    @property
    def shown(self) -> bool:
        """Returns whether this rank prints notices, which only rank 0 does."""
        return self._rank == 0

    def say(self, notices: Iterable[str]) -> None:
        """Prints, on rank 0, those of these notices that were not printed before."""
        for notice in notices:
            if notice not in self._said and self._rank == 0:
                sys.stderr.write(f"shardwise: {notice}\n")
            self._said.add(notice)


def names_line(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that ends a `ShardwiseError` in the script's line: "[train.py, line 12: loss.backward()]"."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShardwiseError as error:
            line = line_of_script()
            if line and not getattr(error, "names_line", False):
                error.names_line = True  # type: ignore[attr-defined]
                error.args = (f"{error} [{line}]", *error.args[1:])
            raise

    return called


def for_good(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method as `names_line` does; what refuses a run (`Calls.refused`) is raised by every later call too.

    Without it a script that catches an error and goes on to its next batch would train unlike one process from there.
    """
    called = names_line(method)

    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.refused:
            raise self.refused[0].with_traceback(None)
        try:
            return called(self, *args, **kwargs)
        except (RefusedPlan, RunError) as error:
            if not isinstance(error, Stopped):  # a run that was asked to stop is as it should be
                self.refused.append(error)
            raise

    return checked


@names_line
def refuse(error: ShardwiseError) -> NoReturn:
    """Raises `error` with the script's line at its end, for callers that are not under `names_line`."""
    raise error


def line_of_script() -> str:
    """Returns the innermost running line that is not shardwise's or torch's: "train.py, line 12: step()"; or ""."""
    frame = sys._getframe(1)
    while frame is not None and (_is_ours(frame.f_code.co_filename)):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    name, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, number, frame.f_globals).strip()
    return f"{Path(name).name}, line {number}" + (f": {text}" if text else "")


def _is_ours(name: str) -> bool:
    return name.startswith(_OURS) or name.startswith("<") or name.endswith(("contextlib.py", "functools.py"))


_GRAPH = (
    "prepared.backward(create_graph=True): gradients of weights are summed over ranks, which no graph goes through. A "
    "penalty on gradients of inputs or outputs adds torch.autograd.grad(..., create_graph=True) of them to the loss; "
    'gradients of weights: torch.autograd.grad under replicas, zero=1 or zero=2, with prepare(..., loss_scope="model")'
)
OPTIONS = ("weight", "mean_over", "summed", "also", "loader", "retain_graph")  # of prepared.backward


def refuse_call(loss: object, options: dict[str, Any]) -> None:
    """Raises `InputError` for a backward without a loss or with an unknown keyword.

    options  the keywords that `backward` has no parameter for; `create_graph=True` raises `RefusedPlan`
    """
    if loss is None:
        raise InputError("prepared.backward is given no loss: prepared.backward(loss)")
    if options.get("create_graph"):
        raise RefusedPlan(_GRAPH)
    for name in options.keys() - {"create_graph"}:
        near = did_you_mean(name, [*OPTIONS])
        raise InputError(f"prepared.backward has no {name}={near or '; it takes ' + ', '.join(OPTIONS)}")
