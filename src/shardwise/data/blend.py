"""`Blend`: mixes several sources in given proportions, each with a position of its own.

Positions are dealt in blocks of 4096. In each block every source has its share of places (weights are rounded to
1/4096), chosen by a keyed permutation; at its places, a source's samples follow in the source's own order:

    position   0 1 2 3 4 5 6 7 ...        weights 3 : 1
    source     a a b a a b a a            a's 0th, 1st sample, b's 0th, a's 2nd, ...

How many samples of each source come before a position follows from the position alone, so a run can be resumed on any
number of ranks and workers and, since those counts are saved, with other weights too.

What this does not do: change weights during a run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from shardwise.data.order import Order, epoch_keys, permuted
from shardwise.dataset import Source
from shardwise.errors import InputError

BLOCK = 4096


class Blend:
    """A `Source` that mixes several sources, whose batches must have the same fields.

    parts   name -> (source, weight); weights are relative, and above 0

    Its length is the sum of the sources' lengths; how often a sample occurs in an epoch of the blend depends on the
    weights.
    """

    def __init__(self, parts: Mapping[str, tuple[Source, float]]) -> None:
        if not parts:
            raise InputError("a blend needs at least one source")
        self.names = tuple(parts)
        self.sources = tuple(source for source, _ in parts.values())
        self.weights = tuple(float(weight) for _, weight in parts.values())
        self.lengths = tuple(len(source) for source in self.sources)
        for name, weight, length in zip(self.names, self.weights, self.lengths, strict=True):
            # `not <`: NaN fails too
            if not 0 < weight < math.inf or length < 1:
                raise InputError(
                    f"blend: source '{name}' has weight {weight:g} and {length} samples; both must be > 0, and finite"
                )
        # raises if there are more sources than places in a block, of which some would never be read
        shares(self.weights)
        self.notices = [
            f"{name}: {notice}" for name, (source, _) in parts.items() for notice in getattr(source, "notices", ())
        ]
        self._starts = np.cumsum((0, *self.lengths))

    def __len__(self) -> int:
        return sum(self.lengths)

    def order(self, seed: int) -> BlendOrder:
        """Returns the order in which a loader reads this blend, shuffled by `seed`."""
        return BlendOrder(len(self), seed, weights=self.weights, lengths=self.lengths, names=self.names)

    def read(self, indices: list[int], region: Any = None) -> Any:
        """Returns the joined batch of the samples at `indices`, which count over all sources one after another.

        `region` is passed to each source. Raises `InputError` if their fields, shapes or dtypes differ.
        """
        # the owner of an index is the last source that starts at or before it
        owner = np.searchsorted(self._starts, indices, side="right") - 1
        rows: dict[int, list[int]] = {}
        for place, source in enumerate(owner.tolist()):
            rows.setdefault(source, []).append(place)
        batches = [
            self.sources[source].read([indices[place] - int(self._starts[source]) for place in places], region)
            for source, places in rows.items()
        ]
        return _joined(batches, [place for places in rows.values() for place in places], [self.names[s] for s in rows])


def _joined(batches: list[Any], places: list[int], names: list[str]) -> Any:
    """Returns several sources' batches joined into one; `InputError` if fields, shapes or dtypes differ.

    places   for each sample, in the order of `batches`, its index in the result
    names    of the sources, for messages
    """
    # the samples of a single source are in order already
    if len(batches) == 1:
        return batches[0]
    flat = [pytree.tree_flatten_with_path(batch) for batch in batches]
    specs = [spec for _, spec in flat]
    # compare structures first, since zip below pairs fields by position, not by name
    if any(spec != specs[0] for spec in specs):
        paths = (", ".join(pytree.keystr(path) for path, _ in keyed) for keyed, _ in flat)
        told = "; ".join(f"{name} has {path}" for name, path in zip(names, paths, strict=True))
        raise InputError(f"blend: {told}: let the sources of a blend give the same fields")
    back = torch.empty(len(places), dtype=torch.int64)
    back[torch.tensor(places)] = torch.arange(len(places))
    leaves = []
    for column in zip(*(keyed for keyed, _ in flat), strict=True):
        path, tensors = pytree.keystr(column[0][0]), [torch.as_tensor(leaf) for _, leaf in column]
        # torch.cat would convert dtypes silently
        kinds = {(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors}
        if len(kinds) > 1:
            told = ", ".join(f"{t.dtype} {tuple(t.shape[1:])} in '{n}'" for t, n in zip(tensors, names, strict=True))
            raise InputError(f"blend: field {path} is {told}: sources of a blend give the same shapes and dtypes")
        leaves.append(torch.cat(tensors)[back])
    return pytree.tree_unflatten(leaves, specs[0])


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns how many of the `BLOCK` places of a block each source gets, by weight and at least one.

    Raises `InputError` for more sources than places.
    """
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * BLOCK
    counts = np.maximum(np.floor(exact).astype(int), 1)
    for index in np.argsort(-(exact - np.floor(exact)), kind="stable"):
        if counts.sum() < BLOCK:
            counts[index] += 1
    while counts.sum() > BLOCK:
        counts[int(np.argmax(counts))] -= 1
    if counts.min() < 1:
        raise InputError(f"a blend deals places in blocks of {BLOCK}, too few for {len(counts)} sources")
    return tuple(int(count) for count in counts)


