"""Reads which steps a run profiles from a text such as "10:12", in which steps count from 1."""

from __future__ import annotations

from shardwise.errors import InputError

FOLDER = "profile"  # of the traces and the table
LONGEST = 20  # steps; each adds megabytes to a trace


def read_steps(text: str | None, steps: int) -> range:
    """Returns the range, from 0, of "10:12": range(9, 11), its 10th and 11th step; an empty one for None.

    steps  of the run; raises `InputError` for a text that is no range within them
    """
    if text is None:
        return range(0)
    profiled = _range(text, "train.profile_steps")
    if profiled.start < 0 or profiled.stop > steps:
        raise InputError(f"train.profile_steps: {text} is no part of the run's {steps} steps (1:{steps + 1})")
    return profiled


def read_steps_of_script(text: str) -> range:
    """Returns the range, from 0, of a script's "10:12", as `read_steps` does; `InputError` also for the first step."""
    profiled = _range(text, "--profile-steps")
    if profiled.start < 1:
        raise InputError(
            f"--profile-steps: {text}: give the first step and the one before which to end, as 10:12; step 1 of a "
            "script, in which the plan is made, is no step like the others"
        )
    return profiled


def _range(text: str, option: str) -> range:
    """Returns range(9, 11) for "10:12"; `InputError` naming `option` for another text, or 0 or more than 20 steps."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise InputError(f"{option}: {text!r} is no range of steps: give it as 10:12, which is steps 10 and 11")
    profiled = range(int(first) - 1, int(last) - 1)
    if not profiled:
        meant = f"{last}:{first}" if int(first) > int(last) else f"{first}:{int(last) + 1}"
        raise InputError(f"{option}: {text} ends before it begins, for its end is not part of it: {meant}")
    if len(profiled) > LONGEST:
        raise InputError(f"{option}: {text} is {len(profiled)} steps; at most {LONGEST} fit into a trace")
    return profiled
