"""Read pairs of fields again for the one process of a run, from the stored numbers of netCDF files and zarr stores.

    value    for zarr stored * scale_factor + add_offset, NaN where `_FillValue` or `missing_value` is stored; for
             netCDF as its library gives it
    figures  mean and standard deviation over all time steps and cells of the source at once
    pairs    every time step t such that t to t + lead lie in the source's times, with no gap between two of them

Nothing of `data/` is called. The source's own figures and days are used if they equal these up to rounding, since
float32 may round them to either side.

What this does not do: sources of more than `MOST_BYTES`, because it reads them into memory.
"""

from __future__ import annotations

import base64
import json
import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

MOST_BYTES = 2**26  # bytes of all fields of a source in float64
GAP = 1.5  # times the median time step: a longer one is a gap
YEAR_DAYS = {"360_day": 360.0, "noleap": 365.0, "365_day": 365.0, "all_leap": 366.0, "366_day": 366.0}
ROUNDING = 1e-9  # relative tolerance of figures in float64


def is_read(source: Any) -> bool:
    """Whether a `FieldSource` is small enough to be read again."""
    names = {name for group in source.groups.values() for name in group}
    elements = sum(int(np.prod(var.shape)) for name in names for _, var in source.grid.variables.get(name, []))
    return 8 * elements <= MOST_BYTES


def sample_of(source: Any, index: int) -> dict[str, torch.Tensor]:
    """Returns pair `index` as {"inputs", "targets", ...}, each (1, C, y, x) in float32, as in `FieldSource`."""
    start = starts_of(source)[index]
    sample: dict[str, torch.Tensor] = {}
    for group, names in source.groups.items():
        step = start if group == "inputs" else start + source.lead
        # a group without names gives nothing
        if names:
            values = np.stack(
                [(series[step % len(series)] - mean) / std for series, mean, std in _series(source, group)]
            )
            sample[group] = torch.from_numpy(np.nan_to_num(values).astype(np.float32))[None]
            if source.missing == "mask" and group in ("inputs", "targets"):
                sample[f"{group}_valid"] = torch.from_numpy(~np.isnan(values))[None]
    waves = [wave for cycle in source.cycles for wave in _waves(source, cycle, start + source.lead)]
    if waves:
        shape = (1, 1, *sample["inputs"].shape[2:])
        planes = [torch.full(shape, wave, dtype=torch.float32) for wave in waves]
        sample["forcing"] = torch.cat([*([sample["forcing"]] if "forcing" in sample else []), *planes], 1)
    return sample


def starts_of(source: Any) -> list[int]:
    """Returns the time step t of each pair t -> t + lead of a source, ascending."""
    first, last = source.times
    starts, (days, _) = range(first, last - source.lead), _calendar(source)
    if days is None:
        return [*starts]
    steps = [after - before for before, after in pairwise(days)]
    return [t for t in starts if max(steps[t : t + source.lead]) <= GAP * float(np.median(steps))]


def _waves(source: Any, cycle: str, step: int) -> tuple[float, float]:
    """Returns (sine, cosine) of where a time step lies in a cycle: "year" or "day"."""
    days, year = _calendar(source)
    assert days is not None
    angle = 2 * np.pi * days[step] / (year if cycle == "year" else 1.0)
    return float(np.sin(angle)), float(np.cos(angle))


def _calendar(source: Any) -> tuple[np.ndarray | None, float]:
    """Returns (days of each time step since January 1 of the first one's year, days of a year).

    (None, 0) if no file has times; (the stored numbers, 0) if these have no date.
    """
    carriers = [file for file in map(str, source.grid.files) if _variable(file, source.groups["inputs"][0]) is not None]
    times = [held for held in (_variable(file, source.time) for file in carriers) if held is not None]
    if not times:
        return None, 0.0
    # times without a date are numbers of any unit
    if " since " not in str(times[0][2].get("units", "")):
        return np.concatenate([values for _, values, _ in times]), 0.0
    import cftime

    calendar = str(times[0][2].get("calendar", "standard"))
    dates = [
        date for _, values, held in times for date in np.atleast_1d(cftime.num2date(values, held["units"], calendar))
    ]
    days = cftime.date2num(dates, f"days since {dates[0].year:04d}-01-01", calendar).astype(np.float64)
    told = source.days + source.first_day
    same = told.shape == days.shape and np.allclose(told, days, rtol=0, atol=1e-6)
    return told if same else days, YEAR_DAYS.get(dates[0].calendar, 365.2425)


