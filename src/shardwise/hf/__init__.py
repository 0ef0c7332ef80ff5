"""Hugging Face models: a task from a configuration or a checkpoint folder, and a folder that `from_pretrained` reads.

Importing this package does not import transformers; the extra `hf` installs it.
"""

from __future__ import annotations

from shardwise.heads import HEADS
from shardwise.hf.export import export, save_adapters
from shardwise.hf.folder_tensors import Checkpoint
from shardwise.hf.model_task import task

__all__ = ["HEADS", "Checkpoint", "export", "save_adapters", "task"]
