"""Tell the other ranks that this one has come to its end, so that none of them waits for it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_KEY = "shardwise-ended"


def say_ended() -> None:
    """Note in the store of the process group that this rank makes no more calls. Nothing where there is no group."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    with suppress(RuntimeError):  # the rank that kept the store has ended before, and nobody waits
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=5))
        store.set(f"{_KEY}/{dist.get_rank()}", "")


def has_ended(store: Any, rank: int) -> bool:
    """Returns whether a rank has called `say_ended`; `store` is the process group's."""
    return bool(store.check([f"{_KEY}/{rank}"]))
