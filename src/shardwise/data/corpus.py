"""A memory-mapped corpus of bytes on disk, which needs neither a tokenizer nor a download.

How: a folder holds `tokens.bin` (uint8, the files one after another) and `corpus.json` (version, dtype,
count, where it came from, sha256). Both are written under another name and renamed, the description last, so
a reader sees a whole corpus or none, and two ranks that build the same corpus at once do no harm. Opening
checks the description and the size, and the sha256 as well up to 64 MiB.

The built-in corpus is the source code of the Python standard library on the user's machine. Its files are
ordered by a hash of their names, so that the held-out end of it resembles the rest.

What it does not do: tokenize, or mark the borders of documents.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from shardwise.errors import InputError

VERSION = 1
PAYLOAD = "tokens.bin"
DESCRIPTION = "corpus.json"
HASHED_ON_OPEN = 64 * 2**20
STANDARD_LIBRARY_LIMIT = 12_000_000
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class Corpus:
    """An open corpus; `tokens` is a read-only uint8 array (N,), mapped from the file."""

    folder: Path
    tokens: np.ndarray
    source: str  # where the text comes from, in words
    sha256: str  # of all bytes

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Returns the memory-mapped corpus in `folder`; `InputError` names the file that is missing or damaged."""
        folder = Path(folder).absolute()
        described = _description(folder / DESCRIPTION)
        payload = folder / PAYLOAD
        try:
            size = payload.stat().st_size
            if size != described["count"]:
                raise InputError(
                    f"{payload} has {size} bytes where {DESCRIPTION} says {described['count']}: the corpus "
                    "is truncated or of two writes; write it again"
                )
            tokens = np.memmap(payload, dtype=np.uint8, mode="r")
        except OSError as error:
            raise InputError(f"{payload} cannot be read ({error}): write the corpus again") from error
        corpus = cls(folder, tokens, described["source"], described["sha256"])
        # reading all of a large corpus would take long, so only its size is checked
        if size <= HASHED_ON_OPEN:
            corpus.verify()
        return corpus

    def verify(self) -> None:
        """Reads every byte and raises `InputError` if the sha256 differs; `open` calls this for small corpora."""
        digest = hashlib.sha256()
        for start in range(0, len(self.tokens), _CHUNK):
            digest.update(self.tokens[start : start + _CHUNK].data)
        if digest.hexdigest() != self.sha256:
            raise InputError(
                f"{self.folder / PAYLOAD} does not have the sha256 in {DESCRIPTION}: the corpus is damaged; "
                "write it again"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __reduce__(self) -> tuple:
        return Corpus.open, (self.folder,)


class BytesSource:
    """A source of {"tokens": int64 (B, seq_len + 1)}: consecutive windows of bytes [start, stop) of a corpus.

    Windows do not overlap; bytes at the end that fill no window are left out. `stop` None: the corpus's end.
    """

    def __init__(self, corpus: Corpus, seq_len: int, start: int = 0, stop: int | None = None) -> None:
        stop = len(corpus) if stop is None else stop
        if seq_len < 1:
            raise InputError(f"seq_len must be at least 1, got {seq_len}")
        if not 0 <= start <= stop <= len(corpus):
            raise InputError(f"bytes [{start}, {stop}) do not lie in a corpus of {len(corpus)} bytes")
        self.corpus = corpus
        self.seq_len = seq_len
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return (self.stop - self.start) // (self.seq_len + 1)

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        """Returns {"tokens": (B, seq_len + 1) int64}; raises `IndexError` beyond the last. `region` is not used."""
        width = self.seq_len + 1
        rows = np.asarray(indices, dtype=np.int64)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < len(self):
            raise IndexError(f"sample {rows.min()} or {rows.max()} is not in a source of {len(self)}")
        places = self.start + rows[:, None] * width + np.arange(width)
        return {"tokens": torch.from_numpy(self.corpus.tokens[places].astype(np.int64))}


def split(corpus: Corpus, seq_len: int, held_out: float = 0.05) -> tuple[BytesSource, BytesSource]:
    """Returns (training source, held-out source); the latter has the last windows, at least one.

    held_out   fraction of the windows. Raises `InputError` if there are too few.
    """
    if not 0 < held_out < 1:
        raise InputError(f"held_out is a fraction between 0 and 1, got {held_out}")
    if seq_len < 1:
        raise InputError(f"seq_len must be at least 1, got {seq_len}")
    width = seq_len + 1
    windows = len(corpus) // width
    held_windows = max(1, round(windows * held_out))
    if windows - held_windows < 1:
        raise InputError(
            f"{corpus.folder} has {len(corpus)} bytes, {windows} windows of seq_len {seq_len} + 1: too "
            f"few to train on some and hold out {held_windows}; give more text or a shorter seq_len"
        )
    border = (windows - held_windows) * width
    return BytesSource(corpus, seq_len, 0, border), BytesSource(corpus, seq_len, border, windows * width)


def write_corpus(
    texts: str | Path | bytes | Iterable[str | Path | bytes], folder: str | Path, *, source: str = ""
) -> Corpus:
    """Writes the concatenation of `texts` as a corpus into `folder`; returns the open `Corpus`.

    texts    one or several of: a path (also as str) of a file, or bytes
    source   description of where the text comes from

    Raises `InputError` if there is no text or the folder cannot be written.
    """
    folder = Path(folder)
    parts = [texts] if isinstance(texts, str | Path | bytes) else texts
    digest, count = hashlib.sha256(), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with renamed(folder / PAYLOAD) as file:
            # the description is written last, so a folder with a description is complete
            for chunk in _chunks(parts):
                digest.update(chunk)
                count += file.write(chunk)
            # an empty file cannot be memory-mapped
            if count == 0:
                raise InputError(f"there is no text to write to {folder}: every file is empty")
        described = {
            "version": VERSION,
            "dtype": "uint8",
            "count": count,
            "source": source,
            "sha256": digest.hexdigest(),
        }
        with renamed(folder / DESCRIPTION) as file:
            file.write(json.dumps(described, indent=2).encode() + b"\n")
    except OSError as error:
        raise InputError(f"the corpus in {folder} cannot be written: {error}") from error
    return Corpus.open(folder)


def cache() -> Path:
    """Returns shardwise's folder in the user's cache (XDG_CACHE_HOME or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def standard_library_corpus(cache_folder: str | Path | None = None, *, limit: int = STANDARD_LIBRARY_LIMIT) -> Corpus:
    """Returns a corpus of this Python's standard library (source code), built once and cached.

    cache_folder   folder in which it is kept; None: `cache()`
    limit          at most so many bytes
    """
    version = ".".join(str(number) for number in sys.version_info[:3])
    folder = Path(cache_folder or cache()) / f"python-{version}-{limit}"
    try:
        return Corpus.open(folder)
    except InputError:
        pass  # not built yet, or damaged: build it
    texts = _standard_library_texts(Path(sysconfig.get_path("stdlib")), limit)
    return write_corpus(texts, folder, source=f"the standard library of Python {version}")


def _standard_library_texts(root: Path, limit: int) -> Iterator[bytes]:
    """Yields the contents of .py files below `root`, up to `limit` bytes in all; `InputError` if there are none."""
    files = []
    for folder, subfolders, names in os.walk(root):
        # changed in place, so that os.walk does not enter skipped folders
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    if not files:
        raise InputError(f"{root} holds no .py files: give text of your own to write_corpus")
    left = limit
    # ordered by a hash of names, so that any `limit` gives a mixture of modules
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if left <= 0:
            return
        text = (root / name).read_bytes()[:left]
        left -= len(text)
        yield text


def _chunks(parts: Iterable[str | Path | bytes]) -> Iterator[bytes]:
    """Yields the bytes of files (paths) and of bytes, in order; `InputError` for any other type."""
    for part in parts:
        if isinstance(part, bytes):
            yield part
        elif isinstance(part, str | Path):
            with open(part, "rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        else:
            raise InputError(f"a corpus is written from paths and bytes, got a {type(part).__name__}")


@contextmanager
def renamed(path: Path) -> Iterator[BinaryIO]:
    """Context that gives a file to write, which is synced and renamed to `path` at the end, and removed on an error."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _description(path: Path) -> dict[str, Any]:
    """Returns the fields of a corpus.json (version, dtype, count, source, sha256); `InputError` if one is wrong."""
    try:
        described = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} is missing: there is no corpus here; make one with write_corpus") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): write the corpus again") from error
    # the version is checked first, since another version may have other fields
    if not isinstance(described, dict) or described.get("version") != VERSION:
        version = described.get("version") if isinstance(described, dict) else None
        raise InputError(
            f"{path} is of format version {version}, this shardwise reads {VERSION}: write the corpus again"
        )
    kinds = {"dtype": str, "count": int, "source": str, "sha256": str}
    wrong = [key for key, kind in kinds.items() if not isinstance(described.get(key), kind)]
    # `Corpus.open` compares `count` with the payload's size
    if wrong or described["dtype"] != "uint8" or described["count"] < 1:
        raise InputError(f"{path} has a wrong {wrong[0] if wrong else 'dtype or count'}: write the corpus again")
    return described
