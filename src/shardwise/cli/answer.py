"""How a command ends: its answer on stdout, all else on stderr, and an exit code (of errors: errors.py).

0 done, 1 failed or no parity, 2 bad input, 3 refused plan, 75 stopped and saved, 130 interrupted. With `--json`, stdout
has exactly one JSON object in any case: while a command runs, everything written to stdout goes to stderr.
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
    """A command's answer, which the command fills in.

    args      words of the command line; `command`: the first that is no option
    fields    the JSON object for --json, which begins with `FIELDS` of the command
    text      for stdout without --json; `code`: exit code
    """

    def __init__(self, args: list[str]) -> None:
        self.args, self.as_json = args, "--json" in args
        self.show_traceback = "--traceback" in args
        self.command = next((arg for arg in args if not arg.startswith("-")), "")
        self.fields: dict[str, Any] = copy.deepcopy(FIELDS.get(self.command, COMMON))
        self.text = ""
        self.code = 0

    def fail(self, error: BaseException) -> None:
        """Sets the exit code and the JSON's "error" or "refused" from `error`, and prints its message to stderr."""
        self.code, message = _code_and_message(error, self.command)
        # a refusal has a key of its own, so that a script need not parse the message
        if isinstance(error, RefusedPlan) and "refused" in self.fields:
            self.fields["refused"] = message
        else:
            self.fields["error"] = message
        # click prints the usage line only for errors that it handles itself
        if isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        # torchrun prints the message of the first failed rank at its end, so it must not be on stderr too
        if not _left_to_torchrun(message):
            click.echo(f"shardwise: {message}", err=True)
        if self.show_traceback:
            click.echo(_whole(error), err=True)

    def output(self) -> str:
        """Returns the text for stdout: `fields` as JSON with --json, else `text`."""
        return json.dumps(self.fields, allow_nan=False, default=str) if self.as_json else self.text


def _left_to_torchrun(message: str) -> bool:
    """Writes the message into torchrun's error file, from which torchrun prints it; returns False without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": f"shardwise: {message}", "timestamp": int(time.time())}, file)
    return True


class Ended(BaseException):
    """Raised in the main thread when SIGTERM arrives.

    arrived   class attribute: time of the first SIGTERM, of the monotonic clock; None: there was none
    raised    class attribute: () -> the exception raised last, None once it is garbage collected, which shows that code
              swallowed it (modules that are being imported may do so)
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
    # code that catches or breaks on `Ended` may end in another error
    if isinstance(error, Ended) or Ended.arrived is not None:
        return 128 + signal.SIGTERM, f"ended by SIGTERM{left}"
    if isinstance(error, click.ClickException):
        return error.exit_code, _usage(error)
    log = getattr(error, "log", None)
    if isinstance(error, ShardwiseError):
        message, trace = str(error), getattr(error, "remote_traceback", "")
        if trace and "\nTraceback " in message:  # a rank's traceback goes into the log, not into the message
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
    """Returns the message for a wrong command line: click's own, completed by what to do."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and error.ctx is not None:
        return _say_which(error.ctx)
    message = " ".join(error.format_message().split()).rstrip(".")
    words = getattr(getattr(getattr(error, "ctx", None), "obj", None), "args", [])  # there may be no context
    # a typographic dash or quote, pasted from a text editor, makes an option an argument
    if sign := next(filter(None, (no_keyboard(word[:1]) for word in words)), ""):
        return message + sign
    extra = re.search(r"extra arguments? \((\w+=[^)]*)\)", message)
    if extra is not None:
        return f"{message}: write a plan without spaces, as in dp_shard=2,{extra[1].replace(' ', ',')}"
    if isinstance(error, click.NoSuchOption) and (advice := _instead(error, words)):
        return f"No such option '{error.option_name}'; {advice}"
    if isinstance(error, click.BadOptionUsage) and error.ctx is None:  # raised before the command was known
        return f"{message}; --help shows what it takes"
    # nothing is added to click's own suggestion ("did you mean")
    if isinstance(error, click.UsageError) and error.ctx is not None and "id you mean" not in message:
        if message.startswith("No such command") and error.ctx.parent is not None:
            return f"{message}; {_say_which(error.ctx)}"
        return f"{message}; {error.ctx.command_path} --help shows what it takes"
    return message


def _instead(error: click.NoSuchOption, words: list[str]) -> str:
    """Returns advice on what to write in place of an unknown option; "" without any. `words`: the command line."""
    params = error.ctx.command.params if error.ctx is not None else []
    of_script = any(param.name == "arguments" for param in params) and any(word.endswith(".py") for word in words)
    # an option that resembles one of the command's is a typing error, and no option of the script
    if of_script and not nearest(error.option_name.strip("-"), [name.strip("-") for name in error.possibilities or ()]):
        return f"a script's own stand behind --, as -- {error.option_name} ..."
    options = {option for param in params for option in param.opts}
    # click reads -plan as -p -l -a -n
    one_dash = next((word for word in words if f"-{word.partition('=')[0]}" in options), None)
    if one_dash is not None:
        return f"did you mean -{one_dash}?"
    return _as_a_key(error)


def _as_a_key(error: click.NoSuchOption) -> str:
    """Returns advice to write an unknown option as a key of the plan or configuration; "" if no key fits."""
    # the beginning of an option's name is a typing error
    if any(option.startswith(error.option_name) for option in error.possibilities or ()):
        return ""
    taken = {param.name for param in error.ctx.command.params} if error.ctx is not None else set()
    name = error.option_name.lstrip("-").replace("-", "_")
    if "plan" in taken and name in Plan.__dataclass_fields__:
        return f"give it as --plan {name}=..."
    if "overrides" in taken and (key := _key(name)):
        return f"give it as --set {key}=..."
    # perhaps it is another library's name for a field of the plan, or else for a key of the configuration
    ours = ours_of(name) if "plan" in taken else None
    if ours is None and "overrides" in taken:
        ours = key_of(name)
    if ours is None:
        return ""
    return f"give it as --plan {ours}" if is_key(ours) else as_ours(ours).removeprefix("; ")


def _key(name: str) -> str | None:
    """Returns the configuration key that an option's name, perhaps of another library, stands for; None if none."""
    from shardwise.config.effective import keys

    key = next((key for key in keys() if key.rpartition(".")[2] == name), None)
    other = (key_of(name) or "").partition(",")[0]
    return key or (other if other in keys() else None)


def _say_which(context: click.Context) -> str:
    """Returns a message "say which: ..." that lists the commands of a group."""
    names = context.command.list_commands(context) if isinstance(context.command, click.Group) else []
    return f"say which: {', '.join(f'{context.command_path} {name}' for name in names)}"


def _written(error: BaseException) -> str:
    """Writes the whole traceback to a new temporary file; returns its path, or why there is none."""
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
    """Whether this process prints the answer: rank 0 of a launcher, or a process without launcher."""
    from shardwise.ranks import here

    try:
        place = here()
    except ShardwiseError:  # the environment contradicts itself, which each process reports
        return True
    return place is None or place.rank == 0


@contextmanager
def quiet_stdout(active: bool) -> Iterator[None]:
    """Context in which stdout, of Python and of C code, goes to stderr; does nothing unless `active`."""
    if not active:
        yield
        return
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):  # stdout has no descriptor, as in a notebook
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
