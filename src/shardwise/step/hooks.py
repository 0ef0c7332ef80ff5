"""Contexts around parts of a step, by which profiles name them and benchmarks time them.

micro_batch   forward and backward of one micro-batch; under a pipeline one op of this rank's row of the schedule
reduce        gradients completed, control rows exchanged, the division
update        the optimizer's update, with what is exchanged for it, and the new weights' publication
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, get_args

Part = Literal["micro_batch", "reduce", "update"]
MakeContext = Callable[[], AbstractContextManager[Any]]


class Hooks:
    """Context managers around parts of a step ("micro_batch", "reduce", "update"); a part without any costs nothing."""

    def __init__(self) -> None:
        self._around: dict[str, list[MakeContext]] = {part: [] for part in get_args(Part)}

    @contextmanager
    def around(self, part: Part, make: MakeContext) -> Iterator[None]:
        """Context: `make()` is entered around each `part` of a step; the first context added is outermost."""
        made = self._around[part]
        made.append(make)
        try:
            yield
        finally:
            made.remove(make)

    def inside(self, part: Part) -> AbstractContextManager[Any]:
        """Returns the context manager that surrounds this part of a step."""
        made = self._around[part]
        if not made:
            return nullcontext()
        stack = ExitStack()
        for make in made:
            stack.enter_context(make())
        return stack
