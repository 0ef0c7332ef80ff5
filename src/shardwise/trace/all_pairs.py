"""Find calls of torch functions that broadcast (n, 1) with (n,) to (n, n), so each sample meets every other one.

    prediction   (n, 1)
    target       (n,)        prediction - target is (n, n), and so is what `mse_loss` sums

This mistake is so common that torch's losses warn of it, and its results look like any others. Contrastive losses
do it on purpose (`labels[:, None] == labels[None]`), so the message names both remedies.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.task_names import is_own
from shardwise.trace.leaves import tensors_in


class AllPairs(TorchFunctionMode):
    """Function mode that adds to `meetings` each call that broadcasts two inputs of `samples` samples to all pairs."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.meetings: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []  # ("file:line", the two shapes)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if self.samples > 1 and len(args) > 1:  # with one sample, (1, 1) and (1,) are broadcast everywhere
            self._look(tensors_in(args, torch.Tensor), tensors_in(output, torch.Tensor))
        return output

    def _look(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Adds to `meetings` each two neighbouring inputs that broadcast to all pairs, with the user's line."""
        if any(tuple(output.shape).count(self.samples) == 1 for output in outputs):
            return  # an output has each sample once, so one input indexes the other, as in `losses[order]`
        for first, second in pairwise(inputs):
            if _crosses(tuple(first.shape), tuple(second.shape), self.samples):
                # the innermost line of the user's own code: between it and here lie torch's functions and other modes
                frame: Any = sys._getframe(2)
                while frame is not None and not is_own(frame.f_code.co_filename):
                    frame = frame.f_back
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
                self.meetings.append((place, tuple(first.shape), tuple(second.shape)))


def _crosses(first: tuple[int, ...], second: tuple[int, ...], samples: int) -> bool:
    """Whether two shapes broadcast to one with two dims of size `samples`, one from the first, one from the second."""
    dims = max(len(first), len(second))
    pairs = list(zip((1,) * (dims - len(first)) + first, (1,) * (dims - len(second)) + second, strict=True))
    return all(a == b or 1 in (a, b) for a, b in pairs) and pairs.count((samples, 1)) == pairs.count((1, samples)) == 1


def told_pairs(whole: AllPairs, part: AllPairs) -> str:
    """Returns the message for the first call that makes all pairs of samples, "" if there is none.

    `whole` and `part` are the modes of a run on a batch and of one on fewer samples. A call counts only if both have
    it: a dim that merely happens to be as long as the batch keeps its size on fewer samples, and is not found there.
    """
    for place, first, second in whole.meetings:
        if any(place == other for other, *_ in part.meetings):
            line = f"at {place} " if place else ""
            return (
                f"{line}{first} meets {second}, which makes all pairs of samples: bring both to one shape, or, where "
                'all pairs are meant, declare loss_scope="global" (the loss makes them) or "model" (the module does)'
            )
    return ""
