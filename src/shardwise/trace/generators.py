"""Save, compare and restore the states of random generators of Python, numpy and torch (`KINDS`)."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def state_of(generator: Any) -> bytes:
    """Returns a generator's state as bytes, for comparison and for `put_back`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state())


def put_back(generator: Any, state: bytes) -> None:
    """Set a generator to a state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        # a copy that may be written to: torch warns of tensors on memory that may not
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))


@contextmanager
def standing_at(generator: Any, state: Any) -> Iterator[None]:
    """Context in which the generator has the state `state` (of `state_of`); afterwards it has its present one again."""
    now = state_of(generator)
    put_back(generator, state)
    try:
        yield
    finally:
        put_back(generator, now)


def shared_states() -> Any:
    """Returns (state of Python's `random`, state of numpy's global generator as bytes), for comparison."""
    return random.getstate(), pickle.dumps(np.random.get_state())
