"""Publishes the files of all ranks as a checkpoint that is complete or absent, and removes old ones. Without torch.

    each rank   step-00000012.tmp-ab12/rank-00003.safetensors    written, synced, read back
                step-00000012.tmp-ab12/rank-00003.json           description of its content, with its digest
    rank 0      waits for every rank's .json; writes manifest.json; syncs all
                renames the folder to step-00000012, syncs the folder above
                writes `latest` (a hint for people and scripts); removes all but the newest `keep` checkpoints

In a store (`remote`) there is no rename: the folder has its final name from the beginning, and counts as a checkpoint
once its manifest exists.

Before the rename the folder does not count as a checkpoint, and after it nothing in it changes: a published folder is
never written again, and a second one of the same step gets a number. So if any process is killed at any time, the
checkpoints that were published before remain. Ranks meet in the folder alone; no collective waits for a disk.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import manifest
from shardwise.checkpoint.files import Disk, digest_of, size_of
from shardwise.checkpoint.manifest import File, FilePiece, Manifest, Tensor
from shardwise.checkpoint.pieces import from_json
from shardwise.checkpoint.remote import is_remote
from shardwise.errors import InputError, RunError

LATEST = "latest"
FAILED = ".failed"
_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_POLL_S = 0.02


@dataclass(frozen=True)
class Work:
    """The part of a checkpoint that one rank writes.

    folder    folder that holds all checkpoints of the run
    partial   name of this checkpoint's folder within `folder` until it is published, the same on every rank
    step      optimizer steps done
    rank      the rank that writes this part
    ranks     how many ranks write a part
    tensors   name -> {"dtype", "shape" of the unsharded tensor, "parts": [[first byte in the file, piece], ...]}
    fields    state that is not a tensor, as JSON; `merged` says how all ranks' are joined
    keep      how many published checkpoints remain in `folder`, this one included
    """

    folder: Path
    partial: str
    step: int
    rank: int
    ranks: int
    tensors: dict[str, Any]
    fields: dict[str, Any]
    keep: int

    @property
    def at(self) -> Path:
        """Returns the path of the unfinished checkpoint's folder."""
        return self.folder / self.partial


def write_rank(work: Work, parts: Iterable[bytes | memoryview], disk: Disk) -> None:
    """Writes this rank's safetensors file, whose bytes are `parts` in order, and a JSON file that describes it."""
    name = rank_file(work.rank)
    disk.folder(work.at)
    path = work.at / name
    digest = disk.file(path, parts, read_back=True)
    size = size_of(path)
    content = {
        "rank": work.rank,
        "file": {"name": name, "bytes": size, "xxh3_128": digest},
        "tensors": work.tensors,
        "fields": work.fields,
    }
    description = work.at / f"rank-{work.rank:05d}.json"
    disk.small(description, manifest.sealed(content))


def rank_file(rank: int) -> str:
    """Returns the name of a rank's safetensors file, such as "rank-00003.safetensors"."""
    return f"rank-{rank:05d}.safetensors"


def publish(work: Work, disk: Disk, wait_s: float = 600.0, going: Callable[[], bool] = lambda: True) -> Path:
    """Waits for every rank's part, then publishes the checkpoint; returns its folder. Called on rank 0 alone.

    wait_s  seconds to wait for the other ranks' parts
    going   called while waiting; waiting ends when it returns False

    Raises `RunError` if another rank failed to write its part, or if a part is still missing when waiting ends.
    """
    text = manifest.sealed(joined(_collected(work, wait_s, going), work).content())
    # on a disk before the rename, which publishes; in a store, which has none, the manifest itself does: last
    if not is_remote(work.folder):
        disk.file(work.at / manifest.NAME, [text])
    # before the publication: after it nothing in the folder changes
    for rank in range(work.ranks):
        disk.remove(work.at / f"rank-{rank:05d}.json")
    final = work.at
    if is_remote(work.folder):
        disk.file(work.at / manifest.NAME, [text], read_back=True)
    else:
        disk.sync_folder(work.at)  # the names of the files last before the rename does
        final = _free_name(work.folder, work.step)
        disk.rename(work.at, final)
        disk.sync_folder(work.folder)
    disk.replace(work.folder / LATEST, f"{final.name}\n".encode())
    retain(work.folder, final, work.keep, disk)
    return final


