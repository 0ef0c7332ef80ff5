"""Every error a user can meet, each with its exit code. A message says what happened, where, why, and what to do.

The exit codes of the command line are properties of the errors: 1 the run failed, 2 bad input, 3 refused plan, 75
stopped when asked to, to be started again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class ShardwiseError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(ShardwiseError):
    """The user's input is wrong: a misspelt key, a missing file, a module that fails on one process too."""

    exit_code = 2


class NoSuchName(InputError, AttributeError):
    """A name that `shardwise` does not have; Python's `hasattr` answers False."""


class RefusedPlan(ShardwiseError):
    """The plan (or the plan on this task) would not equal one process, or its room is not built."""

    exit_code = 3


class RunError(ShardwiseError):
    """The run failed after it began: a rank died, a loss became non-finite, a wait passed its deadline."""


class Stopped(RunError):
    """The run was asked to stop and did: its state is saved, and the same command goes on."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


def rebuilt(kind: type[ShardwiseError], message: str) -> ShardwiseError:
    """Returns an error of a class with this message, whatever arguments its constructor takes."""
    error = kind.__new__(kind)  # without __init__, whose arguments are known where it was raised alone
    error.args = (message,)
    return error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of its class where it has none."""
    message = str(error).strip()
    return message.splitlines()[0] if message else type(error).__name__


def no_keyboard(text: str) -> str:
    """Returns `; '＝' is not the keyboard's '='` for the first sign that only looks like one of syntax; "" for none."""
    import unicodedata

    alike = {"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "−": "-"}
    for sign in text:
        plain = alike.get(sign) or unicodedata.normalize("NFKC", sign)
        if plain != sign and plain.isascii() and not plain.isalnum():
            return f"; {sign!r} is not the keyboard's {plain!r}: type it anew"
    return ""


def at_home(text: str) -> str:
    """Returns a path with its `~` as the home folder: a shell leaves it in `--set key=~/runs`; other text as it is."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Returns the known word that `word` was probably meant to be: one that begins with it, or alike; None if none is.

    Long words must share more: else any two do.
    """
    import difflib

    words = list(words)
    # a short word begins many others: it must be all of a part (`ema` of `ema_decay`)
    begun = [known for known in words if known.startswith(f"{word}_") or (len(word) > 3 and known.startswith(word))]
    if begun:
        return begun[0]
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.6 if len(word) < 6 else 0.65)), None)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest known word, or an empty string."""
    near = nearest(word, words)
    return f"; did you mean '{near}'?" if near else ""
