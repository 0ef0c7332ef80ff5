"""Text as tokens: by a tokenizer from a local folder, by an object with `encode`, by a function, or as UTF-8 bytes.

A folder is one that `save_pretrained` of transformers wrote, or any other with a tokenizer.json, which the library
`tokenizers` reads. Truncation and padding that were saved in the file are switched off, since sources truncate, pack
and pad documents. The token that ends a text is read from tokenizer_config.json or config.json; if neither names one,
it is the first of `USUAL_ENDS` that the tokenizer knows, if any.

What this does not do: read vocabularies without a tokenizer.json (transformers converts them: load with
`AutoTokenizer` and `save_pretrained`), or apply chat templates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import InputError

BYTES = 256
USUAL_ENDS = ("</s>", "<|endoftext|>", "<eos>", "<|im_end|>", "[SEP]")
FILE = "tokenizer.json"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer as sources use it.

    encode  text -> token ids, without special tokens
    decode  token ids -> text; None if the tokenizer cannot decode
    end     id of the token that ends a text; None if there is none
    vocab   one more than the largest token id; None if it is not known
    mark    text that identifies the tokenizer's content, such as a hash; "" if it is not known
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str] | None
    end: int | None
    vocab: int | None
    mark: str


def read_tokenizer(spec: Any) -> Tokenizer:
    """Returns a `Tokenizer` from `spec`: a folder or file, an object with `encode`, a function, or None (UTF-8 bytes).

    Raises `InputError` for anything else, and for a file that is missing or unreadable.
    """
    if spec is None:
        return Tokenizer(lambda text: list(text.encode()), _from_bytes, None, BYTES, "bytes")
    if isinstance(spec, str | Path):
        return _from_folder(Path(spec))
    call = spec.encode if hasattr(spec, "encode") else spec
    if not callable(call):
        raise InputError(f"tokenizer: expected a folder, a function, or an object with encode, got {type(spec)}")
    end = getattr(spec, "eos_token_id", None)
    return Tokenizer(_plain(call), getattr(spec, "decode", None), _usual_end(spec) if end is None else end, None, "")


def _plain(call: Callable) -> Callable[[str], list[int]]:
    """Returns a function (text -> list of token ids, without special tokens) around `call`.

    call   encodes a text into a list of ids or an `Encoding` of the library tokenizers
    """

    def encode(text: str) -> list[int]:
        try:
            ids = call(text, add_special_tokens=False)
        except TypeError:  # a plain function, or an encode of another kind
            ids = call(text)
        return list(getattr(ids, "ids", ids))

    return encode


def _from_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def _usual_end(tokenizer: Any) -> int | None:
    if not hasattr(tokenizer, "token_to_id"):
        return None
    known = (tokenizer.token_to_id(name) for name in USUAL_ENDS)
    return next((token for token in known if token is not None), None)


def _from_folder(path: Path) -> Tokenizer:
    """Returns the `Tokenizer` of a tokenizer.json, or of the folder that has one; `InputError` if it is unreadable."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        beside = ", ".join(sorted(p.name for p in path.iterdir())[:8]) if path.is_dir() else ""
        raise InputError(f"tokenizer: there is no {file}" + (f"; {path} holds {beside}" if beside else ""))
    try:
        from tokenizers import Tokenizer as Theirs
    except ImportError as error:
        raise InputError(f"reading {file} needs tokenizers ({error}): pip install 'shardwise[text]'") from error
    try:
        tokenizer = Theirs.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{file} is not a tokenizer: {error}") from error
    # settings saved in the file would truncate and pad documents here
    tokenizer.no_truncation()
    tokenizer.no_padding()
    configured_end = _told_end(file.parent, tokenizer)
    end = _usual_end(tokenizer) if configured_end is None else configured_end
    mark = hashlib.sha256(file.read_bytes() + f"end {end}".encode()).hexdigest()
    vocab = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return Tokenizer(_plain(tokenizer.encode), tokenizer.decode, end, vocab, mark)


def _told_end(folder: Path, tokenizer: Any) -> int | None:
    """Returns the id of the end-of-text token that the files beside tokenizer.json name; None if they name none.

    Raises `InputError` if the tokenizer does not know it.
    """
    token = _entry(folder / "tokenizer_config.json", "eos_token")
    if isinstance(token, dict):  # an AddedToken, written out
        token = token.get("content")
    if isinstance(token, str):
        number = tokenizer.token_to_id(token)
        # without it documents would run into each other silently
        if number is None:
            raise InputError(f"{folder / 'tokenizer_config.json'}: eos_token {token!r} is not in {folder / FILE}")
        return number
    number = _entry(folder / "config.json", "eos_token_id")
    # a list has the ends of a text and of a turn: take the first
    number = number[0] if isinstance(number, list) and number else number
    return number if isinstance(number, int) else None


def _entry(path: Path, key: str) -> Any:
    """Returns the value of `key` in a JSON file; None if there is no such file or key, `InputError` for no JSON."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return content.get(key) if isinstance(content, dict) else None
