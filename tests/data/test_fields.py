"""Fields from netCDF and zarr: pairs, statistics, regions, masks, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise import Task, parallelize, verify
from shardwise.data import FieldSource, Loader, Order
from shardwise.data.fieldstats import load_or_compute
from shardwise.data.gridfiles import GridFiles
from shardwise.errors import InputError
from shardwise.ranks import RankPool

netCDF4 = pytest.importorskip("netCDF4", reason="fields need netCDF4: pip install 'shardwise[science]'")
zarr = pytest.importorskip("zarr", reason="fields need zarr: pip install 'shardwise[science]'")

STEPS, LEVELS, Y, X = 12, 2, 5, 7


def values(name: str, steps: int = STEPS) -> np.ndarray:
    g = np.random.default_rng(sum(map(ord, name)))
    shape = {"wind": (steps, LEVELS, Y, X), "heat": (steps, Y, X), "sun": (steps, Y, X), "land": (Y, X)}[name]
    return g.normal(280 if name == "heat" else 3, 4, shape)


def write_netcdf(path: Path, start: int = 0, stop: int = STEPS, *, kind: str = "NETCDF4", days: Any = None,
                 units: str = "days since 2001-03-01", holes: bool = False) -> Path:  # fmt: skip
    with netCDF4.Dataset(path, "w", format=kind) as file:
        for name, size in {"time": None, "level": LEVELS, "y": Y, "x": X}.items():
            file.createDimension(name, size)
        time = file.createVariable("time", "f8", ("time",))
        time.units = units
        time[:] = np.arange(start, stop) if days is None else days
        latitude = file.createVariable("y", "f4", ("y",))
        latitude[:] = np.linspace(-40, 40, Y)
        for name, dims in {"wind": ("time", "level", "y", "x"), "heat": ("time", "y", "x"), "sun": ("time", "y", "x"),
                           "land": ("y", "x")}.items():  # fmt: skip
            variable = file.createVariable(name, "f8", dims, fill_value=-999.0)
            data = values(name) if dims[0] != "time" else values(name)[start:stop]
            if holes and name == "heat":
                data = np.where(np.arange(X) == 2, np.nan, data)
            variable[:] = np.ma.masked_invalid(data)
    return path


def write_zarr(path: Path, version: int, *, holes: bool = False) -> Path:
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    dims = {"wind": ["time", "level", "y", "x"], "heat": ["time", "y", "x"], "sun": ["time", "y", "x"],
            "land": ["y", "x"], "time": ["time"], "y": ["y"]}  # fmt: skip
    data = {name: values(name) for name in ("wind", "heat", "sun", "land")}
    data |= {"time": np.arange(STEPS, dtype="f8"), "y": np.linspace(-40, 40, Y)}
    if holes:
        data["heat"] = np.where(np.arange(X) == 2, -999.0, data["heat"])
    for name, array in data.items():
        named = {"dimension_names": dims[name]} if version == 3 else {}
        fill = {"fill_value": -999.0} if version == 2 else {}
        made = group.create_array(name, shape=array.shape, dtype="f8", chunks=array.shape, **named, **fill)
        made[...] = array
        if version == 2:
            made.attrs["_ARRAY_DIMENSIONS"] = dims[name]
        else:
            made.attrs["_FillValue"] = "AAAAAAA4j8A="  # -999.0, as xarray writes it
    group["time"].attrs["units"] = "days since 2001-03-01"
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_netcdf(tmp_path / "fields.nc")


def source(path: Any, **more: Any) -> FieldSource:
    settings = {"inputs": ["wind", "heat"], "targets": ["heat"], "lead": 3, "forcing": ["sun"], "cycles": ["year"],
                "static": ["land", "y"]}  # fmt: skip
    return FieldSource(path, **(settings | more))


def normal(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return (array - array.mean(axes, keepdims=True)) / array.std(axes, keepdims=True)


def test_pairs_are_those_of_the_arrays(file: Path) -> None:
    got = source(file)
    assert len(got) == STEPS - 3
    batch = got.read([4, 0])
    wind, heat, sun = (normal(values(n), (0, -2, -1)) for n in ("wind", "heat", "sun"))
    latitude = np.repeat(normal(np.linspace(-40, 40, Y), (0,))[:, None], X, 1)
    expected = {
        "inputs": np.concatenate([wind, heat[:, None]], 1)[[4, 0]],
        "targets": heat[:, None][[7, 3]],
        "static": np.stack([normal(values("land"), (0, 1)), latitude]),
    }
    for name, value in expected.items():
        assert batch[name].dtype == torch.float32
        assert np.allclose(batch[name], value, atol=1e-5), name
    assert np.allclose(batch["forcing"][:, 0], sun[[7, 3]], atol=1e-5)
    angle = 2 * np.pi * (np.array([7, 3]) + 59) / 365.2425  # 1 March is the 60th day
    assert np.allclose(batch["forcing"][:, 1, 0, 0], np.sin(angle), atol=1e-5)
    assert np.allclose(batch["forcing"][:, 2, -1, -1], np.cos(angle), atol=1e-5)
    assert np.allclose(got.physical("targets", batch["targets"]), values("heat")[[7, 3]][:, None], atol=1e-3)
    assert got.channels["inputs"] == ["wind/0", "wind/1", "heat"]


@pytest.mark.parametrize("kind", ["NETCDF3_CLASSIC", "zarr2", "zarr3"])
@pytest.mark.parametrize("holes", [False, True])
def test_every_format_gives_the_same(kind: str, holes: bool, tmp_path: Path) -> None:
    first = source(write_netcdf(tmp_path / "a.nc", holes=holes), missing="mask").read([1, 5])
    other = tmp_path / "b"
    path = (
        write_netcdf(other, kind=kind, holes=holes) if "NET" in kind else write_zarr(other, int(kind[-1]), holes=holes)
    )
    second = source(path, missing="mask").read([1, 5])
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert bool(first["targets_valid"].all()) != holes


def test_packed_values_are_unpacked(tmp_path: Path) -> None:
    real = np.round(values("heat"), 2)
    group = zarr.open_group(str(tmp_path / "packed"), mode="w", zarr_format=3)
    stored = group.create_array("heat", shape=real.shape, dtype="i2", dimension_names=["time", "y", "x"])
    stored[...] = np.round((real - 280) * 100).astype("i2")
    stored.attrs.update({"scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32767})
    with netCDF4.Dataset(tmp_path / "packed.nc", "w") as file:
        for name, size in {"time": STEPS, "y": Y, "x": X}.items():
            file.createDimension(name, size)
        heat = file.createVariable("heat", "i2", ("time", "y", "x"), fill_value=-32767)
        heat.scale_factor, heat.add_offset = 0.01, 280.0
        heat[:] = real
    for path in ("packed", "packed.nc"):
        got = FieldSource(tmp_path / path, ["heat"])
        assert np.allclose(got.physical("inputs", got.read([2])["inputs"].double())[0, 0], real[2], atol=1e-4), path


@pytest.mark.parametrize("version", [2, 3])
def test_a_mark_that_the_stored_dtype_rounds_is_one(version: int, tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "store"), mode="w", zarr_format=version)
    named = {"dimension_names": ["time", "y", "x"]} if version == 3 else {}
    heat = group.create_array("heat", shape=(STEPS, Y, X), dtype="f4", fill_value=7.0, **named)
    heat[...] = np.where(np.arange(X) == 2, -999.9, values("heat"))
    heat.attrs.update({"missing_value": -999.9, "_ARRAY_DIMENSIONS": ["time", "y", "x"]})
    valid = FieldSource(tmp_path / "store", ["heat"], missing="mask").read([1])["inputs_valid"]
    assert valid[0, 0].all(0).tolist() == [column != 2 for column in range(X)]


def test_files_of_a_series_are_one(tmp_path: Path, file: Path) -> None:
    """Also where each counts its days from a date of its own."""
    first = write_netcdf(tmp_path / "1.nc", 0, 5)
    second = write_netcdf(tmp_path / "2.nc", 5, STEPS, days=np.arange(STEPS - 5), units="days since 2001-03-06")
    joined, whole = source([first, second]), source(file)
    for name, value in whole.read(list(range(len(whole)))).items():
        assert torch.allclose(joined.read(list(range(len(joined))))[name], value, atol=1e-6), name


def test_a_region_is_the_whole_cut_and_no_more_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got, read = source(file, region=((1, 5), (0, 6))), []
    whole = got.read([0, 3])
    plain = GridFiles._read
    monkeypatch.setattr(GridFiles, "_read", lambda *a: read.append((a[2], plain(*a))) or read[-1][1])
    part = got.read([0, 3], ((1, 3), (2, 6)))
    for name, value in whole.items():
        assert torch.equal(part[name], value[..., 1:3, 2:6]), name
    assert {array.shape[-2:] for name, array in read if name in ("wind", "heat", "sun")} == {(2, 4)}
    with pytest.raises(InputError, match=r"does not lie in the source's region of 4 x 6"):
        got.read([0], ((0, 5), (0, 6)))


def test_statistics_are_computed_once_and_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = source(file, times=(0, 8))
    stored = file.with_name("fields.nc.statistics.json")
    told = json.loads(stored.read_text())["channels"]["heat"]
    assert told["mean"] == pytest.approx(values("heat")[:8].mean(), rel=1e-12)
    assert told["std"] == pytest.approx(values("heat")[:8].std(), rel=1e-12)
    assert told["count"] == 8 * Y * X
    held_out = first.over(6, STEPS)
    assert len(held_out) == 3 and len(first) == 5
    monkeypatch.setattr("shardwise.data.fields.computed", None)  # computing again would fail
    again = source(file, times=(0, 8))
    assert torch.equal(again.over(6, STEPS).read([2])["inputs"], held_out.read([2])["inputs"])
    with pytest.raises(InputError, match=r"computed with times \[0, 8\], and the source has times \[0, 12\].*over"):
        source(file)
    stored.write_text("{")
    with pytest.raises(InputError, match="is not a file of means and deviations"):
        source(file, times=(0, 8))


def test_gaps_in_time(tmp_path: Path) -> None:
    days = [0, 1, 2, 3, 4, 9, 10, 11, 12, 13, 14, 15]
    path = write_netcdf(tmp_path / "gap.nc", days=days)
    with pytest.raises(InputError, match=r"5 days lie between the steps 4 and 5.*gaps='skip'"):
        source(path)
    assert source(path, gaps="skip").starts == [0, 1, 5, 6, 7, 8]
    months = write_netcdf(tmp_path / "months.nc", days=np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30]))
    assert len(source(months)) == STEPS - 3
    with pytest.raises(InputError, match="time does not go forward at step 3"):
        source(write_netcdf(tmp_path / "back.nc", days=[0, 1, 2, 2, *range(3, 11)]))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"inputs": ["heta"]}, r"no variable 'heta' in .*did you mean 'heat'"),
        ({"inputs": ["land"]}, r"land has the dims \('y', 'x'\).*static="),
        ({"inputs": "heat"}, r"inputs is a list of names: \['heat'\]"),
        ({"static": ["heat"]}, r"static heat has the dims"),
        ({"lead": 12}, "no pair with a lead of 12 in the steps 0 to 12"),
        ({"times": (3, 20)}, "times 3 to 20 of a series of 12 steps"),
        ({"cycles": ["month"]}, "expected year or day"),
    ],
)
def test_mistakes_are_told(settings: dict, told: str, file: Path) -> None:
    with pytest.raises(InputError, match=told):
        source(file, **settings)


def test_statistics_that_two_ranks_of_one_number_keep_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """In containers of two hosts, which see one folder, processes may have the same number."""
    figures = {"heat": {"mean": 1.0, "std": 2.0, "count": 3.0}}
    kept = functools.partial(load_or_compute, tmp_path / "statistics.json", {"files": []}, lambda: figures)
    own = os.replace

    def other_first(*paths: Any) -> None:
        monkeypatch.setattr(os, "replace", own)
        assert kept() == figures
        own(*paths)

    monkeypatch.setattr(os, "replace", other_first)
    assert kept() == figures == kept()
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.json"]


def test_a_static_field_of_another_grid_is_refused(file: Path, tmp_path: Path) -> None:
    """Its first rows and columns would be taken for those of the fields."""
    with netCDF4.Dataset(tmp_path / "globe.nc", "w") as larger:
        for name, size in {"y": 2 * Y, "x": 2 * X}.items():
            larger.createDimension(name, size)
        larger.createVariable("height", "f8", ("y", "x"))[:] = np.random.default_rng(0).normal(size=(2 * Y, 2 * X))
    with pytest.raises(InputError, match=r"static height is \('y', 'x'\) of \(10, 14\).* the fields have \(5, 7\)"):
        FieldSource([file, tmp_path / "globe.nc"], ["heat"], static=["height"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.nc"
    broken.write_bytes(b"not a file of fields")
    with pytest.raises(InputError, match=r"broken.nc cannot be read as a netCDF file"):
        source(broken)
    with pytest.raises(InputError, match="does not exist"):
        source(tmp_path / "absent.nc")
    with pytest.raises(InputError, match=r"heat has missing values at step 3 \(5 of them\): missing='mask'"):
        source(write_netcdf(tmp_path / "holes.nc", holes=True), inputs=["wind"]).read([0])


def test_ranks_and_workers_read_the_same(file: Path) -> None:
    got = source(file)
    again = pickle.loads(pickle.dumps(got))
    assert torch.equal(again.read([3])["inputs"], got.read([3])["inputs"])
    order = Order(len(got), seed=1)
    plain = [next(iter(Loader(got, order, 4)))[0].batch["targets"]]
    workers = Loader(got, order, 4, workers=1)
    assert torch.equal(next(iter(workers))[0].batch["targets"], plain[0])


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3 + 3 + 2, 1, 3, padding=1)

    def forward(self, inputs: torch.Tensor, forcing: torch.Tensor, static: torch.Tensor) -> torch.Tensor:
        return self.convolution(torch.cat([inputs, forcing, static], 1))


def inputs(batch: dict) -> tuple[tuple, dict]:
    return (batch["inputs"], batch["forcing"], batch["static"]), {}


def loss(output: torch.Tensor, batch: dict) -> tuple:
    there = batch["targets_valid"]
    return (output - batch["targets"]).square()[there].sum(), there.sum()


def test_a_task_of_fields_with_holes_is_equal_to_one_process(tmp_path: Path, pool: RankPool) -> None:
    fields = source(write_netcdf(tmp_path / "f.nc", holes=True), missing="mask")
    task = Task(model=Convolution, loss=loss, inputs=inputs, data=fields)
    parity = verify(task, "dp_shard=2,zero=3", steps=1, pool=pool)
    assert parity.parity, parity.text()
    assert parallelize(task).step(fields.read([0, 1])).weight == 2 * Y * (X - 1)
