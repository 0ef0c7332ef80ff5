"""Mean and standard deviation of each channel of fields: computed once, kept in a JSON file.

    mean_c = Σ x / n,   std_c = sqrt(Σ (x - mean_c)² / n)    over the times and places of channel c that have a value

Fields are read one at a time and merged (Chan, Golub and LeVeque 1979, eq. 2.1), in float64. The file describes the
data that it was computed from; for other data, times or regions it is refused and not recomputed, since a trained model
expects the figures that it was trained with. It is written under another name and then renamed, so that ranks which
compute it at the same time leave one complete file.

What this does not do: weight by the area of a grid cell; notice values that changed while names and sizes stayed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.corpus import renamed
from shardwise.errors import InputError


class Moments:
    """Running count, mean and sum of squared deviations of each channel, arrays (C,) of float64."""

    def __init__(self, channels: int) -> None:
        self.count = np.zeros(channels)
        self.mean = np.zeros(channels)
        self.squares = np.zeros(channels)

    def add(self, field: np.ndarray) -> None:
        """Merges a field (C, y, x), NaN where a value is missing, into the moments of each channel."""
        flat = field.reshape(len(self.count), -1)
        there = ~np.isnan(flat)
        count = there.sum(1)
        mean = np.divide(np.nansum(flat, 1), count, out=np.zeros(len(count)), where=count > 0)
        squares = np.nansum((flat - mean[:, None]) ** 2, 1)
        total = self.count + count
        share = np.divide(count, total, out=np.zeros(len(count)), where=total > 0)
        apart = mean - self.mean
        self.squares += squares + apart**2 * self.count * share
        self.mean += apart * share
        self.count = total


def computed(names: dict[str, list[str]], fields: Callable[[str], Iterable[np.ndarray]]) -> dict[str, dict[str, float]]:
    """Returns {channel: {"mean", "std", "count"}}.

    names    variable -> names of its channels
    fields   variable -> its fields (C, y, x), one after another, NaN where a value is missing

    Raises `InputError` for a channel without values, or of one value everywhere.
    """
    stats: dict[str, dict[str, float]] = {}
    for variable, channels in names.items():
        moments = Moments(len(channels))
        for field in fields(variable):
            moments.add(field)
        for index, channel in enumerate(channels):
            count = float(moments.count[index])
            std = float(np.sqrt(moments.squares[index] / count)) if count else 0.0
            # a constant channel would be divided by 0; `not > 0` also finds a NaN
            if not std > 0:
                why = "has no value at all" if not count else f"is {moments.mean[index]:g} everywhere"
                raise InputError(f"FieldSource: {channel} {why} in these times: it cannot be normalised; leave it out")
            stats[channel] = {"mean": float(moments.mean[index]), "std": std, "count": count}
    return stats


def load_or_compute(
    path: Path, origin: dict[str, Any], compute: Callable[[], dict[str, dict[str, float]]]
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Returns {channel: {"mean", "std", "count"}} from the file `path`; if it does not exist, computes and writes it.

    origin    description (JSON) of the data, saved in the file and compared with it
    compute   makes the figures

    Raises `InputError` for a file of other data than `origin`, or one that cannot be read or written.
    """
    if path.exists():
        return _read(path, origin)
    figures = compute()
    try:
        # `renamed` uses a random draft name, since processes of several hosts may have the same id
        with renamed(path) as file:
            file.write(json.dumps({"of": origin, "channels": figures}, indent=1).encode())
    except OSError as error:
        raise InputError(
            f"FieldSource: the mean and deviation of the fields cannot be kept in {path} ({error.strerror}): name a "
            "file that can be written with statistics="
        ) from error
    return figures


def _read(path: Path, origin: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns {channel: {"mean", "std", "count"}} of a file; `InputError` if its data were not `origin`."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        of, channels = stored["of"], stored["channels"]
        figures = {name: {key: float(each[key]) for key in ("mean", "std", "count")} for name, each in channels.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"FieldSource: {path} is not a file of means and deviations ({error}): remove it") from error
    for key, value in json.loads(json.dumps(origin)).items():
        if of.get(key) != value:
            raise InputError(
                f"FieldSource: {path} was computed with {key} {of.get(key)}, and the source has {key} {value}: give "
                "another file as statistics=, remove it to compute it anew, or take held-out times by source.over(...)"
            )
    return figures
