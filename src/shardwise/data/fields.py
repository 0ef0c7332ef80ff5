"""`FieldSource`: fields from netCDF files and zarr stores, pairs t -> t + lead, normalised, static and forcing fields.

    "inputs"   (B, C, y, x)  the state at t
    "forcing"  (B, F, y, x)  what is known of t + lead: forcing variables, then sine and cosine of each cycle
    "static"   (B, S, y, x)  what has no time; the coordinate of one dim is spread over the other
    "targets"  (B, T, y, x)  the state at t + lead

All are float32, normalised by mean and standard deviation of their channel. A variable with levels has a channel for
each level. A sample is read from the files when it is asked for, and only the region of it.

What this does not do: interpolate, sequences of more than two times, unstructured grids with one index for y and x.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shardwise.data.fieldstats import computed, load_or_compute
from shardwise.data.gridfiles import GridFiles
from shardwise.errors import InputError

Region = tuple[tuple[int, int], tuple[int, int]]
CYCLES = ("year", "day")
YEARS = {
    "360_day": 360.0,
    "noleap": 365.0,
    "365_day": 365.0,
    "all_leap": 366.0,
    "366_day": 366.0,
}  # days; else 365.2425
GAP = 1.5  # a time step longer than so many median steps is a gap; months differ by less


class FieldSource:
    """A `Source` of pairs of fields at t and t + lead.

    files       a netCDF file or zarr store, or several in the order of time
    inputs      names of variables (time, [level, ...] y, x), read at t
    targets     names of variables read at t + lead; None: those of `inputs`
    lead        time steps between the two
    forcing     names of variables that are known in advance, read at t + lead
    cycles      any of "year", "day": adds sine and cosine of the phase of t + lead to the forcing
    static      names of variables (y, x), or coordinates (y,) or (x,)
    times       (start, stop) of the time steps that are used, also for statistics; None: all
    region      ((y0, y1), (x0, x1)) of the indices that are used; None: all
    missing     "refuse" missing values, or "mask": they are 0, and the batch has "inputs_valid", "targets_valid" (bool)
    gaps        "refuse" gaps in time, or "skip": pairs across a gap are left out
    statistics  path of the file of means and deviations; None: FILE.statistics.json beside the first file
    time        name of the fields' first dim and of its coordinate variable

    Raises `InputError` for files that do not fit; `read` raises it for missing values under "refuse".
    """

    def __init__(
        self, files: str | Path | Sequence[str | Path], inputs: Sequence[str], targets: Sequence[str] | None = None, *,
        lead: int = 1, forcing: Sequence[str] = (), cycles: Sequence[str] = (), static: Sequence[str] = (),
        times: tuple[int, int] | None = None, region: Region | None = None,
        missing: Literal["refuse", "mask"] = "refuse", gaps: Literal["refuse", "skip"] = "refuse",
        statistics: str | Path | None = None, time: str = "time",
    ) -> None:  # fmt: skip
        named = {"inputs": inputs, "targets": targets, "forcing": forcing, "cycles": cycles, "static": static}
        for name, value in named.items():
            if isinstance(value, str):
                raise InputError(f"FieldSource: {name} is a list of names: [{value!r}]")
        if missing not in ("refuse", "mask") or gaps not in ("refuse", "skip"):
            raise InputError(
                f"FieldSource: missing={missing!r}, gaps={gaps!r}: expected refuse or mask, refuse or skip"
            )
        if lead < 1 or not inputs:
            raise InputError(
                f"FieldSource: lead={lead}, inputs={list(inputs)}: expected a lead of 1 or more, and inputs"
            )
        unknown = [cycle for cycle in cycles if cycle not in CYCLES]
        if unknown:
            raise InputError(f"FieldSource: cycles={list(cycles)}: expected {' or '.join(CYCLES)}")
        self.grid = GridFiles([files] if isinstance(files, str | Path) else files)
        self.lead, self.missing, self.gaps, self.cycles, self.time = lead, missing, gaps, tuple(cycles), time
        self.groups = {"inputs": tuple(inputs), "targets": tuple(inputs if targets is None else targets),
                       "forcing": tuple(forcing), "static": tuple(static)}  # fmt: skip
        self.space, self.steps = self._agreed()
        self.region = _inside(region, self.space, "the grid")
        self.days, self.first_day, self.year = self._clock()
        self.times = self._checked(times or (0, self.steps))
        self.starts = self._pairs(self.times)
        self.channels = {group: [c for name in names for c in self._channels(name)]
                         for group, names in self.groups.items()}  # fmt: skip
        beside = self.grid.files[0].with_name(f"{self.grid.files[0].name}.statistics.json")
        self.statistics = Path(statistics) if statistics is not None else beside
        self.figures = load_or_compute(self.statistics, self._origin(), self._compute)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def global_shape(self) -> tuple[int, int]:
        """Returns (rows, columns) of a whole field; under a plan that shards space, a rank reads only its tile."""
        (y0, y1), (x0, x1) = self.region
        return y1 - y0, x1 - x0

    def over(self, start: int, stop: int) -> FieldSource:
        """Returns a source of the same fields and statistics over time steps [start, stop), as for held-out data."""
        other = copy.copy(self)
        other.times = self._checked((start, stop))
        other.starts = self._pairs(other.times)
        return other

    def read(self, indices: list[int], region: Region | None = None) -> dict[str, torch.Tensor]:
        """Returns the batch of the pairs at `indices`, as in the module's docstring.

        region   ((y0, y1), (x0, x1)) within the source's own region; None: all of it
        """
        window = self._window(region)
        starts = [self.starts[index] for index in indices]
        later = [start + self.lead for start in starts]
        batch = {}
        for group, at in (("inputs", starts), ("targets", later)):
            values, there = self._filled(group, np.stack([self._state(group, t, window) for t in at]), at)
            batch[group] = values
            # with missing="refuse" `_filled` raises, so a mask would always be True
            if self.missing == "mask":
                batch[f"{group}_valid"] = there
        if self.groups["forcing"] or self.cycles:
            batch["forcing"] = self._forcing(later, window)
        # static fields have no time: one copy is expanded over the samples
        if self.groups["static"]:
            static = self._filled("static", self._static(window)[None], [0])[0]
            batch["static"] = static.expand(len(starts), -1, -1, -1)
        return batch

    def physical(self, group: str, values: torch.Tensor) -> torch.Tensor:
        """Returns normalised values (..., C, y, x) of a group ("inputs", "targets", ...) in the files' units."""
        mean, std = self._figures(group)
        like = {"dtype": values.dtype, "device": values.device}
        return values * torch.as_tensor(std, **like) + torch.as_tensor(mean, **like)

    # --- what the files hold

    def _agreed(self) -> tuple[tuple[int, int], int]:
        """Returns ((rows, columns), time steps) of all variables with time; raises `InputError` if they differ."""
        space: dict[str, tuple[int, ...]] = {}
        steps: dict[str, int] = {}
        for name in dict.fromkeys(n for group in ("inputs", "targets", "forcing") for n in self.groups[group]):
            variable = self.grid.find(name)
            # a variable without time belongs into static=
            if len(variable.dims) < 3 or variable.dims[0] != self.time:
                raise InputError(
                    f"FieldSource: {name} has the dims {variable.dims}; a field is ({self.time!r}, ..., y, x). Name "
                    "another first dim by time=, or what has no time as static="
                )
            space[name], steps[name] = variable.shape[-2:], sum(self.grid.lengths(name))
        # fields of one sample are stacked along channels, and steps are counted alike in all
        for what, by_name in (("size of grid", space), ("number of times", steps)):
            if len(set(by_name.values())) > 1:
                raise InputError(f"FieldSource: variables differ in {what}: {by_name}")
        first = self.groups["inputs"][0]
        self._plane = self.grid.find(first).dims[-2:]
        size = self.grid.find(first).shape[-2:]
        return (size[0], size[1]), steps[first]

    def _channels(self, name: str) -> list[str]:
        levels = int(np.prod(self.grid.find(name).shape[1:-2])) if name not in self.groups["static"] else 1
        return [name] if levels == 1 else [f"{name}/{level}" for level in range(levels)]

    def _state(self, group: str, step: int, window: tuple[slice, slice]) -> np.ndarray:
        """Returns the values (C, y, x) of a group's variables at one time step, in the files' units."""
        fields = [self.grid.at(name, step, window) for name in self.groups[group]]
        return np.concatenate([field.reshape(-1, *field.shape[-2:]) for field in fields])

    def _static(self, window: tuple[slice, slice]) -> np.ndarray:
        return np.stack([self._plane_of(name)[window] for name in self.groups["static"]])

    def _plane_of(self, name: str) -> np.ndarray:
        """Returns a static variable as (y, x), broadcast if it has only y or x; `InputError` for other dims."""
        field = self.grid.find(name)
        values = self.grid.whole(name)
        sizes = dict(zip(self._plane, self.space, strict=True))
        # a variable of another file may have dims of these names but another grid
        if any(size != sizes.get(dim, size) for dim, size in zip(field.dims, field.shape, strict=True)):
            raise InputError(
                f"FieldSource: static {name} is {field.dims} of {field.shape}, and the fields have {self.space}: give "
                "it on the grid of the fields"
            )
        if field.dims == self._plane:
            return values
        if len(field.dims) == 1 and field.dims[0] in self._plane:
            column = values[:, None] if field.dims[0] == self._plane[0] else values[None]
            return np.broadcast_to(column, self.space)
        raise InputError(f"FieldSource: static {name} has the dims {field.dims}; expected {self._plane} or one of them")

    # --- time

    def _clock(self) -> tuple[np.ndarray | None, float, float]:
        """Returns (days of each time step since the first date, first date's day of its year, days of a year).

        The first is None without a time coordinate; the others are 0.0 if times have no dates. Raises `InputError` for
        times that do not increase or do not match the steps, and for cycles without dates.
        """
        if self.time not in self.grid.variables:
            if self.cycles:
                raise InputError(f"FieldSource: cycles= need the coordinate {self.time!r}, which no file has")
            return None, 0.0, 0.0
        # only files that have the inputs count, since files of static fields may have another time
        carriers = [number for number, _ in self.grid.variables[self.groups["inputs"][0]]]
        times = [(place, var) for place, (file, var) in enumerate(self.grid.variables[self.time]) if file in carriers]
        values, origin = [], None
        for place, var in times:
            dates, origin = _days(self.grid.whole(self.time, place), var.attributes, origin)
            values.append(dates)
        days = np.concatenate(values)
        if len(days) != self.steps:
            raise InputError(f"FieldSource: {len(days)} times for {self.steps} steps in {self.grid.files_text()}")
        # pairs are formed by index, so indices must be in the order of time
        if (np.diff(days) <= 0).any():
            back = int(np.argmax(np.diff(days) <= 0))
            raise InputError(f"FieldSource: time does not go forward at step {back + 1}: give the files in their order")
        if origin is None and self.cycles:
            raise InputError(
                f"FieldSource: cycles= need dates, but {self.time!r} has no units such as 'days since ...'"
            )
        # times without dates give no phase in the year
        if origin is None:
            return days, 0.0, 0.0
        seconds = origin.hour * 3600 + origin.minute * 60 + origin.second
        return days, origin.dayofyr - 1 + seconds / 86400, YEARS.get(origin.calendar, 365.2425)

    def _pairs(self, times: tuple[int, int]) -> list[int]:
        """Returns the time steps t in [times[0], times[1]) whose t + lead is in that range too.

        Raises `InputError` if there is none, or for a gap in time unless gaps="skip".
        """
        starts = list(range(times[0], times[1] - self.lead))
        # without a time coordinate gaps cannot be seen
        if self.days is not None and starts:
            steps = np.diff(self.days)
            wide = steps > GAP * np.median(steps)
            broken = [t for t in starts if wide[t : t + self.lead].any()]
            if broken and self.gaps == "refuse":
                where = broken[0] + int(np.argmax(wide[broken[0] : broken[0] + self.lead]))
                raise InputError(
                    f"FieldSource: {steps[where]:g} days lie between the steps {where} and {where + 1}, and "
                    f"{np.median(steps):g} as a rule: pairs over it have another lead. Leave them out by gaps='skip'"
                )
            starts = sorted(set(starts) - set(broken))
        # the lead is longer than the range, or every pair crosses a gap
        if not starts:
            raise InputError(f"FieldSource: no pair with a lead of {self.lead} in the steps {times[0]} to {times[1]}")
        return starts

    def _checked(self, times: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= times[0] < times[1] <= self.steps:
            raise InputError(f"FieldSource: times {times[0]} to {times[1]} of a series of {self.steps} steps")
        return int(times[0]), int(times[1])

    # --- values

    def _forcing(self, steps: list[int], window: tuple[slice, slice]) -> torch.Tensor:
        """Returns the forcing at these time steps, (B, F, y, x): variables, then sine and cosine of each cycle."""
        size = [part.stop - part.start for part in window]
        channels = []
        if self.groups["forcing"]:
            forcing = np.stack([self._state("forcing", t, window) for t in steps])
            channels.append(self._filled("forcing", forcing, steps)[0])
        for cycle in self.cycles:
            assert self.days is not None
            angle = 2 * np.pi * (self.days[steps] + self.first_day) / (self.year if cycle == "year" else 1.0)
            waves = torch.from_numpy(np.stack([np.sin(angle), np.cos(angle)], 1)).float()  # (B, 2)
            channels.append(waves[:, :, None, None].expand(-1, -1, *size))
        return torch.cat(channels, 1)

    def _filled(self, group: str, values: np.ndarray, steps: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (normalised values float32, whether each exists bool), both (B, C, y, x); missing values become 0.

        values   of the group at these time steps, in the files' units

        Raises `InputError` for missing values under missing="refuse", and in forcing and static fields.
        """
        there = ~np.isnan(values)
        if not there.all() and (self.missing == "refuse" or group in ("forcing", "static")):
            sample, channel = (int(i) for i in np.argwhere(~there)[0][:2])
            raise InputError(
                f"FieldSource: {self.channels[group][channel]} has missing values at step {steps[sample]} "
                f"({(~there[sample, channel]).sum()} of them): "
                + ("missing='mask' gives masks of inputs and targets" if group in ("inputs", "targets")
                   else f"{group} fields must be complete")
            )  # fmt: skip
        mean, std = self._figures(group)
        normal = np.where(there, (values - mean) / std, 0.0)
        return torch.from_numpy(normal.astype(np.float32)), torch.from_numpy(there)

    def _figures(self, group: str) -> tuple[np.ndarray, np.ndarray]:
        figures = [self.figures[channel] for channel in self.channels[group]]
        mean, std = (np.array([row[key] for row in figures])[:, None, None] for key in ("mean", "std"))
        return mean, std

    def _origin(self) -> dict[str, Any]:
        """Returns {"files", "variables", "times", "region"}: the data that statistics are computed from."""
        sizes = [file.stat().st_size if file.is_file() else None for file in self.grid.files]
        names = {name for group in self.groups.values() for name in group}
        return {"files": [[file.name, size] for file, size in zip(self.grid.files, sizes, strict=True)],
                "variables": sorted(names), "times": self.times, "region": self.region}  # fmt: skip

    def _compute(self) -> dict[str, dict[str, float]]:
        """Returns {channel: {"mean", "std", "count"}} of all variables over the source's steps and region."""
        window = self._window(None)
        static = self.groups["static"]
        names = dict.fromkeys(name for group in self.groups.values() for name in group)

        def fields(name: str) -> Any:
            if name in static:
                return [self._plane_of(name)[window][None]]
            steps = range(*self.times)
            return (self.grid.at(name, step, window).reshape(-1, *self._size(window)) for step in steps)

        return computed({name: self._channels(name) for name in names}, fields)

    @staticmethod
    def _size(window: tuple[slice, slice]) -> tuple[int, int]:
        return window[0].stop - window[0].start, window[1].stop - window[1].start

    def _window(self, region: Region | None) -> tuple[slice, slice]:
        size = tuple(stop - start for start, stop in self.region)
        inner = _inside(region, (size[0], size[1]), "the source's region")
        rows, columns = (slice(o[0] + i[0], o[0] + i[1]) for o, i in zip(self.region, inner, strict=True))
        return rows, columns


def _inside(region: Region | None, size: tuple[int, int], whole: str) -> Region:
    """Returns ((y0, y1), (x0, x1)) of a region, all of `size` for None; `InputError` if it is not within `size`.

    whole   name of what has that size, for the message
    """
    if region is None:
        return (0, size[0]), (0, size[1])
    try:
        (y0, y1), (x0, x1) = ((int(low), int(high)) for low, high in region)
    except (TypeError, ValueError):
        raise InputError(f"FieldSource: region {region!r}: expected ((y0, y1), (x0, x1))") from None
    if not (0 <= y0 < y1 <= size[0] and 0 <= x0 < x1 <= size[1]):
        raise InputError(f"FieldSource: region {region} does not lie in {whole} of {size[0]} x {size[1]}")
    return (y0, y1), (x0, x1)


def _days(values: np.ndarray, attributes: dict[str, Any], origin: Any) -> tuple[np.ndarray, Any]:
    """Returns (days since the origin, origin) of times in a file.

    attributes   of the time variable; without units "... since ...", times are returned as they are
    origin       date to count from; None: the first of these times

    Raises `InputError` for units or a calendar that cftime does not know.
    """
    units, calendar = str(attributes.get("units", "")), str(attributes.get("calendar", "standard"))
    if " since " not in units:
        return values.astype(np.float64), origin
    import cftime

    try:
        dates = np.atleast_1d(cftime.num2date(values, units, calendar))
        origin = dates[0] if origin is None else origin
        return np.atleast_1d(cftime.date2num(dates, f"days since {origin}", calendar)).astype(np.float64), origin
    except ValueError as error:
        raise InputError(f"FieldSource: times in {units!r} of the calendar {calendar!r}: {error}") from error
