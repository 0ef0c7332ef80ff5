"""The errors that users see, each with its exit code, and helpers for their messages.

A message says what happened, where, why, and what to do. Exit codes of the command line: 1 the run failed, 2 bad
input, 3 refused plan, 75 stopped on request, to be started again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class ShardwiseError(Exception):
    """The base class of all errors raised on purpose; `exit_code`: of the command line."""

    exit_code = 1


class InputError(ShardwiseError):
    """Raised if the user's input is wrong: a misspelt key, a missing file, a module that fails on one process too."""

    exit_code = 2


class NoSuchName(InputError, AttributeError):
    """Raised for an attribute that `shardwise` does not have; an AttributeError, so that `hasattr` returns False."""


class RefusedPlan(ShardwiseError):
    """Raised if a plan (or the plan on this task) would not equal one process, or is not implemented."""

    exit_code = 3


class RunError(ShardwiseError):
    """Raised if a run failed after it began: a rank died, a loss became non-finite, a wait passed its deadline."""


class Stopped(RunError):
    """Raised if a run was asked to stop and has: its state is saved, and the same command resumes it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again


def rebuilt(kind: type[ShardwiseError], message: str) -> ShardwiseError:
    """Returns an error of the class `kind` with this message, whatever arguments its constructor takes."""
    error = kind.__new__(kind)  # without __init__, whose arguments are not known here
    error.args = (message,)
    return error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of its class if the message is empty."""
    message = str(error).strip()
    return message.splitlines()[0] if message else type(error).__name__


def no_keyboard(text: str) -> str:
    """Returns a remark on the first typographic character in `text` that looks like an ASCII one; "" without any.

    For example `; '＝' is not the keyboard's '=': type it anew`.
    """
    import unicodedata

    alike = {"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "−": "-"}
    for sign in text:
        plain = alike.get(sign) or unicodedata.normalize("NFKC", sign)
        if plain != sign and plain.isascii() and not plain.isalnum():
            return f"; {sign!r} is not the keyboard's {plain!r}: type it anew"
    return ""


def at_home(text: str) -> str:
    """Returns a path with a leading `~` expanded, which a shell leaves in `--set key=~/runs`; other text unchanged."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Returns the known word that `word` was probably meant to be, one that begins with it or is similar, or None.

    Long words must be more similar than short ones.
    """
    import difflib

    words = list(words)
    # a word of up to three letters must be a whole part of the known word (`ema` of `ema_decay`)
    begun = [known for known in words if known.startswith(f"{word}_") or (len(word) > 3 and known.startswith(word))]
    if begun:
        return begun[0]
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.6 if len(word) < 6 else 0.65)), None)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest known word, or an empty string."""
    near = nearest(word, words)
    return f"; did you mean '{near}'?" if near else ""
