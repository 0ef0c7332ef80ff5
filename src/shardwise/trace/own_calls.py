"""Name the calls of torch's functions in a module's own code, apart from those of its submodules.

    def forward(self, x):
        h = self.first(x)            what `first` calls is its own
        kept = torch.relu(h) * 2     relu and mul, each by its place in the code and a count of the calls there
        return self.second(h) + kept

So a tensor that a forward keeps to itself can be named, and found again in another run of the same code, even if that
run branches differently before (because it finds what an earlier batch left). Calls by hooks, shards and readers of
weights are not counted, since other files make them. What a transform of `torch.func` runs is one call.
"""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import TorchFunctionMode

from shardwise.trace.functional import counted_transforms, transforming
from shardwise.trace.leaves import tensors_in

_TORCH = Path(torch.__file__).parent
_ANSWERS = frozenset(str(_TORCH / name) for name in (
    "nn/functional.py", "functional.py", "_tensor.py", "overrides.py", "_jit_internal.py", "autograd/function.py",
    "_ops.py",
))  # fmt: skip
_OTHERS = (str(Path(__file__).parent.parent), *(str(_TORCH / name) for name in ("distributed", "utils", "_dynamo")))
_BETWEEN = (*_OTHERS, str(_TORCH / "_functorch"), str(_TORCH / "func"))

Spot = tuple[str, int, int, int]  # file and first line of the code, bytecode offset in it, count of calls there before
Note = Callable[[Any, Spot, str, Any], None]  # (whose forward, which call of its code, function's name, output)
Before = Callable[[Any, Spot, str], None]  # (whose forward, which call of its code, function's name)


class OwnCalls(TorchFunctionMode):
    """Function mode that calls `note(whose, spot, name, result)` after every call whose result has a tensor.

    first   key (any object) of the module whose forward runs at first; None: calls are not noted
    before  called with (whose, spot, name) before every call; None: nothing is. The spot's count rises only if the
            result then has a tensor
    """

    def __init__(self, note: Note, first: Any, before: Before | None = None):
        super().__init__()
        self.note, self.before = note, before
        self._forwards: list[tuple[Any, Counter]] = [(first, Counter())]  # (whose, place -> calls until now)

    @contextmanager
    def inside(self, whose: Any) -> Iterator[None]:
        """Context in which the forward of another module, with the key `whose`, runs; None: calls are not noted."""
        self.enter(whose)
        try:
            yield
        finally:
            self.leave()

    def enter(self, whose: Any) -> None:
        """Notes that the forward of module `whose` begins."""
        self._forwards.append((whose, Counter()))

    def leave(self) -> None:
        """Notes that the forward that began last ends."""
        self._forwards.pop()

    def times(self, whose: Any, spot: Spot) -> int:
        """Returns how many calls the running forward of `whose` has made at the place of `spot`; 0 if none runs."""
        counts: Counter = next((counts for owner, counts in reversed(self._forwards) if owner == whose), Counter())
        return counts[spot[:3]]

    def __enter__(self) -> OwnCalls:
        self._undo = counted_transforms(self._call)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # a transform is one call, noted where it begins; calls by hooks and readers of weights are not the module's
        if transforming() or not by_a_module(sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        return self._call(getattr(func, "__name__", str(func)), func, args, kwargs or {})

    def _call(self, name: str, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Runs a call of torch by the current forward, notes it under its spot, and returns its result."""
        whose, counts = self._forwards[-1]
        # no module's code: a gradient that the forward takes, or messages between pipeline stages
        if whose is None:
            return func(*args, **kwargs)
        place = _place_of(sys._getframe(2))
        spot = (*place, counts[place])
        if self.before is not None:
            self.before(whose, spot, name)
        output = func(*args, **kwargs)
        # without a tensor there is nothing to find again, so the call is not counted either
        if tensors_in(output):
            self.note(whose, spot, name, output)
            counts[place] += 1
        return output


def _place_of(frame: Any) -> tuple[str, int, int]:
    """Returns (file, first line of the code, bytecode offset in it) of the call of a torch function."""
    while frame.f_back is not None and (
        frame.f_code.co_filename in _ANSWERS or frame.f_code.co_filename.startswith(_BETWEEN)
    ):
        frame = frame.f_back
    code, at = frame.f_code, frame.f_lasti
    return code.co_filename, code.co_firstlineno, _first_halves(code).get(at, at)


@lru_cache(maxsize=4096)
def _first_halves(code: CodeType) -> dict[int, int]:
    """Returns offset of a call's PRECALL -> offset of its CALL (Python 3.11), since `f_lasti` may be either one."""
    pairs = pairwise(dis.get_instructions(code))
    return {first.offset: second.offset for first, second in pairs if first.opname == "PRECALL"}


def by_a_module(frame: Any) -> bool:
    """Whether the code that called a torch function is a module's or the user's, not ours or torch's own machinery."""
    while frame is not None and (
        frame.f_code.co_filename in _ANSWERS or frame.f_code.co_name == "__torch_function__"  # of another mode
    ):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_OTHERS)


__all__ = ["OwnCalls", "Spot", "by_a_module"]
