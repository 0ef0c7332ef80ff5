"""Chats by the tokenizer's own template: what is learned is what the assistant says, however the template writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import CHATML, STYLES, TALK, styled, tokenizer
from torch.nn.functional import cross_entropy

from shardwise.data import JsonlSource
from shardwise.data.chat import ChatTemplate
from shardwise.errors import InputError
from shardwise.hf import task as hf_task
from shardwise.proof.literal_sources import one_by_one

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
pytest.importorskip("tokenizers", reason="needs tokenizers, which are not installed here")

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]


def by_hand(theirs: Any, text: str) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a text and which lie in «», by the places of the signs that they stand for."""
    spans, plain = [], ""
    for place, part in enumerate(re.split("[«»]", text)):
        spans += [(len(plain), len(plain) + len(part))] if place % 2 else []
        plain += part
    whole = theirs(plain, add_special_tokens=False, return_offsets_mapping=True)
    return whole["input_ids"], [
        any(a < last and b > first for first, last in spans) for a, b in whole["offset_mapping"]
    ]


def styled_chat(folder: Path, name: str, messages: list[dict]) -> tuple[Any, list[int], list[bool]]:
    theirs = styled(folder, STYLES[name])
    return theirs, *ChatTemplate(folder).document("here", messages)


TURNS_ALONE = {"turns": TALK[1:]}  # a template that takes no system's


@pytest.mark.parametrize("name", STYLES)
def test_answers_alone_are_learned(name: str, tmp_path: Path) -> None:
    messages = TURNS_ALONE.get(name, TALK)
    theirs, ids, learned = styled_chat(tmp_path, name, messages)
    assert ids == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert (ids, learned) == by_hand(theirs, STYLES[name].by_hand)
    assert len({*ids}) > 12  # the tokenizer knows the words


@pytest.mark.parametrize("name", ["chatml", "instructions"])
def test_an_answer_is_cut_by_the_length(name: str, tmp_path: Path) -> None:
    _, ids, learned = styled_chat(tmp_path, name, TALK)
    length = len(ids) - learned[::-1].index(True) - 3  # within the last answer
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    source = JsonlSource(path, length, tokenizer=tmp_path, template=ChatTemplate(tmp_path))
    batch = source.read([0])
    assert batch["input_ids"][0].tolist() == ids[:length]
    kept = [token if mark else -100 for token, mark in zip(ids, learned, strict=True)]
    assert batch["labels"][0].tolist() == kept[:length] and learned[length - 1] and learned[length]
    assert source.notices[-1] == f"1 of 1 documents are longer than {length} tokens and were cut"


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADDED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, ADDED, PARTS], ids=["written", "added", "parts"])
def test_content_in_parts_is_its_text(template: str, tmp_path: Path) -> None:
    tokenizer(tmp_path, CHATML)
    whole = ChatTemplate(tmp_path).document("here", TALK)
    theirs = tokenizer(tmp_path, template)
    parts = [
        {
            **turn,
            "content": [{"type": "text", "text": turn["content"][:3]}, {"type": "text", "text": turn["content"][3:]}],
        }
        for turn in TALK
    ]
    assert ChatTemplate(tmp_path).document("here", parts) == whole
    if template is PARTS:
        assert theirs.apply_chat_template(parts, tokenize=True, return_dict=False) == whole[0]
    mixed = [parts[0], *TALK[1:]] if template is not PARTS else parts
    assert ChatTemplate(tmp_path).document("here", mixed) == whole
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": parts}))
    source = JsonlSource(path, 400, tokenizer=tmp_path, template=ChatTemplate(tmp_path))
    assert torch.equal(source.read([0])["input_ids"][0, : len(whole[0])], torch.tensor(whole[0]))
    assert same_as_literal(source)
    path.write_text(json.dumps({"messages": [*parts[:-1], {**parts[-1], "content": [{"type": "image"}]}]}))
    with pytest.raises(InputError, match=r"message 5 has a part of type 'image': content is text, or a list"):
        JsonlSource(path, 400, tokenizer=tmp_path, template=ChatTemplate(tmp_path))


