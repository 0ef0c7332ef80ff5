"""The progress display of a run on rank 0's stderr: a live bar, or plain lines. Filled by training/loop.

    step 120/1000  loss 2.3456  accuracy 0.512  lr 1.00e-03  51.2k tokens/s  MFU 41.2 %  peak 1.3 GiB  0:01:12 left

The task's metrics and extra terms stand behind the loss. MFU is shown if the device's peak is known, else the
FLOP/s of each rank; the first line names the convention.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from shardwise.observe.speed import Speed

BAR = 20  # columns of the bar
OWN = ("extra/", "metric/")  # prefixes of a record's keys for the task's own numbers
MOST_OWN = 6  # of these in a line, since a task may have hundreds


class Display:
    """Shows steps as they end.

    total      steps of the run
    speed      how rates are converted and shown
    log_every  steps between two plain lines
    live       Whether to show a bar; None: if stderr is a terminal
    first      text beside the bar until the first step has ended
    """

    def __init__(
        self, total: int, speed: Speed, log_every: int, live: bool | None = None, first: str = "first step"
    ) -> None:
        self._total, self._speed, self._log_every = total, speed, log_every
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._started, self._before = time.monotonic(), -1  # steps done before this process began, -1: unknown yet
        self._bar: Progress | None = None
        if sys.stderr.isatty() if live is None else live:
            whole = Column(no_wrap=True)
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=whole),
                BarColumn(bar_width=BAR),
                TextColumn("{task.fields[text]}", table_column=whole),
                console=self._console,
            )
            self._bar_task = self._bar.add_task("steps", total=total, text=first)
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints one line of its own, above the bar."""
        self._console.print(text, markup=False)

    def step(self, record: dict[str, Any]) -> None:
        """Shows one optimizer step that has ended, from its `metrics.jsonl` record."""
        done = record["step"]
        self._before = done - 1 if self._before < 0 else self._before
        if self._bar is not None:
            taken = len(f"step {self._total}/{self._total}") + BAR + 3
            self._bar.update(self._bar_task, completed=done, text=self._text(record, self._console.width - taken))
        elif done % self._log_every == 0 or done in (1, self._total):
            self.say(f"step {done}/{self._total}  {self._text(record)}")

    def _text(self, record: dict[str, Any], width: int | None = None) -> str:
        """Returns a step's numbers as text; beyond `width` columns only the loss, the time left and what fits."""
        unit = self._speed.unit
        loss = "skipped (not finite)" if record["skipped"] else f"loss {record['loss']:.4f}"
        between = own_numbers(record)
        if record.get("lr") is not None:
            between.append(f"lr {record['lr']:.2e}")
        between.append(f"{short(record[f'{unit}_per_s'])} {unit}/s")
        # without the device's peak there is no MFU, so FLOP/s are shown
        if "mfu" in record:
            between.append(f"MFU {100 * record['mfu']:.1f} %")
        elif "flops_per_s_per_rank" in record:
            between.append(f"{short(record['flops_per_s_per_rank'], ' ')}FLOP/s per rank")
        if record.get("peak_bytes"):
            between.append(f"peak {size(record['peak_bytes'])}")
        left = f"{self._left(record['step'])} left"
        # to save room the learning rate goes first, then what stands furthest right; loss and time left stay
        while width is not None and len("  ".join([loss, *between, left])) > width and between:
            between.pop(next((at for at, text in enumerate(between) if text.startswith("lr ")), -1))
        return "  ".join([loss, *between, left])

    def _left(self, done: int) -> str:
        """Returns the time left after `done` steps as "hours:minutes:seconds"."""
        seconds = (time.monotonic() - self._started) / (done - self._before) * (self._total - done)
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"

    def close(self) -> None:
        """Ends the live bar and leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def own_numbers(record: dict[str, Any]) -> list[str]:
    """Returns the extra terms and metrics of a step's record as "name value" texts, the first `MOST_OWN` of them.

    A last text says how many more there are.
    """
    own = [f"{key.partition('/')[2]} {value:.4g}" for key, value in record.items() if key.startswith(OWN)]
    return own if len(own) <= MOST_OWN else [*own[:MOST_OWN], f"(and {len(own) - MOST_OWN} more)"]


def short(number: float, space: str = "") -> str:
    """Returns a number with three digits and a suffix: `51.2k`, `1.3M`, `12.4G`; `space` goes before the suffix."""
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{space}{suffix}"
    return f"{number:.3g}{space}"


def size(count: float) -> str:
    """Returns bytes in binary units: `1.3 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
