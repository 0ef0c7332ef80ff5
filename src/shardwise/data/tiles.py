"""Reads fields by tile under the axis `domain`, and writes outputs by tile to a .npy file or .zarr store.

A source with `global_shape` is asked for this rank's region alone. The engine then tells by its shape whether a tensor
that was read is a tile or a whole field.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.comm import gather_json
from shardwise.data.evaluation import evaluation_parts
from shardwise.dataset import Source
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.part import Owners, forget
from shardwise.part.crossing import axes_of, cuts_of, settled, taken_apart
from shardwise.part.moves import moved
from shardwise.trace.outside_reads import set_training


class TileSource:
    """A source that reads one region of another source's fields. `region`: (start, stop) along each dim of space."""

    def __init__(self, source: Source, region: tuple[tuple[int, int], ...]) -> None:
        self.source, self.region = source, region

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: list[int], region: Any = None) -> Any:
        return self.source.read(indices, self.region)


def own_tile(source: Source, engine: Engine) -> Source:
    """Returns a source of this rank's tile of each field.

    It is `source` itself if the plan does not shard space, or the source has no `global_shape`.
    """
    positions, whole = engine.state.forward.positions, getattr(source, "global_shape", None)
    if positions is None or not positions.shapes or whole is None:
        return source
    return TileSource(source, positions.region(whole))


def predict_to(
    engine: Engine, source: Source, path: str | Path, *, batch_size: int, select: Callable[[Any], Any] | None = None
) -> tuple[int, ...]:  # fmt: skip
    """Writes the model's outputs for all samples of a source to a file; returns its shape, (samples, ...). Collective.

    path        a `.npy` file, or a `.zarr` store, which gets an array "output"; all ranks must see it
    batch_size  samples of all ranks together that are computed at once
    select      output of the model -> the tensor (samples first) that is written; None: the output is one

    Each rank writes the tile that it computed, so no device holds a whole field. In a store, chunks are one sample and
    one tile, and tiles are first moved to equal bounds, so that each chunk is written by one rank. Raises `RefusedPlan`
    under `pp`, `InputError` for another ending of `path`, or an output that is no such tensor.
    """
    state, path = engine.state, Path(path)
    if state.staged is not None:
        raise RefusedPlan(
            f"plan {engine.plan}: predict_to writes what each rank computed, and under pp stages have none"
        )
    if path.suffix not in (".npy", ".zarr"):
        raise InputError(f"predict_to writes NumPy's .npy files and .zarr stores, got {path}")
    file, done = None, 0
    training = state.module.training
    set_training(state.module, False)
    try:
        for parts in evaluation_parts(own_tile(source, engine), batch_size, engine.data_rank, engine.data_ranks):
            for part in parts:
                output = _output(engine, part.batch, select)
                output = _in_chunks(output) if path.suffix == ".zarr" else output
                # shape and dtype are known from the first output on
                if file is None:
                    file = _opened(path, len(source), output, engine)
                # ranks of an axis along which the output is replicated hold the same elements: one of them writes
                if _is_first(output, engine):
                    _write(file, done + part.start, output[: part.count])
                forget()
                done += part.total
        assert file is not None
        if isinstance(file, np.memmap):
            file.flush()
        gather_json(0, state.mesh.world, state.device)  # a barrier: no rank returns before all have written
        return file.shape
    finally:
        set_training(state.module, training)


@torch.no_grad()
def _output(engine: Engine, batch: Any, select: Callable[[Any], Any] | None) -> torch.Tensor:
    """Returns this rank's part of the model's output, reduced, 16-bit floats as float32; `InputError` for no tensor."""
    forward = engine.state.forward
    output = forward.output(forward.to_device(batch))
    output = output if select is None else select(output)
    if not isinstance(output, torch.Tensor) or not output.dim():
        raise InputError(
            f"predict_to writes one tensor, and the model returned {type(output).__name__}: "
            "select=lambda output: ... takes it from there"
        )
    return settled(output.float() if output.dtype in (torch.bfloat16, torch.float16) else output)


def _in_chunks(output: torch.Tensor) -> torch.Tensor:
    """Returns the output resharded into equal blocks (the last smaller) of each sharded dim, the chunks. Collective."""
    for axis, (_, dim, owners) in zip(axes_of(output), cuts_of(output), strict=True):
        stops = np.minimum(np.arange(1, axis.size + 1) * _chunk(owners), owners.size)
        output = moved(output, dim, Owners(stops, np.arange(axis.size), axis.size), axis)
    return output


def _chunk(owners: Owners) -> int:
    return max(-(-owners.size // owners.ranks), 1)


def _is_first(output: torch.Tensor, engine: Engine) -> bool:
    """Whether this rank is the first of those that hold the same elements of an output."""
    mesh, cut = engine.state.mesh, {name for name, _, _ in cuts_of(output)}
    return all(axis.index == 0 for axis in (*mesh.inner, mesh.tp) if axis.name not in cut)


def _opened(path: Path, samples: int, output: torch.Tensor, engine: Engine) -> Any:
    """Returns the open .npy memory map or zarr array (samples, ...) for the outputs, made by rank 0. Collective.

    output   a first output, for shape and dtype
    """
    state, kind = engine.state, torch.empty(0, dtype=output.dtype).numpy().dtype
    shape = (samples, *output.shape[1:])
    if path.suffix == ".zarr":
        zarr = _zarr()
        # rank 0 creates the store, and the others open it after a barrier
        if engine.rank == 0:
            sizes = {dim: _chunk(owners) for _, dim, owners in cuts_of(output)}
            # a chunk is a rank's block, so that no two ranks write into one chunk
            chunks = [1, *(sizes.get(dim, max(n, 1)) for dim, n in enumerate(shape) if dim)]
            names = ["sample", *(f"dim_{dim}" for dim in range(1, len(shape)))]
            zarr.open_group(str(path), mode="w").create_array(
                "output", shape=shape, chunks=chunks, dtype=kind, dimension_names=names
            )
        gather_json(0, state.mesh.world, state.device)
        return zarr.open_group(str(path), mode="r+")["output"]
    if engine.rank == 0:
        np.lib.format.open_memmap(path, "w+", kind, shape).flush()
    gather_json(0, state.mesh.world, state.device)
    return np.lib.format.open_memmap(path, "r+")


def _zarr() -> Any:
    """Returns the module zarr; `InputError` if it is not installed."""
    try:
        import zarr
    except ImportError as error:
        raise InputError(f"a .zarr store needs zarr ({error}): pip install 'shardwise[science]'") from error
    return zarr


def _write(file: Any, first: int, output: torch.Tensor) -> None:
    """Writes this rank's part of an output into the file; `first`: the index of its first sample there."""
    places = [np.arange(n) for n in output.shape]
    for name, dim, owners in cuts_of(output):
        places[dim] = places[dim][owners.indices(_index(output, name))]
    places[0] = places[0] + first
    # a rank with fewer rows than others may hold nothing of this batch
    if all(len(place) for place in places):
        # contiguous ranges are written as slices, which is faster than index arrays
        runs = all(place[-1] - place[0] + 1 == len(place) for place in places)
        where: Any = tuple(slice(place[0], place[-1] + 1) for place in places) if runs else np.ix_(*places)
        file[where] = taken_apart(output).cpu().numpy()


def _index(output: Any, name: str) -> int:
    while output.axis.name != name:
        output = output.settled_local()
    return output.axis.index
