"""Messages as tokens by the tokenizer's own chat template, with a mask of what the assistant says.

The template is rendered as a whole, and once more up to each answer with the prompt that begins it; what lies between
is the answer, its closing mark included:

    <user> hi <end> <assistant>  hello <end>  <user> ...
    ---------------------------  ************              * is learned

A template that marks its answers itself ({% generation %}) is asked instead.

What this does not do: templates that render earlier messages otherwise once there are later ones, without marks of
their own (some take thoughts out): they are refused.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, first_line


class ChatTemplate:
    """The chat template of a tokenizer's folder; `transformers` renders it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @cached_property
    def _tokenizer(self) -> Any:
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

    def document(self, where: str, messages: list[Any]) -> tuple[list[int], list[bool]]:
        """Returns (tokens, whether each is learned). Raises `InputError`, with `where`, for what cannot be rendered."""
        if "{% generation %}" in self._tokenizer.chat_template.replace("{%-", "{%").replace("-%}", "%}"):
            marked = self._rendered(where, messages, return_dict=True, return_assistant_tokens_mask=True)
            return list(marked["input_ids"]), [bool(mark) for mark in marked["assistant_masks"]]
        tokens = self._rendered(where, messages)
        learned = [False] * len(tokens)
        for place, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") != "assistant":
                continue
            before = self._rendered(where, messages[:place], add_generation_prompt=True) if place else []
            through = self._rendered(where, messages[: place + 1])
            if tokens[: len(through)] != through or through[: len(before)] != before:
                raise InputError(
                    f"{where}: the chat template in {self.folder} renders message {place + 1} otherwise when others "
                    "follow, so its answer cannot be found: mark answers in it with {% generation %}"
                )
            learned[len(before) : len(through)] = [True] * (len(through) - len(before))
        return tokens, learned

    def _rendered(self, where: str, messages: list[Any], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=True, **{"return_dict": False, **options})
        except Exception as error:  # of the template's own code: roles in another order, fields that lack
            raise InputError(f"{where}: the chat template in {self.folder} refuses it: {first_line(error)}") from error
