"""How a command ends: its answer on stdout, all else on stderr, and an exit code (of errors: errors.py).

0 done, 1 failed or no parity, 2 bad input, 3 refused plan, 75 stopped and saved, 130 interrupted. With `--json`, stdout
holds exactly one JSON object whatever happens: while a command runs, all that anything writes to stdout goes to stderr.
"""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

from shardwise.errors import RefusedPlan, ShardwiseError, nearest, no_keyboard
from shardwise.layout.other_words import as_ours, is_key, key_of, ours_of
from shardwise.layout.plan import Plan

INTERRUPTED = 130
COMMON: dict[str, Any] = {"refused": None, "error": None, "world_size": None, "plan": None}
FIELDS: dict[str, dict[str, Any]] = {
    "verify": {
        "parity": False,
        "loss_error": None,
        "norm_error": None,
        "gradient_error": {},
        "parameter_error": {},
        "buffer_error": {},
        "optimizer_error": {},
        "bars": {},
        "differences": [],
        "unproven": [],
        "first_difference": None,
        "cause": None,
        "notes": [],
        **COMMON,
    },
    "plan": {
        "cluster": None,
        "proposals": [],
        "lost": {},
        "notes": [],
        "considered": None,
        "fitted": None,
        "command": None,
        **COMMON,
    },
    "simulate": {
        "step_s": None,
        "mfu": None,
        "parts_s": {},
        "memory": [],
        "fits": None,
        "cluster": None,
        "notes": [],
        **COMMON,
    },
    "probe": {"cluster": None, "file": None, **COMMON},
    "compare": {"plans": [], **COMMON},
    "train": {"folder": None, "steps": None, "loss": None, "eval_loss": None, **COMMON},
    "show": {"schedule": None, "microbatches": None, "stages": None, "bubble": None, "live": [], "rows": [], **COMMON},
    "checkpoint": {"checkpoint": None, **COMMON},
    "launch": {"files": {}, "map": [], "nodes": None, "submitted": None, "job": None, **COMMON},
    "doctor": {"checks": [], **COMMON},
    "report": {"file": None, "runs": [], **COMMON},
    "config": {"config": None, "sources": None, **COMMON},
}


class Answer:
    """A command's answer so far: text, exit code, and `fields`, the JSON object."""

    def __init__(self, args: list[str]) -> None:
        self.args, self.as_json = args, "--json" in args
        self.show_traceback = "--traceback" in args
        self.command = next((arg for arg in args if not arg.startswith("-")), "")
        self.fields: dict[str, Any] = copy.deepcopy(FIELDS.get(self.command, COMMON))
        self.text = ""
        self.code = 0

    def fail(self, error: BaseException) -> None:
        """Set code and message from what ended the command, and tell it on stderr."""
        self.code, message = _code_and_message(error, self.command)
        # JSON tells a refusal under a key of its own, so that a script need not read the message
        if isinstance(error, RefusedPlan) and "refused" in self.fields:
            self.fields["refused"] = message
        else:
            self.fields["error"] = message
        # click prints the usage line for its own errors only where it handles them itself
        if isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        # torchrun shows the message of the first failed rank at its end; on stderr it would stand there twice
        if not _left_to_torchrun(message):
            click.echo(f"shardwise: {message}", err=True)
        if self.show_traceback:
            click.echo(_whole(error), err=True)

    def output(self) -> str:
        """Returns the text for stdout: JSON or the answer."""
        return json.dumps(self.fields, allow_nan=False, default=str) if self.as_json else self.text


def _left_to_torchrun(message: str) -> bool:
    """Write the message where torchrun reads it, to show it once at the end; returns False without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": f"shardwise: {message}", "timestamp": int(time.time())}, file)
    return True


class Ended(BaseException):
    """Raised where SIGTERM has arrived.

    arrived   when, by the monotonic clock; None before
    raised    the exception that was raised for it, as long as anything holds it: modules that are being imported
              swallow exceptions or turn them into others
    """

    arrived: float | None = None
    raised: Callable[[], Ended | None] = staticmethod(lambda: None)


def _code_and_message(error: BaseException, command: str) -> tuple[int, str]:
    """Returns (exit code, message) for the exception that ended a command."""
    left = {"train": "; nothing was saved that is not in a checkpoint", "run": "; its ranks are ended too"}.get(
        command, ", before there was an answer"
    )
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, f"interrupted{left}"
    # SIGTERM may come out as another error, of code that swallowed it or broke on it
    if isinstance(error, Ended) or Ended.arrived is not None:
        return 128 + signal.SIGTERM, f"ended by SIGTERM{left}"
    if isinstance(error, click.ClickException):
        return error.exit_code, _usage(error)
    log = getattr(error, "log", None)
    if isinstance(error, ShardwiseError):
        message, trace = str(error), getattr(error, "remote_traceback", "")
        if trace and "\nTraceback " in message:  # a rank's exception: its traceback is in the log
            from shardwise.task_names import where_in_text

            place = where_in_text(trace)
            message = message.splitlines()[0] + (f" ({place})" if place else "")
            log = log or _written(error)
        return error.exit_code, message + (f"\nthe details are in {log}" if log else "")
    from shardwise.task_names import where

    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return 1, f"failed: {where(error)}: raise what a process may open (ulimit -n), or take fewer ranks"
    return 1, f"failed: {where(error)}\nthe details are in {log or _written(error)} (or add --traceback)"


def _usage(error: click.ClickException) -> str:
    """Returns what is wrong with a command line and what to do; click's own message where it says both."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and error.ctx is not None:
        return _say_which(error.ctx)
    message = " ".join(error.format_message().split()).rstrip(".")
    words = getattr(getattr(getattr(error, "ctx", None), "obj", None), "args", [])  # without one before a command
    # a dash or quote of a text editor in place of the keyboard's makes an option an argument
    if sign := next(filter(None, (no_keyboard(word[:1]) for word in words)), ""):
        return message + sign
    extra = re.search(r"extra arguments? \((\w+=[^)]*)\)", message)
    if extra is not None:
        return f"{message}: write a plan without spaces, as in dp_shard=2,{extra[1].replace(' ', ',')}"
    if isinstance(error, click.NoSuchOption) and (advice := _instead(error, words)):
        return f"No such option '{error.option_name}'; {advice}"
    if isinstance(error, click.BadOptionUsage) and error.ctx is None:  # found before there was a command
        return f"{message}; --help shows what it takes"
    # click's own suggestion ("did you mean") is advice enough
    if isinstance(error, click.UsageError) and error.ctx is not None and "id you mean" not in message:
        if message.startswith("No such command") and error.ctx.parent is not None:
            return f"{message}; {_say_which(error.ctx)}"
        return f"{message}; {error.ctx.command_path} --help shows what it takes"
    return message


