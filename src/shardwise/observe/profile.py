"""Profiles a few steps: a trace of each rank for Chrome or Perfetto, and a table of where the time went.

    input          waiting for the batch
    compute        operations of forward, loss and backward
    exposed comm   the thread that trains is inside a collective or waits for one, by mesh axis
    optimizer      the update, without the collectives in it
    idle           the rest of the step: Python between operations
    between steps  records, evaluation, checkpoints and whatever else is done once a step is over
    hidden comm    collectives that ran while the above went on; not part of the sum

The parts are read from the trace, the length of the steps from another clock, so that their sum can be checked.
The axis of a collective is known where it is issued; one that ran in the background is matched to its issue by kind
and order.

What this does not do: the table for a GPU, whose work runs beside the thread that is traced; there the traces alone
are written. Profiling itself slows a step, so speeds of these steps are not those of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, record_function

from shardwise.comm import Ledger, Observer, gather_json
from shardwise.device import on_host, profiler_activities
from shardwise.engine.engine import Engine
from shardwise.observe.folder import write_json
from shardwise.observe.profile_steps import FOLDER

Span = tuple[float, float]  # (start, end) in microseconds
_PREFIX = "shardwise."
_ALL, _INPUT, _STEP, _UPDATE, _WAIT, _ISSUE = (
    f"{_PREFIX}{word}" for word in ("steps", "input", "step", "update", "wait", "issue")
)
# gloo's event in a trace -> kind of collective
_BACKGROUND = {"gloo:all_gather": "all_gather", "gloo:all_reduce": "all_reduce", "gloo:broadcast": "broadcast",
               "gloo:all_to_all": "all_to_all"}  # fmt: skip
_AS_GLOO = {"reduce_scatter": "all_reduce"}  # kind -> the one that gloo implements it with


class StepProfile:
    """Profiles this rank in the steps `steps` (a range, from 0); files go to `folder`/profile.

    measured_s  seconds from the begin of the first profiled step to the end of the last, by the system's clock
    """

    def __init__(self, steps: range, engine: Engine, folder: Path) -> None:
        self.steps, self.engine, self.folder = steps, engine, folder
        self._profiler: Any = None
        self._all: Any = None
        self._watching = ExitStack()
        self.measured_s = 0.0
        self._began = 0.0

    def before(self, step: int) -> None:
        """Starts the profiler if `step` is the range's first; called before its batch is asked for."""
        if step != self.steps.start or not self.steps:  # an empty range has a start too
            return
        self._profiler = profile(activities=profiler_activities(self.engine.device))
        self._profiler.__enter__()
        self._watch()
        self._all = record_function(_ALL)
        self._began = time.perf_counter()
        self._all.__enter__()

    @contextmanager
    def inside(self, step: int, part: str) -> Iterator[None]:
        """Context around the "input" or the "step" (`part`) of a step, named so in the trace if it is profiled."""
        if step not in self.steps:
            yield
            return
        with record_function(f"{_PREFIX}{part}"):
            yield

    def after(self, step: int) -> dict[str, float] | None:
        """Writes the trace after the last profiled step; returns {part: ms per step} of this rank, {} on a GPU.

        Returns None, and does nothing, after any other step.
        """
        if not self.steps or step != self.steps.stop - 1:
            return None
        self._all.__exit__(None, None, None)
        self.measured_s = time.perf_counter() - self._began
        self._watching.close()
        self._profiler.__exit__(None, None, None)
        folder = self.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / f"rank{self.engine.rank}.json"))
        if not on_host(self.engine.device):
            return {}
        return table_of(list(self._profiler.events()), len(self.steps), self.measured_s)

    def tell(self, step: int) -> str:
        """Returns the table of all ranks as text on rank 0, and writes it, after the last profiled step; else "".

        Collective after that step. "" on a GPU too, where the traces alone are written.
        """
        table = self.after(step)
        if table is None:
            return ""
        tables = gather_json(table, self.engine.mesh.world, self.engine.device)
        # on a GPU the table is empty, on all ranks
        if self.engine.rank != 0 or not table:
            return ""
        fields = {"steps": [step + 1 for step in self.steps], "unit": "ms per step", "ranks": tables}
        write_json(self.folder / FOLDER / "table.json", fields)
        return as_text(tables, self.steps)

    def _watch(self) -> None:
        """Adds names to the trace that torch does not: waits, the update, and the axis of each collective."""
        work, wait = dist.Work, dist.Work.wait

        def named_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            with record_function(_WAIT):
                return wait(self, *args, **kwargs)

        self._watching.enter_context(_Issues(_Ranges(), self.engine.mesh.group_axes))
        self._watching.enter_context(self.engine.around("update", lambda: record_function(_UPDATE)))
        self._watching.callback(setattr, work, "wait", wait)
        work.wait = named_wait


