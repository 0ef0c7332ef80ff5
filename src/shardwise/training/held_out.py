"""`Spread` is a source of some samples of a held-out source, spread evenly over it."""

from __future__ import annotations

from typing import Any

from shardwise.dataset import Source
from shardwise.layout.dealing import cut


class Spread:
    """A source of at most `count` samples of another: the first of each of `count` equal stretches. 0: all samples."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._length = min(count, len(source)) if count else len(source)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: list[int], region: Any = None) -> Any:
        chosen = [cut(len(self._source), self._length, index)[0] for index in indices]
        return self._source.read(chosen, region)
