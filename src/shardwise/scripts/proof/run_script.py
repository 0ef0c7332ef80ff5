"""Runs a script within a proof, in one process or as one rank: in float64, in a scratch folder, until enough was seen.

    float64     new tensors, casts, and what comes from NumPy or a file are widened; integers stay as they are
    output      of the script is thrown away
    its end     `Enough`, its own end, or an error, which the record holds

What this does not do: run a kernel in float64 that has none.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryFile
from types import FunctionType
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import RunError, ShardwiseError
from shardwise.ranks.own_group import own_group
from shardwise.ranks.script import HIDDEN
from shardwise.scripts.proof.receipts import files_of
from shardwise.scripts.proof.recorder import Enough, ScriptJob, ScriptRecord, ScriptRecorder, recording, sketch
from shardwise.scripts.proof.scratch import Scratch
from shardwise.scripts.proof.torch_hooks import TorchHooks
from shardwise.trace.double import KeepDouble

_WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
         torch.complex64: torch.complex128}  # fmt: skip
_OF_SCALES = ("_lazy_init_scale_growth_tracker", "unscale_", "update")  # of GradScaler: its kernels want float32
_MAKERS = ("from_numpy", "as_tensor", "frombuffer", "load", "asarray")  # of torch: numbers from elsewhere


def run_in_proof(asked: ScriptJob) -> ScriptRecord:
    """Runs the script in this process and returns the record of what it did. Collective on ranks.

    An error of the script is put into the record of the one process (`plain`), and raised on a rank; our own errors are
    raised on both.
    """
    recorder = ScriptRecorder(asked)
    with ExitStack() as inside:
        # None: --cwd was given, so the script runs in that folder for real
        if asked.scratch is not None:
            inside.enter_context(Scratch(asked.folder, asked.scratch, asked.path))
        else:
            inside.enter_context(chdir(asked.folder))
        said = inside.enter_context(_silence())
        inside.enter_context(_process_kept())
        inside.enter_context(recording(recorder))
        inside.enter_context(own_group(alone=asked.plain))
        if asked.hooks != "none":
            import torch.distributed.optim  # noqa: F401  # compiles functions of torch that are replaced below

            # the recorder beside must not end the script, so it has no limits
            beside = ScriptRecorder(replace(asked, limit=None, epochs=None))
            inside.enter_context(TorchHooks(recorder if asked.hooks == "alone" else beside))
            recorder.record.seen = beside.record if asked.hooks == "beside" else None
        try:
            with _in_double() if asked.exact else CoarsestDtype(recorder.record):
                _run(asked, recorder)
        except Enough:  # the recorder has its steps
            pass
        except ShardwiseError:
            raise
        except (Exception, SystemExit) as error:
            # a rank's failure is raised, which ends the other ranks; that of one process is noted in its record
            if not asked.plain and isinstance(error, SystemExit):
                raise RunError(f"the script ended itself: sys.exit({error.code!r})") from None
            if not asked.plain:
                raise
            recorder.record.failed = _failure_of(error, asked, said)
        # torch's hooks know a parameter by its place in an optimizer; `prepare` knows its name
        if recorder.record.seen is not None:
            recorder.record.seen.names = [_names_of(optimizer, recorder.models) for optimizer in beside.models]
    return recorder.record


def _names_of(optimizer: torch.optim.Optimizer, prepared: list[Any]) -> dict[str, str]:
    """Returns {"parameter 3" (its index in the optimizer): the parameter's name in a prepared model}."""
    names = {id(param): name for each in prepared for name, param in each.model.named_parameters()}
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {f"parameter {at}": names[id(param)] for at, param in enumerate(params) if id(param) in names}


def _run(asked: ScriptJob, recorder: ScriptRecorder) -> None:
    """Runs the script as `__main__`, until its end or `Enough`; then records its models, modules and files."""
    sys.argv = [asked.path, *asked.arguments]
    sys.path.insert(0, str(Path(asked.path).resolve().parent))
    for name in HIDDEN if asked.hides or (asked.plain and not asked.foreign) else ():  # torchrun's variables
        os.environ.pop(name, None)
    names: dict[str, Any] = {}
    try:
        names = runpy.run_path(asked.path, run_name="__main__")
    except SystemExit as done:
        if done.code not in (None, 0):
            raise
        names = _names_in(done, asked.path)
    except Enough as enough:
        recorder.record.ended = True
        names = _names_in(enough, asked.path)
    recorder.record.final = [_final(prepared) for prepared in recorder.models]
    recorder.record.files = files_of(asked.path)
    recorder.record.beside = _modules_beside(names, recorder)
    if recorder.record.seen is not None:
        recorder.record.seen.beside = recorder.record.beside
    # FSDP2's hooks below autograd hold the script's globals in a cycle that Python does not collect: empty them
    for value in names.values():  # hooks of FSDP2 below autograd hold the script's names, a cycle that is not collected
        if isinstance(value, FunctionType) and value.__globals__.get("__name__") == "__main__":
            value.__globals__.clear()


def _names_in(error: BaseException, path: str) -> dict[str, Any]:
    """Returns {name: value} of the script's globals and its functions' locals at the point of an exception."""
    trace, names = error.__traceback__, dict[str, Any]()
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            names |= trace.tb_frame.f_locals
        trace = trace.tb_next
    return names


def _modules_beside(names: dict[str, Any], recorder: ScriptRecorder) -> dict[str, torch.Tensor | None]:
    """Returns {"variable.path": sketch} of weights and buffers of modules in `names` that were not prepared.

    names  {name: value} of the script's variables
    """
    models = [getattr(each, "model", None) for each in recorder.models]
    own = {id(part) for model in models if isinstance(model, nn.Module) for part in model.modules()}
    tensors: dict[str, torch.Tensor | None] = {}
    for name, module in names.items():
        # a module that holds a prepared one, or is part of one, is compared with it
        if isinstance(module, nn.Module) and not any(id(part) in own for part in module.modules()):
            for key, tensor in (*module.named_parameters(), *module.named_buffers()):
                # other classes (DTensors, parts) hold a rank's share, which one process has not
                if type(tensor) in (torch.Tensor, nn.Parameter):
                    tensors[f"{name}.{key}"] = sketch(tensor)
    return tensors


def _final(prepared: Any) -> dict[str, torch.Tensor | None]:
    """Returns {name: sketch} of the model's `state_dict()` at the end of the script; {} for an optimizer.

    Collective.
    """
    if isinstance(prepared, torch.optim.Optimizer):  # of a script that prepares nothing
        return {}
    return {name: sketch(tensor) for name, tensor in prepared.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _failure_of(error: BaseException, asked: ScriptJob, said: TextIO) -> tuple[str, str]:
    """Returns (the failure in one line, its traceback from the script's first line on; "" if the line says all).

    said  what the script has written on stderr
    """
    lines = traceback.format_exception(error)
    what, named = traceback.format_exception_only(error)[-1].strip(), getattr(error, "filename", None)
    # argparse ends a script by SystemExit, and says why on stderr
    if isinstance(error, SystemExit):
        said.seek(0)
        return ": ".join([what, *said.read().strip().splitlines()[-1:]]), ""
    there = Path(asked.folder, named) if asked.stands_in and isinstance(named, str) else None
    # the file is there, but not where a proof's copy of the folder looks
    if isinstance(error, FileNotFoundError) and there is not None and there.exists():
        return f"{what}: {there.resolve()} lies beside what a proof copies: give verify --cwd {asked.folder}", ""
    return what, "".join(lines[next((at for at, line in enumerate(lines) if f'File "{asked.path}"' in line), 0) :])


# --- arithmetic


@contextmanager
def _in_double() -> Iterator[None]:
    """Context in which everything is computed in float64."""
    before = torch.get_default_dtype()
    with ExitStack() as inside:
        for name in _MAKERS:
            inside.callback(setattr, torch, name, getattr(torch, name))
            setattr(torch, name, _widening(getattr(torch, name)))
        for name in _OF_SCALES:
            inside.callback(setattr, torch.amp.GradScaler, name, getattr(torch.amp.GradScaler, name))
            setattr(torch.amp.GradScaler, name, _as_it_is(getattr(torch.amp.GradScaler, name)))
        torch.set_default_dtype(torch.float64)
        inside.callback(torch.set_default_dtype, before)
        inside.enter_context(WideDouble())
        yield


class WideDouble(KeepDouble):
    """Dispatch mode that keeps float64 through casts (`KeepDouble`) and widens tensors made in a narrow dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = _WIDE.get(kwargs.get("dtype"))
        if wide is not None and not any(isinstance(arg, torch.Tensor) for arg in args):
            kwargs["dtype"] = wide
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(numbers)
            return _wide(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


class CoarsestDtype(TorchDispatchMode):
    """Dispatch mode that records the largest epsilon among the 16-bit floating dtypes that operations return."""

    def __init__(self, record: ScriptRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(given):
            if isinstance(leaf, torch.Tensor) and leaf.dtype.itemsize == 2 and leaf.is_floating_point():
                self._record.eps = max(self._record.eps, torch.finfo(leaf.dtype).eps)
        return given


def _as_it_is(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `method`, in which nothing is widened; a loss scale is a power of two, so that it rounds nothing."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return run


def _widening(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `make`, whose tensors come out in float64 or complex128."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # what a file holds is read as it is
            found = make(*args, **kwargs)
        return tree_map_only(torch.Tensor, _wide, found)

    return made


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in the wide dtype of its own (`_WIDE`); unchanged if it has none or is not strided."""
    wide = _WIDE.get(tensor.dtype)
    if wide is None or tensor.layout is not torch.strided:
        return tensor
    if tensor.requires_grad and tensor.is_leaf:
        return tensor.detach().to(wide).requires_grad_()
    return tensor.to(wide)


# --- the process


@contextmanager
def _silence() -> Iterator[TextIO]:
    """Context in which stdout goes nowhere; yields the open temporary file to which stderr goes."""
    with ExitStack() as inside:
        inside.enter_context(redirect_stdout(inside.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        yield inside.enter_context(redirect_stderr(inside.enter_context(TemporaryFile("w+", encoding="utf-8"))))


@contextmanager
def _process_kept() -> Iterator[None]:
    """Context that seeds generators as in a new process, and restores argv, path, environment and modules after it."""
    argv, path, environment, modules = list(sys.argv), list(sys.path), dict(os.environ), set(sys.modules)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        for name in sys.modules.keys() - modules:  # of the script's own, which another run imports anew
            file = getattr(sys.modules[name], "__file__", None) or ""
            if not file.startswith((sys.prefix, sys.base_prefix)) and not name.startswith("shardwise"):
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)
