"""Options, types and callbacks of click that commands share, and writing their output files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shardwise.errors import InputError, at_home

MARK = "written by shardwise"  # in every file that a command writes; files without it are not overwritten


class WholeNumber(click.IntRange):
    """A type of click for whole numbers within bounds, which help texts call a "whole number"."""

    name = "whole number"


class Number(click.FloatRange):
    """A type of click for numbers within bounds, which help texts call a "number"."""

    name = "number"


def output_file(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Returns `path` with ~ expanded (None unchanged); `InputError` if it cannot be written. A callback of click."""
    if path is None:
        return None
    path = os.path.expanduser(path)
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: {folder} may not be written")
    if context.params.get("refine") is None:  # `probe --refine` corrects an existing file
        keep_others(Path(path))
    return path


def keep_others(path: Path) -> None:
    """Raises `InputError` if there is a file at `path` that shardwise did not write (one without `MARK`)."""
    if path.is_file() and path.stat().st_size and MARK.encode() not in path.read_bytes():
        raise InputError(f"{path} exists, and shardwise did not write it: give another name, or move it away")


def write(path: str | Path, text: str) -> None:
    """Writes an output file of a command, with `MARK` in a comment; `InputError` if it cannot be written."""
    if text.startswith("<"):
        text = f"{text}\n<!-- {MARK} -->\n"
    elif not text.startswith("{"):  # JSON has no comments
        text = f"# {MARK}\n{text}"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def given(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Returns an option's text with ~ expanded; `InputError` if it is empty (an unset shell variable)."""
    if text is not None and not text.strip():
        raise InputError(f"{_named(parameter)} is empty: give it its value, or leave it out")
    return text and at_home(text)


def _named(parameter: click.Parameter) -> str:
    """Returns a parameter's name on the command line: `--plan` for an option, `PLAN` for an argument."""
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name


def given_plan(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Returns a plan's text with ~ expanded; `InputError` if it is empty (an unset shell variable)."""
    if text is not None and not text.strip():
        raise InputError(f"{_named(parameter)} is empty: give a plan, such as dp_shard=2,zero=3, or single")
    return text and at_home(text)


def common(function: Callable) -> Callable:
    """Adds --traceback and --json to a command (a decorator).

    `Answer` reads them from the words itself, so that they also work if the command line is wrong.
    """
    for name, text in (
        ("--traceback", "Show the whole traceback of a failure."),
        ("--json", "Write exactly one JSON object to stdout, whatever happens; all else goes to stderr."),
    ):
        function = click.option(name, is_flag=True, expose_value=False, help=text)(function)
    return function


def with_adapters(target: str, overrides: tuple[str, ...], command: str) -> Any:
    """Returns `target`, or an `AdaptedTask` of it if `overrides` ("KEY=VALUE" of each --set) has keys of [lora].

    command   name of the command, for the message

    Raises `UsageError` for keys of other sections.
    """
    if not overrides:
        return target
    from shardwise.config import load

    others = [text for text in overrides if not text.startswith("lora.")]
    if others:
        raise click.UsageError(
            f"--set {others[0]}: {command} reads keys of [lora] for a task; others are CONFIG.toml's"
        )
    section = load(overrides=overrides).config.lora
    from shardwise.task_names import AdaptedTask

    return AdaptedTask(target, section)
