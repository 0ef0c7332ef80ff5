"""Options that every command has."""

from __future__ import annotations

from collections.abc import Callable

import click


def common(function: Callable) -> Callable:
    """The options that every command has; `Answer` reads them from the words, so they work in bad ones too."""
    for name, text in (
        ("--traceback", "Show the whole traceback of a failure."),
        ("--json", "Write exactly one JSON object to stdout, whatever happens; all else goes to stderr."),
    ):
        function = click.option(name, is_flag=True, expose_value=False, help=text)(function)
    return function
