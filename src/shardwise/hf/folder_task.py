"""The task for `shardwise train FOLDER --data FILES`: fine-tune a checkpoint folder's model on files of examples."""

from __future__ import annotations

from pathlib import Path

from shardwise.config.schema import TaskSection
from shardwise.data.chat import ChatTemplate
from shardwise.data.jsonl import JsonlSource
from shardwise.errors import InputError
from shardwise.heads import read_config
from shardwise.hf.model_task import task
from shardwise.task import Task

LENGTH = 1024  # tokens of a sample if task.seq_len is not set; less if the model has fewer positions


def folder_task(section: TaskSection) -> Task:
    """Returns the task that fine-tunes a folder's causal language model on files of examples or text.

    section  the configuration's `[task]`: name (the folder), files, seq_len (tokens), tokenizer
    Only the answers' tokens of examples count in the loss. Raises `InputError` without files, for a seq_len above the
    model's positions, and as `JsonlSource` does.
    """
    folder = section.name
    if not section.files:
        raise InputError(f"{folder} has no examples to learn from: --data chat.jsonl, or task.files in a configuration")
    most = getattr(read_config(folder), "max_position_embeddings", None)
    if most and section.seq_len and section.seq_len > most:
        raise InputError(
            f"task.seq_len = {section.seq_len} is more than the {most} positions of {folder} (max_position_embeddings "
            "in its config.json): lower it"
        )
    longest = most or LENGTH
    tokenizer = section.tokenizer or folder
    data = JsonlSource(
        section.files, section.seq_len or min(longest, LENGTH), tokenizer=tokenizer, template=ChatTemplate(tokenizer)
    )
    return task(folder, "causal-lm", data=data, name=Path(folder).resolve().name)
