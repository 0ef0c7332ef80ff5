"""`TokenSource`: windows of memory-mapped files of tokens.

A file is `.npy` (a vector of whole numbers) or raw numbers of a dtype that is given (`.bin`). Window i holds the
tokens [i L, i L + L]: L inputs and, one further, L targets, so every token but the first is a target once.

    tokens   t0 t1 t2 t3 t4 t5 t6 ...
    L = 3    [t0 t1 t2 t3] [t3 t4 t5 t6] ...

What this does not do: mark the borders of documents (`JsonlSource` packs whole documents).
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import InputError

LOOKED_AT, FEWEST = 4096, 32  # at most and at least so many numbers at a file's start show a wrong dtype


class TokenSource:
    """Windows of `seq_len` + 1 tokens of one or several files: {"tokens": int64 (B, seq_len + 1)}.

    paths    files, read one after another; a window never crosses from one to the next
    seq_len  L of the module's docstring
    dtype    NumPy dtype of raw files; `.npy` files have their own
    vocab    a token that is not below it raises `InputError` when it is read; None: not checked

    `span`: [first, last) of the windows of all files that this source has.
    """

    def __init__(
        self, paths: str | Path | Iterable[str | Path], seq_len: int, *, dtype: str = "uint16", vocab: int | None = None
    ) -> None:
        if seq_len < 1:
            raise InputError(f"seq_len must be at least 1, got {seq_len}")
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        self.seq_len, self.dtype, self.vocab = seq_len, dtype, vocab
        self._open()
        self.span = (0, int(self._ends[-1]) if len(self._ends) else 0)

    def _open(self) -> None:
        """Maps the files and counts their windows; `InputError` for a file that is shorter than one window."""
        self.files = [_mapped(path, self.dtype) for path in self.paths]
        windows = [max(0, (len(tokens) - 1) // self.seq_len) for tokens in self.files]
        for path, tokens, count in zip(self.paths, self.files, windows, strict=True):
            if count == 0:
                raise InputError(f"{path} has {len(tokens)} tokens, too few for one window of {self.seq_len} + 1")
        self._ends = np.cumsum(windows)

    def __len__(self) -> int:
        return self.span[1] - self.span[0]

    def over(self, start: int, stop: int) -> TokenSource:
        """Returns a source of windows [start, stop) of this one; `InputError` if they are not all in it."""
        if not 0 <= start < stop <= len(self):
            raise InputError(f"windows [{start}, {stop}) do not lie in a source of {len(self)}")
        part = copy(self)
        part.span = (self.span[0] + start, self.span[0] + stop)
        return part

    def split(self, held_out: float = 0.05) -> tuple[TokenSource, TokenSource]:
        """Returns (training source, held-out source); the latter has the last windows, at least one.

        held_out   fraction of the windows. Raises `InputError` if there are too few.
        """
        if not 0 < held_out < 1:
            raise InputError(f"held_out is a fraction between 0 and 1, got {held_out}")
        held_windows = max(1, round(len(self) * held_out))
        if len(self) - held_windows < 1:
            raise InputError(
                f"{', '.join(map(str, self.paths))}: {len(self)} windows of {self.seq_len} + 1 tokens are too few to "
                "train on some and hold out others; give more text or a shorter seq_len"
            )
        return self.over(0, len(self) - held_windows), self.over(len(self) - held_windows, len(self))

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        """Returns {"tokens": int64 (B, seq_len + 1)} of the windows at `indices`."""
        rows = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"window {index} is not in a source of {len(self)}")
            window = self.span[0] + index
            file = int(np.searchsorted(self._ends, window, side="right"))
            start = (window - (int(self._ends[file - 1]) if file else 0)) * self.seq_len
            rows[row] = self.files[file][start : start + self.seq_len + 1]
            self._check(rows[row], file, start)
        return {"tokens": torch.from_numpy(rows)}

    def _check(self, row: np.ndarray, file: int, start: int) -> None:
        """Raises `InputError` if a token of a window, which begins at `start` of its file, is not below `vocab`."""
        if self.vocab is None:
            return
        beyond = np.flatnonzero((row >= self.vocab) | (row < 0))
        if beyond.size:
            raise InputError(
                f"{self.paths[file]}: token {start + int(beyond[0])} is {int(row[beyond[0]])}, beyond the vocabulary "
                f"of {self.vocab}: the file was written with another tokenizer, or as another dtype than {self.dtype}"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("paths", "seq_len", "dtype", "vocab", "span")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


def _mapped(path: Path, dtype: str) -> np.ndarray:
    """Returns a file's tokens as a memory map (N,); `InputError` for a file of anything else.

    dtype   of a raw file; a .npy file has its own
    """
    try:
        # .npy says its dtype itself; a raw file has none, so its length must at least fit
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            width = np.dtype(dtype).itemsize
            if path.stat().st_size % width or not path.stat().st_size:
                raise InputError(f"{path} has {path.stat().st_size} bytes, which are no whole number of {dtype} tokens")
            tokens = np.memmap(path, dtype=dtype, mode="r")
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise InputError(f"{path} cannot be read as tokens: {error}") from error
    if not isinstance(tokens, np.ndarray):
        raise InputError(f"{path} holds several arrays ({', '.join(tokens)}), and a file of tokens holds one")
    # a matrix of tokens, or probabilities, would be read as one long text
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, not a vector of whole numbers")
    # reading a raw file at half its width gives no error, but every second number is 0
    _refuse_half(path, tokens)
    return tokens


def _refuse_half(path: Path, tokens: np.ndarray) -> None:
    """Raises `InputError` if every second number is 0, as in a file of wider integers read at half their width."""
    head = np.asarray(tokens[:LOOKED_AT])
    if len(head) < FEWEST or head[1::2].any() or not head[::2].any():
        return
    wide = f"uint{16 * tokens.dtype.itemsize}"
    raise InputError(
        f"{path}: every second of its first {len(head)} numbers is 0, as where {wide} is read as {tokens.dtype}: "
        f'give dtype="{wide}"'
    )
