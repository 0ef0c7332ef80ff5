"""Sends a run's numbers elsewhere too: TensorBoard, MLflow, Weights & Biases (names: config/schema, pyproject.toml).

tensorboard   event files in the run folder
mlflow        MLFLOW_TRACKING_URI, else the SQLite file mlflow.db beside the run folders; the run's name is the folder's
wandb         in the run folder, offline unless WANDB_MODE says otherwise; the run's id is the folder's name

Each gets what `metrics.jsonl` gets, number by number, at the same steps. A run that is opened again under the same
folder continues its record.

What this does not do: send weights, or anything that is not a number.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import InputError

PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "wandb": ("wandb",)}


class Sink(Protocol):
    """A receiver of each step's numbers, as `metrics.jsonl` gets them."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def check_sinks(names: list[str]) -> None:
    """Raises `InputError` if a package that a sink needs is not installed; called before any rank starts."""
    for name in names:
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            raise InputError(f"train.sinks: {name} needs {', '.join(missing)}: pip install 'shardwise[{name}]'")


def open_sinks(names: list[str], folder: Path, settings: dict[str, Any]) -> list[Sink]:
    """Returns the sinks of these names for the run in `folder`.

    settings  {name: value} shown beside the numbers, such as the plan
    """
    makers: dict[str, Callable[[Path, dict[str, Any]], Sink]] = {
        "tensorboard": TensorBoard,
        "mlflow": MLflow,
        "wandb": WandB,
    }
    return [makers[name](folder, settings) for name in names]


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """Returns {name: number} of the finite numbers in a `metrics.jsonl` record, without "step" and bools."""
    plain = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float) and not isinstance(v, bool)}
    return {key: float(value) for key, value in plain.items() if math.isfinite(value)}


class TensorBoard:
    """Sink that writes event files to `folder`/tensorboard."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("plan", str(settings.get("plan", "")))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """Sink that writes a run of the experiment "shardwise"."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs a hundred lines when it makes its tables
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent.absolute() / 'mlflow.db'}"
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        known = self._client.get_experiment_by_name("shardwise")
        experiment = known.experiment_id if known else self._client.create_experiment("shardwise")
        name = f"tags.`mlflow.runName` = '{folder.name}'"
        earlier = self._client.search_runs([experiment], filter_string=name, max_results=1)
        run = earlier[0] if earlier else self._client.create_run(experiment, run_name=folder.name)
        self._run = run.info.run_id
        for key, value in settings.items():
            self._client.set_tag(self._run, key, str(value))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        import time

        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class WandB:
    """Sink that writes a run of the project "shardwise"."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project="shardwise", id=folder.name, name=folder.name, dir=str(folder), resume="allow", config=settings,
            mode=mode, settings=wandb.Settings(silent=True),
        )  # fmt: skip

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()
