"""`key` makes a field of `Plan` with its help and choices; `NEEDS` lists what keys act on, for rules and search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Need:
    """What a key acts on. A plan that sets the key without it is refused, and a search leaves the key out.

    met      plan, or a forecast's layout -> whether it is there
    without  text of a plan that lacks it, such as "tp = 1"
    reason   why the key has no effect then and what to set, a text for the user
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
    """Returns the dataclass field of `Plan` for one key, with these facts in its metadata.

    line     help text in `shardwise config`, a starter file and the docs; "" for a key that nothing runs yet
    degree   Whether it is a whole number of at least 1
    choices  its possible values, if these are names;  needs   what it acts on; None: it always has an effect
    rounds   Whether it changes no more than rounding, so that a proof in float64 leaves it out
    """
    return field(default=default, metadata={"told": line, "degree": degree, "choices": choices, "needs": needs,
                                            "rounds": rounds})  # fmt: skip


def keys_with(plan: type, what: str) -> dict[str, Any]:
    """Returns key -> its metadata `what` ("told", "degree", "choices", "needs", "rounds"), for keys where it is set."""
    return {row.name: row.metadata[what] for row in fields(plan) if row.metadata[what]}
