"""Generates a few lines with the text model at the end of a run."""

from __future__ import annotations

import torch

from shardwise.config.schema import Config
from shardwise.data.tokenizer import read_tokenizer
from shardwise.engine.engine import Engine
from shardwise.task import Task

PROMPT = b"\ndef "  # prompt for the built-in corpus; for the user's files it is the beginning of their held-out part
PROMPT_TOKENS = 8
TEMPERATURE = 0.8


def written_text(engine: Engine, task: Task, config: Config) -> str | None:
    """Returns `config.train.generate` generated tokens as text on rank 0; None on other ranks or if 0. Collective."""
    if not config.train.generate:
        return None
    full = engine.full_parameters()
    # gathering the parameters is collective, so every rank has to iterate over them
    if engine.rank != 0:
        for _ in full:
            pass
        return None
    # building the model draws random weights, which would advance the run's RNG
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = task.model()
        own = dict(model.named_parameters())
        for name, value in full:
            own[name].copy_(value)
    from shardwise.models import generate

    generator = torch.Generator().manual_seed(config.train.seed)
    tokens = generate(model, _prompt(task, config), config.train.generate, TEMPERATURE, generator)
    decode = read_tokenizer(config.task.tokenizer).decode
    assert decode is not None
    return _printable(decode(tokens[0].tolist()))


def _prompt(task: Task, config: Config) -> torch.Tensor:
    """Returns the prompt's tokens (1, S)."""
    if not config.task.files:
        return torch.tensor([list(PROMPT)])
    assert task.eval_data is not None
    return task.eval_data.read([0])["tokens"][:, :PROMPT_TOKENS]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text).strip("\n")