@lru_cache(maxsize=16)
def _dealt(seed: int, block: int, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source of each place of a block, number of that source's places before it), both (BLOCK,) int64.

    counts   places of each source, as `shares` returns them
    """
    places = permuted(np.arange(BLOCK, dtype=np.uint64), BLOCK, epoch_keys(seed, block)).astype(np.int64)
    source = np.searchsorted(np.cumsum(counts), places, side="right")
    before = np.empty(BLOCK, dtype=np.int64)
    for index in range(len(counts)):
        mine = np.flatnonzero(source == index)
        before[mine] = np.arange(len(mine))
    return source, before


@dataclass(frozen=True)
class BlendOrder(Order):
    """The sample order of a blend, whose `indices` count over all sources one after another."""

    weights: tuple[float, ...] = ()  # of each source, as given
    lengths: tuple[int, ...] = ()  # samples of each source
    names: tuple[str, ...] = ()
    drawn: tuple[int, ...] = field(default=())  # samples of each source that were read before `origin`; (): none
    origin: int = 0  # position in the order at which these weights began

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Returns the samples' indices at positions [start, stop), int64; `InputError` if `start` precedes `origin`."""
        if start < self.origin:
            raise InputError(f"this blend continues from position {self.origin}, {start} lies before it")
        offsets = np.cumsum((0, *self.lengths))
        positions = np.arange(start, stop, dtype=np.int64)
        source, number = self._own(positions)
        out = np.empty(len(positions), dtype=np.int64)
        for index, length in enumerate(self.lengths):
            mine = np.flatnonzero(source == index)
            if mine.size:
                out[mine] = offsets[index] + self._samples(index, length, number[mine])
        return out

    def _own(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source of each position, position in that source's own order, over its epochs), int64 arrays."""
        counts = shares(self.weights)
        source, number = np.empty_like(positions), np.empty_like(positions)
        blocks, places = np.divmod(positions - self.origin, BLOCK)
        base = self.drawn or (0,) * len(counts)
        for block in np.unique(blocks):
            here = np.flatnonzero(blocks == block)
            dealt, before = _dealt(self.seed, int(block) + self.origin, counts)
            source[here] = dealt[places[here]]
            whole = np.asarray(base) + int(block) * np.asarray(counts)
            number[here] = whole[source[here]] + before[places[here]]
        return source, number

    def _samples(self, index: int, length: int, numbers: np.ndarray) -> np.ndarray:
        """Returns the samples of source `index`, which has `length`, at positions `numbers` of its own order."""
        own = Order(length, seed=hash_of(self.seed, self.names[index]), shuffle=self.shuffle)
        low = int(numbers.min())
        return own.indices(low, int(numbers.max()) + 1)[numbers - low]

    def state(self, position: int) -> dict[str, Any]:
        """Returns the JSON state from which `continued` resumes at `position`, with these weights or with others.

        weights, drawn, positions   name of a source -> its weight, its `drawn`, its samples before `position`
        names, origin               as the fields
        """
        drawn = dict(zip(self.names, self.drawn or (0,) * len(self.names), strict=True))
        own = {"weights": dict(zip(self.names, self.weights, strict=True)), "drawn": drawn, "origin": self.origin}
        return own | {"names": list(self.names), "positions": self.positions(position)}

    def continued(self, state: dict[str, Any] | None, position: int) -> BlendOrder:
        """Returns this order from `position` on, each source at its position in `state`.

        state   as the method `state` returned it for `position`, perhaps under other weights; None: there is none

        Raises `InputError` for other sources, or no state.
        """
        # positions are saved by source name
        if state is None or set(state["positions"]) != set(self.names):
            saved = ", ".join(state["positions"]) if state else "no blend"
            raise InputError(f"the saved run read {saved}, this one {', '.join(self.names)}: blend the same sources")
        same = all(state["weights"][name] == weight for name, weight in zip(self.names, self.weights, strict=True))
        # a block's places are dealt in the order of the sources, so that must be the same too
        same = same and state.get("names", list(self.names)) == list(self.names)
        # with the same weights the grid of blocks continues; with others a new one begins at `position`
        counts = state["drawn"] if same else state["positions"]
        origin = int(state["origin"]) if same else position
        return replace(self, drawn=tuple(int(counts[name]) for name in self.names), origin=origin)

    def positions(self, position: int) -> dict[str, int]:
        """Returns {name of a source: how many of its samples come before `position`}."""
        counts, base = shares(self.weights), self.drawn or (0,) * len(self.lengths)
        block, place = divmod(position - self.origin, BLOCK)
        dealt, _ = _dealt(self.seed, block + self.origin, counts)
        inside = np.bincount(dealt[:place], minlength=len(counts))
        return {name: int(base[i] + block * counts[i] + inside[i]) for i, name in enumerate(self.names)}


def hash_of(seed: int, name: str) -> int:
    """Returns the seed of one source of a blend, a 56-bit hash of the blend's seed and the source's name."""
    return int.from_bytes(hashlib.blake2b(f"blend/{seed}/{name}".encode(), digest_size=7).digest(), "little")
