"""Saves an engine's state as checkpoints while training goes on (checkpoint/load loads them).

    rank     copies its pieces into a preallocated buffer (a memory file), and goes on with the next step
    writer   another process, without torch: writes the buffer as the rank's file, and on rank 0 publishes all

Which elements a rank writes is decided once for a layout: ranks exchange descriptions of their pieces, and ranks with
the same piece each write a part of it. Afterwards a save costs a gather of one short row from each rank, and the copy.
One save is in flight at a time; a second one waits for it. An error of a writer is raised by `finish`, or by the next
save.

Bytes: each element of the state is written once over all ranks; each rank's buffer has the size of its part.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

import shardwise
from shardwise.checkpoint import manifest, publish
from shardwise.checkpoint.background import Writer
from shardwise.checkpoint.files import ITEM_BYTES, Disk, TensorEntry, header_of
from shardwise.checkpoint.holdings import Holding, ReadAgain, averages, generators, state_dict_names, weights
from shardwise.checkpoint.optimizers import Options, groups_of, options_of, state_of
from shardwise.checkpoint.pieces import Piece, common_count, from_json, to_json
from shardwise.checkpoint.publish import Work
from shardwise.checkpoint.remote import disk_of, is_remote, place
from shardwise.comm import gather_json, gather_rows
from shardwise.engine.ema import Ema
from shardwise.engine.engine import Engine
from shardwise.errors import RefusedPlan, RunError
from shardwise.guard.points import reach
from shardwise.host import put
from shardwise.layout import Plan
from shardwise.layout.grid import Grid

SPLIT_BYTES = 2**16  # a piece of fewer bytes is written by one of the ranks that hold it
SEEN_S = 5.0  # seconds within which the other ranks must see a file that rank 0 has made
SLACK = 1.02  # times the bytes to be written must be free on the disk

Fields = dict[str, Any]


@dataclass(frozen=True)
class _Share:
    """The part of a tensor that this rank writes: elements [first, last) of its piece, as `entry` of its file."""

    first: int
    last: int
    entry: TensorEntry


class Saver:
    """Writer of an engine's checkpoints below `folder`. Every rank makes one, before the first step and `restore`.

    Options of param groups that change after a Saver is made count as state, which `restore` puts back. All ranks call
    its methods at the same steps.

    keep        how many published checkpoints remain in `folder`
    background  Whether another process writes while training goes on; if not, `save` returns once it is published
    ema         the moving average to save with the weights; None: there is none
    disk        what writes the files; None: the file system or the store that `folder` lies in
    """

    def __init__(
        self, engine: Engine, folder: str | Path, *, keep: int = 2, background: bool = True, ema: Ema | None = None,
        disk: Disk | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.folder, self.keep, self.ema = engine, place(folder).absolute(), keep, ema
        self.background = background
        self.disk = disk or disk_of(self.folder)
        self.built: Options = options_of(engine)
        self._read_again = ReadAgain(engine)
        self._elsewhere: dict[str, str] = {}  # name -> digest of frozen weights that the last save left out
        mine = [secrets.token_hex(4), time.time_ns() // 1000]
        self.token, self.began_us = gather_json(mine, engine.mesh.world, engine.device)[0]
        self._count = 0
        self._layout = ""
        self._shares: dict[str, _Share] = {}
        self._header = b""
        self.total_bytes = 0  # to be written by all ranks together
        self._file = -1  # descriptor of the memory that the background process reads; -1: none
        self._buffer: mmap.mmap | None = None
        self._writer: Writer | None = None
        self._made = False  # whether the folder exists and all ranks see it
        self.last: Path | None = None  # the newest checkpoint that is published, on every rank

    # --- saving

    def save(self, fields: Fields | None = None) -> None:
        """Begins a checkpoint of the engine's current state. Collective. `fields`: JSON to save with it (of rank 0).

        Raises on all ranks alike: `RunError` if the save before failed or the disk has no space for this one,
        `RefusedPlan` if the optimizer has state that a checkpoint cannot hold.
        """
        self.finish()
        reach("save", subject=self)
        holdings, tree = self._state()
        self._settle(holdings)
        self._check_space()
        work = self._work(holdings, tree, fields or {})
        self._count += 1
        if self.background:
            self._fill(holdings)
            self._started().begin(work, len(self._mapped()))
        else:
            self._agreed(lambda: publish.write_and_publish(work, self._parts(holdings), self.disk))

    def _state(self) -> tuple[list[Holding], Fields]:
        """Returns (holdings to save, the optimizer's state as {weight: {state key: node}}). Collective.

        Left out are frozen weights that the task reads from its files, if no rank has changed them. Raises
        `RefusedPlan` on all ranks for state that a checkpoint cannot hold.
        """
        engine, error = self.engine, ""
        holdings: list[Holding] = []
        tree: Fields = {}
        try:
            tree, of_optimizer = state_of(engine)
            holdings = [*weights(engine), *of_optimizer, *averages(engine, self.ema)]
            holdings += generators(engine.rank, engine.device)
            for holding in holdings:
                _ = holding.dtype  # raises now if safetensors has no such dtype
        except RefusedPlan as problem:
            error = str(problem)
        answers = gather_json([error, self._read_again.changed()], engine.mesh.world, engine.device)
        # told to all before anyone raises: the others would wait in the next collective
        if any(word for word, _ in answers):
            raise RefusedPlan(next(word for word, _ in answers if word))
        changed = {name for _, names in answers for name in names}
        self._elsewhere = {name: mark for name, mark in engine.state.read.items() if name not in changed}
        left = {f"model/{name}" for name in self._elsewhere}
        return [holding for holding in holdings if holding.key not in left], tree

    def _work(self, holdings: list[Holding], tree: Fields, fields: Fields) -> Work:
        """Returns this rank's part of the checkpoint: tensors with their places in its file, and all other state.

        tree    the optimizer's state, as `_state` returns it
        fields  the caller's JSON, whose keys the engine's own override
        """
        engine = self.engine
        tensors = {}
        for holding in holdings:
            share = self._shares.get(holding.key)
            if share is not None:  # None: another rank that holds the same writes it
                piece = to_json(holding.piece.part(share.first, share.last))
                shape = list(holding.piece.shape)
                parts = [[share.entry.begin, piece]]
                tensors[holding.key] = {"dtype": holding.dtype, "shape": shape, "parts": parts}
        group_of, groups = groups_of(engine, self.built)
        scale = None if engine.state.scale is None else engine.state.scale.state_dict()
        whole = {
            **fields,
            "plan": str(engine.plan),
            "task": engine.task.name,
            "engine": {
                "seed": engine.state.seed,
                "steps": engine.steps_done,
                "skipped": engine.state.skipped_steps,
                "scale": scale,
            },
            "optimizer_class": type(engine.optimizer).__name__,
            "versions": {"shardwise": shardwise.__version__, "torch": str(torch.__version__)},
            "names": state_dict_names(engine),
            "shared": {"optimizer": tree, "group_of": group_of, "groups": groups, "elsewhere": self._elsewhere},
        }
        partial = f"step-{engine.steps_done:08d}.tmp-{self.token}-{self._count}"
        if is_remote(self.folder):  # a store has no rename: this is the final name, so it must never have been used
            partial = f"step-{engine.steps_done:08d}-{self.began_us + self._count}"
        return Work(self.folder, partial, engine.steps_done, engine.rank, engine.world_size, tensors, whole, self.keep)

    def _settle(self, holdings: list[Holding]) -> None:
        """Decides which elements this rank writes, and where in its file. Collective.

        Does nothing if every rank's holdings have the keys, pieces and dtypes of the call before.
        """
        engine = self.engine
        mine = [[h.key, to_json(h.piece), h.piece.shape, h.dtype, h.alike] for h in holdings]
        text = json.dumps(mine)
        number = xxhash.xxh3_64_intdigest(text.encode()) % 2**52  # exact in float64, in which rows travel
        rows = gather_rows(put([float(number)], engine.device), engine.mesh.world)
        layout = str(rows.view(-1).tolist())
        # all ranks compare the hashes of all ranks, so that either none or all of them enter the gather below
        if layout == self._layout:
            return
        everybody = gather_json(mine, engine.mesh.world, engine.device)
        shares = assigned(everybody, _by_family(engine.plan))
        sizes = [sum((last - first) * ITEM_BYTES[dtype] for _, dtype, first, last in own) for own in shares]
        whole = {h.key: h.piece for h in holdings if h.piece.is_whole}
        named: dict[str, tuple[str, tuple[int, ...]]] = {}
        for key, dtype, first, last in shares[engine.rank]:
            # a whole tensor keeps its shape in the file; any other share is stored flat
            all_of_it = key in whole and last - first == whole[key].count
            named[key] = (dtype, whole[key].shape if all_of_it else (last - first,))
        self._header, entries = header_of(named)
        self._shares = {key: _Share(first, last, entries[key]) for key, _, first, last in shares[engine.rank]}
        # tensors, plus an upper estimate of the JSON that describes them
        self.total_bytes = sum(sizes) + sum(len(json.dumps(own)) * 2 for own in everybody)
        # a writer in another process reads shared memory
        if self.background:
            self._map(max([len(self._header), *(entry.end for entry in entries.values())]))
        self._layout = layout

    def _map(self, size_bytes: int) -> None:
        """Makes the memory file of `size_bytes` that the writer reads, and puts the safetensors header into it."""
        if self._file < 0:
            self._file = _memory_file()
        if self._buffer is None or len(self._buffer) != size_bytes:
            os.ftruncate(self._file, size_bytes)
            touched = getattr(mmap, "MAP_POPULATE", 0)  # pages are allocated now, not one by one in the first copy
            self._buffer = mmap.mmap(self._file, size_bytes, mmap.MAP_SHARED | touched)
        self._buffer[: len(self._header)] = self._header

    def _mapped(self) -> mmap.mmap:
        assert self._buffer is not None
        return self._buffer

    def _fill(self, holdings: list[Holding]) -> None:
        """Copies the elements that this rank writes into the buffer."""
        for holding in holdings:
            share = self._shares.get(holding.key)
            if share is not None and share.last > share.first:
                count = share.last - share.first
                place = torch.frombuffer(
                    self._mapped(), dtype=holding.tensor.dtype, count=count, offset=share.entry.begin
                )
                place.copy_(holding.flat()[share.first : share.last])

    def _parts(self, holdings: list[Holding]) -> Iterator[bytes | memoryview]:
        """Yields the bytes of this rank's file in order, without a buffer; the state must not change meanwhile."""
        yield self._header
        holding_of = {holding.key: holding for holding in holdings}
        for key, share in sorted(self._shares.items(), key=lambda item: item[1].entry.begin):
            if share.last > share.first:
                yield holding_of[key].flat()[share.first : share.last].cpu().contiguous().view(torch.uint8).numpy().data

    def _check_space(self) -> None:
        """Raises `RunError` on all ranks if the folder cannot be made or seen, or the disk lacks space. Collective."""
        free, error = 0.0, ""
        # rank 0 asks the disk and all ranks get its answer: a rank that raised alone would be waited for
        if self.engine.rank == 0:
            try:
                # before a run's first save, remove half-written checkpoints of earlier runs, and make the file
                # by which all ranks see that they share one folder
                if not self._made:
                    self.disk.folder(self.folder)
                    publish.clear(self.folder, self.disk)
                    (self.folder / self._mark).write_bytes(b"")
                free = self._free_bytes()
            except OSError as problem:
                error = f"{self.folder}: {problem.strerror}"
        free, error = gather_json([free, error], self.engine.mesh.world, self.engine.device)[0]
        # a rank on another host may have a folder of this name to itself
        error = error or ("" if self._made else self._not_shared())
        if error:
            raise RunError(f"no checkpoint of step {self.engine.steps_done} was written: {error}")
        self._made = True
        # refused now, rather than by a write that fails halfway
        if free < SLACK * self.total_bytes:
            raise RunError(
                f"no checkpoint of step {self.engine.steps_done} was written: it needs "
                f"{self.total_bytes / 1e6:.3g} MB, and {self.folder} has {free / 1e6:.3g} MB left"
            )

    @property
    def _mark(self) -> str:
        """Returns the name of the temporary file that every rank must see for the folder to count as shared."""
        return f"meeting-{self.token}"

    def _not_shared(self) -> str:
        """Returns a message if some rank does not see rank 0's file in the folder; "" if all do. Collective."""
        engine, mark = self.engine, self.folder / self._mark
        until = time.monotonic() + SEEN_S
        while not (seen := mark.exists()) and time.monotonic() < until:
            time.sleep(0.1)
        blind = [rank for rank, saw in enumerate(gather_json(seen, engine.mesh.world, engine.device)) if not saw]
        if engine.rank == 0:
            with suppress(OSError):  # a file that stays does no harm
                mark.unlink()
        return f"rank {blind[0]} does not see what rank 0 writes in {self.folder}: hosts share it not" if blind else ""

    def _free_bytes(self) -> float:
        """Returns the free bytes of the folder's disk; 2^62 for a store, whose free space is unknown."""
        if is_remote(self.folder):
            return float(2**62)
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    # --- writing

    def _started(self) -> Writer:
        """Returns the background writer; starts one if there is none or it has ended."""
        if self._writer is not None and self._writer.process.poll() is not None:
            self._writer.close()  # it was killed between two saves
            self._writer = None
        if self._writer is None:
            self._writer = Writer(self._file)
        return self._writer

    def prepare(self) -> None:
        """Starts the writer, makes its buffer and checks disk space, before the first step. Collective.

        Raises as `save` does.
        """
        self.make_room()
        self._check_space()
        if self.background:
            self._started()

    def make_room(self) -> None:
        """Decides which elements each rank writes, and makes this rank's buffer of the size of its part. Collective."""
        self._settle(self._state()[0])

    def answered(self) -> str:
        """Returns the outcome of this rank's save: "" if none was begun or it still runs, else "well" or "badly"."""
        return "" if self._writer is None else self._writer.answered()

    def finish(self) -> None:
        """Waits until the save under way has ended on all ranks. Collective. Raises `RunError` on all if one failed."""
        if self._writer is None or self._writer.step is None:
            return
        writer = self._writer

        def waited() -> Path:
            writer.wait()
            path = place(writer.path)
            if self.engine.rank == 0 and not (path / manifest.NAME).exists():
                raise RunError(f"its writer, another process, wrote {path}, which is not seen from here")
            return path

        self._agreed(waited)

    def _agreed(self, work: Callable[[], Path]) -> None:
        """Runs `work` on every rank and sets `last` to the path that rank 0's returned. Collective.

        Raises `RunError` on all ranks if it failed on one, with the message of the lowest such rank.
        """
        path, error = "", ""
        try:
            path = str(work())
        except (OSError, RunError) as problem:
            error = str(problem)
        answers = gather_json([path, error], self.engine.mesh.world, self.engine.device)
        first = next((word for _, word in answers if word), "")
        if first:
            raise RunError(first if "was not written" in first else f"no checkpoint was written: {first}")
        self.last = place(answers[0][0])

    def close(self) -> None:
        """Lets the writer process end after the save under way, whose outcome is not checked."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _memory_file() -> int:
    """Returns a descriptor of anonymous shared memory, or of an unlinked temporary file where the OS has none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardwise-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _by_family(plan: Plan) -> list[int]:
    """Returns all ranks sorted by their (pp, tp) coordinates.

    Ranks with equal coordinates are adjacent; together they hold one full set of pieces of a replicated weight.
    """
    grid = Grid(plan)
    places = [grid.coordinates(rank) for rank in range(plan.world_size)]
    return sorted(range(plan.world_size), key=lambda rank: [places[rank][axis] for axis in ("pp", "tp")])


def assigned(everybody: list[list[list[Any]]], order: Sequence[int]) -> list[list[tuple[str, str, int, int]]]:
    """Returns, for each rank, (key, dtype, first, last) of the elements of its pieces that it writes.

    everybody   for each rank a list of [key, piece as JSON, unsharded shape, dtype, alike], one for each tensor
    order       ranks by precedence: if two ranks hold overlapping but different pieces, the earlier rank's is written.
                That happens to flat pieces of a weight that tp replicates, if tp ranks have buckets of other sizes
    """
    holders: dict[tuple[str, str], list[int]] = {}
    about: dict[tuple[str, str], tuple[Piece, str, bool]] = {}
    for rank in order:
        for key, piece, shape, dtype, alike in everybody[rank]:
            # ranks may hold different values of a buffer: all of it comes from the first rank
            name = (key, json.dumps(piece) if alike else "")
            holders.setdefault(name, []).append(rank)
            if name not in about:
                about[name] = (from_json(tuple(shape), piece), dtype, alike)
    _leave_doubles_out(holders, about)
    shares: list[list[tuple[str, str, int, int]]] = [[] for _ in everybody]
    for (key, _), ranks in holders.items():
        piece, dtype, alike = about[key, _]
        count = piece.count
        if not alike:
            shares[ranks[0]].append((key, dtype, 0, count))
        elif len(ranks) == 1 or count * ITEM_BYTES[dtype] < SPLIT_BYTES:
            # a hash of the name chooses the writer: the first holder would write all small tensors
            shares[ranks[zlib.crc32(key.encode()) % len(ranks)]].append((key, dtype, 0, count))
        else:
            for place, rank in enumerate(ranks):
                shares[rank].append((key, dtype, count * place // len(ranks), count * (place + 1) // len(ranks)))
    return shares


def _leave_doubles_out(
    holders: dict[tuple[str, str], list[int]], about: dict[tuple[str, str], tuple[Piece, str, bool]]
) -> None:
    """Removes from `holders` each piece that overlaps an earlier piece of the same tensor.

    holders  (key, piece as text) -> ranks that hold it, in order of precedence; changed in place
    about    the same keys -> (piece, dtype, alike)
    """
    of_key: dict[str, list[tuple[str, str]]] = {}
    for name in holders:
        of_key.setdefault(name[0], []).append(name)
    for names in of_key.values():
        pieces = [about[name][0] for name in names]
        if sum(piece.count for piece in pieces) <= math.prod(pieces[0].shape):
            continue  # nearly always: comparing every pair of many pieces is quadratic
        kept: list[Piece] = []
        for name, piece in zip(names, pieces, strict=True):
            if any(common_count(piece, other) for other in kept):
                del holders[name]
            else:
                kept.append(piece)
