"""`Spread`: some samples of a held-out source, spread evenly. Proofs choose their own: proof/plain_run, own_run."""

from __future__ import annotations

from typing import Any

from shardwise.dataset import Source
from shardwise.layout.dealing import cut


class Spread:
    """A source of at most `count` samples of another, one from each of `count` equal stretches; 0: all samples."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._length = min(count, len(source)) if count else len(source)

    def __len__(self) -> int:
        return self._length

    def read(self, indices: list[int], region: Any = None) -> Any:
        chosen = [cut(len(self._source), self._length, index)[0] for index in indices]
        return self._source.read(chosen, region)
