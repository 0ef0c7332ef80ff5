"""A few lines that the text model writes at the end of a run."""

from __future__ import annotations

import torch

from shardwise.config.schema import TrainSection
from shardwise.engine.engine import Engine
from shardwise.task import Task

PROMPT = b"\ndef "
TEMPERATURE = 0.8


def written_text(engine: Engine, task: Task, config: TrainSection) -> str | None:
    """`config.generate` bytes on rank 0, from the full parameters; None elsewhere. Every rank calls this."""
    if not config.generate:
        return None
    full = engine.full_parameters()
    if engine.rank != 0:
        for _ in full:
            pass
        return None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = task.model()
        own = dict(model.named_parameters())
        for name, value in full:
            own[name].copy_(value)
    return _write(model, config.generate, config.seed)


def _write(model: torch.nn.Module, length: int, seed: int) -> str:
    from shardwise.models import generate

    prompt = torch.tensor([list(PROMPT)])  # (1, bytes)
    tokens = generate(model, prompt, length, TEMPERATURE, torch.Generator().manual_seed(seed))
    text = bytes(tokens[0].tolist()).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text).strip("\n")
