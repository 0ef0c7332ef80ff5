"""What rank 0 shows while a run goes on, all of it on stderr: a live bar on a terminal, plain lines elsewhere.

    step 120/1000  loss 2.3456  lr 1.00e-03  51.2k tokens/s  MFU 41.2 %  peak 1.3 GiB  0:01:12 left

MFU is shown where the device's peak is known, else the FLOP/s of each rank; the first line names the convention.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from shardwise.observe.flops import Flops


@dataclass(frozen=True)
class Speed:
    """How samples per second become what is shown."""

    unit: str  # "tokens" | "samples"
    per_sample: int  # of the unit
    flops: Flops
    peak: float | None  # FLOP/s of one device
    ranks: int

    def of(self, samples: int, seconds: float) -> dict[str, float]:
        """Units per second; FLOP/s of each rank and MFU where they are known."""
        rate = samples / max(seconds, 1e-9)
        found = {f"{self.unit}_per_s": rate * self.per_sample}
        if self.flops.per_sample is not None:
            found["flops_per_s_per_rank"] = rate * self.flops.per_sample / self.ranks
            if self.peak is not None:
                found["mfu"] = found["flops_per_s_per_rank"] / self.peak
        return found


class Display:
    """Shows steps as they end. `live` None: a bar where stderr is a terminal."""

    def __init__(self, total: int, speed: Speed, log_every: int, live: bool | None = None) -> None:
        self._total, self._speed, self._log_every = total, speed, log_every
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._started = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty() if live is None else live:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._bar_task = self._bar.add_task("steps", total=total, text="")
            self._bar.start()

    def say(self, text: str) -> None:
        """One line of its own, above the bar."""
        self._console.print(text, markup=False)

    def step(self, record: dict[str, Any]) -> None:
        """One optimizer step has ended."""
        done = record["step"] + 1
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=done, text=self._text(record))
        elif done % self._log_every == 0 or done in (1, self._total):
            self.say(f"step {done}/{self._total}  {self._text(record)}")

    def _text(self, record: dict[str, Any]) -> str:
        unit = self._speed.unit
        parts = ["skipped (not finite)" if record["skipped"] else f"loss {record['loss']:.4f}"]
        if record.get("lr") is not None:
            parts.append(f"lr {record['lr']:.2e}")
        parts.append(f"{short(record[f'{unit}_per_s'])} {unit}/s")
        if "mfu" in record:
            parts.append(f"MFU {100 * record['mfu']:.1f} %")
        elif "flops_per_s_per_rank" in record:
            parts.append(f"{short(record['flops_per_s_per_rank'], ' ')}FLOP/s per rank")
        if record.get("peak_bytes"):
            parts.append(f"peak {size(record['peak_bytes'])}")
        return "  ".join([*parts, f"{self._left(record['step'] + 1)} left"])

    def _left(self, done: int) -> str:
        seconds = (time.monotonic() - self._started) / done * (self._total - done)
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()


def short(number: float, space: str = "") -> str:
    """`51.2k`, `1.3M`, `12.4G`: three digits; `space` goes before the unit that follows."""
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{space}{suffix}"
    return f"{number:.3g}{space}"


def size(count: float) -> str:
    """Bytes in binary units: `1.3 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