def _instead(error: click.NoSuchOption, words: list[str]) -> str:
    """Returns what to write in the place of an unknown option; "" where nothing tells. `words`: the command line."""
    params = error.ctx.command.params if error.ctx is not None else []
    of_script = any(param.name == "arguments" for param in params) and any(word.endswith(".py") for word in words)
    # an option that resembles one of ours is a slip of the pen, and no option of the script
    if of_script and not nearest(error.option_name.strip("-"), [name.strip("-") for name in error.possibilities or ()]):
        return f"a script's own stand behind --, as -- {error.option_name} ..."
    options = {option for param in params for option in param.opts}
    one_dash = next((word for word in words if f"-{word.partition('=')[0]}" in options), None)  # read as -p -l -a -n
    if one_dash is not None:
        return f"did you mean -{one_dash}?"
    return _as_a_key(error)


def _as_a_key(error: click.NoSuchOption) -> str:
    """Returns advice to write an unknown option as a key of the plan or configuration; "" where no key fits."""
    if any(option.startswith(error.option_name) for option in error.possibilities or ()):  # the option's own name, cut
        return ""
    taken = {param.name for param in error.ctx.command.params} if error.ctx is not None else set()
    name = error.option_name.lstrip("-").replace("-", "_")
    if "plan" in taken and name in Plan.__dataclass_fields__:
        return f"give it as --plan {name}=..."
    if "overrides" in taken and (key := _key(name)):
        return f"give it as --set {key}=..."
    # not a key of ours: perhaps another library's word for one
    ours = ours_of(name) if "plan" in taken else None
    # words of other libraries, of plans first: these are the more specific
    if ours is None and "overrides" in taken:
        ours = key_of(name)
    if ours is None:
        return ""
    return f"give it as --plan {ours}" if is_key(ours) else as_ours(ours).removeprefix("; ")


def _key(name: str) -> str | None:
    """Returns the configuration's key that an option's name, perhaps another tool's, stands for; None for others."""
    from shardwise.config.effective import keys

    key = next((key for key in keys() if key.rpartition(".")[2] == name), None)
    other = (key_of(name) or "").partition(",")[0]
    return key or (other if other in keys() else None)


def _say_which(context: click.Context) -> str:
    """Returns "say which: " with the commands of a group."""
    names = context.command.list_commands(context) if isinstance(context.command, click.Group) else []
    return f"say which: {', '.join(f'{context.command_path} {name}' for name in names)}"


def _written(error: BaseException) -> str:
    """Returns the path of a new file with the whole traceback, or why there is none."""
    try:
        handle, path = tempfile.mkstemp(prefix="shardwise-error-", suffix=".log")
    except OSError as full:
        return f"no file ({full.strerror})"
    os.close(handle)
    Path(path).write_text(_whole(error), encoding="utf-8")
    return path


def _whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def speaks() -> bool:
    """Returns whether this process prints the answer: the first rank of a launcher's, or a process by itself."""
    from shardwise.ranks import here

    try:
        place = here()
    except ShardwiseError:  # an environment that contradicts itself: each process says so
        return True
    return place is None or place.rank == 0


@contextmanager
def quiet_stdout(active: bool) -> Iterator[None]:
    """Context: what is written to stdout, by Python and by everything below it, goes to stderr."""
    if not active:
        yield
        return
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):  # a stdout of Python alone, as a notebook's
        number = None
    kept = os.dup(number) if number is not None else None
    try:
        if number is not None:
            os.dup2(2, number)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if number is not None and kept is not None:
            os.dup2(kept, number)
            os.close(kept)