def _collected(work: Work, wait_s: float, going: Callable[[], bool]) -> list[dict[str, Any]]:
    """Returns each rank's description of its part (JSON), in rank order.

    Raises `RunError` if a rank failed, or if a part is missing after `wait_s` seconds or once `going` returns False.
    """
    until = time.monotonic() + wait_s
    missing = set(range(work.ranks))
    contents: dict[int, dict[str, Any]] = {}
    while missing:
        for rank in sorted(missing):
            arrived = _arrived(work.at / f"rank-{rank:05d}.json")
            if arrived is not None:
                contents[rank] = arrived
                missing.discard(rank)
            # a rank that could not write says so: others need not wait until the deadline
            elif (failed := work.at / f"rank-{rank:05d}{FAILED}").exists():
                raise RunError(f"rank {rank}: {failed.read_text(encoding='utf-8', errors='replace')}")
        # `going` becomes False a while after this writer's own rank has ended
        if missing and (time.monotonic() > until or not going()):
            raise RunError(f"{work.at}: nothing came from rank {sorted(missing)[0]} ({len(missing)} ranks in all)")
        if missing:
            time.sleep(_POLL_S)
    return [contents[rank] for rank in range(work.ranks)]


def _arrived(path: Path) -> dict[str, Any] | None:
    """Returns a rank's JSON description of its part; None while the file does not exist or, in a store, is partial."""
    if not path.exists():
        return None
    try:
        return manifest.unsealed(path)
    except InputError:
        # a store may show half of a file that is being written; a file system shows it after a rename
        if is_remote(path):
            return None
        raise


def joined(contents: list[dict[str, Any]], work: Work) -> Manifest:
    """Returns the checkpoint's manifest, joined from all ranks' descriptions `contents`.

    Raises `RunError` if ranks disagree about a tensor, or if its pieces leave out or repeat an element.
    """
    files: dict[str, File] = {}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: dict[str, list[FilePiece]] = {}
    for content in contents:
        name = content["file"]["name"]
        files[name] = File(content["file"]["bytes"], content["file"]["xxh3_128"])
        for key, row in content["tensors"].items():
            shape = tuple(row["shape"])
            # each rank's part says what it holds of a tensor; the whole must be the same tensor everywhere
            first = tensors.setdefault(key, (row["dtype"], shape))
            if first != (row["dtype"], shape):
                raise RunError(f"'{key}' is {first} on one rank and {(row['dtype'], shape)} on another")
            parts.setdefault(key, []).extend(
                FilePiece(name, begin, from_json(shape, piece)) for begin, piece in row["parts"]
            )
    whole = {key: Tensor(tensors[key][0], tensors[key][1], tuple(parts[key])) for key in sorted(tensors)}
    # checked as ranks hand it in: a hole would only be found when somebody loads it
    for key, tensor in whole.items():
        try:
            manifest.check_parts(key, tensor, files)
        except ValueError as error:
            raise RunError(f"the ranks' pieces do not add up: {error}") from error
    fields = merged([content["fields"] for content in contents])
    fields |= {"step": work.step, "world_size": work.ranks}
    return Manifest(files, whole, fields)


