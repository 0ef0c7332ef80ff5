"""The package's own sources, read again from what they were made of: digits, chats, files of text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_tokenizer import STYLES, TALK, WORDS, styled
from mutations.plant import Bug, planted

from shardwise.config import load
from shardwise.data import DigitsSource, JsonlSource
from shardwise.data.chat import ChatTemplate
from shardwise.proof.literal_settings import other_sizes
from shardwise.proof.literal_sources import leaked, miscounted, mistokenized, one_by_one
from shardwise.task_names import resolve_task

CONFIGS = Path(__file__).parents[1] / "mutations"


class Read:
    """A source as a proof reads it."""

    def __init__(self, source: Any):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)


def same(source: Any, indices: list[int]) -> bool:
    apart, together = one_by_one(Read(source), indices), source.read(indices)
    return apart is None or all(torch.equal(apart[name], value) for name, value in together.items())


def chats(folder: Path, style: str) -> JsonlSource:
    styled(folder, STYLES[style])
    talk = TALK if "Be brief" in STYLES[style].by_hand else TALK[1:]
    lines = [talk, talk[:-2], [*talk, {"role": "user", "content": WORDS[0]}]]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in lines), encoding="utf-8")
    return JsonlSource(path, 400, tokenizer=folder, template=ChatTemplate(folder), pack=False)


@pytest.mark.parametrize("style", STYLES)
def test_chats_are_those_of_the_source_in_every_style(style: str, tmp_path: Path) -> None:
    assert same(chats(tmp_path, style), [2, 0, 1])


def test_blanks_that_are_learned_are_found(tmp_path: Path) -> None:
    bug = Bug("", "shardwise.data.chat:ChatTemplate._end", "return end if", "return last if", "", "")
    with planted(bug) as ran:
        assert not same(chats(tmp_path, "chatml"), [0]) and ran()


def test_labels_of_digits_are_those_of_their_images() -> None:
    assert same(DigitsSource([5, 1700, 3]), [2, 0, 1])
    bug = Bug("", "shardwise.data.digits:DigitsSource.__init__", "labels[chosen]", "labels[: len(chosen)]", "", "")
    with planted(bug) as ran:
        assert not same(DigitsSource([5, 1700, 3]), [2, 0, 1]) and ran()


@pytest.mark.parametrize("wrong", [False, True])
def test_tokens_of_text_files_are_made_again(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    section = load(CONFIGS / "texts.toml").config.task
    bug = Bug(
        "", "shardwise.data.tokenized:_write", "+ end", "+ end * (not wrong)".replace("wrong", str(wrong)), "", ""
    )
    with planted(bug):
        assert bool(mistokenized(section, resolve_task("text", section))) == wrong


def test_a_model_of_other_sizes_is_told() -> None:
    section = load(CONFIGS / "words.toml").config.task
    assert not other_sizes(section, resolve_task("text", section))
    assert "layers=2" in other_sizes(section, resolve_task("text"))[1]
    assert not other_sizes(section, SimpleNamespace(model=object))


def test_rows_are_counted_and_hold_each_document_once(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "so" * length}) + "\n" for length in (3, 5, 2, 7)), encoding="utf-8")
    source = JsonlSource(path, 20)
    task = SimpleNamespace(data=source, eval_data=DigitsSource())
    assert not miscounted(task)
    with planted(Bug("", "shardwise.data.jsonl:JsonlSource.__len__", "len(self.rows)", "len(self.rows) - 1", "", "")):
        assert "and tells" in miscounted(task)[0]
    source.rows[0] = source.rows[0][1:]
    assert miscounted(task) == ["data has 4 documents, and its rows hold 3"]


def test_held_out_digits_are_others_than_those_of_training() -> None:
    task = SimpleNamespace(data=DigitsSource([0, 1, 2]), eval_data=DigitsSource([3, 4]))
    assert not leaked(task)
    task.eval_data = DigitsSource([4, 2])
    assert leaked(task) == ["held-out images are trained on"]
