"""Turns messages into tokens by the tokenizer's chat template, with a mask of the assistant's tokens.

The template is rendered for all messages, and again up to each answer with the generation prompt; the difference is
the answer, with its closing mark but without blanks after that mark:

    <user> hi <end> \\n <assistant>  hello <end>  \\n <user> ...
    ------------------------------  ************  -----------    * is learned

If a template marks answers itself ({% generation %}), its marks are used instead. Content that is a list of text parts
is passed as it is to a template that reads parts, and joined for one that expects text.

A template may end every rendering with a mark that it leaves out if messages follow (Phi's); this mark belongs to the
last answer. If a template renders an answer differently once messages follow (Qwen3 leaves out thoughts), the answer
is located by rendering another text in its place.

What this does not do: find an answer that an unmarked template leaves out if messages follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, first_line

_OTHER = "\ue000"  # a character of Unicode's private use area, which does not occur in texts
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """The chat template in a tokenizer's folder, rendered by transformers."""

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
        """Whether the template marks the assistant's text itself ({% generation %})."""
        return bool(_MARKED.search(self._tokenizer.get_chat_template()))

    def document(self, where: str, messages: list[Any], given: int = 0, **options: Any) -> tuple[list[int], list[bool]]:
        """Returns (token ids, whether each is learned) of one conversation.

        where     place of the record, for messages
        messages  dicts with "role" and "content"
        given     how many messages at the start are the prompt, of which nothing is learned
        options   options of the template, such as `tools`

        Raises `InputError` for messages that the template cannot render or whose answers cannot be located.
        """
        for number, message in enumerate(messages, 1):
            if lack := _lack(message):
                raise InputError(f"{where}: message {number} {lack}")
        messages = self._as_read(messages, **options)
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
            # the template renders this answer differently once messages follow
            if not text.startswith(before) or not _goes_on(through, text, before, message):
                before, through = self._by_another(where, text, messages, place, **options)
            if not through:
                raise InputError(
                    f"{where}: the chat template in {self.folder} renders message {place + 1} otherwise when others "
                    "follow, so its answer cannot be found: mark answers in it with {% generation %}"
                )
            # a token across a border counts to the answer at its begin, and not at its end
            first, last = (_shared(tokens, self._tokens(part)) for part in (before, through))
            last = self._end(tokens, first, last)
            learned[first:last] = [True] * (last - first)
        return tokens, learned

    def _as_read(self, messages: list[Any], **options: Any) -> list[Any]:
        """Returns the messages unchanged if the template reads lists of text parts, else with the parts joined.

        A template that does not read parts fails on a list, or renders its Python repr.
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
        except (TemplateError, TypeError):  # if the joined text fails too, rendering it raises
            return joined
        return joined if any(part in text for part in parts) else messages

    def _by_another(
        self, where: str, text: str, messages: list[Any], place: int, **options: Any
    ) -> tuple[str, str]:  # fmt: skip
        """Returns (rendering before the answer at `place`, rendering through its closing mark).

        The answer is located by rendering another text in its place. `text`: the rendering of all messages. ("", "") if
        the renderings differ in more than the answer, or the template leaves the answer out.
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
        """Returns (token ids, whether each is learned) by the template's own marks; parameters as `document`.

        Tokens are matched with marks by character offsets, since transformers' own mask is wrong for an answer that
        begins or ends in a character that belongs to no token.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        options = {**tokenizer.special_tokens_map, **options, "chat_template": tokenizer.get_chat_template()}
        with _refused(where, self.folder):
            (text,), (spans,) = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
            if given:  # the first spans are answers within the prompt, which are not learned
                _, (prompts,) = render_jinja_template([messages[:given]], return_assistant_tokens_mask=True, **options)
                spans = spans[len(prompts) :]
            whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        learned = [any(start < last and end > first for first, last in spans) for start, end in whole["offset_mapping"]]
        return whole["input_ids"], learned

    def _end(self, tokens: list[int], first: int, last: int) -> int:
        """Returns the end of the answer at tokens [first, last), without blanks after its closing special token."""
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
    """Context in which an error of the template's code (wrong order of roles, missing fields) is an `InputError`."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{where}: the chat template in {folder} refuses it: {first_line(error)}") from error


def _goes_on(through: str, text: str, before: str, message: dict[str, Any]) -> bool:
    """Whether the rendering `through` an answer is a prefix of the whole `text`, apart from what ends every rendering.

    before    rendering up to the answer; `message`: the answer
    """
    if text.startswith(through):
        return True
    shared = _shared(through, text)
    content = plain_text(message.get("content"))
    answer = content.strip() if isinstance(content, str) else ""
    return bool(answer) and text.endswith(through[shared:]) and answer in through[len(before) : shared]


def plain_text(content: Any) -> Any:
    """Returns the joined text if `content` is a list of text parts; any other content unchanged."""
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        return "".join(str(part["text"]) for part in content)
    return content


def _shared(tokens: Sequence[Any], others: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two sequences of tokens or characters."""
    differs = (place for place, (token, other) in enumerate(zip(tokens, others, strict=False)) if token != other)
    return next(differs, min(len(tokens), len(others)))


def _lack(message: Any) -> str:
    """Returns what is wrong with a message, for an error; "" for an object with role and text content.

    A template would render a missing content as nothing, null as the word None, and a picture as a placeholder.
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
