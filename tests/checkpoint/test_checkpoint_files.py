"""Checkpoints as files: pieces, the manifest, publication under kills and losses, hostile and damaged files."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import manifest, publish
from shardwise.checkpoint.files import Disk, header_of, parsed, read_header
from shardwise.checkpoint.pieces import Piece, common_count, copy_common, from_json, narrowed, runs_of, to_json
from shardwise.checkpoint.stored import of_checkpoint
from shardwise.errors import InputError, RunError

# --- pieces


@st.composite
def pieces(draw, shape: tuple[int, ...]) -> Piece:
    runs = []
    for size in shape:
        kept = draw(st.lists(st.integers(0, max(size - 1, 0)), unique=True, max_size=size))
        whole = draw(st.booleans())
        runs.append(runs_of(range(size) if whole else sorted(kept)))
    count = math.prod(sum(stop - start for start, stop in one) for one in runs)
    first = draw(st.integers(0, count))
    return Piece(shape, tuple(runs), first, draw(st.integers(first, count)))


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(piece: Piece) -> np.ndarray:
    """Places in the whole tensor of the piece's elements, in its order: what the definition says, the slow way."""
    whole = np.arange(math.prod(piece.shape)).reshape(piece.shape)
    for dim, runs in enumerate(piece.runs):
        whole = whole.take([i for start, stop in runs for i in range(start, stop)], axis=dim)
    return whole.reshape(-1)[piece.first : piece.last]


@given(st.data())
def test_what_two_pieces_share_is_copied_and_nothing_else(data) -> None:
    shape = data.draw(SHAPES)
    held, wanted = data.draw(pieces(shape)), data.draw(pieces(shape))
    mine, theirs = elements(wanted), elements(held)
    target = np.full(wanted.count, -1)
    assert copy_common(theirs, held, target, wanted) == common_count(held, wanted) == len(np.intersect1d(mine, theirs))
    assert (target == np.where(np.isin(mine, theirs), mine, -1)).all()
    assert from_json(shape, json.loads(json.dumps(to_json(held)))) == held


def test_many_runs_are_copied_by_index_alike() -> None:
    held = Piece((200, 3), (runs_of(range(0, 200, 2)), ((0, 3),)), 5, 297)
    wanted = Piece((200, 3), (runs_of(range(0, 200, 3)), ((1, 3),)), 3, 100)
    target = np.full(wanted.count, -1)
    copy_common(elements(held), held, target, wanted)
    assert (target == np.where(np.isin(elements(wanted), elements(held)), elements(wanted), -1)).all()


def test_a_box_of_a_share_is_a_piece() -> None:
    assert narrowed(((0, 2), (4, 6)), 1, 3) == ((1, 2), (4, 5))
    with pytest.raises(InputError, match="ascending"):
        Piece((4,), (((2, 3), (1, 2)),), 0, 2)
    with pytest.raises(InputError, match=r"elements \[0, 5\) of 4"):
        Piece.whole((4,)).__class__((4,), (((0, 4),),), 0, 5)


# --- a checkpoint of two ranks, without torch


def work_of(folder: Path, step: int, rank: int, ranks: int = 2, keep: int = 2) -> tuple[publish.Work, list[bytes]]:
    """Rank `rank`'s rows of a (4, 3) tensor whose elements are 10 * step + rank."""
    each = 4 // ranks
    header, entries = header_of({"model/w": ("I64", (each * 3,))})
    piece = to_json(Piece.whole((4, 3)).part(rank * each * 3, (rank + 1) * each * 3))
    tensors = {"model/w": {"dtype": "I64", "shape": [4, 3], "parts": [[entries["model/w"].begin, piece]]}}
    fields = {"shared": {"optimizer": {"w": step}}, "listed": {"groups": [{"lr": 0.5}]}, "own": rank, "plan": "x"}
    work = publish.Work(folder, f"step-{step:08d}.tmp-ab", step, rank, ranks, tensors, fields, keep)
    return work, [header, np.full(each * 3, 10 * step + rank).tobytes()]


def save(folder: Path, step: int, disk: Disk, keep: int = 2) -> Path:
    for rank in (1, 0):
        work, parts = work_of(folder, step, rank, keep=keep)
        publish.write_rank(work, parts, disk)
    return publish.publish(work, disk)