def _series(source: Any, group: str) -> list[tuple[np.ndarray, float, float]]:
    """Returns (values (steps, y, x) of the source's region, mean, standard deviation) of each channel of a group."""
    (top, bottom), (left, right) = source.region
    of_figures = slice(*json.loads(Path(source.statistics).read_text(encoding="utf-8"))["of"]["times"])
    plane, channels = _joined(source, source.groups["inputs"][0])[0][-2:], []
    for name in source.groups[group]:
        dims, values = _joined(source, name)
        if group == "static":
            # a coordinate such as latitude is broadcast over the dim that it lacks
            values = values[:, None] if dims == plane[:1] else values
            values = np.broadcast_to(values, source.space)[None]
        levels = values.reshape(len(values), -1, *source.space)[..., top:bottom, left:right]
        for level in range(levels.shape[1]):
            series = levels[:, level]
            counted = series if group == "static" else series[of_figures]
            own = float(np.nanmean(counted)), float(np.nanstd(counted))
            figures = source.figures[name if levels.shape[1] == 1 else f"{name}/{level}"]
            told = figures["mean"], figures["std"]
            channels.append((series, *(told if np.allclose(told, own, rtol=ROUNDING, atol=ROUNDING * own[1]) else own)))
    return channels


def _joined(source: Any, name: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns (names of dims, values) of a variable, joined over the source's files in their order."""
    pieces = [held for held in (_variable(str(file), name) for file in source.grid.files) if held is not None]
    # a variable without time is the same in each file
    timed = pieces[0][0][0] == source.time
    return pieces[0][0], np.concatenate([values for _, values, _ in pieces]) if timed else pieces[0][1]


@lru_cache(maxsize=64)
def _variable(file: str, name: str) -> tuple[tuple[str, ...], np.ndarray, dict[str, Any]] | None:
    """Returns (names of dims, values in float64, attributes) of a variable of one file; None if the file lacks it."""
    if Path(file).is_file():
        import netCDF4

        with netCDF4.Dataset(file) as opened:
            if name not in opened.variables:
                return None
            variable = opened[name]
            attributes = {key: variable.getncattr(key) for key in variable.ncattrs()}
            values = np.ma.filled(np.ma.asarray(variable[...]).astype(np.float64), np.nan)
            return tuple(variable.dimensions), values, attributes
    import zarr

    group = zarr.open_group(file, mode="r")
    if name not in group:
        return None
    array: Any = group[name]
    attributes, stored = dict(array.attrs), np.asarray(array[...])
    unnamed = [f"dim_{place}" for place in range(array.ndim)]
    dims = getattr(array.metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS", unnamed)
    marks = [attributes.get("_FillValue"), attributes.get("missing_value")]
    # zarr version 2 stores `_FillValue` outside the attributes
    marks += [array.fill_value] if array.metadata.zarr_format == 2 and marks[0] is None else []
    values = stored.astype(np.float64) * float(attributes.get("scale_factor", 1)) + float(
        attributes.get("add_offset", 0)
    )
    for mark in marks:
        values[np.isin(stored, _numbers(mark, stored.dtype))] = np.nan
    return tuple(dims), values, attributes


def _numbers(mark: Any, stored: np.dtype) -> np.ndarray:
    """Returns the stored numbers that mark missing values; `mark` may be a number, or text in base64 or digits."""
    if isinstance(mark, str):
        try:
            mark = struct.unpack("<d", base64.b64decode(mark, validate=True))
        except (ValueError, struct.error):
            mark = float(mark)
    numbers = np.atleast_1d([] if mark is None else mark)
    # cast as the stored values are, since a mark that float32 cannot hold is stored rounded
    return numbers.astype(stored) if stored.kind == "f" else numbers
