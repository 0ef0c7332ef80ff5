"""Messages as tokens by the tokenizer's own chat template, with a mask of what the assistant says.

The template is rendered as a whole, and once more up to each answer with the prompt that begins it; what lies between
is the answer, its closing mark included, and blanks after that mark left out:

    <user> hi <end> \\n <assistant>  hello <end>  \\n <user> ...
    ------------------------------  ************  -----------    * is learned

A template that marks its answers itself ({% generation %}) is asked instead. Content in parts of text goes to a
template that reads parts as it is, to one that writes content as text joined.

A template may end every text with a mark that it leaves out where messages follow (Phi's): it is the last answer's. Of
one that renders an answer otherwise once messages follow (Qwen3 leaves out its thoughts), an earlier answer is what
another text in its place would change, with its closing mark.

What this does not do: find an answer that a template leaves out where messages follow, without marks of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, first_line

_OTHER = "\ue000"  # of a private area of Unicode: no text has it
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

    def document(self, where: str, messages: list[Any], given: int = 0, **options: Any) -> tuple[list[int], list[bool]]:
        """Returns (tokens, whether each is learned). Raises `InputError`, with `where`, for what cannot be rendered.

        given     messages at the start that are the prompt, of which nothing is learned
        options   of the template: the tools that the assistant may call
        """
        for number, message in enumerate(messages, 1):
            if lack := _lack(message):
                raise InputError(f"{where}: message {number} {lack}")
        messages = self._as_read(messages, **options)
        # the template tells itself what the assistant generates ({% generation %})
        if self._is_marked:
            return self._marked(where, messages, given, **options)
        text = self._rendered(where, messages, **options)
        tokens = self._tokens(text)
        learned = [False] * len(tokens)
        for place, message in enumerate(messages):
            if message["role"] != "assistant" or place < given:
                continue
            earlier = messages[:place]
            before = self._rendered(where, earlier, **options, add_generation_prompt=True) if earlier else ""
            through = self._rendered(where, messages[: place + 1], **options)
            # some templates write an answer otherwise once others follow it: found by another text in its place
            if not text.startswith(before) or not _goes_on(through, text, before, message):
                before, through = self._by_another(where, text, messages, place, **options)
            if not through:
                raise InputError(
                    f"{where}: the chat template in {self.folder} renders message {place + 1} otherwise when others "
                    "follow, so its answer cannot be found: mark answers in it with {% generation %}"
                )
            # a token over the border is the answer's where it begins, and what follows it where it ends
            first, last = (_shared(tokens, self._tokens(part)) for part in (before, through))
            last = self._end(tokens, first, last)
            learned[first:last] = [True] * (last - first)
        return tokens, learned

    def _as_read(self, messages: list[Any], **options: Any) -> list[Any]:
        """Returns messages with content in parts where the template reads parts, else with the parts' text joined.

        A template that reads no parts fails on a list, or writes it as Python shows it: brackets, quotes, keys.
        """
        parts = [str(part) for message in messages if isinstance(message.get("content"), list)
                 for part in message["content"]]  # fmt: skip
        joined = [{**message, "content": plain_text(message["content"])} if "content" in message else message
                  for message in messages]  # fmt: skip
        if not parts:
            return joined
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except (TemplateError, TypeError):  # where the joined text fails too, that is told
            return joined
        return joined if any(part in text for part in parts) else messages

    def _by_another(
        self, where: str, text: str, messages: list[Any], place: int, **options: Any
    ) -> tuple[str, str]:  # fmt: skip
        """Returns (text before an answer, text through its closing mark), found by another answer in its place.

        ("", "") where the texts differ in more than the answer, or the template does not write it.
        """
        parts = isinstance(messages[place].get("content"), list)
        other = {**messages[place], "content": [{"type": "text", "text": _OTHER}] if parts else _OTHER}
        whole = self._rendered(where, [*messages[:place], other, *messages[place + 1 :]], **options).split(_OTHER)
        alone = self._rendered(where, [*messages[:place], other], **options).split(_OTHER)
        if len(whole) != 2 or len(alone) != 2:
            return "", ""
        (ahead, behind), (_, closing) = whole, alone
        end = len(text) - len(behind)
        if not text.startswith(ahead) or not text.endswith(behind) or not text[len(ahead) : end].strip():
            return "", ""
        return ahead, text[: end + _shared(closing, behind)]

    def _marked(self, where: str, messages: list[Any], given: int, **options: Any) -> tuple[list[int], list[bool]]:
        """Returns (tokens, whether each is learned) by the template's own marks.

        By the signs between them: transformers' mask takes the rest of a text where an answer ends in a sign that is
        part of no token, and nothing of one that begins with such.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        options = {**tokenizer.special_tokens_map, **options, "chat_template": tokenizer.get_chat_template()}
        with _refused(where, self.folder):
            (text,), (spans,) = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
            if given:  # marks of the prompt's own answers come first
                _, (prompts,) = render_jinja_template([messages[:given]], return_assistant_tokens_mask=True, **options)
                spans = spans[len(prompts) :]
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


def _goes_on(through: str, text: str, before: str, message: dict[str, Any]) -> bool:
    """Whether a chat's text goes on from the rendering up to an answer, but for how every rendering ends."""
    if text.startswith(through):
        return True
    shared = _shared(through, text)
    content = plain_text(message.get("content"))
    answer = content.strip() if isinstance(content, str) else ""
    return bool(answer) and text.endswith(through[shared:]) and answer in through[len(before) : shared]


def plain_text(content: Any) -> Any:
    """Returns the text of a content in parts of text; any other content as it is."""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return content


def _shared(tokens: Sequence[Any], others: Sequence[Any]) -> int:
    """Returns how many tokens, or signs, both begin with."""
    differs = (place for place, (token, other) in enumerate(zip(tokens, others, strict=False)) if token != other)
    return next(differs, min(len(tokens), len(others)))


def _lack(message: Any) -> str:
    """Returns what is wrong with a message as text; "" for an object with role and content.

    A template would write a missing content as nothing, null as the word None, and a picture's part as its place alone.
    """
    if not isinstance(message, dict):
        return f"is a {type(message).__name__}: expected an object with role and content"
    if not isinstance(message.get("role"), str):
        return f"has {', '.join(message) or 'nothing'}: expected role and content"
    if isinstance(content := message.get("content"), list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                what = f"of type {part.get('type')!r}" if isinstance(part, dict) else f"that is a {type(part).__name__}"
                return f'has a part {what}: content is text, or a list of {{"type": "text", "text": ...}}'
    if content is None and not message.keys() - {"role", "content"}:  # a call of a tool has no content
        return f"has no content (role {message['role']!r}): write it, or leave the line out"
    return ""
