"""Injects faults for tests: a chosen rank dies, stops, fails or is corrupted at a chosen step and point (guard/points).

    from shardwise.testing import faults

    with faults.injected(faults.Fault("kill", rank=1, step=3, at="update")):
        shardwise.train("digits", "dp_shard=2", restarts=1, checkpoint_every=2)

Faults reach ranks that are started inside (by `train`, `launch`, a `RankPool`'s jobs), and a script under torchrun
whose environment has `faults.environment(...)`. A fault strikes once over all attempts of a run, unless `times` says
otherwise.

    kill, exit, raise      SIGKILL; leaves with code 41; raises `Injected`
    segfault, abort        a crash in C: SIGSEGV, SIGABRT
    stop                   SIGSTOP: the process is there and does nothing
    lock                   a C call holds the interpreter's lock, for `seconds`
    sleep                  the rank is late by `seconds`
    nan                    one element of one gradient of this rank becomes NaN ("forward")
    flip-weight, flip-optimizer, flip-buffer     one bit of this rank's local tensor is flipped
    eio, enospc            the next change of a file of this rank's checkpoint fails with that error ("disk")
    disconnect             all of the rank's network connections are shut down
    drop                   packets from and to the rank vanish, as on a broken link; the rank must be in a network
                           namespace of its own (`ip netns exec`), whose links are taken down

Points: "start", "input", "forward", "reduce", "update", "evaluate", "save", "disk", "end" (`shardwise.guard.points`).
"disk" is each write, sync, rename and removal of a checkpoint, in the process that does it (the rank, or its writer);
its step is the checkpoint's. A script that calls `prepare` reaches "input", "forward" (when a batch is returned),
"reduce", "update", "save" and "disk". With `after=N` a process passes the point N times before the fault strikes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, did_you_mean
from shardwise.guard import points

VARIABLE = "SHARDWISE_FAULTS"
EXIT_CODE = 41
AT = ("start", "input", "forward", "reduce", "update", "evaluate", "save", "disk", "end")


class Injected(Exception):
    """The error that a fault of kind "raise" raises."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject.

    kind      as in the module's docstring
    rank      the rank that it strikes
    step      number of optimizer steps done when it strikes; None: any
    at        the point of the step
    name      name of the parameter or buffer that is corrupted; None: the first
    element   index of the corrupted element of the local tensor, in row-major order; `bit`: of that element, 0 lowest
    seconds   duration of "sleep" and "lock"
    times     how often it strikes, over all processes and attempts
    after     how often a process passes the point before
    """

    kind: str
    rank: int = 0
    step: int | None = None
    at: str = "forward"
    name: str | None = None
    element: int = 0
    bit: int = 0
    seconds: float = 3600.0
    times: int = 1
    after: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"no fault is called {self.kind!r}{did_you_mean(self.kind, sorted(KINDS))}")
        if self.at not in AT:
            raise InputError(f"no point is called {self.at!r}{did_you_mean(self.at, list(AT))}; there are {AT}")
        # disk errors only make sense where files are written
        if self.at != "disk" and self.kind in ("eio", "enospc"):
            raise InputError(f"fault {self.kind!r} at {self.at!r}: eio and enospc are for 'disk'")
        # these corrupt weights or optimizer state, to which other points have no access
        if self.kind in STATE and self.at in ("start", "save", "disk"):
            raise InputError(f"fault {self.kind!r} needs the rank's state, which {self.at!r} does not have")


@contextmanager
def injected(*faults: Fault) -> Iterator[Path]:
    """Context in which started ranks get these faults; gives a folder, for `struck`."""
    with tempfile.TemporaryDirectory(prefix="shardwise-faults-") as folder:
        variables = environment(faults, folder)
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def environment(faults: tuple[Fault, ...] | list[Fault], folder: str | Path) -> dict[str, str]:
    """Returns {environment variable: value} that make ranks inject these faults; `folder` records those that struck."""
    text = json.dumps({"folder": str(folder), "faults": [asdict(fault) for fault in faults]})
    return {VARIABLE: text, points.VARIABLE: f"{__name__}:meet"}


def struck(folder: str | Path) -> int:
    """Returns how many times faults recorded in `folder` have struck."""
    return len(list(Path(folder).glob("fault-*")))


def meet(point: str, step: int, subject: Any) -> None:
    """Injects the faults that the environment asks for at this rank, step and point; called by `guard.points`.

    point     where the process is, one of `AT`; `step`: optimizer steps done
    subject   what the point passes: the `RankState` in a step, (change, path) at "disk"; None: there is none
    """
    faults_text = os.environ.get(VARIABLE)
    if not faults_text:
        return
    plan = json.loads(faults_text)
    for number, fields in enumerate(plan["faults"]):
        fault = Fault(**fields)
        if fault.at != point or not _is_mine(fault, step, subject):
            continue
        at = (plan["folder"], number)
        _passed[at] = _passed.get(at, 0) + 1
        # `after` counts in this process, `times` over all, so that a restarted run is not struck again
        if _passed[at] > fault.after and _first(Path(plan["folder"]), number, fault.times):
            KINDS[fault.kind](fault, subject)


_passed: dict[tuple[str, int], int] = {}  # (folder, index of a fault) -> how often this process reached its point


def _is_mine(fault: Fault, step: int, subject: Any) -> bool:
    """Whether a fault is for this process's rank and this step (parameters as `meet`)."""
    if fault.kind in STATE and subject is None:  # a script's model has no state before its first forward
        return False
    if fault.at == "disk":  # the writing process knows the step only from the name of the checkpoint's folder
        named = re.search(r"step-(\d+)", str(subject[1]))
        step = int(named[1]) if named else -1
    return int(os.environ.get("RANK", "0")) == fault.rank and fault.step in (None, step)


