"""Seed torch's, NumPy's and Python's generators for each sample that is read, and restore them afterwards.

    with drawing(seed, epoch, start) as drawn:
        batch = source.read(indices)

    sample of a dataset          seeded by (seed, epoch, index), the same in any batch and on any rank
    a collate function,          seeded by (seed, start of the batch), the same as in one process if the same samples
    a source's read              are read together

What this does not do: look inside threads that a source starts, or at generators of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shardwise.dataset import READING
from shardwise.trace.deferred import seed_of


class ReadDraws:
    """Seeds the generators within one read of a batch, and records what drew random numbers.

    by_sample  Whether a dataset did while it fetched a sample
    together   Whether code did that gets several samples (a collate function)
    pads       Whether collating may change a sample depending on the others (padding)
    """

    def __init__(self, seed: int, epoch: int, start: int) -> None:
        self.by_sample = self.together = self.pads = False
        self._seed, self._epoch, self._start = seed, epoch, start
        self._stood: Any = None
        self.samples()

    def sample(self, index: int) -> None:
        """Seeds the generators for sample `index`, which a dataset is about to fetch."""
        self.look()
        seed_generators(seed_of("sample", self._seed, self._epoch, index))
        # once a dataset is known to draw, it need not be looked at again
        self._of_sample, self._stood = True, None if self.by_sample else generators()

    def samples(self, pads: bool = False) -> None:
        """Seeds the generators for code that gets several samples (a collate function, a source's read)."""
        self.look()
        self.pads |= pads
        seed_generators(seed_of("read", self._seed, self._start))
        self._of_sample, self._stood = False, generators()

    def look(self) -> None:
        """Records in `by_sample` or `together` whether a generator's state changed since it was seeded."""
        if self._stood is not None and generators() != self._stood:
            self.by_sample, self.together = self.by_sample or self._of_sample, self.together or not self._of_sample


@contextmanager
def drawing(seed: int, epoch: int, start: int) -> Iterator[ReadDraws]:
    """Context that yields the `ReadDraws` of one read of a batch; the generators are restored at its end.

    start  position of the batch's first sample in the epoch's order
    """
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    drawn = ReadDraws(seed, epoch, start)
    token = READING.set(drawn)
    try:
        yield drawn
        drawn.look()
    finally:
        READING.reset(token)
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def generators() -> tuple:
    """Returns the states of Python's, NumPy's and torch's CPU generator, as a tuple that can be compared."""
    _, keys, place, *rest = np.random.get_state()
    torchs = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), place, rest, torchs


def seed_generators(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's CPU generator; an accelerator's is left as it is."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
