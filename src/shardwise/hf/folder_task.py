"""The task that a checkpoint folder is by itself: its model on files of examples, `shardwise train FOLDER --data`."""

from __future__ import annotations

from glob import glob
from pathlib import Path

from shardwise.config.schema import TaskSection
from shardwise.data.chat import ChatTemplate
from shardwise.data.jsonl import JsonlSource
from shardwise.errors import InputError
from shardwise.heads import read_config
from shardwise.hf.model_task import task
from shardwise.task import Task

LENGTH = 1024  # tokens of a row where task.seq_len is not set and the model takes as many


def folder_task(section: TaskSection) -> Task:
    """Returns the task of fine-tuning the folder's causal language model on JSON lines, answers alone.

    Raises `InputError` for a folder without examples, and as `JsonlSource` does.
    """
    folder = section.name
    if not section.files:
        raise InputError(f"{folder} has no examples to learn from: --data chat.jsonl, or task.files in a configuration")
    # patterns, and files by name: a name that matches nothing is told as it is
    paths = [path for pattern in section.files for path in sorted(glob(pattern)) or [pattern]]
    # folders without that field have no such limit
    most = getattr(read_config(folder), "max_position_embeddings", None)
    if most and section.seq_len and section.seq_len > most:
        raise InputError(
            f"task.seq_len = {section.seq_len} is more than the {most} positions of {folder} (max_position_embeddings "
            "in its config.json): lower it"
        )
    longest = most or LENGTH
    tokenizer = section.tokenizer or folder
    data = JsonlSource(
        paths, section.seq_len or min(longest, LENGTH), tokenizer=tokenizer, template=ChatTemplate(tokenizer)
    )
    return task(folder, "causal-lm", data=data, name=Path(folder).resolve().name)
