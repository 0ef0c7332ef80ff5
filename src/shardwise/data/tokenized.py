"""Tokenize files of text (data/text_files) once, into a file of tokens that `TokenSource` (data/tokens) maps.

A text file is one document, and so is the text of a record; each ends with the tokenizer's end-of-text token. The
tokens of all documents stand one after another, in the order of the paths. The file lies in the user's cache under a
name made of what it was made from (paths, sizes and times of the files, the tokenizer's content), so it is made again
when one of them changes, and never twice for the same; it takes its name when it is whole.

What this does not do: stream. The tokens of all files are held in memory while the file is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from shardwise.data.corpus import cache, renamed
from shardwise.data.text_files import contents, text_files
from shardwise.data.tokenizer import Tokenizer, read_tokenizer
from shardwise.errors import InputError

FORMAT = 2  # raised when the same inputs would give other tokens


def tokenized(
    paths: str | Path | Iterable[str | Path], tokenizer: str | Path | None = None, *,
    cache_folder: str | Path | None = None,
) -> Path:  # fmt: skip
    """Returns the path of a .npy file with the tokens of text files, made if it is not there yet.

    paths         files, patterns ("texts/*.txt") or folders: text, or records with a `text` each
    tokenizer     a folder with tokenizer.json, or such a file; None: UTF-8 bytes
    cache_folder  where the file goes; by default shardwise/ in the user's cache

    Raises `InputError` where a file is missing, is not UTF-8, or a line has no text.
    """
    files = text_files(paths)
    made_by = read_tokenizer(tokenizer)
    target = (Path(cache_folder) if cache_folder is not None else cache()) / f"tokens-{_name(files, made_by)}.npy"
    if not target.exists():
        _write(files, made_by, target)
    return target


def _name(files: list[Path], tokenizer: Tokenizer) -> str:
    """Returns a name for the tokens of these files: of the tokenizer, and of their paths, sizes and times."""
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.mark}".encode())
    for file in files:
        about = file.stat()
        digest.update(f"\0{file.resolve()}\0{about.st_size}\0{about.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _write(files: list[Path], tokenizer: Tokenizer, target: Path) -> None:
    """Write text files' tokens, with end tokens, as .npy of the narrowest unsigned dtype; `InputError` for no text."""
    assert tokenizer.vocab is not None  # known of folders and of bytes
    dtype = np.dtype(np.uint8 if tokenizer.vocab <= 2**8 else np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    end = [] if tokenizer.end is None else [tokenizer.end]
    texts = (text for file in files for text in _texts(file))
    parts = [np.asarray(tokenizer.encode(text) + end, dtype) for text in texts]
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
    if not tokens.size:
        raise InputError(f"{', '.join(map(str, files))}: there is no text")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with renamed(target) as out:
            np.save(out, tokens)
    except OSError as error:
        raise InputError(f"the tokens of {files[0]} cannot be written to {target}: {error}") from error


def _texts(file: Path) -> Iterator[str]:
    """Yields the documents of a file: its text, or that of each record; `InputError` for one without text."""
    held = contents(file, 'expected {"text": ...}')
    if isinstance(held, str):
        yield held
        return
    for where, record in held:
        text = record.get("text")
        if not isinstance(text, str):
            keys = ", ".join(record) or "nothing"
            raise InputError(
                f"{where}: has {keys}; expected text. Prompts and messages need a task of your own: JsonlSource leaves "
                "out of the loss what is not to be learnt"
            )
        yield text
