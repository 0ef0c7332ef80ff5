"""Hosts that do not answer each other are told by name, before a group is made."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from shardwise.ranks import reach


@pytest.mark.parametrize("closed", [None, 1])
def test_the_host_that_does_not_answer_is_told(closed: int | None) -> None:
    """Three hosts, of two ranks each; that of one host's listener is gone before the others come."""
    store, until = dist.HashStore(), time.monotonic() + 20
    listeners = [reach._listener() for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in listeners]
    answers = []
    with ThreadPoolExecutor(6) as threads:
        for number, listener in enumerate(listeners):
            first = threads.submit(reach.unanswered, store, 6, True, listener, until, ["127.0.0.1"])
            while store.add("reach/hosts", 0) <= number:  # hosts are numbered as they come
                time.sleep(0.001)
            answers += [first, threads.submit(reach.unanswered, store, 6, False, listener, until, [])]
            if number == closed:
                while not store.check([f"reach/{number}"]):
                    time.sleep(0.001)
                listener.close()
    texts = [answer.result() for answer in answers]
    for listener in listeners:
        listener.close()
    if closed is None:
        assert texts == [""] * 6
    else:
        assert [bool(text) for text in texts] == [True, False, False, False, True, False]
        assert all(f"127.0.0.1, port {ports[closed]}" in text and "refused" in text for text in texts if text)
