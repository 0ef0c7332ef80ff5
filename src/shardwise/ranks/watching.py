"""Begins this rank's record under a launcher, and starts its host's watcher process (guard/watcher)."""

from __future__ import annotations

import atexit
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shardwise.guard import points, watcher
from shardwise.guard.diagnose import Deadlines
from shardwise.guard.records import RankRecord, memory_folder
from shardwise.guard.stacks import answer_with_stacks
from shardwise.ranks import attempts
from shardwise.ranks.meet import MEET_S

BEAT_S = 1.0


def be_watched(deadlines: Deadlines | None) -> None:
    """Begins this rank's record; the first rank of each host starts the watcher. Does nothing if called again.

    deadlines   seconds in which a rank must do something, by phase; None: only a rank that can never go on ends the run
    """
    import torch.distributed as dist

    if points.record() is not None or dist.get_world_size() == 1:
        return
    from shardwise.comm import recording

    host, rank, world = socket.gethostname(), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    if attempts.has_agent() and not attempts.began():  # the script's own group, on a store that attempts share
        store = attempts.fresh(store, rank, world, MEET_S)
    store = dist.PrefixStore("shardwise-watch", store)
    if store.add(f"{host}/first", 1) == 1:
        folder = tempfile.mkdtemp(prefix="shardwise-", dir=memory_folder())
        watcher.start(folder, deadlines)
        store.set(f"{host}/folder", folder)
    folder = store.get(f"{host}/folder").decode()
    try:
        answer_with_stacks(_kept(Path(folder) / f"stacks-{rank}"), crashes=sys.__stderr__)
        record = RankRecord(Path(folder) / f"record-{rank}", rank, world)
    except OSError:  # another container of the same host name, or no space: hangs end by torch's timeout alone
        return
    points.have(record)
    recording.begin(record)
    threading.Thread(target=_beats, args=(record,), name="beats", daemon=True).start()
    atexit.register(lambda: record.ended(not hasattr(sys, "last_value")))  # an error that ended it has been printed


_files: list[Any] = []


def _kept(path: Path) -> Any:
    """Returns the file at `path`, kept open until the process ends, since faulthandler keeps only its descriptor."""
    _files.append(path.open("w"))
    return _files[-1]


def _beats(record: RankRecord) -> None:
    while True:
        time.sleep(BEAT_S)
        record.beat()
