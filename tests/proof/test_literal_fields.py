"""Fields of files, read a second time by nothing of `data/`: what reads them wrongly on both sides of a proof shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.test_fields import STEPS, write_netcdf, write_zarr
from mutations.plant import Bug, planted

from shardwise.data import FieldSource
from shardwise.proof import literal_fields
from shardwise.proof.literal_sources import miscounted, one_by_one

ALL = {"inputs": ["wind", "heat"], "targets": ["heat"], "lead": 3, "forcing": ["sun"], "cycles": ["year", "day"],
       "static": ["land", "y"]}  # fmt: skip


def two_files(folder: Path) -> list[Path]:
    later = np.arange(STEPS - 5)
    return [write_netcdf(folder / "1.nc", 0, 5),
            write_netcdf(folder / "2.nc", 5, STEPS, days=later, units="days since 2001-03-06")]  # fmt: skip


KINDS: dict[str, Callable[[Path], Any]] = {
    "netcdf": lambda folder: write_netcdf(folder / "a.nc", holes=True),
    "netcdf3": lambda folder: write_netcdf(folder / "a.nc", kind="NETCDF3_CLASSIC"),
    "hours": lambda folder: write_netcdf(folder / "a.nc", days=np.arange(STEPS) * 6.0,
                                         units="hours since 1999-12-30 11:30:45"),
    "two files": two_files,
    "zarr2": lambda folder: write_zarr(folder / "a", 2, holes=True),
    "zarr3": lambda folder: write_zarr(folder / "a", 3, holes=True),
    "a gap": lambda folder: write_netcdf(folder / "a.nc", days=[0, 1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 15]),
}  # fmt: skip


class Read:
    """A source as a proof reads it."""

    def __init__(self, source: Any):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)


class Sources:
    """Stands for a task: its two sources."""

    def __init__(self, data: Any, eval_data: Any = None):
        self.data, self.eval_data = data, eval_data


def same(source: FieldSource) -> bool:
    """Whether pairs, read one by one, are those that the source gives, bit by bit, and as many."""
    indices = [len(source) - 1, 0, 1]
    apart, together = one_by_one(Read(source), indices), source.read(indices)
    assert apart is not None and apart.keys() == together.keys()
    return not miscounted(Sources(source)) and all(torch.equal(apart[key], value) for key, value in together.items())


def of(path: Any, **more: Any) -> FieldSource:
    return FieldSource(path, **(ALL | {"missing": "mask", "gaps": "skip", "region": ((1, 5), (0, 6))} | more))


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_those_of_the_source(kind: str, tmp_path: Path) -> None:
    whole = of(KINDS[kind](tmp_path), times=(0, STEPS - 1))
    assert same(whole) and same(whole.over(4, STEPS))
    assert same(
        FieldSource(whole.grid.files, ["wind"], times=(1, 7), gaps="skip", statistics=tmp_path / "of_wind.json")
    )


WRONG = {
    "a mark read the other way round": ("data.gridfiles:_mark", '"<d"', '">d"'),
    "a pair a step too late": ("data.fields:FieldSource.read", "start + self.lead", "start + self.lead - 1"),
    "a region a column off": ("data.fields:FieldSource._window", "o[0] + i[0], o[0] + i[1]", "i[0], i[1]"),
    "the last pair left out": ("data.fields:FieldSource._pairs", "times[1] - self.lead", "times[1] - self.lead - 1"),
    "the day of the year left out": ("data.fields:FieldSource._clock", "origin.dayofyr - 1", "0"),
    "deviations of a batch too small": ("data.fieldstats:Moments.add", "apart**2 * self.count", "0 * self.count"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_reads_a_file_wrongly_is_found(kind: str, tmp_path: Path) -> None:
    place, old, new = WRONG[kind]
    with planted(Bug("", f"shardwise.{place}", old, new, "", "")) as ran:
        assert not same(of(write_zarr(tmp_path / "a", 3, holes=True))) and ran()


def test_values_that_changed_since_their_figures_were_kept_are_found(tmp_path: Path) -> None:
    """The file of figures tells names and sizes of what they are of, and no values."""
    path = write_netcdf(tmp_path / "a.nc")
    assert same(of(path))
    write_netcdf(tmp_path / "b.nc", holes=True).replace(path)
    literal_fields._variable.cache_clear()
    assert not same(of(path))
