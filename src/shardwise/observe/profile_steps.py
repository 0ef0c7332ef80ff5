"""Read which steps a run profiles, from a text such as "10:12"."""

from __future__ import annotations

from shardwise.errors import InputError

LONGEST = 20  # steps; a trace grows by megabytes in each


def read_steps(text: str | None, steps: int) -> range:
    """The steps of "10:12" (10 and 11); empty where nothing was asked for. Raises `InputError`."""
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    found = range(int(first), int(last))
    if not found or found.stop > steps:
        raise InputError(f"train.profile_steps: {text} is no part of the run's {steps} steps (0:{steps})")
    if len(found) > LONGEST:
        raise InputError(f"train.profile_steps: {text} is {len(found)} steps; at most {LONGEST} fit into a trace")
    return found
