"""`key`: a field of `Plan`, its help and choices; `NEEDS`: what keys act on (a new one here; rules, search read it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Need:
    """What a key acts on. A plan that sets the key without it is refused, and a search leaves the key out.

    met      whether a plan has it, or a forecast's layout
    without  a plan that has it not, in words
    reason   why the key says nothing there, and what to give
    """

    met: Callable[[Any], bool]
    without: str
    reason: str


TP = Need(
    lambda plan: plan.tp > 1, "tp = 1",
    "they say how tp cuts, and there is nothing to cut over: give tp its degree",
)  # fmt: skip
TILES = Need(
    lambda plan: plan.tiles > 1, "domain = 1",
    "they say how tiles come to their halos, and there are no tiles: give domain its grid",
)  # fmt: skip
PIPELINE = Need(
    lambda plan: plan.pp > 1, "pp = 1",
    "they say where a pipeline is cut, what is in flight and in which order, and there is one stage: give pp its "
    "degree; accumulate cuts a batch without stages",
)  # fmt: skip
GATHERED = Need(
    lambda plan: plan.sharded.weights, "zero < 3",
    "wrap names the units whose parameters zero=3 gathers; other stages gather none",
)  # fmt: skip
NEEDS = (TP, TILES, PIPELINE, GATHERED)


def key(
    default: Any, line: str = "", *, degree: bool = False, choices: tuple[str, ...] = (), needs: Need | None = None,
    rounds: bool = False,
) -> Any:  # fmt: skip
    """Returns the field of a plan for one of its keys.

    line     for people: in `shardwise config`, a starter file and the docs; "" for a key that nothing runs yet
    degree   a whole number of at least 1
    choices  what it may be, where these are names;  needs   what it acts on, where that is not always there
    rounds   it changes at most how numbers are rounded, so a proof in float64 goes without it
    """
    return field(default=default, metadata={"told": line, "degree": degree, "choices": choices, "needs": needs,
                                            "rounds": rounds})  # fmt: skip


def keys_with(plan: type, what: str) -> dict[str, Any]:
    """Returns key -> its entry `what` ("choices", "needs", ...), for the keys of `Plan` that have that entry."""
    return {row.name: row.metadata[what] for row in fields(plan) if row.metadata[what]}
