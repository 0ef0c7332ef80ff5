"""Chats by the tokenizer's own template: what is learned is what the assistant says, however the template writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import CHATML, tokenizer

from shardwise.data import JsonlSource
from shardwise.data.chat import ChatTemplate
from shardwise.errors import InputError
from shardwise.hf import task as hf_task

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
pytest.importorskip("tokenizers", reason="needs tokenizers, which are not installed here")

TEMPLATES = {  # template -> what is learned of the second and fourth message, as text
    "chatml": (CHATML, ["4<|im_end|>\n", "6<|im_end|>\n"]),
    "instruction": (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}",
        [" 4<|im_end|>", " 6<|im_end|>"],
    ),
    "headers": (
        "{% for m in messages %}<{{ m['role'] }}>\n\n{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n\n{% endif %}",
        ["4<|im_end|>", "6<|im_end|>"],
    ),
    "turns": (
        "{% for m in messages %}<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] }}</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}",
        ["4</turn>\n", "6</turn>\n"],
    ),
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
        "{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}",
        ["4<|im_end|>", "6<|im_end|>"],
    ),
}  # fmt: skip
CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_alone_are_learned(name: str, tmp_path: Path) -> None:
    template, answers = TEMPLATES[name]
    theirs = tokenizer(tmp_path, template)
    ids, learned = ChatTemplate(tmp_path).document("here", CHAT)
    assert ids == theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert theirs.decode([token for token, mark in zip(ids, learned, strict=True) if mark]) == "".join(answers)


def test_packed_chats_have_the_labels_of_single_ones(tmp_path: Path) -> None:
    tokenizer(tmp_path, CHATML)
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps({"messages": CHAT[:2]}) for _ in range(5)))
    template = ChatTemplate(tmp_path)
    ids, learned = template.document("here", CHAT[:2])
    source = JsonlSource(path, 2 * len(ids) + 3, tokenizer=tmp_path, template=template)
    assert len(source) == 3
    batch = source.read([0])
    one = torch.tensor([token if mark else -100 for token, mark in zip(ids, learned, strict=True)])
    assert torch.equal(batch["labels"][0, : 2 * len(ids)], one.repeat(2))
    assert torch.equal(batch["input_ids"][0, : 2 * len(ids)], torch.tensor(ids * 2))


@torch.no_grad()
def test_packed_chats_have_the_loss_of_single_ones(tmp_path: Path) -> None:
    theirs = tokenizer(tmp_path, CHATML)
    path = tmp_path / "chat.jsonl"
    chats = [
        CHAT[:2],
        [{"role": "user", "content": "a longer one: 11+12?"}, {"role": "assistant", "content": "23"}],
        CHAT,
    ]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    task = hf_task(transformers.LlamaConfig(vocab_size=len(theirs), **sizes), batch=lambda step: {})
    model = task.model().double()
    losses, rows = [], []
    for pack in (True, False):
        source = JsonlSource(path, 200, tokenizer=tmp_path, template=ChatTemplate(tmp_path), pack=pack)
        batch = source.read(list(range(len(source))))
        args, kwargs = task.inputs(batch)
        losses.append(tuple(map(float, task.loss(model(*args, **kwargs), batch))))
        rows.append(len(source))
    assert rows == [1, 3]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_what_cannot_be_learned_is_told(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"

    def source(template: str | None, messages: list[Any], seq_len: int = 200) -> JsonlSource:
        tokenizer(tmp_path, template)
        path.write_text("\n".join(json.dumps({"messages": some}) for some in messages))
        return JsonlSource(path, seq_len, tokenizer=tmp_path, template=ChatTemplate(tmp_path))

    refusals: list[tuple[str | None, list[Any], int, str]] = [
        (None, [CHAT], 200, "has no chat template, and the examples are messages"),
        (CHATML, [CHAT[:1]], 200, "chat.jsonl:1: nothing to learn: no message has the role assistant, but 'user'"),
        (CHATML, [CHAT], 8, "no answer begins within 8 tokens: raise seq_len"),
        ("{{ raise_exception('roles must alternate') }}", [CHAT], 200, "refuses it.*roles must alternate"),
        (
            "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
            [CHAT], 200, "renders message 2 otherwise when others follow",
        ),
    ]  # fmt: skip
    for template, messages, seq_len, words in refusals:
        with pytest.raises(InputError, match=words):
            source(template, messages, seq_len)
    long = [
        CHAT[:2],
        [{"role": "user", "content": "x" * 90}, CHAT[1]],
        [*CHAT, CHAT[0] | {"content": "y" * 90}, CHAT[1]],
    ]
    (notice,) = source(CHATML, long, 90).notices
    assert notice == (
        "2 of 3 documents are longer than 90 tokens and were cut, 1 of them dropped, since nothing to learn was left"
    )
