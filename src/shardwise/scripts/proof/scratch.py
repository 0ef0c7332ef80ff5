"""`Scratch`: a folder in which a script runs during its proof, so that nothing of the user's is overwritten.

    the script's folder      data/a.npy   out/best.pt   notes.txt
    scratch                  data/a.npy   out/best.pt   notes.txt      folders of its own, copies, large files as links

Relative paths end up here. When the script opens a large file for writing, its link is first replaced by a file of the
script's own, a copy if the content is needed; what it removes or moves is the link. A script that writes beside itself
by an absolute path is stopped.

What this does not do: watch large files that libraries beside torch.save write into without Python, or programs that
the script starts if they write by absolute paths.
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

MOST_FILES = 5000  # entries that are taken one by one; folders beyond are linked as a whole
MOST_OF_A_FILE, MOST_BYTES = 64 * 2**20, 2**30  # bytes that are copied: of one file, of all
_LEFT_OUT = {".git", "__pycache__", ".venv", "venv", "node_modules", ".shardwise"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_ACTIVE: list[Scratch] = []  # those that this process is inside


@cache
def _listening() -> None:
    """Adds an audit hook that tells active `Scratch`es of opened files; once in a process, as it cannot be removed."""

    def hear(event: str, args: tuple[Any, ...]) -> None:
        for each in _ACTIVE:
            each.heard(event, args)

    sys.addaudithook(hear)


class Scratch:
    """Context in which the process works in a scratch folder that looks like `home`."""

    def __init__(self, home: str, folder: str, script: str) -> None:
        """`folder` is what `looking_like(home)` made, one for all ranks of a run; `script` is the script's path."""
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
        """Audit hook: replaces a linked file before Python writes it; refuses files outside.

        event, args  as Python's audit events have them
        """
        # audit hooks cannot be removed, so this one does nothing outside of a proof
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
            for path in args[:2]:  # a rename has a second path, its goal
                if isinstance(path, str | bytes | os.PathLike):
                    self._refuse_outside(os.fsdecode(path))

    def _saving(self, obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        """Stands for `torch.save`, which opens files without Python's audit; calls it and returns its result."""
        if isinstance(f, str | os.PathLike):
            self._before_write(os.fspath(f), keeps=False)
        return self._save(obj, f, *args, **options)

    def _before_write(self, path: str, *, keeps: bool) -> None:
        """Replaces a link at `path` by a file of the script's own; `keeps`: with the user's content."""
        link = Path(path)
        # a folder is opened for writing to make a file without a name in it (O_TMPFILE)
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
        """Whether a path lies in the scratch folder, links in its parent resolved."""
        return Path(os.path.abspath(path)).parent.resolve().is_relative_to(self._folder)

    def _refuse_outside(self, path: str) -> None:
        """Raises `InputError` if `path` lies in the user's folders, before it is written or removed."""
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
    """Whether `place` is in the user's folder, outside hidden folders such as `~/.cache` and temporary files."""
    if not place.is_relative_to(folder):
        return False
    temporary = Path(tempfile.gettempdir()).resolve()
    if temporary.is_relative_to(folder) and place.is_relative_to(temporary):
        return False
    return not any(part.startswith(".") for part in place.relative_to(folder).parts)


@contextmanager
def looking_like(home: str) -> Iterator[str]:
    """Context that yields the path of a scratch folder with the content of `home`, and removes it at its end."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-proof-")).resolve()
    try:
        # the scratch folder may lie in the one that is copied
        _Copy(Path(home).resolve(), folder).make(Path(home).resolve(), folder)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Copy:
    """Copies a folder's tree: small files as copies, large ones as links; unreadable folders are left empty."""

    def __init__(self, *left_out: Path) -> None:
        """`left_out`: folders that are not entered, such as the copy itself."""
        self._files, self._bytes = MOST_FILES, MOST_BYTES
        self._seen = {*left_out}  # resolved, since a link may lead to a folder that was copied

    def make(self, source: Path, to: Path) -> None:
        """Fills the folder `to` with the entries of the folder `source`, a path without links."""
        try:
            entries = sorted(os.scandir(source), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            if entry.name in _LEFT_OUT:
                continue
            place, real = to / entry.name, Path(entry.path)
            if entry.is_symlink():  # its target is copied
                real = Path(os.path.realpath(real))  # a link to itself gives itself
            self._files -= 1
            if os.path.isdir(real) and self._files > 0 and real not in self._seen:
                self._seen.add(real)
                place.mkdir()
                self.make(real, place)
            elif not self._copied(real, place):  # beyond a limit, or a folder that was met before
                place.symlink_to(entry.path)

    def _copied(self, real: Path, place: Path) -> bool:
        """Copies a plain file if the limits of number and bytes allow; returns whether it was copied."""
        try:
            size = real.stat().st_size
            if not real.is_file() or size > MOST_OF_A_FILE or size > self._bytes or self._files <= 0:
                return False
            shutil.copy2(real, place)
        except OSError:
            return False
        self._bytes -= size
        return True