def steps_that_load(folder: Path) -> list[int]:
    """The step of each published checkpoint, all of whose elements must be of that step, rank by rank."""
    found = []
    for path in publish.scan(folder):
        assert publish.verify(path) == []
        whole = manifest.read(path)
        values = [
            np.frombuffer((path / part.file).read_bytes()[part.begin :][: 8 * part.piece.count], np.int64)
            for part in whole.tensors["model/w"].parts
        ]
        assert np.concatenate(values).tolist() == [10 * whole.step] * 6 + [10 * whole.step + 1] * 6
        assert whole.fields["own"] == [0, 1] and whole.fields["groups"] == [{"lr": 0.5}]
        found.append(whole.step)
    return found


def test_published_ones_load_and_the_older_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert save(tmp_path, step, Disk()).name == f"step-{step:08d}"
    assert steps_that_load(tmp_path) == [3, 2]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    assert save(tmp_path, 3, Disk()).name == "step-00000003-2"  # what is published is never written again
    assert steps_that_load(tmp_path) == [3, 3]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000003", "step-00000003-2"]
    assert read_header(tmp_path / "step-00000003" / "rank-00001.safetensors")["model/w"].shape == (6,)


class Ending(Disk):
    """Ends the process before the n-th change; counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.changes: list[str] = []

    def reached(self, change: str, path: Path) -> None:
        if self.count == self.at:
            os._exit(77)
        self.count += 1
        self.changes.append(change)


def test_killed_at_any_change_the_last_published_one_loads(tmp_path: Path) -> None:
    counting = Ending(-1)
    save(tmp_path / "count", 1, Disk(), keep=1)
    save(tmp_path / "count", 2, counting, keep=1)
    assert {"create", "write", "sync", "rename", "sync folder", "remove"} == set(counting.changes)
    for at in range(counting.count):
        folder = tmp_path / str(at)
        save(folder, 1, Disk(), keep=1)
        child = os.fork()
        if child == 0:
            save(folder, 2, Ending(at), keep=1)
            os._exit(1)  # it should have ended before
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 77
        found = steps_that_load(folder)
        assert found in ([1], [2], [2, 1]), (at, counting.changes[at])
        published = counting.changes[:at].count("rename") >= 3  # two ranks' .json, then the folder
        assert (2 in found) == published
        publish.clear(folder, Disk())
        assert all(".tmp-" not in name and ".gone-" not in name for name in os.listdir(folder))
        save(folder, 3, Disk(), keep=1)  # and saving goes on
        assert steps_that_load(folder) == [3]


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch) -> None:
    def full(handle: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*rank-00001\.safetensors'"):
        save(tmp_path, 1, Disk())


def test_every_sync_reaches_the_disk(tmp_path: Path, monkeypatch) -> None:
    synced, own, counting = [], os.fsync, Ending(-1)
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), own(handle)))
    save(tmp_path, 1, counting)
    assert len(synced) == sum(change.startswith("sync") for change in counting.changes) == 9


# --- a log of changes, replayed on a disk that loses what was not synced


class Logging(Disk):
    """Keeps what is done, as it is done."""

    def __init__(self) -> None:
        self.log: list[tuple] = []

    def folder(self, path: Path) -> None:
        if not path.exists():
            self.log.append(("mkdir", path))
        super().folder(path)

    def file(self, path, parts, read_back=False):
        parts = [bytes(part) for part in parts]
        self.log.append(("create", path))
        self.log += [("write", path, part) for part in parts]
        return super().file(path, parts, read_back)

    def reached(self, change: str, path: Path) -> None:
        if change == "sync":
            self.log.append((change, path))

    def rename(self, path: Path, to: Path) -> None:
        self.log.append(("rename", path, to))
        super().rename(path, to)

    def sync_folder(self, path: Path) -> None:
        self.log.append(("sync folder", path))
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        self.log.append(("remove", path))
        super().remove(path)


def after_a_crash(log: list[tuple], root: Path, to: Path, rng: random.Random) -> None:
    """A state that a disk may be in after these changes: of what was not synced, any part may be lost.

    Bytes of a file last once it is synced; before, a prefix of them, or zeros. Names (made, renamed, removed) last
    once their folder is synced, and each by itself before.
    """
    kept: list[tuple] = []
    for place, change in enumerate(log):
        later = log[place + 1 :]
        if change[0] == "write":
            safe = any(other[0] == "sync" and other[1] == change[1] for other in later)
            data = change[2] if safe else rng.choice([b"", change[2][: len(change[2]) // 2], bytes(len(change[2]))])
            kept.append(("write", change[1], data))
        elif change[0] in ("rename", "remove", "create", "mkdir"):
            folder = change[1].parent
            safe = any(other[0] == "sync folder" and other[1] == folder for other in later)
            if safe or rng.random() < 0.5:
                kept.append(change)
    for change in kept:
        paths = [to / path.relative_to(root) for path in change[1:] if isinstance(path, Path)]
        if change[0] == "mkdir":
            paths[0].mkdir(parents=True, exist_ok=True)
        elif not paths[0].parent.exists() or (len(paths) > 1 and paths[1].is_dir()):
            continue
        elif change[0] == "create":
            paths[0].touch()
        elif change[0] == "write" and paths[0].exists():
            with paths[0].open("ab") as file:
                file.write(change[2])
        elif change[0] == "rename" and paths[0].exists():
            paths[0].rename(paths[1])
        elif change[0] == "remove" and paths[0].exists():
            (shutil.rmtree if paths[0].is_dir() else os.remove)(paths[0])


def test_a_disk_that_loses_what_was_not_synced_leaves_a_good_one(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    disk, ends = Logging(), {}
    for step in (1, 2, 3):
        save(live, step, disk, keep=1)
        ends[step] = len(disk.log)
    rng = random.Random(0)
    for trial in range(120):
        cut = rng.randrange(1, len(disk.log) + 1)
        state = tmp_path / f"state-{trial}"
        state.mkdir()
        after_a_crash(disk.log[:cut], live, state, rng)
        good = [path for path in publish.scan(state) if not publish.verify(path)]
        published = [step for step, end in ends.items() if end <= cut]
        steps = [manifest.read(path).step for path in good]
        if published:
            assert steps and max(steps) >= max(published), (trial, cut, steps, published)
        shutil.rmtree(state)


# --- damage


def damage(folder: Path, rng: random.Random) -> str:
    """Change a published checkpoint in one place; returns what was done."""
    names = sorted(os.listdir(folder))
    shards = [name for name in names if name.endswith(".safetensors")]
    kind = rng.choice(["flip"] * 5 + ["cut", "lose", "swap", "grow", "zeros"])
    path = folder / rng.choice(names)
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "grow":
        path.write_bytes(data + b"\0")
    elif kind == "zeros":
        path.write_bytes(bytes(len(data)))
    elif kind == "lose":
        path.unlink()
    else:
        one, other = folder / shards[0], folder / shards[1]
        one.rename(folder / "x"), other.rename(one), (folder / "x").rename(other)
        path = folder
    return f"{kind} {path}"


def test_every_damage_is_found_and_named(tmp_path: Path) -> None:
    good = tmp_path / "good"
    made = save(good, 7, Disk())
    rng = random.Random(1)
    for trial in range(200):
        folder = tmp_path / "bad"
        shutil.copytree(made, folder)
        what = damage(folder, rng)
        wrong = publish.verify(folder)
        assert wrong and all(str(folder) in word for word in wrong), (trial, what)
        shutil.rmtree(folder)
    digest = manifest.read(made).files["rank-00001.safetensors"].digest
    path = made / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    (told,) = publish.verify(made)
    assert str(path) in told and f"should be {digest} and is " in told


def test_a_file_that_is_cut_after_it_was_verified_is_an_error_and_no_zeros(tmp_path: Path) -> None:
    made = save(tmp_path, 7, Disk())
    with of_checkpoint(made) as stored:
        path = made / "rank-00001.safetensors"
        os.truncate(path, path.stat().st_size - 8)
        with pytest.raises(RunError, match=r"rank-00001\.safetensors ends at byte \d+"):
            stored.read("model/w", Piece.whole((4, 3)))


CANARY = "import os; os.environ['CANARY'] = 'dead'"


class Pickled:
    def __reduce__(self):
        return exec, (CANARY,)


def hostile(made: Path) -> dict[str, bytes]:
    """Contents for `manifest.json`."""
    import pickle

    content = json.loads((made / "manifest.json").read_bytes())["content"]

    def with_(**changes) -> bytes:
        return manifest.sealed({**content, **changes})

    tensor = content["tensors"]["model/w"]
    part = tensor["parts"][0]
    bomb = {"dtype": "I64", "shape": [10**9, 10**9], "parts": [[0, 0, [[None, None], 0, 10**18]]]}
    many = {**tensor, "parts": [[0, 0, [[None, None], 0, 0]]] * 1000}
    return {
        "pickle": pickle.dumps(Pickled()),
        "zip": b"PK\x03\x04" + bytes(100),
        "deep": b"[" * 10**6,
        "wide number": b'{"format": ' + b"9" * 10**5 + b"}",
        "twice": b'{"format": "shardwise checkpoint", "format": "shardwise checkpoint"}',
        "nan": b'{"format": NaN}',
        "list": b"[]",
        "newer": json.dumps({"format": manifest.FORMAT, "version": 2, "digest": "", "content": {}}).encode(),
        "path": with_(files={"../../etc/passwd": {"bytes": 1, "xxh3_128": "0"}}),
        "absolute": with_(files={"/etc/passwd": {"bytes": 1, "xxh3_128": "0"}}),
        "huge": with_(tensors={"model/w": bomb}),
        "hole": with_(tensors={"model/w": many}),
        "overlap": with_(tensors={"model/w": {**tensor, "parts": [part, part]}}),
        "negative": with_(tensors={"model/w": {**tensor, "parts": [[0, -8, part[2]]]}}),
        "past the end": with_(tensors={"model/w": {**tensor, "parts": [[0, 10**12, part[2]], tensor["parts"][1]]}}),
        "dims": with_(tensors={"model/w": {**tensor, "shape": [1] * 10**5}}),
        "no tensors": with_(tensors=None),
        "text for a number": with_(step="7"),
    }


def test_hostile_manifests_are_one_error(tmp_path: Path) -> None:
    made = save(tmp_path, 7, Disk())
    for name, data in hostile(made).items():
        (made / "manifest.json").write_bytes(data)
        with pytest.raises(InputError, match=r"manifest\.json") as caught:
            manifest.read(made)
        assert len(str(caught.value)) < 400, name
    assert "CANARY" not in os.environ
    os.truncate(made / "manifest.json", 2**31)  # as of a thousand million elements
    with pytest.raises(InputError, match="more than any checkpoint needs"):
        manifest.read(made)
    (made / "manifest.json").unlink()
    os.mkfifo(made / "manifest.json")
    with pytest.raises(InputError):
        manifest.read(made)


def test_hostile_safetensors_are_one_error(tmp_path: Path) -> None:
    import pickle

    def headed(fields, body: bytes = b"", length: int | None = None) -> bytes:
        text = json.dumps(fields).encode()
        return (len(text) if length is None else length).to_bytes(8, "little") + text + body

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    path = tmp_path / "x.safetensors"
    for data in (
        pickle.dumps(Pickled()), b"", b"\xff" * 8, headed({}, length=2**40), headed([], b""), headed({"w": one}),
        headed({"w": {**one, "shape": [10**9]}}, bytes(4)), headed({"w": {**one, "dtype": "F33"}}, bytes(4)),
        headed({"w": one, "v": one}, bytes(4)), headed({"w": {**one, "shape": [-1]}}, bytes(4)),
        headed({"w": {**one, "data_offsets": [4, 8]}}, bytes(8)), headed({"w": {}}, bytes(4)), headed({"w": 3}, b""),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"x\.safetensors"):
            read_header(path)
    path.write_bytes(headed({"w": one}, bytes(4)))
    assert read_header(path)["w"].shape == (1,)
    assert "CANARY" not in os.environ
    with pytest.raises(ValueError, match="twice"):
        parsed(b'{"a": 1, "a": 2}')


def test_ranks_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        work, parts = work_of(tmp_path, 1, rank)
        work.fields["shared"]["optimizer"]["w"] = rank
        publish.write_rank(work, parts, Disk())
    with pytest.raises(RunError, match="optimizer 'w' = 1, another rank 0"):
        publish.publish(work_of(tmp_path, 1, 0)[0], Disk())
    work, parts = work_of(tmp_path, 2, 0)
    publish.write_rank(work, parts, Disk())
    with pytest.raises(RunError, match="nothing came from rank 1"):
        publish.publish(work, Disk(), wait_s=0)
    publish.give_up(work_of(tmp_path, 2, 1)[0], OSError("No space left on device"), Disk())
    with pytest.raises(RunError, match="rank 1: No space left"):
        publish.publish(work, Disk())
    publish.give_up(work_of(tmp_path, 3, 1)[0], OSError("before there was a folder"), Disk())
    work, parts = work_of(tmp_path, 3, 0)
    publish.write_rank(work, parts, Disk())
    with pytest.raises(RunError, match="rank 1: before there was a folder"):
        publish.publish(work, Disk(), wait_s=10)
    assert publish.scan(tmp_path) == []