@pytest.mark.parametrize("name", STYLES)
def test_of_prompt_and_completion_in_messages_the_completion_is_learned(name: str, tmp_path: Path) -> None:
    messages = TURNS_ALONE.get(name, TALK)
    theirs, ids, learned = styled_chat(tmp_path, name, messages)
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": messages[:-1], "completion": messages[-1:]}))
    source = JsonlSource(path, len(ids), tokenizer=tmp_path, template=ChatTemplate(tmp_path))
    batch = source.read([0])
    assert batch["input_ids"][0].tolist() == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = len(theirs.apply_chat_template(
        messages[:-1], tokenize=True, return_dict=False, **({} if name == "marked" else {"add_generation_prompt": True})
    ))  # fmt: skip
    expected = [
        token if mark and at >= prompt else -100 for at, (token, mark) in enumerate(zip(ids, learned, strict=True))
    ]
    assert batch["labels"][0].tolist() == expected and sum(learned[:prompt]) > 0
    assert same_as_literal(source)


def same_as_literal(source: JsonlSource) -> bool:
    """Whether the second reader of a proof makes the same rows; True for what it does not read."""
    source.source = source  # type: ignore[attr-defined]
    apart, together = one_by_one(source, [0]), source.read([0])
    return apart is None or all(torch.equal(apart[name], value) for name, value in together.items())


def test_options_of_a_line_go_to_the_template(tmp_path: Path) -> None:
    theirs = tokenizer(tmp_path, "{% if brief %}brief{% endif %}{{ tools[0]['name'] }}" + CHATML)
    options = {"brief": True, "tools": [{"name": "add", "parameters": {}}]}
    path = tmp_path / "chat.jsonl"
    path.write_text(
        json.dumps({"messages": CHAT, "tools": json.dumps(options["tools"]), "chat_template_kwargs": {"brief": True}})
    )
    source = JsonlSource(path, 200, tokenizer=tmp_path, template=ChatTemplate(tmp_path))
    expected = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
    assert source.read([0])["input_ids"][0, : len(expected)].tolist() == expected and same_as_literal(source)


SPLIT = CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}"
)


def test_of_an_answer_whose_thoughts_are_left_out_the_rest_is_learned(tmp_path: Path) -> None:
    theirs = tokenizer(tmp_path, SPLIT)
    thinking = [{**turn, "content": f"<think>{turn['content']}?</think>{turn['content']}"} for turn in CHAT[1::2]]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [CHAT[0], thinking[0], CHAT[2], thinking[1]]}))
    source = JsonlSource(path, 400, tokenizer=tmp_path, template=ChatTemplate(tmp_path))
    labels = source.read([0])["labels"]
    assert theirs.decode(labels[labels != -100]) == "4<|im_end|><think>6?</think>6<|im_end|>"
    assert same_as_literal(source)


def test_a_token_over_the_border_is_the_answers(tmp_path: Path) -> None:
    theirs = styled(tmp_path, STYLES["headers"])
    theirs.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    theirs.save_pretrained(str(tmp_path))
    talk = [{"role": "user", "content": "W"}, {"role": "assistant", "content": "hat is 2"}]
    ids, learned = ChatTemplate(tmp_path).document("here", talk)
    assert (ids, learned) == by_hand(theirs, "W«hat is 2»")
    assert theirs.decode(ids[:1]) == "Wh" and learned[0]


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


