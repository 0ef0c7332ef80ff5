"""Lets a script call `init_process_group` and `destroy_process_group` on ranks that already have a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def own_group(*, alone: bool) -> Iterator[None]:
    """Context in which `init_process_group` keeps an existing group and `destroy_process_group` does nothing.

    alone   Whether the script runs as one process: then there is no group inside until the script asks for one

    Afterwards there is a group in any case, of one process if there was none.
    """
    begin, end = dist.init_process_group, dist.destroy_process_group

    def join(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            begin("gloo", store=dist.HashStore(), rank=0, world_size=1)

    # destroy the group that this process was started with: a script in one process must find none
    if alone and dist.is_initialized():
        end()
    dist.init_process_group, dist.destroy_process_group = join, lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.init_process_group, dist.destroy_process_group = begin, end
        join()  # the code that started this process expects a group and destroys it
