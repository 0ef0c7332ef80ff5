"""Values that a trace attaches to tensors without values: the choices of a router, and what is no choice."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.trace.known_values import Values, shadow

CHOICES = {
    "max along a dim": (lambda scores: scores.max(-1).indices, True),
    "argmax along a dim": (lambda scores: scores.argmax(-1), True),
    "sort": (lambda scores: scores.sort().indices, True),
    "max of all": (lambda scores: scores.max(), False),  # the largest number, which is no place
    "argmax of all": (lambda scores: scores.argmax(), False),
    "the larger of two": (lambda scores: torch.max(scores, scores + 1), False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_places_are_chosen_and_numbers_are_not(name):
    choose, has_values = CHOICES[name]
    fake = FakeTensorMode()
    scores = fake.from_tensor(torch.zeros(6, 4, dtype=torch.int64))
    with fake, Values(fake):
        assert (shadow(choose(scores)) is not None) == has_values