def token_losses(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the losses of each row's labels, in order."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
    return list(losses.view(len(logits), -1))


@torch.no_grad()
def test_packed_chats_have_the_losses_of_single_ones(tmp_path: Path) -> None:
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
    model = task.model().double().eval()
    packed, single = (
        JsonlSource(path, 200, tokenizer=tmp_path, template=ChatTemplate(tmp_path), pack=pack) for pack in (True, False)
    )
    assert (len(packed), len(single)) == (1, 3)
    row, rows = packed.read([0]), single.read([0, 1, 2])
    starts = [place for place, position in enumerate(row["position_ids"][0]) if position == 0]
    assert len(starts) == 4 and starts[0] == 0  # three documents, and the rest of the row
    (together,), alone = token_losses(model, row), token_losses(model, rows)
    learned = row["labels"][0, 1:] != -100
    apart = torch.cat([losses[labels != -100] for losses, labels in zip(alone, rows["labels"][:, 1:], strict=True)])
    torch.testing.assert_close(together[learned], apart, rtol=1e-12, atol=1e-12)
    # whatever stands in the first document, those after it see the same
    row["input_ids"][0, : starts[1]] = row["input_ids"][0, : starts[1]].flip(0)
    (changed,) = token_losses(model, row)
    assert torch.equal(changed[starts[1] :], together[starts[1] :])
    assert not torch.equal(changed[: starts[1] - 1], together[: starts[1] - 1])


def test_tools_are_the_templates(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}<|im_start|>{{ tool['name'] }}\n{% endfor %}" + CHATML
    theirs = tokenizer(tmp_path, template)
    path, tools = tmp_path / "chat.jsonl", [{"name": "add", "parameters": {}}]
    path.write_text(json.dumps({"messages": CHAT[:2], "tools": tools}))
    source = JsonlSource(path, 200, tokenizer=tmp_path, template=ChatTemplate(tmp_path))
    expected = theirs.apply_chat_template(CHAT[:2], tools=tools, tokenize=True, return_dict=False)
    batch = source.read([0])
    assert batch["input_ids"][0, : len(expected)].tolist() == expected
    assert theirs.decode(batch["labels"][batch["labels"] != -100]) == "4<|im_end|>"


def test_what_cannot_be_learned_is_told(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"

    def source(template: str | None, messages: list[Any], seq_len: int = 200) -> JsonlSource:
        tokenizer(tmp_path, template)
        path.write_text("\n".join(json.dumps({"messages": some}) for some in messages))
        return JsonlSource(path, seq_len, tokenizer=tmp_path, template=ChatTemplate(tmp_path))

    refusals: list[tuple[str | None, list[Any], int, str]] = [
        (None, [CHAT], 200, "has no chat template, and the examples are messages"),
        (CHATML, [CHAT[:1]], 200, "chat.jsonl:1: nothing to learn: no message has the role assistant, but 'user'"),
        (
            "{% for m in messages %}{% generation %}{% endgeneration %}{{ m['content'] }}{% endfor %}",
            [CHAT], 200, "nothing to learn: the chat template marks nothing of the answers",
        ),
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
    broken: list[tuple[list[Any], str]] = [
        (
            [{"role": "user", "content": "2+2?"}, {"role": "assistant"}],
            "chat.jsonl:1: message 2 has no content .role 'a",
        ),
        ([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": None}], "message 2 has no content"),
        ([{"from": "human", "value": "2+2?"}], "message 1 has from, value: expected role and content"),
        ([{"role": "user", "content": [1]}], "message 1 has a part that is a int: content is text, or a list"),
        (["2+2?", "4"], "message 1 is a str: expected an object with role and content"),
    ]
    for messages, words in broken:
        with pytest.raises(InputError, match=words):
            source(CHATML, [messages])
    assert source(CHATML, [CHAT, [CHAT[0], {"role": "assistant", "content": ""}]]).notices == [
        "1 of 2 documents have an empty answer: its closing mark is learned"
    ]
    long = [
        CHAT[:2],
        [{"role": "user", "content": "x" * 90}, CHAT[1]],
        [*CHAT, CHAT[0] | {"content": "y" * 90}, CHAT[1]],
    ]
    (notice,) = source(CHATML, long, 90).notices
    assert notice == (
        "2 of 3 documents are longer than 90 tokens and were cut, 1 of them dropped, since nothing to learn was left"
    )
