"""Which files of text are read and what they hold: plain text, JSON lines, arrays, tables, packed ones, folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_tokenizer import CHATML, TALK, tokenizer

from shardwise.data import JsonlSource, tokenized
from shardwise.data.chat import ChatTemplate
from shardwise.data.text_files import text_files
from shardwise.errors import InputError
from shardwise.proof.literal_sources import one_by_one

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(6)] + [{"text": "the end"}]
LINES = "\n".join(map(json.dumps, ROWS))


class Read:
    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)


def rows(source: JsonlSource) -> dict[str, torch.Tensor]:
    """Returns all rows of a source, which a proof's second reader makes too where it reads the file."""
    every = list(range(len(source)))
    batch, again = source.read(every), one_by_one(Read(source), every)
    assert again is None or all(torch.equal(again[name], value) for name, value in batch.items())
    return batch


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("windows.jsonl", b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode() + b"\r\n\r\n"),
        ("gaps.jsonl", LINES.replace("\n", "\n\n").encode()),
        ("array.json", json.dumps(ROWS).encode()),
        ("indented.json", json.dumps(ROWS, indent=1).encode()),
        ("packed.jsonl.gz", gzip.compress(LINES.encode())),
        ("lines.txt", LINES.encode()),
        ("lines", LINES.encode()),
    ],
)
def test_a_file_of_records_is_read_however_it_is_written(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text(LINES)
    (tmp_path / name).write_bytes(content)
    plain, other = (rows(JsonlSource(tmp_path / file, 12)) for file in ("plain.jsonl", name))
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_a_table_of_parquet_is_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "plain.jsonl").write_text(LINES)
    columns = {name: [row.get(name) for row in ROWS] for name in ("prompt", "completion", "text")}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    plain, other = (rows(JsonlSource(tmp_path / file, 12)) for file in ("plain.jsonl", "rows.parquet"))
    assert all(torch.equal(plain[key], other[key]) for key in plain)
    (tmp_path / "rows.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:50])
    with pytest.raises(InputError, match=r"rows.parquet cannot be read"):
        JsonlSource(tmp_path / "rows.parquet", 12)


def test_every_token_of_a_plain_text_but_the_first_is_learned_once(tmp_path: Path) -> None:
    texts = ["one long text of several rows\r\nand two lines", "short", "tiny"]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" * (number == 1) + text.encode())
    source = JsonlSource(tmp_path / "texts", 12, end=0)
    batch = rows(source)
    learned = batch["labels"][batch["labels"] != -100].tolist()
    assert learned == [token for text in texts for token in [*text.replace("\r\n", "\n").encode()[1:], 0]]
    assert batch["position_ids"][-1].tolist()[:7] == [0, 1, 2, 3, 4, 5, 0]  # texts do not see each other
    assert not source.notices
    tokens = np.load(tokenized(tmp_path / "texts", cache_folder=tmp_path)).tobytes()
    assert tokens == "".join(texts).replace("\r\n", "\n").encode()


def test_a_folder_is_its_files_where_they_are_of_one_kind(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", ".hidden"):
        (tmp_path / name).write_text(LINES)
    assert [path.name for path in text_files(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in text_files([tmp_path / "*.jsonl"])] == ["a.jsonl", "b.jsonl"]
    (tmp_path / "README").write_text("about")
    with pytest.raises(
        InputError, match=r"is a folder that holds 1 without an ending, 2 .jsonl: name the files to read"
    ):
        text_files(tmp_path)
    (tmp_path / "splits" / "train").mkdir(parents=True)
    with pytest.raises(InputError, match=r"splits is a folder that holds folders: train: name the files"):
        text_files(tmp_path / "splits")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("utf16.jsonl", LINES.encode("utf-16"), "utf16.jsonl: byte 0 is not UTF-8 text.*write it as UTF-8"),
        ("cut.jsonl.gz", gzip.compress(LINES.encode())[:40], "cut.jsonl.gz cannot be read"),
        ("bits.jsonl.gz", gzip.compress(LINES.encode())[:10] + b"\xff" * 40, "bits.jsonl.gz cannot be read"),
        ("mixed.json", b'[{"text": "a b"}, 3]', "mixed.json, element 2: a int; expected"),
        ("broken.json", b'[{"text": "a b"},', "broken.json: not JSON: .* in an array, or on each line"),
        ("odd.jsonl", b'{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}', "one is text and one"),
        ("pairs.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}', "task of their own: examples/preferences"),
        ("empty.txt", b"", "empty.txt: there is no line to learn from"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        JsonlSource(tmp_path / name, 12)


def test_options_of_a_line_that_are_none_are_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer(tmp_path, CHATML)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": "no JSON"}, "tools is text, and not JSON"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is a list: expected an object"),
    ]
    for more, words in wrong:
        (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": TALK, **more}))
        with pytest.raises(InputError, match=words):
            JsonlSource(tmp_path / "chat.jsonl", 200, tokenizer=tmp_path, template=ChatTemplate(tmp_path))
