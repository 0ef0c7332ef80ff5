"""`Scratch`: a folder in which a script runs during its proof, so that nothing of the user's is overwritten.

    the script's folder      data/a.npy   out/best.pt   notes.txt
    scratch                  data/a.npy   out/best.pt   notes.txt      folders of its own, copies, large files as links

Relative paths end up here. A large file that the script opens to write in takes the link's place first, as a copy where
it is added to; what it removes or moves is the link. A script that writes beside itself by an absolute path is stopped.

What this does not do: watch large files that libraries beside torch.save write into without Python, or programs that
the script starts where they write by absolute paths.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import InputError

MOST_FILES = 5000  # that are taken one by one; a folder that is left then is linked whole
MOST_OF_A_FILE, MOST_BYTES = 64 * 2**20, 2**30  # that are copied, of one file and of all
_LEFT_OUT = {".git", "__pycache__", ".venv", "venv", "node_modules", ".shardwise"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_ACTIVE: list[Scratch] = []  # that this process stands in


@cache
def _listening() -> None:
    """Add an audit hook that tells active `Scratch`es of opened files, once for the process: it cannot be removed."""

    def hear(event: str, args: tuple[Any, ...]) -> None:
        for each in _ACTIVE:
            each.heard(event, args)

    sys.addaudithook(hear)


class Scratch:
    """Context: the process stands in a scratch folder that looks like `home`."""

    def __init__(self, home: str, folder: str, script: str) -> None:
        """`folder` is what `looking_like(home)` made, for all ranks of a run."""
        self._folder = Path(folder).resolve()
        self._guarded = {str(Path(home).resolve()), str(Path(script).resolve().parent)}
        self._active, self._save = False, torch.save

    def __enter__(self) -> Scratch:
        self._before = os.getcwd()
        os.chdir(self._folder)
        self._active = True
        torch.save = self._saving
        _listening()
        _ACTIVE.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._active = False
        _ACTIVE.remove(self)
        torch.save = self._save
        os.chdir(self._before)

    # --- what the script writes

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """Audit hook: copies a linked file before Python writes, removes or moves it; refuses files outside."""
        # hooks of Python stay for good: outside of a proof they do nothing
        if not self._active:
            return
        # args[0] may be a file's number, which was opened before
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path, mode, flags = args
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITES)
            if writes:
                # opened for appending or changing, the copy must have the file's content
                kept = (isinstance(mode, str) and "w" not in mode) or not isinstance(mode, str)
                self._before_write(os.fsdecode(path), keeps=kept)
        # these write without opening
        elif event in ("os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"):
            for path in args[:2]:  # of a rename also where it goes
                if isinstance(path, str | bytes | os.PathLike):
                    self._refuse_outside(os.fsdecode(path))

    def _saving(self, obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        """Stands for `torch.save`, which opens files without Python's audit; returns what that does."""
        if isinstance(f, str | os.PathLike):
            self._before_write(os.fspath(f), keeps=False)
        return self._save(obj, f, *args, **options)

    def _before_write(self, path: str, *, keeps: bool) -> None:
        """Replace a link by a file of the script's own before it is written; `keeps`: with the user's content."""
        link = Path(path)
        # a folder is opened so for a file without a name in it (O_TMPFILE)
        if not link.is_dir():
            self._refuse_outside(path)
        # no link: the file is a copy already, or new
        if not link.is_symlink() or not self._is_inside(link):
            return
        target = link.resolve()
        active, self._active = self._active, False
        try:
            link.unlink(missing_ok=True)  # another rank may have done so
            if keeps and target.is_file():
                shutil.copy2(target, link)
        finally:
            self._active = active

    def _is_inside(self, path: Path) -> bool:
        return Path(os.path.abspath(path)).parent.resolve().is_relative_to(self._folder)

    def _refuse_outside(self, path: str) -> None:
        """Raise `InputError` before a file or folder beside the script is written or removed by an absolute path."""
        place = Path(os.path.abspath(path))
        if self._is_inside(place) or "__pycache__" in place.parts:
            return
        place = place.parent.resolve() / place.name
        if any(_belongs_to(place, Path(folder)) for folder in self._guarded):
            raise InputError(
                f"verify: the script writes to {place} by an absolute path, and a proof runs the script "
                "several times: let it take its folder from where it is started or from an argument; or prove it in a "
                "folder of its own that may be written (verify --cwd FOLDER)"
            )


def _belongs_to(place: Path, folder: Path) -> bool:
    """Whether a file is one of a user's folder: not of a cache (`~/.cache`) or one of the system's temporary files."""
    if not place.is_relative_to(folder):
        return False
    temporary = Path(tempfile.gettempdir()).resolve()
    if temporary.is_relative_to(folder) and place.is_relative_to(temporary):
        return False
    return not any(part.startswith(".") for part in place.relative_to(folder).parts)


@contextmanager
def looking_like(home: str) -> Iterator[str]:
    """Context: the path of a scratch folder that looks like `home`; it is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-proof-")).resolve()
    try:
        # the scratch folder may lie in the one that is copied
        _Copy(Path(home).resolve(), folder).make(Path(home).resolve(), folder)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Copy:
    """Copies a folder's tree: small files as copies, large ones as links, without files that the user may not read."""

    def __init__(self, *left_out: Path) -> None:
        self._files, self._bytes = MOST_FILES, MOST_BYTES
        self._seen = {*left_out}  # folders, by where they lie: a link may lead to one that is there

    def make(self, source: Path, to: Path) -> None:
        """Fill the folder `to` with the entries of the folder `source`, a path without links."""
        try:
            entries = sorted(os.scandir(source), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            if entry.name in _LEFT_OUT:
                continue
            place, real = to / entry.name, Path(entry.path)
            if entry.is_symlink():  # copied is what it leads to
                real = Path(os.path.realpath(real))  # of a link to itself that link
            self._files -= 1
            if os.path.isdir(real) and self._files > 0 and real not in self._seen:
                self._seen.add(real)
                place.mkdir()
                self.make(real, place)
            elif not self._copied(real, place):  # beyond a limit, or a folder that was met before
                place.symlink_to(entry.path)

    def _copied(self, real: Path, place: Path) -> bool:
        """Copy a plain file, where the limits of count and bytes have room; returns whether it was copied."""
        try:
            size = real.stat().st_size
            if not real.is_file() or size > MOST_OF_A_FILE or size > self._bytes or self._files <= 0:
                return False
            shutil.copy2(real, place)
        except OSError:
            return False
        self._bytes -= size
        return True
