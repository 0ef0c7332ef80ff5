"""Reads variables of netCDF files and zarr stores by index, as float64 with NaN for missing values.

netCDF 3 and 4 are read by netCDF4, zarr 2 and 3 by zarr; each package is imported for the first such file. Packed
values are unpacked (CF conventions 8.1), `_FillValue` and `missing_value` become NaN (2.5.1). Several files are one
series: a variable's values are concatenated over all files that have it, in the order given.

One lock is held while a file is read, since the HDF5 library serves one thread at a time. At most `OPEN` files are
kept open.
"""

from __future__ import annotations

import base64
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import InputError, did_you_mean

OPEN = 64
_READING = threading.RLock()


@dataclass(frozen=True)
class FileVariable:
    """A variable of one file: names of its dims, shape, and attributes (name -> value)."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    attributes: dict[str, Any]


class GridFiles:
    """The variables of one or several files. It can be pickled; files are opened again after unpickling."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        if not files:
            raise InputError("FieldSource: give at least one netCDF file or zarr store")
        self.files = [Path(file) for file in files]
        self._open_files: OrderedDict[Path, Any] = OrderedDict()
        self.variables: dict[str, list[tuple[int, FileVariable]]] = {}  # name -> (index of a file, its variable)
        for number, file in enumerate(self.files):
            for name, variable in self._list(file).items():
                self.variables.setdefault(name, []).append((number, variable))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open_files": OrderedDict()}

    def find(self, name: str) -> FileVariable:
        """Returns the variable `name` of the first file that has it; `InputError` if none does."""
        if name not in self.variables:
            raise InputError(
                f"FieldSource: no variable {name!r} in {self.files_text()}; there are "
                f"{', '.join(sorted(self.variables))}{did_you_mean(name, list(self.variables))}"
            )
        return self.variables[name][0][1]

    def files_text(self) -> str:
        """Returns a text that names the files, for messages."""
        return str(self.files[0]) + (f" and {len(self.files) - 1} more" if len(self.files) > 1 else "")

    def lengths(self, name: str) -> list[int]:
        """Returns a variable's number of time steps in each file that has it; `InputError` if its other dims differ."""
        first = self.find(name)
        for number, var in self.variables[name]:
            if var.dims != first.dims or var.shape[1:] != first.shape[1:]:
                raise InputError(
                    f"FieldSource: {name} is {var.dims} {var.shape} in {self.files[number]}, but {first.dims} "
                    f"{first.shape} in {self.files[self.variables[name][0][0]]}: files of one series must agree"
                )
        return [var.shape[0] for _, var in self.variables[name]]

    def at(self, name: str, time: int, window: tuple[slice, slice]) -> np.ndarray:
        """Returns a variable's field at step `time` of the series, (..., y, x) in float64, NaN where missing.

        window   slices of the last two dims
        """
        ends = np.cumsum(self.lengths(name)).tolist()
        place = bisect_right(ends, time)
        number, variable = self.variables[name][place]
        index = (time - (ends[place] - variable.shape[0]), *(slice(None),) * (len(variable.dims) - 3), *window)
        return self._read(number, name, variable, index)

    def whole(self, name: str, place: int = 0) -> np.ndarray:
        """Returns all values of a variable, float64, in the `place`-th of the files that have it."""
        number, variable = self.variables[name][place]
        return self._read(number, name, variable, (slice(None),) * len(variable.dims))

    def _read(self, number: int, name: str, variable: FileVariable, index: tuple) -> np.ndarray:
        """Returns `variable[index]` of file `number` as float64, NaN for missing values; `InputError` on failure."""
        with _READING:
            opened = self._opened(self.files[number])
            try:
                values = opened[name][index]
            except (OSError, RuntimeError, ValueError) as error:
                raise InputError(f"{self.files[number]}: {name} cannot be read at {index}: {error}") from error
        if isinstance(values, np.ma.MaskedArray):  # netCDF4 unpacked it
            return np.ma.filled(values.astype(np.float64), np.nan)
        values = np.asarray(values)
        return values.astype(np.float64) if _is_netcdf(self.files[number]) else _unpacked(values, variable.attributes)

    def _opened(self, file: Path) -> Any:
        """Returns the open file, and drops the least recently used one if more than `OPEN` are open."""
        if file in self._open_files:
            self._open_files.move_to_end(file)
        else:
            self._open_files[file] = _open(file)
            if len(self._open_files) > OPEN:
                self._open_files.popitem(last=False)
        return self._open_files[file]

    def _list(self, file: Path) -> dict[str, FileVariable]:
        """Returns {name: `FileVariable`} of a file."""
        with _READING:
            opened = self._opened(file)
            if _is_netcdf(file):
                return {
                    name: FileVariable(
                        tuple(var.dimensions), tuple(var.shape), {k: var.getncattr(k) for k in var.ncattrs()}
                    )
                    for name, var in opened.variables.items()
                }
            return {name: _zarr_held(file, name, variable) for name, variable in opened.arrays()}


def _is_netcdf(file: Path) -> bool:
    return file.is_file()


def _open(file: Path) -> Any:
    """Opens a netCDF file (a file) or zarr store (a folder) for reading; `InputError` if missing or unreadable."""
    if not file.exists():
        raise InputError(f"FieldSource: {file} does not exist")
    try:
        if _is_netcdf(file):
            import netCDF4

            return netCDF4.Dataset(str(file), "r")
        import zarr

        return zarr.open_group(str(file), mode="r")
    except ImportError as error:
        raise InputError(
            f"fields from files need netCDF4 and zarr ({error}): pip install 'shardwise[science]'"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        kind = "netCDF file" if _is_netcdf(file) else "zarr store"
        raise InputError(f"FieldSource: {file} cannot be read as a {kind}: {error}") from error


def _zarr_held(file: Path, name: str, array: Any) -> FileVariable:
    """Returns the dims, shape and attributes of an array of a zarr store."""
    attributes = dict(array.attrs)
    dims = getattr(array.metadata, "dimension_names", None) or attributes.get("_ARRAY_DIMENSIONS")
    if dims is None:
        dims = [f"dim_{i}" for i in range(array.ndim)]
    if array.metadata.zarr_format == 2 and array.fill_value is not None:  # version 2 does not store it as an attribute
        attributes.setdefault("_FillValue", array.fill_value)
    return FileVariable(tuple(dims), tuple(array.shape), attributes)


def _unpacked(values: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    """Returns stored values as float64, with missing ones as NaN and `scale_factor` and `add_offset` applied."""
    missing = np.zeros(values.shape, bool)
    for key in ("_FillValue", "missing_value"):
        marks = np.atleast_1d(_mark(attributes.get(key), values.dtype))
        # compare in the stored dtype, since -999.9 is not the same number in float32 and float64
        for mark in marks.astype(values.dtype) if values.dtype.kind == "f" else marks:
            missing |= values == mark  # a mark of NaN needs no comparison
    number = values.astype(np.float64) * float(attributes.get("scale_factor", 1)) + float(
        attributes.get("add_offset", 0)
    )
    number[missing] = np.nan
    return number


def _mark(value: Any, dtype: np.dtype) -> Any:
    """Returns an attribute's fill value as a number, [] for None; xarray writes floats in base64 (little-endian)."""
    if value is None:
        return []
    if isinstance(value, str) and dtype.kind == "f":
        try:
            return struct.unpack("<d", base64.b64decode(value))[0]
        except (ValueError, struct.error):
            return float(value)
    return value
