"""Small tokenizers as folders that transformers reads, with chat templates: `tokenizer` of bytes, and `STYLES`.

Each style is one that models of the field use: its marks, its way of cutting text, its template, and by hand what the
template writes of a conversation, with what is learned in «».
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}\n"
    "{% elif m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MARKED = (
    "{%- for m in messages %}{%- if m['role'] == 'assistant' %}<|assistant|>\n"
    "{%- generation %} {{ m['content'] }} <|end|>{%- endgeneration %}\n"
    "{%- else %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|>\n{%- endif %}{%- endfor %}"
)
CLOSED = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["What is 2 + 2 ?", "It is 4 .", "And 3 + 3 ?", "Six , of course .", "Be brief ."]
TALK = [
    {"role": "system", "content": WORDS[4]},
    {"role": "user", "content": WORDS[0]},
    {"role": "assistant", "content": WORDS[1]},
    {"role": "user", "content": WORDS[2]},
    {"role": "assistant", "content": WORDS[3]},
]


@dataclass(frozen=True)
class Style:
    """A template, its tokenizer's marks (the first ends a text, the second begins one), and how text is cut.

    by_hand   what it writes of `TALK`, or of its turns alone where it takes no system's
    """

    template: str
    marks: list[str]
    cut: str
    by_hand: str


STYLES = {
    "chatml": Style(
        CHATML, ["<|im_end|>", "<|endoftext|>", "<|im_start|>"], "bytes",
        "<|im_start|>system\nBe brief .<|im_end|>\n<|im_start|>user\nWhat is 2 + 2 ?<|im_end|>\n<|im_start|>assistant\n"
        "«It is 4 .<|im_end|>»\n<|im_start|>user\nAnd 3 + 3 ?<|im_end|>\n<|im_start|>assistant\n"
        "«Six , of course .<|im_end|>»\n",
    ),
    "headers": Style(
        HEADERS, ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], "merged bytes",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief .<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2 ?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 4 .<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 3 + 3 ?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Six , of course .<|eot_id|>»",
    ),
    "instructions": Style(
        INSTRUCTIONS, ["</s>", "<s>", "[INST]", "[/INST]"], "pieces",
        "<s>Be brief .\n[INST] What is 2 + 2 ? [/INST]« It is 4 .</s>»"
        "[INST] And 3 + 3 ? [/INST]« Six , of course .</s>»",
    ),
    "turns": Style(
        TURNS, ["<end_of_turn>", "<bos>", "<start_of_turn>"], "merged pieces",
        "<bos><start_of_turn>user\nWhat is 2 + 2 ?<end_of_turn>\n<start_of_turn>model\n«It is 4 .<end_of_turn>»\n"
        "<start_of_turn>user\nAnd 3 + 3 ?<end_of_turn>\n<start_of_turn>model\n«Six , of course .<end_of_turn>»\n",
    ),
    "closed": Style(
        CLOSED, ["<|endoftext|>", "<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], "merged bytes",
        "<|system|>\nBe brief .<|end|>\n<|user|>\nWhat is 2 + 2 ?<|end|>\n<|assistant|>\n«It is 4 .<|end|>»\n"
        "<|user|>\nAnd 3 + 3 ?<|end|>\n<|assistant|>\n«Six , of course .<|end|>\n<|endoftext|>»",
    ),
    "thoughts": Style(
        THOUGHTS, ["<|im_end|>", "<|endoftext|>", "<|im_start|>"], "merged bytes",
        "<|im_start|>system\nBe brief .<|im_end|>\n<|im_start|>user\nWhat is 2 + 2 ?<|im_end|>\n<|im_start|>assistant\n"
        "«It is 4 .<|im_end|>»\n<|im_start|>user\nAnd 3 + 3 ?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nSix , of course .<|im_end|>»\n",
    ),
    "marked": Style(
        MARKED, ["<|end|>", "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>"], "words",
        "<|system|> Be brief . <|end|><|user|> What is 2 + 2 ? <|end|><|assistant|>« It is 4 . <|end|>»"
        "<|user|> And 3 + 3 ? <|end|><|assistant|>« Six , of course . <|end|>»",
    ),
}  # fmt: skip


def tokenizer(folder: Path, template: str | None) -> Any:
    """Saves a tokenizer of bytes with ChatML's marks and this template in a folder; returns it."""
    return _saved(folder, template, ["<|im_end|>", "<pad>", "<|im_start|>"], _bytes([]))


def styled(folder: Path, style: Style) -> Any:
    """Saves a tokenizer of a style in a folder, trained on `WORDS`; returns it."""
    made = {"bytes": lambda: _bytes([]), "merged bytes": lambda: _bytes(WORDS), "words": _words,
            "pieces": lambda: _pieces(30), "merged pieces": lambda: _pieces(80)}[style.cut]()  # fmt: skip
    return _saved(folder, style.template, style.marks, made)


def _bytes(corpus: list[str]) -> Any:
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({sign: place for place, sign in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    if corpus:
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator(corpus, trainer)
    return made


def _pieces(count: int) -> Any:
    """Returns merges over text whose blanks are a sign, without cutting it into words first."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?", fuse_unk=False))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.decoder = tokenizers.decoders.Replace("▁", " ")
    signs = sorted(set("".join(WORDS)) | set("usermodel\n▁"))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=len(signs) + count, initial_alphabet=signs, show_progress=False)
    made.train_from_iterator([word for word in WORDS for _ in range(2)], trainer)
    return made


def _words() -> Any:
    import tokenizers

    vocab = {word: place for place, word in enumerate(sorted({part for text in WORDS for part in text.split()}))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def _saved(folder: Path, template: str | None, marks: list[str], made: Any) -> Any:
    import transformers

    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=marks[0], bos_token=marks[1], pad_token=marks[1],
        additional_special_tokens=marks[2:],
    )  # fmt: skip
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return fast
