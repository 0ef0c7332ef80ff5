"""`SIZES`: every constant above which the code takes another path, and a small value at which a proof takes that path.

    verify TASK     steps 0, 2, ... at the sizes as they are, steps 1, 3, ... at the small ones
    verify CONFIG   the run in float64 and the steps in its own precision at the small ones, the run in its own
                    precision at the sizes as they are

A small model never reaches 2^26 scores or a megabyte of a file, so the code for those would never be proven. A size in
`AS_THEY_ARE` is not made small, since a proof takes both paths at it anyway.

What this does not do: change sizes of caches, which do not affect results, or limits beyond which the code refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class PathSize:
    """A named constant of a module, which its functions read when they run.

    module, name  of the constant, the module without "shardwise."
    small         its value in proofs; for a function, the function in its place
    what          what changes at it
    """

    module: str
    name: str
    small: Any
    what: str


def _no_kernel(*args: Any) -> None:
    """Returns None, like `kernel_for` on a device without a fused kernel."""


SIZES = (
    PathSize("parallel.sequence.block_attention", "MOST_SCORES", 64, "scores of more are written a few rows at a time"),
    PathSize(
        "parallel.sequence.block_attention", "kernel_for", _no_kernel, "blocks are written out, as where no kernel is"
    ),
    PathSize("parallel.sequence.ring_plan", "LEAST_TILE", 2, "positions whose mask is made and looked at by itself"),
    PathSize("parallel.sequence.ring_plan", "MOST_PAIRS", 1, "more pairs of runs are one masked block"),
    PathSize("part.tiles.overlap", "LEAST", 0.0, "larger convolutions compute while their halo is on its way"),
    PathSize("part.tiles.overlap", "BORDER", 1.0, "those of which more is border wait for it"),
    PathSize("comm.together", "MOST_BYTES", 64, "tables of more are gathered in several rounds"),
    PathSize("checkpoint.save", "SPLIT_BYTES", 8, "a piece of more is written by several ranks"),
    PathSize("checkpoint.stored", "AT_ONCE", 3, "elements of more are read in several parts"),
    PathSize("checkpoint.pieces", "FEW", 1, "more runs of a dim are copied by index"),
    PathSize("checkpoint.files", "CHUNK", 48, "bytes of more are written and read in several parts"),
    PathSize("digest", "_CHUNK", 2, "words of more are hashed in several parts"),
    PathSize("step.scaler", "GROW_AFTER", 6, "after as many good steps the loss scale grows"),
)

AS_THEY_ARE = (  # (module, name, how a proof takes both paths)
    ("data.blend", "BLOCK", "`visited` reads a blend's first block, around its second one's begin, and in its last"),
    ("layout.flat_buckets", "FIRST_BUCKET_BYTES", "`small_buckets` makes those of a proof a third of the model"),
)


def small_of(name: str) -> Any:
    """Returns the small value of the constant `name` in `SIZES`."""
    return next(size.small for size in SIZES if size.name == name)


@contextmanager
def small_sizes() -> Iterator[None]:
    """Context in which each of `SIZES` has its small value, for all threads, since backward may use another one."""
    modules = [import_module(f"shardwise.{size.module}") for size in SIZES]
    before = [getattr(module, size.name) for module, size in zip(modules, SIZES, strict=True)]
    try:
        for module, size in zip(modules, SIZES, strict=True):
            setattr(module, size.name, size.small)
        yield
    finally:
        for module, size, value in zip(modules, SIZES, before, strict=True):
            setattr(module, size.name, value)


@contextmanager
def sizes_of(step: int) -> Iterator[None]:
    """Context around a step of a proof, counted from 0: odd steps run at the small sizes."""
    if step % 2 == 0:
        yield
        return
    with small_sizes():
        yield
