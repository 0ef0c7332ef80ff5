"""`JsonlSource`: text for fine-tuning from JSON lines and other files (data/text_files), packed, with masked prompts.

A record is {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., "content": ...}, ...]} or {"text": ...};
prompt and completion may both be messages. The model learns completions, the assistant's messages (after the prompt),
or all of a text; all other tokens have the label -100. A file of plain text is split into pieces of `seq_len` tokens,
which overlap by one token, so that every token but the first is learned once.

    documents      aaaaa bbb cccc            row of 9: aaaaa bbb _     (packing: in the order of the file)
    position_ids   0 1 2 3 4 0 1 2 0         they start again with each document
    labels         - - a a a - b b -         a document's first token is nobody's target

transformers' models take positions that start again as documents that do not see each other; pass
`attention_mask=None` (a batch here has none).

What this does not do: stream. Tokens are held in memory, four bytes each, on every rank; larger text is better
tokenized once into a file (`TokenSource`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.chat import ChatTemplate, plain_text
from shardwise.data.text_files import contents, text_files
from shardwise.data.tokenizer import read_tokenizer
from shardwise.errors import InputError

IGNORED = -100
FORMS = 'expected {"messages": [{"role": ..., "content": ...}]}, {"prompt": ..., "completion": ...} or {"text": ...}'
PAIRS = "; preference pairs are a task of their own: examples/preferences.py"
Encode = Callable[[str], list[int]]


class JsonlSource:
    """A source of {"input_ids", "labels", "position_ids"}, int64 (B, seq_len) each, of packed documents.

    paths      files, patterns and folders: JSON lines, a JSON array, parquet, plain text
    tokenizer  a folder with tokenizer.json, such a file, an object with `encode`, or a function; None: UTF-8 bytes
    seq_len    tokens of a sample; a longer document is truncated, which `notices` tells
    end        id of the token that ends a document; None: the tokenizer's own end-of-text token, if it has one
    pad        id of the token that fills a sample up; its label is -100
    pack       Whether a sample may hold several documents; if not, it holds one
    template   a `ChatTemplate` for records of messages; None: the messages' texts are concatenated

    Raises `InputError`, with file and line, for a record that cannot be read, or of which nothing is learned.
    """

    def __init__(
        self, paths: str | Path | Iterable[str | Path], seq_len: int, *, tokenizer: Any = None, end: int | None = None,
        pad: int = 0, pack: bool = True, template: ChatTemplate | None = None,
    ) -> None:  # fmt: skip
        if seq_len < 2:
            raise InputError(f"seq_len must be at least 2, got {seq_len}")
        self.paths = text_files(paths)
        self.seq_len, self.pad = seq_len, pad
        self.notices: list[str] = []
        self.template = template
        read = read_tokenizer(tokenizer)
        end = read.end if end is None else end
        self.encode: Encode | None = read.encode
        self.end = end
        if end is None and tokenizer is not None:
            self.notices.append("the tokenizer tells no end-of-text token, so documents end without one: give end=")
        self._without_words = 0
        documents = [document for path in self.paths for document in self._documents(path, read.encode, end)]
        if not documents:
            raise InputError(f"{', '.join(map(str, self.paths))}: there is no line to learn from; {FORMS} on each")
        if self._without_words:
            self.notices.append(
                f"{self._without_words} of {len(documents)} documents have an empty answer: its closing mark is learned"
            )
        # a document's first token is never a target, so a truncated one needs a learned token after it
        cut = sum(len(tokens) > seq_len for tokens, _ in documents)
        left = [(tokens, learn) for tokens, learn in documents if learn[1:seq_len].any()]
        if cut:
            dropped = f", {len(documents) - len(left)} of them dropped, since" if len(left) < len(documents) else ""
            why = " nothing to learn was left" if dropped else ""
            self.notices.append(
                f"{cut} of {len(documents)} documents are longer than {seq_len} tokens and were cut{dropped}{why}"
            )
        if not left:
            raise InputError(f"{self.paths[0]}: no answer begins within {seq_len} tokens: raise seq_len")
        documents = left
        self._tokens = [tokens[:seq_len] for tokens, _ in documents]
        self._learn = [learn[:seq_len] for _, learn in documents]
        self.rows = (
            packed([len(tokens) for tokens in self._tokens], seq_len) if pack else [[i] for i in range(len(documents))]
        )

    def _documents(self, path: Path, encode: Encode, end: int | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (tokens int32, whether each is learned), both (N,), of each record of a file, or piece of its text."""
        held = contents(path, FORMS)
        if not isinstance(held, str):
            for where, line in held:
                yield self._document(where, line, encode, end)
            return
        tokens = np.asarray(encode(held) + ([] if end is None else [end]), dtype=np.int32)
        for start in range(0, len(tokens) - 1, self.seq_len - 1):  # pieces overlap, since a first token is no target
            piece = tokens[start : start + self.seq_len]
            yield piece, np.ones(len(piece), dtype=bool)

    def _document(self, where: str, line: dict, encode: Encode, end: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens int32 (N,), whether each is learned, bool (N,)) of a record; `InputError` if none is learned.

        where   place of the record, for messages; `line`: the record
        """
        conversation = _conversation(where, line)
        if self.template is not None and conversation is not None:
            messages, given = conversation
            ids, learned = self.template.document(where, messages, given, **_options(where, line))
            said = [turn for turn in messages[given:] if turn["role"] == "assistant"]
            self._without_words += any(turn.get("content") in ("", []) for turn in said)
            if not any(learned[1:]):
                raise InputError(f"{where}: nothing to learn: {_unlearned(messages[given:])}")
            return np.asarray(ids, dtype=np.int32), np.asarray(learned, dtype=bool)
        tokens: list[int] = []
        learn: list[bool] = []
        pieces = _pieces(where, line, conversation)
        self._without_words += not any(text for text, counts in pieces if counts)
        for text, counts in pieces:
            ids = encode(text)
            tokens += ids
            learn += [counts] * len(ids)
        # the end token is learned, or the model would not learn to stop
        if end is not None:
            tokens.append(end)
            learn.append(True)
        if not any(learn[1:]):
            raise InputError(f"{where}: nothing to learn: no token after the prompt")
        return np.asarray(tokens, dtype=np.int32), np.asarray(learn, dtype=bool)

    def __getstate__(self) -> dict[str, Any]:
        # a tokenizer may be a function that cannot be pickled, and workers only need the tokens
        return {**vars(self), "encode": None}

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        """Returns the packed samples at `indices`, (B, seq_len) each; the label of a token is its id or -100."""
        shape = (len(indices), self.seq_len)
        tokens = np.full(shape, self.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for row, index in enumerate(indices):
            at = 0
            for document in self.rows[index]:
                ids, learn = self._tokens[document], self._learn[document]
                place = slice(at, at + len(ids))
                tokens[row, place] = ids
                labels[row, place] = np.where(learn, ids, IGNORED)
                labels[row, at] = IGNORED  # it would be predicted from the previous document
                positions[row, place] = np.arange(len(ids))
                at += len(ids)
            positions[row, at:] = np.arange(self.seq_len - at)  # padding counts as a document without labels
        batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(value) for name, value in batch.items()}


def _unlearned(messages: list[Any]) -> str:
    """Returns the reason why no message of a conversation is learned, for an error."""
    roles = dict.fromkeys(message.get("role") for message in messages if isinstance(message, dict))
    if "assistant" in roles:
        says = any(message.get("content") for message in messages if message.get("role") == "assistant")
        return "the chat template marks nothing of the answers" if says else "the assistant says nothing"
    return f"no message has the role assistant, but {', '.join(map(repr, roles)) or 'none'}"


def packed(lengths: list[int], room: int) -> list[list[int]]:
    """Returns, for each row, the indices of its documents: in order, as many as fit into `room` tokens.

    lengths   tokens of each document
    """
    rows: list[list[int]] = []
    left = -1
    for document, length in enumerate(lengths):
        if length > left:
            rows.append([])
            left = room
        rows[-1].append(document)
        left -= length
    return rows


def _conversation(where: str, line: dict[str, Any]) -> tuple[list[Any], int] | None:
    """Returns (messages, how many of them are the prompt) of a record of messages; None for other records.

    Raises `InputError` if of prompt and completion one is text and one is messages.
    """
    prompt, completion = line.get("prompt", []), line.get("completion")
    if isinstance(completion, list) and isinstance(prompt, list):
        return [*prompt, *completion], len(prompt)
    if completion is not None and isinstance(completion, list) != isinstance(prompt, list) and prompt:
        raise InputError(f"{where}: of prompt and completion one is text and one is messages: write both alike")
    messages = line.get("messages")
    return (messages, 0) if "completion" not in line and isinstance(messages, list) else None


def _options(where: str, line: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that a record has for the chat template: "tools" and those in "chat_template_kwargs"."""
    tools, more = line.get("tools"), line.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise InputError(f"{where}: tools is text, and not JSON: {error}") from None
    if not isinstance(more, dict):
        raise InputError(f"{where}: chat_template_kwargs is a {type(more).__name__}: expected an object")
    return {**more, **({"tools": tools} if tools else {})}


def _pieces(where: str, line: dict[str, Any], conversation: tuple[list[Any], int] | None) -> list[tuple[str, bool]]:
    """Returns (text, whether it is learned) pairs of a record, in order; `InputError` if it has no known form.

    conversation   as `_conversation` returns it
    """
    if conversation is not None:
        turns = [turn if isinstance(turn, dict) else {} for turn in conversation[0]]
        pieces = [
            (plain_text(turn.get("content")), turn.get("role") == "assistant" and place >= conversation[1])
            for place, turn in enumerate(turns)
        ]
    elif "completion" in line:
        pieces = [(line.get("prompt", ""), False), (line["completion"], True)]
    elif "text" in line:
        pieces = [(line["text"], True)]
    else:
        keys = ", ".join(line) or "nothing"
        raise InputError(f"{where}: has {keys}; {FORMS}{PAIRS if {'chosen', 'rejected'} <= line.keys() else ''}")
    for text, _ in pieces:
        if not isinstance(text, str):
            raise InputError(f"{where}: {json.dumps(text)[:60]} where text should be; {FORMS}")
    return pieces
