"""Turns a full disk and exhausted memory into one-line errors with advice."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import RunError, ShardwiseError, first_line
from shardwise.look.memory_limits import is_out_of_memory

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
MORE_ROOM = (
    "A smaller batch, accumulate=N (smaller micro-batches) or remat=full need less for activations; dp_shard=N with "
    "zero=3 less for weights, gradients and optimizer"
)


@contextmanager
def told_plainly(folder: Path) -> Iterator[None]:
    """Context in which a full disk or exhausted memory becomes a `RunError` that says what to do.

    folder   the run's, for the message
    """
    try:
        yield
    # shardwise's own errors already say what to do
    except ShardwiseError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise RunError(f"out of memory: {first_line(error)}. {MORE_ROOM}") from error
        full = isinstance(error, OSError) and error.errno in DISK
        if full or "os error 28" in str(error):  # as safetensors tells
            raise RunError(
                f"{folder} cannot be written: {first_line(error)} ({_free(folder)} free there). Make room, or "
                "give another folder with --set train.out=FOLDER"
            ) from error
        raise


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:,.1f} MiB"
