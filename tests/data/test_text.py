"""Text through tokenizers: from a local folder, from Python and from a configuration, and what is wrong with them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sources import lines_file

from shardwise.config import load
from shardwise.data import JsonlSource, TokenSource, tokenized
from shardwise.data.tokenizer import read_tokenizer
from shardwise.errors import InputError
from shardwise.task_names import resolve_task
from shardwise.training import execute


def small_tokenizer(folder: Path, **beside: Any) -> Path:
    """A folder as transformers leaves it, truncation saved too; `beside` are its other files of JSON."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2, "</s>": 3, "<stop>": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.enable_padding(length=9)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_end_of_a_text_is_what_the_folder_says(tmp_path: Path) -> None:
    told = {"tokenizer_config": {"eos_token": {"content": "<stop>"}}}
    for beside, end in ((told, 4), ({"config": {"eos_token_id": [2, 4]}}, 2), ({}, 3)):
        read = read_tokenizer(small_tokenizer(tmp_path / str(end), **beside))
        assert (read.end, read.vocab, read.encode("a b a c")) == (end, 5, [1, 2, 1, 0])
    with pytest.raises(InputError, match=r"tokenizer_config.json: eos_token '<no>' is not in"):
        read_tokenizer(small_tokenizer(tmp_path / "odd", tokenizer_config={"eos_token": "<no>"}))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vocab.txt").write_text("a")
    with pytest.raises(InputError, match=r"there is no .*old/tokenizer.json; .* holds vocab.txt"):
        read_tokenizer(tmp_path / "old")


def test_text_files_and_lines_become_a_file_of_tokens_once(tmp_path: Path) -> None:
    folder, cache = small_tokenizer(tmp_path / "tokenizer"), tmp_path / "cache"
    (tmp_path / "one.txt").write_text("a b\na")
    lines = lines_file(tmp_path, [{"text": "b"}, {"text": "a a"}])
    paths = [tmp_path / "*.txt", lines]
    file = tokenized(paths, folder, cache_folder=cache)
    assert np.load(file).tolist() == [1, 2, 1, 3, 2, 3, 1, 1, 3]
    written = file.stat().st_mtime_ns
    assert tokenized(paths, folder, cache_folder=cache) == file and file.stat().st_mtime_ns == written
    (tmp_path / "one.txt").write_text("b")
    assert np.load(tokenized(paths, folder, cache_folder=cache)).tolist() == [2, 3, 2, 3, 1, 1, 3]
    assert np.load(tokenized(lines, cache_folder=cache)).tobytes() == b"ba a"
    train, held_out = TokenSource(file, 2).split(0.3)
    assert (len(train), len(held_out)) == (3, 1) and held_out.read([0])["tokens"].tolist() == [[1, 1, 3]]
    assert pickle.loads(pickle.dumps(held_out)).read([0])["tokens"].tolist() == [[1, 1, 3]]


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        (b"caf\xe9", "one.txt", r"one.txt: byte 3 is not UTF-8"),
        (b'{"text": "a"}\n{"text"', "one.jsonl", r"one.jsonl:2: not JSON"),
        (b'{"prompt": "a", "completion": "b"}', "one.jsonl", r"one.jsonl:1: has prompt, completion; expected text"),
        (b"", "one.txt", "there is no text"),
    ],
)
def test_text_that_cannot_be_read_is_named(content: bytes, name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        tokenized(tmp_path / name, cache_folder=tmp_path)
    with pytest.raises(InputError, match=r"no file is named .*\*.md"):
        tokenized(tmp_path / "*.md", cache_folder=tmp_path)


def test_a_configuration_names_files_and_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "words.txt").write_text("a b b a " * 100)
    (tmp_path / "words.toml").write_text(
        '[task]\nfiles = ["*.txt"]\ntokenizer = "tokenizer"\nseq_len = 8\n'
        "[task.model]\nlayers = 1\nhidden = 8\nheads = 1\n"
        f'[train]\nsteps = 2\ngenerate = 3\nout = "{tmp_path / "runs"}"\n'
    )
    run = execute(load(tmp_path / "words.toml"))
    assert run.summary["text"].split()[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    again = load(run.folder / "config.toml")  # a run's own copy lies elsewhere
    assert again.config.task.files == [str(tmp_path / "*.txt")]
    assert resolve_task("text", again.config.task).model().head.weight.shape == (5, 8)
    with pytest.raises(InputError, match=r"task.tokenizer = .* would have no effect: task.files is not set"):
        load(overrides=["task.tokenizer=tokenizer"])


def test_lines_for_fine_tuning_go_through_a_tokenizer(tmp_path: Path) -> None:
    lines = lines_file(tmp_path, [{"prompt": "a", "completion": "b c"}])
    source = JsonlSource(lines, 6, tokenizer=small_tokenizer(tmp_path / "tokenizer"))
    assert source.read([0])["input_ids"].tolist() == [[1, 2, 0, 3, 0, 0]]
    assert source.read([0])["labels"].tolist() == [[-100, 2, 0, 3, -100, -100]]
