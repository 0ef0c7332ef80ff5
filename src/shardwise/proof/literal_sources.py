"""Read samples of the package's own sources again for the one process of a run, one at a time.

    Blend        a sample of the source that the index falls into
    TokenSource  a window of its files, found by counting from the first file
    JsonlSource  its documents, of which answers are trained on and prompts are not
    DigitsSource an image, with the label that it has in scikit-learn
    ArraySource  one row of each array
    FieldSource  a pair of fields (`literal_fields`)

The samples of each are counted again too, the training and held-out parts of a built-in task are checked to be
disjoint, and the text files of such a task are tokenized again.

Both sides of a proof read a user's source as it is. A mistake in one of the package's would be on both.

What this does not do: read large files of fields, many chats or much text, parquet tables, chats of templates that
mark answers, or a user's own source.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from shardwise.data.arrays import ArraySource
from shardwise.data.blend import Blend
from shardwise.data.corpus import BytesSource
from shardwise.data.digits import DigitsSource
from shardwise.data.fields import FieldSource
from shardwise.data.jsonl import JsonlSource
from shardwise.data.tokenizer import read_tokenizer
from shardwise.data.tokens import TokenSource
from shardwise.proof import literal_fields
from shardwise.trace.double import as_written, default_dtype

MOST_BYTES, MOST_CHATS = 2**20, 2000  # bytes of text files that are tokenized again; rows of chats read again


def one_by_one(data: Any, indices: list[int]) -> Any:
    """Returns the batch of these samples, read one at a time; None for a source that is not read again.

    data     a proof's source (`First`), which has every n-th sample of the task's
    indices  into `data`
    """
    source: Any = getattr(data, "source", None)
    read = _reader(source)
    if read is None:
        return None
    with as_written(), default_dtype(torch.float32):
        rows = [read(source, len(source) * index // len(data)) for index in indices]
        return tree_map(lambda *leaves: torch.cat([torch.as_tensor(leaf) for leaf in leaves]), *rows)


def miscounted(task: Any) -> list[str]:
    """Returns a sentence for each of a task's sources whose `len()` is wrong, or whose rows lack documents."""
    told = []
    for name in ("data", "eval_data"):
        source = getattr(task, name)
        count = _count(source)
        if count is not None and count != len(source):
            told.append(f"{name} has {count} samples, and tells {len(source)}")
        if not _is_packed_again(source):
            continue
        # each document lies in one row
        documents = sorted(document for row in source.rows for document in row)
        if documents != [*range(len(_documents(source)))]:
            told.append(f"{name} has {len(_documents(source))} documents, and its rows hold {len(documents)}")
    return told


def leaked(task: Any) -> list[str]:
    """Returns [a sentence] if a built-in task trains on samples that it holds out; else []."""
    if isinstance(task.data, DigitsSource) and isinstance(task.eval_data, DigitsSource):
        shared = not _images(task.data).isdisjoint(_images(task.eval_data))  # no two of the digits are alike
        return ["held-out images are trained on"] if shared else []
    spans = [_span(task.data), _span(task.eval_data)]
    if None in spans or max(span[0] for span in spans) >= min(span[1] for span in spans):
        return []
    return ["held-out text is trained on"]


def mistokenized(section: Any, task: Any) -> list[str]:
    """Returns [a sentence] if a task's tokens are not those of its text files, each with the end token; else [].

    section  `[task]` of the configuration
    """
    named = [sorted(glob.glob(pattern, recursive=True)) or [pattern] for pattern in section.files]
    files = [Path(path) for paths in named for path in paths]
    # the task was given tokens, or texts from elsewhere, so there is nothing to encode again
    if not isinstance(task.data, TokenSource) or not files or not all(map(Path.is_file, files)):
        return []
    # tokenizing much text takes too long; parquet is not read here
    if sum(file.stat().st_size for file in files) > MOST_BYTES or _has_tables(files):
        return []
    # encoded from the texts, since the file of tokens that training reads may be stale
    tokenizer, wanted = read_tokenizer(section.tokenizer), list[int]()
    for text in (text for file in files for text in _texts(file)):
        wanted += tokenizer.encode(text) + ([] if tokenizer.end is None else [tokenizer.end])
    same = np.array_equal(np.load(task.data.paths[0], mmap_mode="r"), wanted)
    return [] if same else ["the tokens of the text files are not those of their texts"]


def _texts(file: Path) -> list[str]:
    held = _held(file)
    return [held] if isinstance(held, str) else [record["text"] for record in held]


def _held(file: Path) -> str | list[dict[str, Any]]:
    """Returns the records of a file that is JSON as a whole or in each line, otherwise its text."""
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = io.StringIO(raw.decode("utf-8-sig"), newline=None).read()
    for part in (lambda: json.loads(text), lambda: [json.loads(line) for line in text.split("\n") if line.strip()]):
        try:
            values = part()
        except ValueError:
            continue
        values = values if isinstance(values, list) else [values]
        if values and all(isinstance(value, dict) for value in values):
            return values
    return text


