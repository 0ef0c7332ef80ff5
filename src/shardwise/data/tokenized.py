"""`tokenized`: tokenizes text files (data/text_files) once, into a file that `TokenSource` (data/tokens) maps.

A text file is one document, and so is the text of a record; each ends with the tokenizer's end-of-text token. The
tokens of all documents are concatenated in the order of the paths. The file is content-addressed: its name in the
user's cache is a hash of the files' paths, sizes and times and of the tokenizer's content, so it is made again if one
of these changes. It gets its name once it is complete.

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

FORMAT = 2  # version of this code's output, part of the hash: increase it if the same inputs give other tokens


def tokenized(
    paths: str | Path | Iterable[str | Path], tokenizer: str | Path | None = None, *,
    cache_folder: str | Path | None = None,
) -> Path:  # fmt: skip
    """Returns the path of a .npy file (a vector) with the tokens of text files; makes it if it does not exist.

    paths         files, patterns ("texts/*.txt") or folders: text, or records with a "text" each
    tokenizer     a folder with tokenizer.json, or such a file; None: UTF-8 bytes
    cache_folder  folder for the .npy file; None: shardwise/ in the user's cache

    Raises `InputError` if a file is missing or not UTF-8, or a record has no text.
    """
    files = text_files(paths)
    made_by = read_tokenizer(tokenizer)
    target = (Path(cache_folder) if cache_folder is not None else cache()) / f"tokens-{_name(files, made_by)}.npy"
    if not target.exists():
        _write(files, made_by, target)
    return target


def _name(files: list[Path], tokenizer: Tokenizer) -> str:
    """Returns 24 hex digits that identify the tokenizer and the files' paths, sizes and times."""
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.mark}".encode())
    for file in files:
        about = file.stat()
        digest.update(f"\0{file.resolve()}\0{about.st_size}\0{about.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _write(files: list[Path], tokenizer: Tokenizer, target: Path) -> None:
    """Writes the files' tokens, with end tokens, to `target`: .npy of the narrowest unsigned dtype for the vocabulary.

    Raises `InputError` if there is no text or `target` cannot be written.
    """
    assert tokenizer.vocab is not None  # known for folders and for bytes
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
    """Yields the documents of a file: its text, or the "text" of each record; `InputError` for a record without."""
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
