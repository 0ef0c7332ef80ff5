"""Generators of random numbers that are no tensors: Python's, numpy's, torch's own objects, and where each stands."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def state_of(generator: Any) -> Any:
    """Returns where a generator stands, to be compared and put back."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state())


def put_back(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` returned."""
    if isinstance(generator, torch.Generator):
        # a copy that may be written to: torch warns of tensors on memory that may not
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)
    else:
        generator.set_state(_arrays(state))


@contextmanager
def standing_at(generator: Any, state: Any) -> Iterator[None]:
    """Context: a generator stands where it did inside, and afterwards where it does now."""
    now = state_of(generator)
    put_back(generator, state)
    try:
        yield
    finally:
        put_back(generator, now)


def shared_states() -> Any:
    """Returns where the generators of Python's and numpy's modules stand, which all code draws from."""
    return random.getstate(), _plain(np.random.get_state())


def _plain(state: Any) -> Any:
    """Returns the state with bytes in the place of arrays, so that it can be compared."""
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.tobytes()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, tuple) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, tuple):
        return np.frombuffer(state[1], dtype=state[0]).copy()
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return tuple(_arrays(value) for value in state) if isinstance(state, list) else state
