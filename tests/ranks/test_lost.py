"""Ranks of a launcher's job that have gone are named with their hosts."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from shardwise.ranks import lost


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    """The store of four ranks on two hosts, of which this process is rank 0; it waits a moment alone."""
    made = dist.HashStore()
    for rank, host in enumerate("aabb"):
        made.set(f"shardwise/host/{rank}", f"node-{host}")
    monkeypatch.setattr(lost, "ANSWER_S", 0.3)
    monkeypatch.setattr(lost, "_store", lambda: made)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return made


ECHO = RuntimeError("[pair.cc:537] Read error [10.78.0.2]:53965: Connection reset by peer")


def test_ranks_that_say_nothing_are_named_with_their_host(store: dist.Store) -> None:
    store.set("shardwise/end/1", "")
    assert str(lost.named(ECHO)).startswith("lost of 4 ranks: ranks 2, 3 on node-b. ")


def test_the_rank_that_failed_by_itself_is_named_with_what_it_said(store: dist.Store) -> None:
    for rank, said in enumerate(("", "ValueError: no such column", ""), 1):
        threading.Timer(0.05, store.set, (f"shardwise/end/{rank}", said)).start()
    said = str(lost.named(ECHO))
    assert said == "rank 2 on node-b failed, and the others lost it: ValueError: no such column"


def test_who_fails_by_itself_says_so_and_keeps_its_error(store: dist.Store) -> None:
    assert lost.named(ValueError("no such column")) is None
    assert store.get("shardwise/end/0") == b"ValueError: no such column"


def test_without_the_store_rank_0_is_lost(store: dist.Store, monkeypatch) -> None:
    def gone() -> dist.Store:
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(lost, "_store", gone)
    assert str(lost.named(ECHO)).startswith("rank 0 is lost")
