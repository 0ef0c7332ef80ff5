"""Tell where a script reads a number (a scheduler's metric, say) of its rank's samples alone; `prepared.sum` adds.

    correct += (out.argmax(1) == y).sum().item()     on two ranks half of the batch each: told, with the line
    n = mask.sum().item(); backward(loss * n, n)      a weight, which is added up over ranks: not told
    prepared.sum(correct)                             right, unless samples were held that count on other ranks: told

What this does not do: add up by itself, since nothing tells a count from a mean. A branch on a number (`if x.isnan()`)
is not told.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.scripts.dealt import Dealt
from shardwise.scripts.outside import with_line
from shardwise.scripts.saying import Notices, line_of_script

_READS = {"item", "__float__", "__int__", "tolist", "numpy", "__array__", "__complex__"}
_SHOWS = {"__format__", "__repr__", "__str__"}
_REMEDY = "a sum over ranks is prepared.sum(n)[0], a mean total / n of total, n = prepared.sum(mean * n, n)"
_READ = "a number is read of this rank's samples alone, where one process reads it of the whole batch: "
_SUMMED = "what is of this rank's samples alone is added up over steps, where one process adds up that of all: "
_STEERS = (
    "a number is read that the script adds up over steps from this rank's samples alone: where it steers the run (a "
    "learning rate by tokens seen, a stop), one process has that of all samples: add up prepared.sum(n)[0] instead"
)
_TWICE = (
    ". Beside that some ranks hold samples in this batch that count on others (it has few, or is looked at): count "
    "them where loader.part.count is not 0"
)


class OwnNumbers:
    """The numbers that a script read of its rank's samples in the step under way."""

    def __init__(self, told: Notices) -> None:
        self._told = told
        self._found: dict[str, list[float | None]] = {}  # by line
        self._lines: dict[str, str] = {}  # what is told of them
        self._read: set[float] = set()
        self._dealt: Dealt | None = None
        self._others = False  # numbers may be of another loader's batches

    def begin(self, dealt: Dealt, *, fresh: bool) -> None:
        """Forget the numbers read of the last batch, since a new one is handed out; one that was before (not `fresh`)
        may have been read from."""
        self._dealt, self._others = dealt, False
        if fresh:
            self._read.clear()

    def counts_others(self) -> None:
        """Note that another loader hands out a batch in this step."""
        self._others = True

    def read(self, name: str, value: Any) -> None:
        """Note that the script read `value`, which is no tensor, of this rank's samples."""
        if name not in _READS | _SHOWS or isinstance(value, bool):
            return
        number = float(value) if isinstance(value, int | float) else None
        if number is not None:
            self._read.add(number)
        self._found.setdefault(line_of_script(), []).append(number)
        self._lines.setdefault(line_of_script(), _READ)

    def summed(self) -> None:
        """Note that a tensor that adds up over steps takes something of this rank's samples."""
        self._found.setdefault(line_of_script(), []).append(None)
        self._lines[line_of_script()] = _SUMMED

    def summed_over_ranks(self, value: Any) -> None:
        """Stop telling of lines that read this number: it is added up over ranks, or is the weight of a loss."""
        if isinstance(value, int | float) and self._dealt is not None:
            of = {value, value / self._dealt.held.count}
            self._found = {line: read for line, read in self._found.items() if not of & set(read)}

    def end(self) -> None:
        """Print the script's lines that read numbers of this rank's samples, before the next batch."""
        few = self._dealt is not None and self._dealt.elsewhere
        self._told.say(f"{self._lines[line]}{_REMEDY}{_TWICE if few else ''} [{line}]" for line in self._found)
        self._found, self._lines = {}, {}

    def has_read(self, value: float) -> bool:
        """Whether a number is one that was read of this rank's samples of the batch at hand."""
        return value in self._read

    def has(self, value: float) -> bool:
        """Whether a number is of this rank's samples of the batch at hand: read of them, how many, or a product."""
        if self._dealt is None or self._others:
            return False
        count = self._dealt.held.count
        return value == count or value in self._read or value in {one * count for one in self._read}


class Steered:
    """A number that is added up over steps from this rank's samples alone, once the script has read it."""

    def __init__(self, told: Notices) -> None:
        self._told = told
        self._read_at = ""  # where, since the last step
        self._settings = ""  # of the optimizer, in the last step

    def read(self) -> None:
        """One is read."""
        self._read_at = line_of_script()
        self._told.say([f"{_STEERS} [{self._read_at}]"])

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `RefusedPlan` where the script set a learning rate or the like after it had read such a number."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        settings, read_at, self._read_at = repr(groups), self._read_at, ""
        before, self._settings = self._settings, settings
        scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # which sets them by its own count of steps
        if read_at and before not in ("", settings) and not scheduled:
            raise with_line(f"the optimizer's settings were changed, and {_STEERS}", read_at)
