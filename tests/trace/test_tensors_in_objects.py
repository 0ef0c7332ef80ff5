"""Tensors in objects that torch's tree functions do not look into are found, and replaced where they lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch

from shardwise.trace.tensors_in_objects import change_hidden, hidden


class Pair(NamedTuple):
    first: object
    second: object


def test_tensors_in_objects_are_replaced_in_lists_dicts_and_tuples() -> None:
    named = [torch.full((), float(n)) for n in range(6)]
    inner = SimpleNamespace(tensor=named[4])
    kept = (1, "a")
    given = SimpleNamespace(
        alone=named[0], listed=[named[1]], pair=(named[2], 5), named=Pair(named[3], inner), kept=kept
    )
    assert {int(tensor) for tensor in hidden([given])} == {0, 1, 2, 3, 4}
    change_hidden([given], lambda tensor: tensor + 10)
    assert (int(given.alone), int(given.listed[0]), int(given.pair[0]), int(given.named.first)) == (10, 11, 12, 13)
    assert type(given.named) is Pair and given.named.second is inner and int(inner.tensor) == 14
    assert given.pair[1] == 5 and given.kept is kept
