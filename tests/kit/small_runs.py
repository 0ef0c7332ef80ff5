"""Small runs of `train` on the digits, and what they come to: losses, and digests of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import shardwise
from shardwise.digest import digest

MODEL: dict[str, Any] = {"config": {"task": {"model": {"layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1}}}}
STEPS = 8
SMALL: dict[str, Any] = {**MODEL, "batch_samples": 12, "eval_every": 0, "steps": STEPS}
AVERAGED: dict[str, Any] = {**MODEL, "batch_samples": 40, "eval_samples": 8, "ema_decay": 0.9}


def losses_of(run: Any) -> list[float]:
    return [record["loss"] for record in run.metrics if "loss" in record]


def weights_of(folder: Path) -> dict[str, str]:
    """A digest of each weight that a run ended with, and of each average of one; its best ones are apart."""
    files = [path for path in (folder / "ema.safetensors", folder / "model.safetensors") if path.exists()]
    return {f"{file.name}/{name}": digest(value) for file in files for name, value in load_file(file).items()}


def undisturbed(plan: str) -> tuple[list[float], dict[str, str]]:
    run = shardwise.train("digits", plan, **SMALL)
    return losses_of(run), weights_of(run.folder)
