"""Name the calls of torch's functions in a module's own code, apart from those of its submodules.

    def forward(self, x):
        h = self.first(x)            what `first` calls is its own
        kept = torch.relu(h) * 2     relu and mul, each by where it stands in the code, and the how-manieth time
        return self.second(h) + kept

So a tensor that a forward keeps to itself can be named, and found again in another run of the same code, also where
that takes another way before (it finds what an earlier batch left). Whatever else hooks, shards and readers of weights
do on the way is not counted, since other files call it. What a transform of `torch.func` runs is one call.
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

Spot = tuple[str, int, int, int]  # file and first line of the code, where in it, and the how-manieth time
Note = Callable[[Any, Spot, str, Any], None]  # (whose forward, which call of its code, function, output)
Before = Callable[[Any, Spot, str], None]


class OwnCalls(TorchFunctionMode):
    """While entered, calls `note(whose, spot, name, result)` for every call whose result has a tensor.

    first   whose forward runs at first; None: nobody's, of which nothing is noted
    before  called with (whose, spot, name) before every call; the spot counts if its result has a tensor
    """

    def __init__(self, note: Note, first: Any, before: Before | None = None):
        super().__init__()
        self.note, self.before = note, before
        self._forwards: list[tuple[Any, Counter]] = [(first, Counter())]  # whose, and calls until now by place

    @contextmanager
    def inside(self, whose: Any) -> Iterator[None]:
        """Context: another module's forward runs. None: nobody's."""
        self.enter(whose)
        try:
            yield
        finally:
            self.leave()

    def enter(self, whose: Any) -> None:
        """Notes that another module's forward begins."""
        self._forwards.append((whose, Counter()))

    def leave(self) -> None:
        """Notes that the forward that began last ends."""
        self._forwards.pop()

    def times(self, whose: Any, spot: Spot) -> int:
        """Returns how often the code of a forward that runs now has made the call at a spot."""
        counts: Counter = next((counts for owner, counts in reversed(self._forwards) if owner == whose), Counter())
        return counts[spot[:3]]

    def __enter__(self) -> OwnCalls:
        self._undo = counted_transforms(self._call)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # a transform is one call, noted where it begins; what hooks and readers of weights call is not the module's
        if transforming() or not by_a_module(sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        return self._call(getattr(func, "__name__", str(func)), func, args, kwargs or {})

    def _call(self, name: str, func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns the result of a call of torch by the forward that runs, which is noted under its spot."""
        whose, counts = self._forwards[-1]
        # nobody's code: a gradient that the forward takes, or what pipeline stages exchange
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
    """Returns (file, first line of the code, offset in it) of the call of a torch function."""
    while frame.f_back is not None and (
        frame.f_code.co_filename in _ANSWERS or frame.f_code.co_filename.startswith(_BETWEEN)
    ):
        frame = frame.f_back
    code, at = frame.f_code, frame.f_lasti
    return code.co_filename, code.co_firstlineno, _first_halves(code).get(at, at)


@lru_cache(maxsize=4096)
def _first_halves(code: CodeType) -> dict[int, int]:
    """Returns offset of a call's PRECALL -> of its CALL (Python 3.11): builtins are run in the one or the other."""
    pairs = pairwise(dis.get_instructions(code))
    return {first.offset: second.offset for first, second in pairs if first.opname == "PRECALL"}


def by_a_module(frame: Any) -> bool:
    """Whether the code that called a function of torch is neither ours nor torch's own machinery."""
    while frame is not None and (
        frame.f_code.co_filename in _ANSWERS or frame.f_code.co_name == "__torch_function__"  # of another mode
    ):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_OTHERS)


__all__ = ["OwnCalls", "Spot", "by_a_module"]
