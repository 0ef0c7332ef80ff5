"""Options that every command has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shardwise.errors import InputError


class WholeNumber(click.IntRange):
    """A whole number within bounds; click calls it an "integer range"."""

    name = "whole number"


def output_file(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """The path of a file to write, refused before the work where its folder is not there or cannot be written."""
    if path is not None:
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {folder}")
        if not os.access(folder, os.W_OK):
            raise InputError(f"cannot write {path}: {folder} may not be written")
    return path


def given(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """The text as it was given, refused where nothing is: a variable of the shell that was never set."""
    if text is not None and not text.strip():
        raise InputError(f"{_named(parameter)} is empty: give it its value, or leave it out")
    return text


def _named(parameter: click.Parameter) -> str:
    """`--plan`, or `PLAN` of an argument."""
    return parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name


def given_plan(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """The plan as it was given, refused where nothing is: a variable of the shell that was never set."""
    if text is not None and not text.strip():
        raise InputError(f"{_named(parameter)} is empty: give a plan, such as dp_shard=2,zero=3, or single")
    return text


def common(function: Callable) -> Callable:
    """The options that every command has; `Answer` reads them from the words, so they work in bad ones too."""
    for name, text in (
        ("--traceback", "Show the whole traceback of a failure."),
        ("--json", "Write exactly one JSON object to stdout, whatever happens; all else goes to stderr."),
    ):
        function = click.option(name, is_flag=True, expose_value=False, help=text)(function)
    return function


def with_adapters(target: str, overrides: tuple[str, ...], command: str) -> Any:
    """Returns the named task, with adapters in its model where keys of [lora] are set; of a task no others are read."""
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