def _first(folder: Path, number: int, times: int) -> bool:
    """Records one more strike of fault `number`; returns False if it has struck `times` times over all processes."""
    for time_ in range(times):
        try:
            os.close(os.open(folder / f"fault-{number}-{time_}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            continue
    return False


# --- what happens


def _kill(fault: Fault, subject: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault, subject: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(fault: Fault, subject: Any) -> None:
    os._exit(EXIT_CODE)


def _segfault(fault: Fault, subject: Any) -> None:
    import ctypes

    ctypes.string_at(0)


def _abort(fault: Fault, subject: Any) -> None:
    os.abort()


def _raise(fault: Fault, subject: Any) -> None:
    raise Injected(f"an injected error on rank {fault.rank} at {fault.at!r}")


def _sleep(fault: Fault, subject: Any) -> None:
    time.sleep(fault.seconds)


def _lock(fault: Fault, subject: Any) -> None:
    """Holds the interpreter's lock for `fault.seconds`, so that no other Python thread runs."""
    import ctypes

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)  # if a signal ends the sleep early, other threads still must not run in between
    try:
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            ctypes.PyDLL(None).sleep(max(1, int(until - time.monotonic())))
    finally:
        sys.setswitchinterval(interval)


def _nan(fault: Fault, state: Any) -> None:
    """Sets one element of a parameter's next gradient to NaN, through a hook; `state`: the `RankState`."""
    name = fault.name or state.names[0]
    home, _, leaf = name.rpartition(".")
    owner = state.module.get_submodule(home)

    def spoil(gradient: Any) -> Any:
        gradient = gradient.clone()
        gradient.reshape(-1)[fault.element] = float("nan")
        return gradient

    def before(module: Any, args: Any) -> None:
        handle.remove()
        hooks.append(getattr(module, leaf).register_hook(lambda gradient: (hooks[0].remove(), spoil(gradient))[1]))

    hooks: list[Any] = []
    handle = owner.register_forward_pre_hook(before)


def _flip(tensor: Any, fault: Fault) -> None:
    """Flips one bit of one element of a tensor, or of a DTensor's local part."""
    import torch

    local = getattr(tensor, "to_local", lambda: tensor)().detach()
    with torch.no_grad():
        flat = local.view(-1)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        whole = flat.view(bits)
        size = 8 * flat.element_size()
        mask = 1 << fault.bit
        whole[fault.element] ^= mask - (1 << size) if mask >= 1 << (size - 1) and bits != torch.uint8 else mask


def _flip_weight(fault: Fault, state: Any) -> None:
    named = dict(state.module.named_parameters())
    _flip(named[fault.name or state.names[0]], fault)


def _flip_optimizer(fault: Fault, state: Any) -> None:
    """Flips one bit in the optimizer's state of a parameter (the first with state if no name is given).

    Raises `InputError` if there is no such state.
    """
    import torch

    for slot in state.technique.slots:
        if fault.name in (None, slot.name):
            held = [value for value in state.optimizer.state[slot.master].values() if isinstance(value, torch.Tensor)]
            # only tensors with dims, since a 0-d one is a step counter
            held = [value for value in held if value.numel() > fault.element and value.dim()]
            if held:
                return _flip(held[0], fault)
    raise InputError(f"fault {fault.kind!r}: the optimizer of rank {fault.rank} holds no tensor for {fault.name}")


def _flip_buffer(fault: Fault, state: Any) -> None:
    named = dict(state.module.named_buffers())
    if not named:
        raise InputError(f"fault {fault.kind!r}: the module has no buffer")
    _flip(named[fault.name or next(iter(named))], fault)


def _no_space(fault: Fault, subject: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(subject[1]))


def _io_error(fault: Fault, subject: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(subject[1]))


def _disconnect(fault: Fault, subject: Any) -> None:
    """Shuts down all of this process's TCP connections."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile, or it only listens
            continue


def _drop(fault: Fault, subject: Any) -> None:
    """Takes down the links of this rank's network namespace; `InputError` if it is not in a named one."""
    own = os.stat("/proc/self/ns/net").st_ino
    if own not in [path.stat().st_ino for path in Path("/run/netns").glob("*")]:
        raise InputError(
            f"fault 'drop' takes down the links of a network namespace, and rank {fault.rank} is in none that has a "
            "name: start it by `ip netns exec NAME ...`"
        )
    for _, name in socket.if_nameindex():
        if name != "lo":
            subprocess.run(["ip", "link", "set", name, "down"], check=True)


KINDS = {
    "kill": _kill, "exit": _exit, "segfault": _segfault, "abort": _abort, "raise": _raise,
    "stop": _stop, "lock": _lock, "sleep": _sleep, "nan": _nan,
    "flip-weight": _flip_weight, "flip-optimizer": _flip_optimizer, "flip-buffer": _flip_buffer,
    "eio": _io_error, "enospc": _no_space, "disconnect": _disconnect, "drop": _drop,
}  # fmt: skip
STATE = ("nan", "flip-weight", "flip-optimizer", "flip-buffer")
