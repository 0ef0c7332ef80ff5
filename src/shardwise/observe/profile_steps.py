"""Read which steps a run profiles, from a text such as "10:12"."""

from __future__ import annotations

from shardwise.errors import InputError

LONGEST = 20  # steps; a trace grows by megabytes in each


def read_steps(text: str | None, steps: int) -> range:
    """Returns the steps of "10:12" (10 and 11); empty where nothing was asked for. Raises `InputError`."""
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    profiled = range(int(first), int(last))
    if not profiled or profiled.stop > steps:
        raise InputError(f"train.profile_steps: {text} is no part of the run's {steps} steps (0:{steps})")
    if len(profiled) > LONGEST:
        raise InputError(f"train.profile_steps: {text} is {len(profiled)} steps; at most {LONGEST} fit into a trace")
    return profiled
