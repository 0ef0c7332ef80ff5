"""Lets a rank tell the others that its function has ended, so that none of them waits for it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_KEY = "shardwise-ended"


def say_ended() -> None:
    """Notes in the process group's store that this rank makes no more calls; does nothing without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    with suppress(RuntimeError):  # the store's host has ended before, so nobody can wait for this rank
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=5))
        store.set(f"{_KEY}/{dist.get_rank()}", "")


def has_ended(store: Any, rank: int) -> bool:
    """Whether `rank` has called `say_ended`; `store` is the process group's."""
    return bool(store.check([f"{_KEY}/{rank}"]))