def _span(source: Any) -> Any:
    """Returns (start, stop) of a source's part of its text (bytes) or tokens (windows); None for other sources."""
    if isinstance(source, BytesSource):
        return source.start, source.stop
    return source.span if isinstance(source, TokenSource) else None


def _count(source: Any) -> int | None:
    """Returns the number of a source's samples by its files or arrays; None for a source that is not counted here."""
    # of the parts of a blend only those that cannot be counted here count by their own `len`
    if isinstance(source, Blend):
        counts = [(_count(one), one) for one in source.sources]
        return sum(len(one) if count is None else count for count, one in counts)
    if isinstance(source, TokenSource):
        return source.span[1] - source.span[0]
    if isinstance(source, BytesSource):
        return (source.stop - source.start) // (source.seq_len + 1)
    if isinstance(source, DigitsSource):
        return len(source.images)
    if _is_packed_again(source):
        return len(source.rows)
    if isinstance(source, FieldSource):
        return len(literal_fields.starts_of(source))
    if isinstance(source, ArraySource):
        return len(_read(next(iter(source.sources.values()))))
    return None


def _reader(source: Any) -> Callable[[Any, int], Any] | None:
    """Returns a function (source, index) -> batch of one sample; None for a source that is not read again."""
    if isinstance(source, Blend):
        return _of_blend
    if isinstance(source, TokenSource):
        return _of_tokens
    if isinstance(source, DigitsSource):
        return _of_digits
    # chats are encoded again for each row, which only small files allow (`_is_read`)
    if _is_packed_again(source):
        return _of_lines
    if isinstance(source, FieldSource):
        return literal_fields.sample_of if literal_fields.is_read(source) else None
    return _of_arrays if isinstance(source, ArraySource) else None


def _of_blend(blend: Blend, index: int) -> Any:
    """Returns the batch of one sample of a blend; `index` counts over its sources in order."""
    for source, length in zip(blend.sources, blend.lengths, strict=True):
        if index < length:
            read = _reader(source)
            return source.read([index]) if read is None else read(source, index)
        index -= length
    raise IndexError(index)


def _of_tokens(source: TokenSource, index: int) -> Any:
    """Returns {"tokens": (1, seq_len + 1)} of one window, found by counting windows from the source's first file."""
    window = source.span[0] + index
    for path in source.paths:
        tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, source.dtype, "r")
        count = (len(tokens) - 1) // source.seq_len
        if window < count:
            first = window * source.seq_len
            row = np.array(tokens[first : first + source.seq_len + 1], dtype=np.int64)
            return {"tokens": torch.from_numpy(row)[None]}
        window -= count
    raise IndexError(index)


def _of_lines(source: JsonlSource, index: int) -> Any:
    """Returns a batch of one packed row: "input_ids", "labels" and "position_ids", each (1, seq_len)."""
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document in source.rows[index]:
        ids, learned = _documents(source)[document]
        tokens += ids
        labels += [-100, *(token if counts else -100 for token, counts in zip(ids[1:], learned[1:], strict=True))]
        positions += range(len(ids))
    left = source.seq_len - len(tokens)
    row = {
        "input_ids": tokens + [source.pad] * left,
        "labels": labels + [-100] * left,
        "position_ids": [*positions, *range(left)],
    }
    return {name: torch.tensor([value]) for name, value in row.items()}


@lru_cache(maxsize=1)
def _documents(source: JsonlSource) -> list[tuple[list[int], list[bool]]]:
    """Returns (tokens, for each whether it is trained on) of each document in which any is: answers, not prompts."""
    assert source.encode is not None
    ending = [] if source.end is None else [source.end]
    documents = []
    records: list[dict[str, Any]] = []
    for held in map(_held, source.paths):
        if isinstance(held, str):  # a row's first token is no target, so rows of plain text overlap by one token
            ids, first = [*source.encode(held), *ending], 0
            while first + 1 < len(ids):
                records.append({"row": ids[first : first + source.seq_len]})
                first += source.seq_len - 1
        else:
            records += held
    for record in records:
        # plain text has no prompt, so all of it is trained on
        if "row" in record:
            documents.append((record["row"], [True] * len(record["row"])))
            continue
        turns, before = _turns(record)
        # a chat template writes tokens between turns; without one, texts are joined as they are
        if source.template is not None and turns:
            documents.append(_of_chat(source.template.folder, turns, before, record))
            continue
        if turns:
            said = [
                (_joined(turn), turn["role"] == "assistant" and place >= before) for place, turn in enumerate(turns)
            ]
        elif "completion" in record:
            said = [(record.get("prompt", ""), False), (record["completion"], True)]
        else:
            said = [(record["text"], True)]
        pairs = [(token, counts) for text, counts in said for token in source.encode(text)]
        # the end token is trained on too, so that a model learns to stop
        pairs = pairs if source.end is None else [*pairs, (source.end, True)]
        documents.append(([token for token, _ in pairs], [counts for _, counts in pairs]))
    cut = [(tokens[: source.seq_len], learned[: source.seq_len]) for tokens, learned in documents]
    # the first token is never predicted, so a document with that one to train on has no loss
    return [(tokens, learned) for tokens, learned in cut if any(learned[1:])]


