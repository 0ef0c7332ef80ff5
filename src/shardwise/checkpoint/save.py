"""Save an engine's state as checkpoints while training goes on (writer: background; counterpart: load).

    rank     copies its pieces into a buffer that was made before (a memory file), and goes on with the next step
    writer   a process of its own without torch: the buffer -> the rank's file -> (rank 0) the checkpoint

Which pieces a rank writes is settled once for a layout: ranks tell each other what they hold, and those that hold the
same each write a part of it. Afterwards a save costs one row of numbers from each rank, and the copy. One save is in
flight; a second one waits for it. What a writer fails with is raised by `finish`, or by the next save.

Bytes: each element of the state once over all ranks; a buffer of that size beside it, in host memory.
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
SEEN_S = 5.0  # in which a file that one rank has made is seen by the others
SLACK = 1.02  # of the bytes to be written, that must be free

Fields = dict[str, Any]


@dataclass(frozen=True)
class _Share:
    """The part of a tensor that this rank writes: elements [first, last) of its piece, at `entry` of its file."""

    first: int
    last: int
    entry: TensorEntry


class Saver:
    """Checkpoints of an engine below `folder`. Every rank makes one, before the first step and before `restore`.

    Options of param groups that move later are state, and put back by `restore`. Every rank calls it at the same steps.

    keep        published checkpoints that stay
    background  a process writes while training goes on; else `save` returns when the checkpoint is published
    ema         the moving average to save with the weights
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
        self._elsewhere: dict[str, str] = {}  # digests of weights that the last save left to the task's files
        mine = [secrets.token_hex(4), time.time_ns() // 1000]
        self.token, self.began_us = gather_json(mine, engine.mesh.world, engine.device)[0]
        self._count = 0
        self._layout = ""
        self._shares: dict[str, _Share] = {}
        self._header = b""
        self.total_bytes = 0  # of all ranks
        self._file = -1  # of memory, where a process writes in the background
        self._buffer: mmap.mmap | None = None
        self._writer: Writer | None = None
        self._made = False  # the folder
        self.last: Path | None = None  # the newest checkpoint that is published, on every rank

    # --- saving

    def save(self, fields: Fields | None = None) -> None:
        """Begin a checkpoint of the state as it is now. Collective. `fields`: JSON to keep with it, rank 0's.

        Raises on all ranks alike: `RunError` for what the save before failed with, and where there is no space for
        this one; `RefusedPlan` for state that a checkpoint has no form for.
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
        """Returns (this rank's tensors, the optimizer's state as a tree). `RefusedPlan` for what has no form."""
        engine, error = self.engine, ""
        holdings: list[Holding] = []
        tree: Fields = {}
        try:
            tree, of_optimizer = state_of(engine)
            holdings = [*weights(engine), *of_optimizer, *averages(engine, self.ema)]
            holdings += generators(engine.rank, engine.device)
            for holding in holdings:
                _ = holding.dtype  # that it has a name
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
        """Returns this rank's part of the checkpoint: tensors with their places in its file, and all other state."""
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
        if is_remote(self.folder):  # no rename there: the name stays, and must be one that nothing else has or had
            partial = f"step-{engine.steps_done:08d}-{self.began_us + self._count}"
        return Work(self.folder, partial, engine.steps_done, engine.rank, engine.world_size, tensors, whole, self.keep)

    def _settle(self, holdings: list[Holding]) -> None:
        """Decide which rank writes which tensors, once for each layout of holdings. Collective."""
        engine = self.engine
        mine = [[h.key, to_json(h.piece), h.piece.shape, h.dtype, h.alike] for h in holdings]
        text = json.dumps(mine)
        number = xxhash.xxh3_64_intdigest(text.encode()) % 2**52  # exact in float64, in which rows travel
        rows = gather_rows(put([float(number)], engine.device), engine.mesh.world)
        layout = str(rows.view(-1).tolist())
        # all ranks compare all ranks' numbers, so that either none gathers below or every one does
        if layout == self._layout:
            return
        everybody = gather_json(mine, engine.mesh.world, engine.device)
        shares = assigned(everybody, _by_family(engine.plan))
        sizes = [sum((last - first) * ITEM_BYTES[dtype] for _, dtype, first, last in own) for own in shares]
        whole = {h.key: h.piece for h in holdings if h.piece.is_whole}
        named: dict[str, tuple[str, tuple[int, ...]]] = {}
        for key, dtype, first, last in shares[engine.rank]:
            all_of_it = key in whole and last - first == whole[key].count
            named[key] = (dtype, whole[key].shape if all_of_it else (last - first,))
        self._header, entries = header_of(named)
        self._shares = {key: _Share(first, last, entries[key]) for key, _, first, last in shares[engine.rank]}
        self.total_bytes = sum(sizes) + sum(len(json.dumps(own)) * 2 for own in everybody)
        # a writer in another process reads shared memory
        if self.background:
            self._map(max([len(self._header), *(entry.end for entry in entries.values())]))
        self._layout = layout

    def _map(self, size_bytes: int) -> None:
        """Make the memory file that the writer reads, with the header in it."""
        if self._file < 0:
            self._file = _memory_file()
        if self._buffer is None or len(self._buffer) != size_bytes:
            os.ftruncate(self._file, size_bytes)
            touched = getattr(mmap, "MAP_POPULATE", 0)  # the first copy is not to wait for every page
            self._buffer = mmap.mmap(self._file, size_bytes, mmap.MAP_SHARED | touched)
        self._buffer[: len(self._header)] = self._header

    def _mapped(self) -> mmap.mmap:
        assert self._buffer is not None
        return self._buffer

    def _fill(self, holdings: list[Holding]) -> None:
        """Copy this rank's shares into the buffer."""
        for holding in holdings:
            share = self._shares.get(holding.key)
            if share is not None and share.last > share.first:
                count = share.last - share.first
                place = torch.frombuffer(
                    self._mapped(), dtype=holding.tensor.dtype, count=count, offset=share.entry.begin
                )
                place.copy_(holding.flat()[share.first : share.last])

    def _parts(self, holdings: list[Holding]) -> Iterator[bytes | memoryview]:
        """Yields the bytes of this rank's file, from where they are: nothing changes before it is written."""
        yield self._header
        holding_of = {holding.key: holding for holding in holdings}
        for key, share in sorted(self._shares.items(), key=lambda item: item[1].entry.begin):
            if share.last > share.first:
                yield holding_of[key].flat()[share.first : share.last].cpu().contiguous().view(torch.uint8).numpy().data

    def _check_space(self) -> None:
        """Raises `RunError` where the folder cannot be made or the disk lacks the bytes. Collective."""
        free, error = 0.0, ""
        # one rank knows the disk, and tells the others: a rank that raises alone would be waited for
        if self.engine.rank == 0:
            try:
                # at a run's first save: what an earlier run left half written goes, and ranks look for one file
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
        """Returns the name of a file by which rank 0 shows for a moment that all ranks see one folder."""
        return f"meeting-{self.token}"

    def _not_shared(self) -> str:
        """Returns why some rank does not see what rank 0 writes into the folder; "" where all see it. Collective."""
        engine, mark = self.engine, self.folder / self._mark
        until = time.monotonic() + SEEN_S
        while not (seen := mark.exists()) and time.monotonic() < until:
            time.sleep(0.1)
        blind = [rank for rank, saw in enumerate(gather_json(seen, engine.mesh.world, engine.device)) if not saw]
        if engine.rank == 0:
            with suppress(OSError):  # it is in nobody's way
                mark.unlink()
        return f"rank {blind[0]} does not see what rank 0 writes in {self.folder}: hosts share it not" if blind else ""

    def _free_bytes(self) -> float:
        """Returns the free bytes of the folder's disk; 2^62 for a store, which does not tell."""
        if is_remote(self.folder):
            return float(2**62)
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    # --- writing

    def _started(self) -> Writer:
        """Returns the writer, started anew where it has ended."""
        if self._writer is not None and self._writer.process.poll() is not None:
            self._writer.close()  # it was killed between two saves
            self._writer = None
        if self._writer is None:
            self._writer = Writer(self._file)
        return self._writer

    def prepare(self) -> None:
        """Start the writer, make its buffer, check disk space, before the first step. Collective; raises as `save`."""
        self.make_room()
        self._check_space()
        if self.background:
            self._started()

    def make_room(self) -> None:
        """Deal what is saved over the ranks and make this rank's buffer as large as its part. Collective."""
        self._settle(self._state()[0])

    def answered(self) -> str:
        """Returns the state of this rank's save: "" while it runs (or without one), then "well" or "badly"."""
        return "" if self._writer is None else self._writer.answered()

    def finish(self) -> None:
        """Wait until no save is under way anywhere. Collective. Raises `RunError`, on all ranks, where one failed."""
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
        """Run `work`; returns when all ranks have, or raises what the first of them failed with. Collective."""
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
        """Let the writer end after the save under way, whose outcome is not checked."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _memory_file() -> int:
    """Returns a descriptor of memory that another process can be given, or of a file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardwise-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _by_family(plan: Plan) -> list[int]:
    """Returns all ranks, those together that share one set of pieces of what neither tp nor pp cuts."""
    grid = Grid(plan)
    places = [grid.coordinates(rank) for rank in range(plan.world_size)]
    return sorted(range(plan.world_size), key=lambda rank: [places[rank][axis] for axis in ("pp", "tp")])


def assigned(everybody: list[list[list[Any]]], order: Sequence[int]) -> list[list[tuple[str, str, int, int]]]:
    """Returns, for each rank, (key, dtype, first, last) of the elements of its pieces that it writes.

    everybody   for each rank [key, piece, shape, dtype, alike] of each tensor
    order       ranks, those first whose pieces are written where others have other pieces of the same elements: flat
                pieces of a weight that tp leaves whole end elsewhere on each of its ranks where it cuts others unevenly
    """
    holders: dict[tuple[str, str], list[int]] = {}
    about: dict[tuple[str, str], tuple[Piece, str, bool]] = {}
    for rank in order:
        for key, piece, shape, dtype, alike in everybody[rank]:
            # where ranks may have other values in one tensor (buffers), all of it is the first rank's
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
            # not always the first of them: small tensors are spread by their names
            shares[ranks[zlib.crc32(key.encode()) % len(ranks)]].append((key, dtype, 0, count))
        else:
            for place, rank in enumerate(ranks):
                shares[rank].append((key, dtype, count * place // len(ranks), count * (place + 1) // len(ranks)))
    return shares


def _leave_doubles_out(
    holders: dict[tuple[str, str], list[int]], about: dict[tuple[str, str], tuple[Piece, str, bool]]
) -> None:
    """Drop from `holders` pieces with elements that an earlier one of the same tensor has."""
    of_key: dict[str, list[tuple[str, str]]] = {}
    for name in holders:
        of_key.setdefault(name[0], []).append(name)
    for names in of_key.values():
        pieces = [about[name][0] for name in names]
        if sum(piece.count for piece in pieces) <= math.prod(pieces[0].shape):
            continue  # as nearly all: pairs of many pieces cost the square
        kept: list[Piece] = []
        for name, piece in zip(names, pieces, strict=True):
            if any(common_count(piece, other) for other in kept):
                del holders[name]
            else:
                kept.append(piece)
