"""Turn the files of all ranks into a checkpoint that is whole or not there, and remove old ones. Without torch.

    each rank   step-00000012.tmp-ab12/rank-00003.safetensors    written, synced, read back
                step-00000012.tmp-ab12/rank-00003.json           what is in it, and its digest
    rank 0      waits for every rank's .json; manifest.json; all synced
                renames the folder to step-00000012, syncs the one above
                `latest` (a hint for people and scripts); then removes what is older than the newest `keep`

In a store (`remote`) there is no rename: the folder has its name from the first, and is a checkpoint from the moment
its manifest is there.

Until the rename nobody takes the folder for a checkpoint, and after it nothing in it changes: a published folder is
never written again, and a second one of the same step gets a number. So whatever is killed, and whenever, what was
published before is what is found. Ranks meet in the folder alone; no collective waits for a disk.
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

    folder    where checkpoints lie
    partial   the folder's name while it is written, the same on every rank
    step      steps done
    ranks     how many write
    tensors   name -> {"dtype", "shape", "parts": [[first byte, piece], ...]}
    fields    what is not a tensor; see `merged`
    keep      see `retain`
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
    """Write this rank's file of tensors, and a JSON file that describes it."""
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
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def publish(work: Work, disk: Disk, wait_s: float = 600.0, going: Callable[[], bool] = lambda: True) -> Path:
    """Wait on rank 0 for every rank's part, then make the checkpoint; returns its folder.

    going   asked while waiting: whether to go on

    Raises `RunError` for what another rank failed with, or where one does not come.
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
    """Returns each rank's description of its part, by rank; `RunError` if one failed, or is missing after `wait_s`."""
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
    """Returns a rank's JSON description of its part; None before that is there (in a store: whole)."""
    if not path.exists():
        return None
    try:
        return manifest.unsealed(path)
    except InputError:
        if is_remote(path):
            return None
        raise


def joined(contents: list[dict[str, Any]], work: Work) -> Manifest:
    """Returns one manifest from all ranks' parts. `RunError` where they do not add up to whole tensors."""
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
    """Returns all ranks' fields as one; `RunError` where "shared" ones differ.

    "shared"   name -> value: of any rank, equal where several have one
    "listed"   name -> list: joined, equal entries once
    "own"      anything: kept as a list with an entry for each rank
    else       rank 0's
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
    """Returns a path for the step's checkpoint that is not taken."""
    for number in range(1, 10_000):
        path = folder / (f"step-{step:08d}" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(path):
            return path
    raise RunError(f"{folder} holds ten thousand checkpoints of step {step}")


def write_and_publish(
    work: Work, parts: Iterable[bytes | memoryview], disk: Disk, going: Callable[[], bool] = lambda: True
) -> Path:
    """Write a rank's part, on rank 0 publish the checkpoint; returns its folder (other ranks: the unfinished one).

    What fails is marked in the folder (`give_up`) and raised.
    """
    try:
        write_rank(work, parts, disk)
        return publish(work, disk, going=going) if work.rank == 0 else work.at
    except Exception as error:
        give_up(work, error, disk)
        raise


def give_up(work: Work, error: Exception, disk: Disk) -> None:
    """Mark in the folder that this rank's part will not come; rank 0 removes the folder. Never raises."""
    try:
        if work.rank:
            disk.folder(work.at)  # which nobody may have come to yet
            disk.file(work.at / f"rank-{work.rank:05d}{FAILED}", [str(error).encode()])
        elif work.at.exists():
            disk.remove(work.at)
    except OSError:  # no space for the word either: rank 0 waits until its deadline
        return


# --- what is there


def scan(folder: Path) -> list[Path]:
    """Returns published checkpoints below a folder, newest first; whether each can be read is not checked."""
    published = []
    for name in names_in(folder):
        match = _STEP.fullmatch(name)
        if match and _is_published(folder / name):
            published.append((int(match[1]), int(match[2] or 1), folder / name))
    return [path for _, _, path in sorted(published, key=lambda row: row[:2], reverse=True)]


def names_in(folder: Path) -> list[str]:
    """Returns the names in a folder; [] where it cannot be read."""
    own = getattr(folder, "names", None)  # of a place in a store
    try:
        return os.listdir(folder) if own is None else own()
    except OSError:
        return []


def _is_published(path: Path) -> bool:
    return (path / manifest.NAME).exists() if is_remote(path) else path.is_dir()


def under_way(folder: Path) -> list[Path]:
    """Returns the folders of saves that are under way, or that never ended."""
    if not is_remote(folder):
        return sorted(folder.glob("step-*.tmp-*"))
    named = [folder / name for name in names_in(folder) if _STEP.fullmatch(name)]
    return [path for path in named if not _is_published(path) and not _is_set_aside(path)]


def _is_set_aside(path: Path) -> bool:
    """Returns whether a folder in a store is a withdrawn checkpoint: its manifest has another name, its files stay."""
    kept = f"{manifest.NAME}."
    return any(name.startswith(kept) and not name.startswith(f"{kept}gone-") for name in names_in(path))


def step_of(path: Path) -> int:
    """Returns the step in a checkpoint's name; `InputError` for another name."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not named as a checkpoint is")
    return int(match[1])


def retain(folder: Path, newest: Path, keep: int, disk: Disk) -> None:
    """Remove published checkpoints but `newest`, whose files were read back, and the `keep` - 1 before it."""
    others = [path for path in scan(folder) if path != newest]
    for path in others[max(keep - 1, 0) :]:
        # renamed first: half a removed folder would still look like a checkpoint
        disk.remove(disk.withdraw(path, f"gone-{os.getpid()}"))


def clear(folder: Path, disk: Disk) -> None:
    """Remove folders of saves that never ended."""
    for path in under_way(folder) + ([] if is_remote(folder) else sorted(folder.glob("step-*.gone-*"))):
        disk.remove(path)


def set_aside(path: Path, why: str, disk: Disk) -> Path:
    """Rename a checkpoint that is damaged or of steps taken again, so that no scan finds it; returns its new path."""
    return disk.withdraw(path, f"{why}-{os.urandom(2).hex()}")


def verify(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Returns a sentence for each damaged file, by digests; of every `parts`-th file from `part` on."""
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