def _turns(record: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Returns (the messages of a record, how many of them are the prompt); ([], 0) if it has text instead."""
    if isinstance(record.get("completion"), list):
        return record.get("prompt", []) + record["completion"], len(record.get("prompt", []))
    return ([], 0) if "completion" in record else (record.get("messages", []), 0)


def _joined(turn: dict[str, Any]) -> Any:
    content = turn.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _of_chat(
    folder: Path, turns: list[dict[str, Any]], before: int, record: dict[str, Any]
) -> tuple[list[int], list[bool]]:
    """Returns (tokens, for each whether it is trained on) of a conversation: answers, each with its end token.

    folder  of the tokenizer
    before  how many turns are the prompt, whose answers are not trained on
    record  the line of the file, with tools and options of the template
    """
    tokenizer = _tokenizer(folder)
    tools = json.loads(record["tools"]) if isinstance(record.get("tools"), str) else record.get("tools")
    options = {**(record.get("chat_template_kwargs") or {}), **({"tools": tools} if tools else {})}
    # contents in parts are joined, unless the template reads the parts itself and would lose joined ones
    if any(isinstance(turn.get("content"), list) for turn in turns):
        flat = [{**turn, "content": _joined(turn)} for turn in turns]
        text = tokenizer.apply_chat_template(flat, tokenize=False, **options)
        turns = flat if all((turn["content"] or "").strip() in text for turn in flat) else turns

    def tokens_of(count: int, **more: bool) -> list[int]:
        text = tokenizer.apply_chat_template(turns[:count], tokenize=False, **options, **more) if count else ""
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    tokens, special = tokens_of(len(turns)), set(tokenizer.all_special_ids)
    learned = [False] * len(tokens)
    text, cursor = tokenizer.apply_chat_template(turns, tokenize=False, **options), 0
    for place, turn in enumerate(turns):
        content = (_joined(turn) or "").strip()
        # a template may leave out the start of an answer (its thoughts)
        said = next(content[at:] for at in range(len(content) + 1) if content[at:] in text[cursor:])
        cursor = text.index(said, cursor) + len(said)
        if turn["role"] == "assistant" and place >= before:
            low = _alike(tokens, tokens_of(place, add_generation_prompt=True))
            high = _alike(tokens, tokens_of(place + 1))
            # the template writes this answer otherwise once turns follow (without thoughts), so a prefix of the
            # conversation does not show where it lies: its place in the whole text does
            if high < len(tokenizer(text[:cursor], add_special_tokens=False)["input_ids"]):
                low = len(tokenizer(text[: cursor - len(said)], add_special_tokens=False)["input_ids"])
                high = next(at for at in range(low, len(tokens)) if tokens[at] in special) + 1
            marks = [at for at in range(low, high) if tokens[at] in special]
            if marks and not tokenizer.decode(tokens[marks[-1] + 1 : high]).strip():  # blanks of the template
                high = marks[-1] + 1
            learned[low:high] = [True] * (high - low)
    return tokens, learned


def _alike(tokens: list[int], others: list[int]) -> int:
    """Returns the length of the common prefix of two lists of tokens."""
    least = min(len(tokens), len(others))
    return next((at for at in range(least) if tokens[at] != others[at]), least)


def _is_packed_again(source: Any) -> bool:
    """Whether a source packs documents into rows and is read again here."""
    return isinstance(source, JsonlSource) and source.encode is not None and _is_read(source)


def _is_read(source: JsonlSource) -> bool:
    """Whether a source is read again: without a chat template, or with few chats and one that marks no answers."""
    if _has_tables(source.paths):
        return False
    if source.template is None:
        return True
    template = _tokenizer(source.template.folder).get_chat_template()
    return len(source) <= MOST_CHATS and "% generation" not in template.replace("-", "")


def _has_tables(files: list[Path]) -> bool:
    return any(file.suffix == ".parquet" for file in files)


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _of_digits(source: DigitsSource, index: int) -> Any:
    image = source.images[index]
    return {"image": image[None], "label": torch.tensor([_digits()[image.float().numpy().tobytes()]])}


def _images(source: DigitsSource) -> set[bytes]:
    return {image.float().numpy().tobytes() for image in source.images}


@lru_cache(maxsize=1)
def _digits() -> dict[bytes, int]:
    """Returns bytes of an image as float32 -> its label, for the handwritten digits in scikit-learn."""
    (package,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
    return {(row[:-1] / 16).astype(np.float32).tobytes(): int(row[-1]) for row in rows}


def _of_arrays(source: ArraySource, index: int) -> Any:
    return {name: torch.from_numpy(np.array(_read(array)[index])[None]) for name, array in source.sources.items()}


def _read(array: Any) -> Any:
    return np.load(array, mmap_mode="r") if isinstance(array, str | Path) else array
