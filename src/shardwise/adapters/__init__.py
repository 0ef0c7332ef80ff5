"""Low-rank adapters in a task's model, through peft: choose the layers, put adapters in, read and write their files.

Importing this package does not import peft; the extra `lora` installs it.
"""

from __future__ import annotations

from shardwise.adapters.lora import with_lora

__all__ = ["with_lora"]
