"""Low-rank adapters in a task's model, through peft: which layers get them, and a task whose model has them.

Importing this room does not import peft; the extra `lora` brings it.
"""

from __future__ import annotations

from shardwise.adapters.lora import with_lora

__all__ = ["with_lora"]
