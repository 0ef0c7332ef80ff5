"""What reading draws: torch's, NumPy's and Python's generators, seeded for each sample and put back afterwards.

    with drawing(seed, epoch, start) as drawn:
        batch = source.read(indices)

    sample of a dataset          (seed, epoch, index): the same, whoever reads it, and beside whichever others
    all else: a collate          (seed, start of the batch): the same where the same samples are read together,
    function, a source's read    as in one process

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
    """Seeds the generators of one read, and sees what moves them.

    by_sample  a dataset drew while it fetched a sample
    together   something drew that was given several samples
    pads       what joins samples may make each look otherwise beside others
    """

    def __init__(self, seed: int, epoch: int, start: int) -> None:
        self.by_sample = self.together = self.pads = False
        self._seed, self._epoch, self._start = seed, epoch, start
        self._stood: Any = None
        self.samples()

    def sample(self, index: int) -> None:
        """Seeds for one sample that a dataset is about to fetch."""
        self.look()
        seed_generators(seed_of("sample", self._seed, self._epoch, index))
        # once a dataset is known to draw, it need not be looked at again
        self._of_sample, self._stood = True, None if self.by_sample else generators()

    def samples(self, pads: bool = False) -> None:
        """Seeds for code that is given several samples: a collate function, a source's read."""
        self.look()
        self.pads |= pads
        seed_generators(seed_of("read", self._seed, self._start))
        self._of_sample, self._stood = False, generators()

    def look(self) -> None:
        """Notes whether the generators moved since they were seeded."""
        if self._stood is not None and generators() != self._stood:
            self.by_sample, self.together = self.by_sample or self._of_sample, self.together or not self._of_sample


@contextmanager
def drawing(seed: int, epoch: int, start: int) -> Iterator[ReadDraws]:
    """Context: code that reads draws by its place in the data; the generators are restored afterwards.

    start  position of the batch's first sample
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
    """Returns the states of the generators that reading may draw from, to be compared."""
    _, keys, place, *rest = np.random.get_state()
    torchs = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), place, rest, torchs


def seed_generators(seed: int) -> None:
    """Seeds every generator that reading may draw from; an accelerator's are left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
