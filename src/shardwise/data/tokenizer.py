"""Text as tokens: by a tokenizer from a local folder, by an object with `encode`, by a function, or as UTF-8 bytes.

A folder is one that `save_pretrained` of transformers wrote, or any other with a tokenizer.json, which the library
`tokenizers` reads. Truncation and padding that were saved in the file are switched off: documents are cut, packed and
filled up by the sources. The token that ends a text is what tokenizer_config.json or config.json say; a bare
tokenizer.json does not tell, and then it is the first of the usual names that the tokenizer knows, if any.

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

    encode  text -> tokens, without special tokens
    decode  tokens -> text; None where it cannot
    end     the token that ends a text; None where there is none
    vocab   one more than the largest token; None where it is not known
    mark    changes when the tokenizer does; empty where it cannot be told
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str] | None
    end: int | None
    vocab: int | None
    mark: str


def read_tokenizer(spec: Any) -> Tokenizer:
    """Returns the tokenizer in a folder or file, of an object with `encode`, or of a function; None: UTF-8 bytes.

    Raises `InputError` for anything else, and a file that is missing or unreadable.
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
    """Returns text -> ids without special tokens, for a function that gives an `Encoding` or a list."""

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
    """Returns the `Tokenizer` of a tokenizer.json, or of the folder that holds it; `InputError` where it is none."""
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
    # settings of whoever saved the file, which would cut or fill documents here
    tokenizer.no_truncation()
    tokenizer.no_padding()
    configured_end = _told_end(file.parent, tokenizer)
    end = _usual_end(tokenizer) if configured_end is None else configured_end
    mark = hashlib.sha256(file.read_bytes() + f"end {end}".encode()).hexdigest()
    vocab = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return Tokenizer(_plain(tokenizer.encode), tokenizer.decode, end, vocab, mark)


def _told_end(folder: Path, tokenizer: Any) -> int | None:
    """Returns the end-of-text token's id that files beside tokenizer.json name, or None; `InputError` if unknown."""
    token = _entry(folder / "tokenizer_config.json", "eos_token")
    if isinstance(token, dict):  # an AddedToken, written out
        token = token.get("content")
    if isinstance(token, str):
        number = tokenizer.token_to_id(token)
        # documents would run into each other without a word
        if number is None:
            raise InputError(f"{folder / 'tokenizer_config.json'}: eos_token {token!r} is not in {folder / FILE}")
        return number
    number = _entry(folder / "config.json", "eos_token_id")
    # of several ends (of a text, of a turn) the first
    number = number[0] if isinstance(number, list) and number else number
    return number if isinstance(number, int) else None


def _entry(path: Path, key: str) -> Any:
    """Returns the value of a key in a JSON file; None without such a file or key, `InputError` for no JSON."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return content.get(key) if isinstance(content, dict) else None
