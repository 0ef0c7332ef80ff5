"""Parse `offload=`. A new tier (an entry of `TIERS`) also needs tiers/, engine/tiers, costs/offload.

offload=optimizer                  all of the optimizer's state in the host's memory
offload=optimizer:disk             in a file on a disk of the host
offload=optimizer:disk:0.6         six tenths of its bytes, to the nearest parameter; the rest stays on the device
offload=optimizer:host:0.5|optimizer:disk:0.5     a part in each
offload=parameters:disk            a rank's shards of weights, under zero=3; a fraction is of units, the first ones
offload=parameters                 on the host, and with them their gradients and the optimizer's state, which lie where
                                   weights do: short for optimizer|parameters|gradients; optimizer:disk|parameters works
offload=activations:disk           what blocks keep for backward; a fraction is of the blocks, the first ones
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import InputError, did_you_mean
from shardwise.layout.other_words import ours_of

CLASSES = ("optimizer", "parameters", "gradients", "activations")
TIERS = ("host", "disk")
# bytes of state that move at once, unless one parameter has more: large enough that a disk is at its full rate
SUBGROUP_BYTES = 64 << 20
SUBGROUPS = 8  # the fewest, if there are as many parameters, so that a small model runs the same code as a large one


@dataclass(frozen=True)
class Placement:
    """A class of state (`CLASSES`), the tier that holds it between uses, and the fraction of its bytes held there."""

    state: str
    tier: str = "host"
    fraction: float = 1.0

    def __str__(self) -> str:
        if self.fraction < 1:
            return f"{self.state}:{self.tier}:{self.fraction:g}"
        return self.state if self.tier == "host" else f"{self.state}:{self.tier}"


def placements(text: str, state: str = "") -> tuple[Placement, ...]:
    """Parses a plan's `offload` text to `Placement`s, of one class `state` or ("") all; `InputError` if it cannot."""
    if text == "none":
        return ()
    # asked for by class: parsed as a whole first, since weights on the host move other classes too
    if state:
        return tuple(placement for placement in placements(text) if placement.state == state)
    if not isinstance(text, str):
        raise InputError(f"plan: offload must be a text such as optimizer:disk, got {text!r}")
    parts = tuple(_placement(piece.strip(), text) for piece in text.split("|"))
    if len({(part.state, part.tier) for part in parts}) < len(parts):
        raise InputError(f"plan: offload={text} names a class twice for one tier: give one fraction for each")
    # several tiers of one class share it
    for state in CLASSES:
        total = sum(part.fraction for part in parts if part.state == state)
        if total > 1 + 1e-9:
            raise InputError(f"plan: offload={text} moves {total:g} of {state}: fractions add up to at most 1")
    return _with_weights(parts)


def _with_weights(parts: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Returns `parts`; if weights lie on the host, gradients, and state that is on no disk, are placed there too."""
    # on a disk weights move alone; on the host the update runs where they lie
    if not any((part.state, part.tier) == ("parameters", "host") for part in parts):
        return parts
    # the optimizer's state goes with them, but for what a disk has; where the user put it does not matter
    others = [part for part in parts if (part.state, part.tier) not in (("optimizer", "host"), ("gradients", "host"))]
    left = 1 - sum(part.fraction for part in others if part.state == "optimizer")
    state = [Placement("optimizer", "host", left)] if left > 1e-9 else []
    # at the place where the weights stand, so that a plan's text keeps its order
    after = 1 + next(place for place, part in enumerate(others) if (part.state, part.tier) == ("parameters", "host"))
    return (*state, *others[:after], Placement("gradients"), *others[after:])


def weights_on_host(text: str) -> bool:
    """Whether shards of weights lie in the host's memory, with their gradients and the optimizer's state."""
    return in_tier(text, "parameters", "host") > 0


def canonical(text: str) -> str:
    """Returns the text of `offload` in the one form in which plans print and compare it."""
    return "|".join(map(str, placements(text))) or "none"


def in_tier(text: str, state: str, tier: str) -> float:
    """Returns the fraction, 0 to 1, of the bytes of class `state` that the text puts into `tier`."""
    return sum(placement.fraction for placement in placements(text, state) if placement.tier == tier)


def of_class(text: str, state: str) -> str:
    """Returns the part of an `offload` text that is about class `state`, in canonical form; "none" if none is."""
    return "|".join(map(str, placements(text, state))) or "none"


def _placement(part: str, text: str) -> Placement:
    """Returns the `Placement` of one part (class:tier:fraction) of the `offload` text; `InputError` for other text."""
    state, *rest = part.split(":")
    if state not in CLASSES:
        hint = did_you_mean(state, list(CLASSES)) or f"; {ours_of('cpu_offload')}"
        # "disk" alone means the optimizer's state, nearly always
        if state in TIERS:
            hint = f"; write offload=optimizer:{state}"
        raise InputError(f"plan: offload={text}: {state or 'nothing'} is not one of none, {', '.join(CLASSES)}{hint}")
    if len(rest) > 2:
        raise InputError(f"plan: offload={text}: a part is class:tier:fraction, such as optimizer:disk:0.6")
    tier = rest[0] if rest else "host"
    if tier not in TIERS:
        hint = did_you_mean(tier, list(TIERS)) or "; host is the processor's memory, disk a file on a local disk"
        raise InputError(
            f"plan: offload={text}: the tier {tier or 'of no name'} is not one of {', '.join(TIERS)}{hint}"
        )
    return Placement(state, tier, _fraction(rest[1], text) if rest[1:] else 1.0)


def _fraction(word: str, text: str) -> float:
    """Returns a fraction of the text `offload=...`; `InputError` unless it is above 0 and at most 1."""
    try:
        fraction = float(word)
    except ValueError:
        fraction = -1.0
    if not 0 < fraction <= 1:
        raise InputError(f"plan: offload={text}: a fraction lies above 0 and is at most 1, got {word!r}")
    return fraction
