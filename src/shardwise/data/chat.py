"""Messages as tokens by the tokenizer's own chat template, with a mask of what the assistant says.

The template is rendered as a whole, and once more up to each answer with the prompt that begins it; what lies between
is the answer, its closing mark included, and blanks after that mark left out:

    <user> hi <end> \\n <assistant>  hello <end>  \\n <user> ...
    ------------------------------  ************  -----------    * is learned

A template that marks its answers itself ({% generation %}) is asked instead.

What this does not do: templates that render earlier messages otherwise once there are later ones, without marks of
their own (some take thoughts out): they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, first_line

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """The chat template of a tokenizer's folder; `transformers` renders it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @cached_property
    def _tokenizer(self) -> Any:
        """Returns transformers' tokenizer of the folder; `InputError` without it, or without a chat template."""
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise InputError(f"chat templates need transformers ({error}): pip install 'shardwise[hf]'") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        except Exception as error:  # the library raises many kinds
            raise InputError(f"{self.folder} is no tokenizer's folder: {first_line(error)}") from error
        if tokenizer.chat_template is None:
            raise InputError(
                f"the tokenizer in {self.folder} has no chat template, and the examples are messages: set its "
                "chat_template and save it, or write the examples as prompt and completion"
            )
        return tokenizer

    @cached_property
    def _is_marked(self) -> bool:
        """Whether the template marks itself which text the assistant generates ({% generation %})."""
        return bool(_MARKED.search(self._tokenizer.get_chat_template()))

    def document(self, where: str, messages: list[Any], **options: Any) -> tuple[list[int], list[bool]]:
        """Returns (tokens, whether each is learned). Raises `InputError`, with `where`, for what cannot be rendered.

        options   of the template: the tools that the assistant may call
        """
        for number, message in enumerate(messages, 1):
            if lack := _lack(message):
                raise InputError(f"{where}: message {number} {lack}")
        # the template marks answers itself ({% generation %}): nothing has to be rendered twice
        if self._is_marked:
            return self._marked(where, messages, **options)
        text = self._rendered(where, messages, **options)
        tokens = self._tokens(text)
        learned = [False] * len(tokens)
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            earlier = messages[:place]
            before = self._rendered(where, earlier, **options, add_generation_prompt=True) if earlier else ""
            through = self._rendered(where, messages[: place + 1], **options)
            if not text.startswith(through) or not text.startswith(before):
                raise InputError(
                    f"{where}: the chat template in {self.folder} renders message {place + 1} otherwise when others "
                    "follow, so its answer cannot be found: mark answers in it with {% generation %}"
                )
            # a token over the border is the answer's where it begins, and what follows it where it ends
            first, last = (_shared(tokens, self._tokens(part)) for part in (before, through))
            last = self._end(tokens, first, last)
            learned[first:last] = [True] * (last - first)
        return tokens, learned

    def _marked(self, where: str, messages: list[Any], **options: Any) -> tuple[list[int], list[bool]]:
        """Returns (tokens, whether each is learned) by the template's own marks.

        By the signs between them: transformers' mask takes the rest of a text where an answer ends in a sign that is
        part of no token, and nothing of one that begins with such.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        options = {**tokenizer.special_tokens_map, **options, "chat_template": tokenizer.get_chat_template()}
        with _refused(where, self.folder):
            (text,), (spans,) = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
            whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        learned = [any(start < last and end > first for first, last in spans) for start, end in whole["offset_mapping"]]
        return whole["input_ids"], learned

    def _end(self, tokens: list[int], first: int, last: int) -> int:
        """Returns where an answer ends that its template ends with a special token and blanks: after the token."""
        end = last
        while end > first and not self._tokenizer.decode(tokens[end - 1 : end]).strip():
            end -= 1
        return end if end > first and tokens[end - 1] in self._tokenizer.all_special_ids else last

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _rendered(self, where: str, messages: list[Any], **options: Any) -> str:
        with _refused(where, self.folder):
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)


@contextmanager
def _refused(where: str, folder: Path) -> Iterator[None]:
    """Context: what a template's own code raises (roles in another order, fields that lack) is an `InputError`."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{where}: the chat template in {folder} refuses it: {first_line(error)}") from error


def _shared(tokens: list[int], others: list[int]) -> int:
    """Returns how many tokens both begin with."""
    differs = (place for place, (token, other) in enumerate(zip(tokens, others, strict=False)) if token != other)
    return next(differs, min(len(tokens), len(others)))


def _lack(message: Any) -> str:
    """Returns what is wrong with a message as text; "" for an object with role and content.

    A template would write a missing content as nothing, and null as the word None.
    """
    if not isinstance(message, dict):
        return f"is a {type(message).__name__}: expected an object with role and content"
    if not isinstance(message.get("role"), str):
        return f"has {', '.join(message) or 'nothing'}: expected role and content"
    if message.get("content") is None and not message.keys() - {"role", "content"}:  # a call of a tool has no content
        return f"has no content (role {message['role']!r}): write it, or leave the line out"
    return ""
