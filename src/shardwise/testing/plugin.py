"""A pytest fixture, `rank_pool`, for tests that need ranks. In a `conftest.py`:

    from shardwise.testing.plugin import rank_pool  # noqa: F401

Then a test takes `rank_pool` and calls `rank_pool.run(function, world_size, *args)`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Yields one `RankPool` for the whole test session, so that ranks are started once."""
    with RankPool() as pool:
        yield pool
