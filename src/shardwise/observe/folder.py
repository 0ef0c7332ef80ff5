"""The run folder `runs/<timestamp>-<name>/`: the run's inputs, results and versions.

config.toml        the effective configuration, each value with its source; `shardwise train` reads it again
plan.toml          the plan, every field written out
versions.json      python, torch, shardwise, platform, device
metrics.jsonl      one line for each step and each evaluation
model.safetensors  the weights at the end
ema.safetensors    their moving average, if train.ema_decay is set
best.safetensors   weights of the smallest held-out loss, if train.keep_best is set
summary.json       the final table
running.lock       the process that has the folder, while it runs (training/holding.py)
journal.jsonl      one line for each attempt, if ranks were started here (training/restart.py)
profile/           traces and a table, if train.profile_steps is set
ranks/             what the other ranks wrote

One process makes it: the one that launches the ranks, or rank 0 under a launcher.
"""

from __future__ import annotations

import datetime
import errno
import json
import platform
import shutil
from pathlib import Path
from typing import Any

import shardwise
from shardwise.config import Effective, show
from shardwise.errors import InputError
from shardwise.observe.metrics import finite

LEAST_BYTES = 2**16  # that a run writes beside its weights and metrics


def make_folder(out: str | Path, name: str) -> Path:
    """Returns a new run folder below `out`, numbered if that second has one already; `InputError` if none can be."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        folder = Path(out) / (f"{stamp}-{name}" + (f"-{number}" if number > 1 else ""))
        try:
            folder.mkdir(parents=True)
            _try_writing(folder)
            return folder
        except (FileExistsError, NotADirectoryError):
            if not Path(out).is_dir():
                raise InputError(
                    f"train.out = {str(out)!r} is not a folder: give one with --set train.out=FOLDER"
                ) from None
        except OSError as error:
            raise InputError(
                f"train.out: {folder} cannot be made: {error.strerror}. Give a folder that can be written, with "
                "--set train.out=FOLDER"
            ) from None
    raise InputError(f"train.out: {out} holds 999 runs named {stamp}-{name}")


def _try_writing(folder: Path) -> None:
    """Raises `InputError` if a new folder takes no file, which a run would otherwise find out at its end."""
    trial = folder / "config.toml"
    try:
        trial.write_bytes(bytes(LEAST_BYTES))
        trial.unlink()
    except OSError as error:
        free = shutil.disk_usage(folder).free
        shutil.rmtree(folder, ignore_errors=True)
        remedy = "Make room, or give another folder with --set train.out=FOLDER"
        room = f"{error.strerror} ({free / 2**20:,.1f} MiB free there)"
        if error.errno == errno.EFBIG:
            remedy = "Raise how large a file may be (ulimit -f unlimited)"
        raise InputError(f"train.out: {folder.parent} takes no files: {room}. {remedy}") from None


def write_inputs(folder: Path, effective: Effective, device: str) -> None:
    """Writes the run's configuration, plan and versions as config.toml, plan.toml and versions.json."""
    (folder / "config.toml").write_text(show(effective), encoding="utf-8")
    (folder / "plan.toml").write_text(effective.plan.to_toml(), encoding="utf-8")
    write_json(folder / "versions.json", versions(device))


def versions(device: str) -> dict[str, str]:
    """Returns the versions of python, torch and shardwise, the platform and the device of a run, by these names."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "shardwise": shardwise.__version__,
        "platform": platform.platform(),
        "device": device,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as indented JSON; numbers that are not finite become null."""
    path.write_text(json.dumps(finite(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
