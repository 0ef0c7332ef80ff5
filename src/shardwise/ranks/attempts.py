"""Attempts of one job under torchrun, whose agent keeps one store: each uses a part of it of its own.

    attempt 1   ranks write their addresses into the agent's store, and one of them dies
    attempt 2   the store still has those addresses: a rank that looks too early finds where nobody listens any more

So the ranks of an attempt agree on a part of the store that none before them has used (`fresh`). What is to outlive an
attempt is kept in the store itself (`remember`, `remembered`).
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
    """Whether the ranks' process group uses a part of the agent's store that is this attempt's own."""
    return _agent is not None


def agent_store(rank: int, world_size: int) -> Any:
    """Returns the store of torchrun's agent, by the addresses in the environment."""
    global _agent
    if _agent is None:
        from torch.distributed.rendezvous import rendezvous

        _agent = next(iter(rendezvous("env://", rank, world_size)))[0]
    return _agent


def fresh(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Returns a part of a store that no attempt before has used, the same on every rank. Collective over the store.

        rank r   asks under its number, by a word of its own (what a rank r before it has asked may lie there)
        rank 0   answers each word that it finds with the part's name, until all have come

    Raises `RunError` on rank 0 with the ranks that did not come within `timeout_s`, on others where no answer comes.
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
    """Rank 0: tell each rank that asks which part of the store is used, until all came; `RunError` after `until`."""
    missing, answered = set(range(1, world_size)), set()
    while True:
        missing = {rank for rank in missing if not store.check([f"{_AT}/came/{name}/{rank}"])}
        for rank in missing:
            if store.check([f"{_AT}/ask/{rank}"]):
                word = store.get(f"{_AT}/ask/{rank}").decode()
                # an earlier attempt's words may lie there: each is answered once, and its rank is gone
                if word not in answered:
                    store.set(f"{_AT}/answer/{word}", name)
                    answered.add(word)
        # a rank is there when it says so, not when it was answered
        if not missing:
            return
        if time.monotonic() > until:
            shown = ", ".join(map(str, sorted(missing)[:8]))
            raise RunError(
                f"rank {shown} of {world_size} did not come: look for why it did not start in its own output"
            )
        time.sleep(_POLL_S)


def remember(name: str, text: str) -> None:
    """Keep a text for the attempts of this job that come after this one, where there is an agent's store."""
    if _agent is not None:
        _agent.set(f"{_AT}/kept/{name}", text)


def remembered(name: str) -> str | None:
    """Returns the text that an earlier attempt kept under this name (`remember`), or None."""
    key = f"{_AT}/kept/{name}"
    return _agent.get(key).decode() if _agent is not None and _agent.check([key]) else None
