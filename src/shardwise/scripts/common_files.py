"""Warns of a file that several ranks write by `torch.save`, each over the others, since one rank is enough.

Ranks of a host count in the store how many of them have written a path; the second one prints the warning. A path that
contains the rank's number differs between ranks and is never counted twice.

What this does not do: see files that are written otherwise (`open`, numpy, libraries).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from shardwise.scripts.script_lines import line_of_script

TOLD = (
    "several ranks write {}, each over the others [{}]: write it on one, torch.save(...) under if prepared.rank == 0; "
    "calls that give whole weights (model.state_dict()) stand before that, on every rank"
)
_asked: list[weakref.WeakMethod] = []  # the `writes` of the script prepared last; empty before


def watch_saves(writes: Callable[[str], bool]) -> None:
    """Wraps `torch.save`, once per process, to warn on standard error of paths that several ranks write.

    writes   path -> whether to warn of it now (`Meeting.writes`); a bound method, held weakly

    `torch.save` stays wrapped; when the method's object is gone it only saves.
    """
    _asked[:] = [weakref.WeakMethod(writes)]
    if getattr(torch.save, "tells_of_common_files", False):
        return
    save = torch.save

    @wraps(save)
    def telling(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        asked = _asked[0]()
        # group destroyed: the script is about to end, and its store may be gone
        if asked is not None and isinstance(f, str | os.PathLike) and dist.is_initialized():
            path = os.path.abspath(os.fspath(f))
            if asked(path):
                sys.stderr.write(f"shardwise: {TOLD.format(f, line_of_script())}\n")
        return save(obj, f, *args, **options)

    telling.tells_of_common_files = True  # type: ignore[attr-defined]
    torch.save = telling
