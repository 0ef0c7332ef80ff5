"""Profiles a few steps of a script's loop: `shardwise run --profile-steps 10:12 train.py`.

A step lasts from one call of `optimizer.step()` to the next, with what the script does there itself (logging, an
evaluation). The traces and the table are those of a run (observe/profile), in a folder `profile` where the script runs.

What this does not do: the table for a GPU; more than the first of the models that one loop trains.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from shardwise.engine.engine import Engine
from shardwise.observe.profile import StepProfile
from shardwise.observe.profile_steps import FOLDER, read_steps_of_script
from shardwise.ranks.script import PROFILE_STEPS


class ScriptProfile:
    """The profile of the script's steps in the range `steps`, from 0; `stepped` is called after each step."""

    def __init__(self, steps: range, engine: Engine) -> None:
        self._profile = StepProfile(steps, engine, Path.cwd())
        self._step = 0  # the current step
        self._under_way = ExitStack()  # open range of the current step in the trace

    def reading(self) -> AbstractContextManager[None]:
        """Context around the wait for a batch."""
        return self._profile.inside(self._step, "input")

    def stepped(self) -> None:
        """Ends a step and begins the next; after the last profiled step writes the traces and prints the table.

        Collective then.
        """
        self._under_way.close()
        table, profile = self._profile.tell(self._step), self._profile
        if self._step == profile.steps.stop - 1 and profile.engine.rank == 0:
            sys.stderr.write(f"{table}{table and chr(10)}traces of all ranks: {profile.folder / FOLDER}\n")
        self._step += 1
        self._profile.before(self._step)
        self._under_way.enter_context(self._profile.inside(self._step, "step"))


def asked_profile(engine: Engine) -> ScriptProfile | None:
    """Returns the profile that the environment asks for (`PROFILE_STEPS`), or None."""
    text = os.environ.get(PROFILE_STEPS)
    return None if not text else ScriptProfile(read_steps_of_script(text), engine)
