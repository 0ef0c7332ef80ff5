"""Attempts of one job under torchrun: each uses a key prefix of its own in the store that the agent keeps for all.

    attempt 1   ranks write their addresses into the agent's store, and one of them dies
    attempt 2   the store still has those addresses: a rank that reads too early gets one where nobody listens now

So the ranks of an attempt agree on a prefix that no attempt before has used (`fresh`). Values that must outlive an
attempt are kept outside of any prefix (`remember`, `remembered`).
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

from shardwise.errors import RunError

_POLL_S = 0.01
_AT = "shardwise"
_agent: Any = None  # the store, once `agent_store` has found it


def has_agent() -> bool:
    """Whether torchrun's agent holds the store of this job, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def began() -> bool:
    """Whether `agent_store` was called, so that the process group uses a prefix of the agent's store."""
    return _agent is not None


def agent_store(rank: int, world_size: int) -> Any:
    """Returns the store of torchrun's agent, found by MASTER_ADDR and MASTER_PORT; the same object on each call."""
    global _agent
    if _agent is None:
        from torch.distributed.rendezvous import rendezvous

        _agent = next(iter(rendezvous("env://", rank, world_size)))[0]
    return _agent


def fresh(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Returns `store` under a key prefix that no attempt before has used, the same on every rank. Collective.

        rank r   writes a random word at ask/r (where a word of an earlier attempt may lie)
        rank 0   answers each word that it finds with the prefix, until all ranks have confirmed the answer

    Raises `RunError` after `timeout_s` seconds: on rank 0 it names the missing ranks, on others there was no answer.
    """
    from torch.distributed import PrefixStore

    mine = secrets.token_hex(8)
    if rank == 0:
        _answer(store, mine, world_size, time.monotonic() + timeout_s)
        return PrefixStore(f"{_AT}/{mine}", store)
    store.set(f"{_AT}/ask/{rank}", mine)
    answer = f"{_AT}/answer/{mine}"
    try:
        store.wait([answer], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RunError(f"rank {rank} heard nothing from rank 0 in {timeout_s:g} s: look at its own output") from error
    name = store.get(answer).decode()
    store.set(f"{_AT}/came/{name}/{rank}", "")
    return PrefixStore(f"{_AT}/{name}", store)


def _answer(store: Any, name: str, world_size: int, until: float) -> None:
    """Answers each rank that asks with the prefix `name`, until all have confirmed it. Called on rank 0 alone.

    Raises `RunError` that names the missing ranks after `until` (monotonic clock).
    """
    missing, answered = set(range(1, world_size)), set()
    while True:
        missing = {rank for rank in missing if not store.check([f"{_AT}/came/{name}/{rank}"])}
        for rank in missing:
            if store.check([f"{_AT}/ask/{rank}"]):
                word = store.get(f"{_AT}/ask/{rank}").decode()
                # the word may be an earlier attempt's, whose rank is gone: it is answered too, but only once
                if word not in answered:
                    store.set(f"{_AT}/answer/{word}", name)
                    answered.add(word)
        # a rank has come once it confirms the answer, since an answered word may be an earlier attempt's
        if not missing:
            return
        if time.monotonic() > until:
            shown = ", ".join(map(str, sorted(missing)[:8]))
            raise RunError(
                f"rank {shown} of {world_size} did not come: look for why it did not start in its own output"
            )
        time.sleep(_POLL_S)


def remember(name: str, text: str) -> None:
    """Stores `text` under `name` for later attempts of this job; does nothing without an agent's store."""
    if _agent is not None:
        _agent.set(f"{_AT}/kept/{name}", text)


def remembered(name: str) -> str | None:
    """Returns the text that `remember` stored under `name` in this job; None if there is none."""
    key = f"{_AT}/kept/{name}"
    return _agent.get(key).decode() if _agent is not None and _agent.check([key]) else None
