"""A script that sets up a process group, on ranks that have one: it finds theirs, and leaves it when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def own_group(*, alone: bool) -> Iterator[None]:
    """Context: a script that sets up a process group finds this process's in the place of its own.

    alone   it is the one process of a proof, in no group until then
    """
    begin, end = dist.init_process_group, dist.destroy_process_group

    def join(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            begin("gloo", store=dist.HashStore(), rank=0, world_size=1)

    # the group that this process was started with: a script that runs alone finds none until it sets one up
    if alone and dist.is_initialized():
        end()
    dist.init_process_group, dist.destroy_process_group = join, lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.init_process_group, dist.destroy_process_group = begin, end
        join()  # whoever started this process ends it