def merged(fields: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fields of all ranks joined into one dict; `RunError` if ranks disagree about a shared entry.

    "shared"   table -> name -> value: the union over ranks; ranks that have the same entry must have equal values
    "listed"   name -> list: concatenated in rank order without repetitions
    "own"      any JSON: kept as a list with one entry for each rank
    other keys rank 0's value

    The entries of "shared" and "listed" become top-level keys of the result.
    """
    shared: dict[str, Any] = {}
    listed: dict[str, list[Any]] = {}
    for rank, own in enumerate(fields):
        # a table may be of one rank alone (its generators); where several have an entry, it must be the same
        for table, values in own.get("shared", {}).items():
            table_values = shared.setdefault(table, {})
            for name, value in values.items():
                if table_values.setdefault(name, value) != value:
                    raise RunError(f"rank {rank} has {table} '{name}' = {value}, another rank {table_values[name]}")
        # notices and the like: each once, in the order in which they came
        for name, values in own.get("listed", {}).items():
            joined_values = listed.setdefault(name, [])
            joined_values += [value for value in values if value not in joined_values]
    # every rank wrote the rest alike
    rest = {name: value for name, value in fields[0].items() if name not in ("shared", "listed", "own")}
    return {**rest, **shared, **listed, "own": [own.get("own") for own in fields]}


def _free_name(folder: Path, step: int) -> Path:
    """Returns the first unused path for the step's checkpoint: step-00000012, then step-00000012-2, and so on."""
    for number in range(1, 10_000):
        path = folder / (f"step-{step:08d}" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(path):
            return path
    raise RunError(f"{folder} holds ten thousand checkpoints of step {step}")


def write_and_publish(
    work: Work, parts: Iterable[bytes | memoryview], disk: Disk, going: Callable[[], bool] = lambda: True
) -> Path:
    """Writes a rank's part, publishes the checkpoint on rank 0; returns its folder (other ranks: the unfinished one).

    An error is marked in the folder, so that no rank waits for this part (`give_up`), and raised.
    """
    try:
        write_rank(work, parts, disk)
        return publish(work, disk, going=going) if work.rank == 0 else work.at
    except Exception as error:
        give_up(work, error, disk)
        raise


def give_up(work: Work, error: Exception, disk: Disk) -> None:
    """Writes a marker file that says that this rank's part will not come; rank 0 removes the folder. Never raises."""
    try:
        if work.rank:
            disk.folder(work.at)  # no rank may have made the folder yet
            disk.file(work.at / f"rank-{work.rank:05d}{FAILED}", [str(error).encode()])
        elif work.at.exists():
            disk.remove(work.at)
    except OSError:  # no space for the marker file either: rank 0 waits until its deadline
        return


# --- what is there


def scan(folder: Path) -> list[Path]:
    """Returns the paths of published checkpoints in a folder, newest first; their content is not checked."""
    published = []
    for name in names_in(folder):
        match = _STEP.fullmatch(name)
        if match and _is_published(folder / name):
            published.append((int(match[1]), int(match[2] or 1), folder / name))
    return [path for _, _, path in sorted(published, key=lambda row: row[:2], reverse=True)]


def names_in(folder: Path) -> list[str]:
    """Returns the names in a folder, or in a folder of a store; [] if it cannot be read."""
    own = getattr(folder, "names", None)  # the method of a `RemotePath`
    try:
        return os.listdir(folder) if own is None else own()
    except OSError:
        return []


def _is_published(path: Path) -> bool:
    return (path / manifest.NAME).exists() if is_remote(path) else path.is_dir()


def under_way(folder: Path) -> list[Path]:
    """Returns the folders below `folder` of unpublished checkpoints: being written, or left by a killed process."""
    if not is_remote(folder):
        return sorted(folder.glob("step-*.tmp-*"))
    named = [folder / name for name in names_in(folder) if _STEP.fullmatch(name)]
    return [path for path in named if not _is_published(path) and not _is_set_aside(path)]


def _is_set_aside(path: Path) -> bool:
    """Whether a folder in a store holds a checkpoint that `set_aside` withdrew by renaming its manifest.

    One that `retain` was removing when its process ended (manifest.json.gone-PID) does not count.
    """
    kept = f"{manifest.NAME}."
    return any(name.startswith(kept) and not name.startswith(f"{kept}gone-") for name in names_in(path))


def step_of(path: Path) -> int:
    """Returns the step number in the name of a checkpoint's folder; `InputError` for any other name."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not named as a checkpoint is")
    return int(match[1])


def retain(folder: Path, newest: Path, keep: int, disk: Disk) -> None:
    """Removes the published checkpoints in `folder` except `newest` and the `keep` - 1 most recent others."""
    others = [path for path in scan(folder) if path != newest]
    for path in others[max(keep - 1, 0) :]:
        # renamed first: half a removed folder would still look like a checkpoint
        disk.remove(disk.withdraw(path, f"gone-{os.getpid()}"))


def clear(folder: Path, disk: Disk) -> None:
    """Removes unpublished checkpoints and half-removed ones from `folder`; called only when no save is running."""
    for path in under_way(folder) + ([] if is_remote(folder) else sorted(folder.glob("step-*.gone-*"))):
        disk.remove(path)


def set_aside(path: Path, why: str, disk: Disk) -> Path:
    """Renames a checkpoint so that `scan` does not find it; returns its new path. `why`: a word in the new name."""
    return disk.withdraw(path, f"{why}-{os.urandom(2).hex()}")


def verify(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Returns a sentence for each file whose digest is wrong or that cannot be read; [] if all files are intact.

    Only files `part`, `part` + `parts`, ... of the manifest are read, so that `parts` ranks can divide the work.
    """
    try:
        content = manifest.read(folder)
    except InputError as error:
        return [str(error)]
    wrong = []
    for name, file in list(content.files.items())[part::parts]:
        try:
            digest = digest_of(folder / name)
        except OSError as error:
            digest = f"none ({error.strerror})"
        if digest != file.digest:
            wrong.append(f"{folder / name}: its digest should be {file.digest} and is {digest}")
    return wrong
