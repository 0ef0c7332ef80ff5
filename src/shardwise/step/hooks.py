"""Context managers around parts of a step, with which profiles label them and benchmarks time them.

micro_batch   forward and backward of one micro-batch; under a pipeline one op of this rank's row of the schedule
reduce        reductions of gradients completed, control rows exchanged, gradients divided
update        the optimizer's update with its exchanges, and the all-gather of new weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, get_args

Part = Literal["micro_batch", "reduce", "update"]
MakeContext = Callable[[], AbstractContextManager[Any]]


class Hooks:
    """Holds the context managers to enter around each part of a step ("micro_batch", "reduce", "update")."""

    def __init__(self) -> None:
        self._around: dict[str, list[MakeContext]] = {part: [] for part in get_args(Part)}

    @contextmanager
    def around(self, part: Part, make: MakeContext) -> Iterator[None]:
        """Context in which each `part` of a step runs inside `make()`; the first context added is outermost."""
        made = self._around[part]
        made.append(make)
        try:
            yield
        finally:
            made.remove(make)

    def inside(self, part: Part) -> AbstractContextManager[Any]:
        """Returns the context manager for one run of this part, which has entered all that were added."""
        made = self._around[part]
        if not made:
            return nullcontext()
        stack = ExitStack()
        for make in made:
            stack.enter_context(make())
        return stack