class _Ranges(Ledger):
    """Ledger that opens a range in the trace instead of counting a collective."""

    def __init__(self) -> None:
        super().__init__()
        self._open: Any = None

    def record(
        self, tag: str, op: str, axis: str, full_bytes: int, ranks: int, received_bytes: float | None = None
    ) -> None:
        self._open = record_function(f"{_ISSUE} {op} {axis}")
        self._open.__enter__()

    def close(self) -> None:
        """Closes the range if one is open."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)


class _Issues(Observer):
    """Observer that names each collective in the trace where it is issued, by kind and mesh axis."""

    ledger: _Ranges

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.ledger.close()


# --- from events to the table; times are in microseconds


def table_of(events: list[Any], steps: int, measured_s: float) -> dict[str, float]:
    """Returns {part: milliseconds per step} of one rank, and "measured", the step's length by another clock.

    events      of torch's profiler;  steps  how many were profiled;  measured_s  seconds of all of them
    """
    main = next(event.thread for event in events if event.name == _STEP)
    own = [event for event in events if event.thread == main]

    def spans(chosen: Callable[[Any], bool], among: list[Any]) -> list[Span]:
        return union([(event.time_range.start, event.time_range.end) for event in among if chosen(event)])

    whole = spans(lambda event: event.name == _ALL, own)
    inside = spans(lambda event: event.name in (_STEP, _INPUT), own)
    waits = spans(lambda event: event.name == _WAIT or event.name.startswith(_ISSUE), own)
    update = minus(spans(lambda event: event.name == _UPDATE, own), waits)
    reading = spans(lambda event: event.name == _INPUT, own)
    operations = spans(lambda event: not event.is_user_annotation and not event.name.startswith(_PREFIX), own)
    compute = minus(minus(minus(operations, waits), update), reading)
    background = _by_axis(events, own)
    per_step = 1e-3 / steps
    table = {"input": length(reading) * per_step, "compute": length(compute) * per_step}
    left = waits  # each moment of waiting counts for one axis, though collectives of a second one may run then
    for axis, ran in sorted(background.items()):
        exposed = meet(left, ran)
        table[f"exposed comm, {axis}"] = length(exposed) * per_step
        left = minus(left, exposed)
    table["exposed comm, waiting for others"] = length(left) * per_step
    table["optimizer"] = length(update) * per_step
    parts = union([*reading, *compute, *waits, *update])
    table["idle"] = length(minus(inside, parts)) * per_step
    table["between steps"] = length(minus(minus(whole, inside), parts)) * per_step
    for axis, ran in sorted(background.items()):
        table[f"hidden comm, {axis}"] = length(minus(ran, waits)) * per_step
    table["measured"] = measured_s * 1e3 / steps
    return table


def _by_axis(events: list[Any], own: list[Any]) -> dict[str, list[Span]]:
    """Returns axis -> spans of its background collectives, matched to their issues by kind and order.

    own  the events of the thread that trains, among which are the issues
    """
    issued: dict[str, list[str]] = {}
    for event in sorted(own, key=lambda event: event.time_range.start):
        if event.name.startswith(_ISSUE):
            _, kind, axis = event.name.split(" ", 2)
            issued.setdefault(_AS_GLOO.get(kind, kind), []).append(axis)
    spans_by_axis: dict[str, list[Span]] = {}
    ran = sorted((e for e in events if e.name in _BACKGROUND), key=lambda event: event.time_range.start)
    for kind in set(_BACKGROUND.values()):
        of_kind = [event for event in ran if _BACKGROUND[event.name] == kind]
        axes = issued.get(kind, [])
        for place, event in enumerate(of_kind):
            # if the trace has more or fewer than were issued, the order says nothing
            axis = axes[place] if len(axes) == len(of_kind) else "unknown axis"
            spans_by_axis.setdefault(axis, []).append((event.time_range.start, event.time_range.end))
    return {axis: union(spans) for axis, spans in spans_by_axis.items()}


def union(spans: list[Span]) -> list[Span]:
    """Returns the union of the spans, as spans in order that do not overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > start:
            joined.append((start, end))
    return joined


def meet(first: list[Span], other: list[Span]) -> list[Span]:
    """Returns the intersection of two unions of spans."""
    common, at = [], 0
    for start, end in first:
        while at < len(other) and other[at][1] <= start:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end:
            common.append((max(start, other[place][0]), min(end, other[place][1])))
            place += 1
    return common


def minus(first: list[Span], other: list[Span]) -> list[Span]:
    """Returns the times that are in `first` and not in `other`; both are unions."""
    rest = []
    for start, end in first:
        for low, high in meet([(start, end)], other):
            if low > start:
                rest.append((start, low))
            start = high
        if end > start:
            rest.append((start, end))
    return rest


def length(spans: list[Span]) -> float:
    """Returns the sum of the spans' lengths, in microseconds."""
    return sum(end - start for start, end in spans)


def as_text(tables: list[dict[str, float]], steps: range) -> str:
    """Returns one table of all ranks, each cell in milliseconds and percent of that rank's step.

    tables  of `table_of`, by rank;  steps  the profiled range, from 0
    """
    names = list(dict.fromkeys(name for table in tables for name in table if name != "measured"))
    names.sort(key=lambda name: name.startswith("hidden"))
    width = max(map(len, names)) + 2
    lines = [f"steps {steps.start + 1} to {steps.stop}, profiled (ms in a step, share of it)"]
    lines += ["".ljust(width) + "".join(f"rank {rank}".rjust(16) for rank in range(len(tables)))]
    for name in [*names, "measured"]:
        cells = [f"{t.get(name, 0.0):.1f} {t.get(name, 0.0) / t['measured']:6.1%}".rjust(16) for t in tables]
        lines.append(name.ljust(width) + "".join(cells))
    return "\n".join(lines)
