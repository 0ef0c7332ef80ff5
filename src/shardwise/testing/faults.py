"""Inject faults in tests: a chosen rank dies, stops, errs or is corrupted at a chosen step and point (guard/points).

    from shardwise.testing import faults

    with faults.injected(faults.Fault("kill", rank=1, step=3, at="update")):
        shardwise.train("digits", "dp_shard=2", restarts=1, checkpoint_every=2)

Ranks that are started inside (by `train`, `launch`, a `RankPool`'s jobs) meet them; so does a script under torchrun
where `faults.environment(...)` is in its environment. A fault strikes once in all attempts of a run, unless
`times` says otherwise.

    kill, exit, raise      SIGKILL; leaves with code 41; raises `Injected`
    segfault, abort        a crash in C: SIGSEGV, SIGABRT
    stop                   SIGSTOP: the process is there and does nothing
    lock                   a C call holds the interpreter's lock, for `seconds`
    sleep                  the rank is late by `seconds`
    nan                    one element of one gradient of this rank is NaN ("forward")
    flip-weight, flip-optimizer, flip-buffer     one bit of what this rank holds is another
    eio, enospc            the next change of a file of this rank's checkpoint fails so ("disk")
    disconnect             all of the rank's network connections are closed
    drop                   packets from and to the rank vanish without a word, as on a link that is gone: the rank has
                           to be in a network namespace of its own (`ip netns exec`), whose links are taken down

Points: "start", "input", "forward", "reduce", "update", "evaluate", "save", "disk", "end" (`shardwise.guard.points`).
"disk" is each write, sync, rename and removal of a checkpoint, in the process that does it (the rank's, or its
writer's); its step is the checkpoint's. A script that calls `prepare` comes to "input", "forward" (a batch is handed
out), "reduce", "update", "save" and "disk". With `after=N` a fault lets a process pass its point N times first.
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
    """The error of a fault "raise"."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject: its kind, and the rank, step and point that it strikes.

    step      optimizer steps done; None: any
    at        the point of the step
    name      of the parameter or buffer that is corrupted; None: the first
    element   of it, in row-major order; `bit` of that element, 0 the lowest
    seconds   of "sleep" and "lock"
    times     how often it strikes, over all attempts
    after     how often a process passes the point first
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
        # a disk fails where files are written, at no point of a step
        if self.at != "disk" and self.kind in ("eio", "enospc"):
            raise InputError(f"fault {self.kind!r} at {self.at!r}: eio and enospc are for 'disk'")
        # these change weights or optimizer state, of which there is none before the first step or while files are
        # written
        if self.kind in STATE and self.at in ("start", "save", "disk"):
            raise InputError(f"fault {self.kind!r} needs the rank's state, which {self.at!r} does not have")


@contextmanager
def injected(*faults: Fault) -> Iterator[Path]:
    """Context: ranks started inside meet these faults; yields a folder, of which `struck` counts those that did."""
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
    """Returns {environment variable: value} that bring these faults to ranks; `folder` records which have struck."""
    text = json.dumps({"folder": str(folder), "faults": [asdict(fault) for fault in faults]})
    return {VARIABLE: text, points.VARIABLE: f"{__name__}:meet"}


def struck(folder: str | Path) -> int:
    """Returns how many times faults have struck."""
    return len(list(Path(folder).glob("fault-*")))


def meet(point: str, step: int, subject: Any) -> None:
    """The listener of `shardwise.guard.points`: does what the environment says for this rank, step and point."""
    faults_text = os.environ.get(VARIABLE)
    if not faults_text:
        return
    plan = json.loads(faults_text)
    for number, fields in enumerate(plan["faults"]):
        fault = Fault(**fields)
        # other ranks, steps and points go by
        if fault.at != point or not _is_mine(fault, step, subject):
            continue
        at = (plan["folder"], number)
        _passed[at] = _passed.get(at, 0) + 1
        # `after` matches are let through; `times` counts over processes, so that an attempt that follows is spared
        if _passed[at] > fault.after and _first(Path(plan["folder"]), number, fault.times):
            KINDS[fault.kind](fault, subject)


_passed: dict[tuple[str, int], int] = {}  # (folder, number of a fault) -> how often this process came to its point


def _is_mine(fault: Fault, step: int, subject: Any) -> bool:
    """Whether a fault is for this rank, step and point."""
    if fault.kind in STATE and subject is None:  # a script's model that waits for its first forward
        return False
    if fault.at == "disk":  # the process that writes does not know the step, but its name
        named = re.search(r"step-(\d+)", str(subject[1]))
        step = int(named[1]) if named else -1
    return int(os.environ.get("RANK", "0")) == fault.rank and fault.step in (None, step)


def _first(folder: Path, number: int, times: int) -> bool:
    """Record one more strike of a fault; returns False where it has struck `times` times, in all processes."""
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
    """Hold the interpreter's lock for `fault.seconds`: no other thread of Python runs."""
    import ctypes

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)  # where a signal ends the call early, no other thread is let in between
    try:
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until:
            ctypes.PyDLL(None).sleep(max(1, int(until - time.monotonic())))
    finally:
        sys.setswitchinterval(interval)


def _nan(fault: Fault, state: Any) -> None:
    """Set one element of a parameter's next gradient to NaN, by a hook on the parameter."""
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
    """Flip one bit of one element of this rank's part of a tensor."""
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
    """Flip one bit in the optimizer's state of a parameter, the first without a name; `InputError` for none."""
    import torch

    for slot in state.technique.slots:
        # without a name the first parameter will do
        if fault.name in (None, slot.name):
            held = [value for value in state.optimizer.state[slot.master].values() if isinstance(value, torch.Tensor)]
            # a state with a dim holds a number for each element; a counter has none to flip
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
    """Shut down this process's network connections."""
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
    """Take down the links of this rank's network namespace; `InputError` where it has no named one."""
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
