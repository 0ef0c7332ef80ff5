"""Run a script within a proof, in one process or as one rank: in float64, in a scratch folder, until enough was seen.

    float64     new tensors, casts, and what comes from NumPy or a file are wide; integers stay as they are
    output      of the script is thrown away
    its end     `Enough`, its own, or what it raises, which the record tells

What this does not do: make a kernel that has no float64 run in it.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from shardwise.errors import ShardwiseError
from shardwise.ranks.script import HIDDEN
from shardwise.scripts.proof.hooks import TorchHooks, single_group
from shardwise.scripts.proof.recorder import Enough, ScriptRecord, ScriptRecorder, recording
from shardwise.scripts.proof.scratch import Scratch
from shardwise.scripts.proof.sketch import sketch
from shardwise.trace.double import KeepDouble

_WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
         torch.complex64: torch.complex128}  # fmt: skip
_MAKERS = ("from_numpy", "as_tensor", "tensor", "frombuffer", "load", "asarray")  # tensors of numbers from elsewhere


@dataclass(frozen=True)
class ScriptJob:
    """What a process of a proof is to run.

    plain       as the one process, in which `prepare` only records
    plan        in the place of the script's own; None: its own
    limit, epochs, shorten, apart       of `ScriptRecorder`
    foreign     a script that does not call `prepare`: recorded through torch's hooks, RANK and the like are shown
    folder      where the script stands; `scratch`: a stand-in for it, in which nothing of the user's is overwritten
    """

    path: str
    arguments: tuple[str, ...]
    plain: bool
    plan: str | None = None
    limit: int | None = 6
    epochs: int | None = None
    shorten: int | None = None
    apart: bool = False
    foreign: bool = False
    folder: str = "."
    scratch: bool = True


def run_in_proof(asked: ScriptJob) -> ScriptRecord:
    """Returns what the script did in this process; an error of it is in the record. Collective on ranks."""
    recorder = ScriptRecorder(
        limit=asked.limit, plain=asked.plain, plan=asked.plan, shorten=asked.shorten, apart=asked.apart
    )
    recorder.epochs = asked.epochs
    with ExitStack() as inside:
        if asked.scratch:
            inside.enter_context(Scratch(asked.folder, asked.path))
        else:
            inside.enter_context(_standing_in(asked.folder))
        inside.enter_context(_silence())
        inside.enter_context(_process_kept())
        inside.enter_context(recording(recorder))
        if asked.foreign:
            inside.enter_context(single_group())
            inside.enter_context(TorchHooks(recorder))
        try:
            with _in_double():
                _run(asked, recorder)
        except Enough:
            pass
        except ShardwiseError:
            raise
        except BaseException as error:
            if recorder.plain or not isinstance(error, Exception):
                recorder.record.failed = _told(error, asked.path)
            else:
                raise
    return recorder.record


def _run(asked: ScriptJob, recorder: ScriptRecorder) -> None:
    sys.argv = [asked.path, *asked.arguments]
    sys.path.insert(0, str(Path(asked.path).resolve().parent))
    if not asked.foreign:
        for name in HIDDEN:
            os.environ.pop(name, None)
    names: dict[str, Any] = {}
    try:
        names = runpy.run_path(asked.path, run_name="__main__")
        recorder.record.ended = True
    except SystemExit as done:
        if done.code not in (None, 0):
            raise
        recorder.record.ended = True
    except Enough:
        pass
    recorder.record.final = [_final(prepared) for prepared in recorder.models]
    for value in names.values():  # hooks of FSDP2 below autograd hold the script's names, a cycle that is not collected
        if isinstance(value, FunctionType) and value.__globals__.get("__name__") == "__main__":
            value.__globals__.clear()


def _final(prepared: Any) -> dict[str, torch.Tensor | None]:
    """What the model's `state_dict()` and `save_weights` give at the end, as sketches. Collective."""
    if not hasattr(prepared, "state_dict"):
        return {}
    return {name: sketch(tensor) for name, tensor in prepared.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _told(error: BaseException, path: str) -> tuple[str, str]:
    """(its last line, its traceback from the script's first line on)."""
    lines = traceback.format_exception(error)
    start = next((at for at, line in enumerate(lines) if f'File "{path}"' in line), 0)
    return traceback.format_exception_only(error)[-1].strip(), "".join(lines[start:])


# --- arithmetic


@contextmanager
def _in_double() -> Iterator[None]:
    """Context: everything is computed in float64."""
    before = torch.get_default_dtype()
    with ExitStack() as inside:
        for name in _MAKERS:
            inside.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, _widening(getattr(torch, name)))
        torch.set_default_dtype(torch.float64)
        inside.callback(torch.set_default_dtype, before)
        inside.enter_context(WideDouble())
        yield


class WideDouble(KeepDouble):
    """As `KeepDouble`, and numbers that are drawn or made in a narrow dtype are wide too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = _WIDE.get(kwargs.get("dtype"))
        if wide is not None and not any(isinstance(arg, torch.Tensor) for arg in args):
            kwargs["dtype"] = wide
        return super().__torch_dispatch__(func, types, args, kwargs)


def _widening(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, _wide, make(*args, **kwargs))

    return made


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    wide = _WIDE.get(tensor.dtype)
    if wide is None or tensor.layout is not torch.strided:
        return tensor
    if tensor.requires_grad and tensor.is_leaf:
        return tensor.detach().to(wide).requires_grad_()
    return tensor.to(wide)


# --- the process


@contextmanager
def _silence() -> Iterator[None]:
    """Context: what the script prints goes nowhere."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def _standing_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _process_kept() -> Iterator[None]:
    """Context: generators begin as those of a new process might, argv, the path and the environment are put back."""
    argv, path, environment = list(sys.argv), list(sys.path), dict(os.environ)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
