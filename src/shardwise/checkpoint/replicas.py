"""Compare bit for bit what several ranks hold copies of: weights, state, buffers. Who is wrong: training/replay.

A rank's piece of a tensor has a place in the whole one (`holdings`); ranks with the same piece must hold the same. Each
takes a hash of integers (exact, in any order), and all see all hashes: the majority tells which rank is wrong.

    h = sum of w_i * m_i mod 2^64    w_i the words of the tensor's bytes, m_i odd: one changed word always changes h

In a step that is compared, weights and buffers are hashed right before the update too: an update writes some copies
anew, and spreads to all ranks what a wrong one has done to the gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch.distributed.tensor import DTensor

from shardwise.checkpoint.holdings import Holding, share_of, weights
from shardwise.checkpoint.optimizers import state_of
from shardwise.checkpoint.pieces import Piece, to_json
from shardwise.comm import gather_json
from shardwise.digest import bits_hash
from shardwise.engine.engine import Engine
from shardwise.errors import RunError

BEFORE = "before/"  # of the name of what was hashed before the update
Hashes = dict[str, tuple[str, int]]  # name -> (piece, hash)
HashesByRank = dict[str, dict[int, int]]  # name -> rank -> hash, of one piece


class ReplicasDiffer(RunError):
    """Raised on all ranks alike where ranks that should hold the same do not.

    step    steps done
    hashes  of each tensor that differs, by rank; those taken before the update alone, where any of them differ
    rank    the one that differs from the majority; None: there is none
    """

    def __init__(self, step: int, hashes: HashesByRank) -> None:
        self.step, self.hashes = step, hashes
        blamed = _blamed(hashes)
        self.rank = blamed[0] if blamed else None
        super().__init__(_message(hashes, step, blamed))

    def judged(self, blamed: list[int], why: str) -> ReplicasDiffer:
        """Returns this error with a verdict from steps taken again; `blamed` and `why` are those of `verdict`."""
        error = ReplicasDiffer(self.step, self.hashes)
        error.rank = blamed[0] if blamed else None
        said = "another rank that took the steps in its place came to what the others have"
        error.args = (_message(self.hashes, self.step, blamed, said, "" if blamed else f" ({why})"),)
        return error


class ReplicaCheck:
    """Check that copies of tensors on several ranks have equal bits. Every rank makes one, called at the same steps.

    every   steps between the calls: in those steps, hashes are taken before the update too (None: never)
    """

    def __init__(self, engine: Engine, every: int | None = None) -> None:
        self.engine = engine
        self._every = every
        self._before: Hashes = {}
        self.unlike: list[str] | None = None  # buffers that differed at the first check: ranks keep their own

    def before_update(self) -> AbstractContextManager[None]:
        """Hash the tensors that modules compute with, in steps that are compared; returns an empty context, as
        `Engine.around("update", ...)` asks."""
        if self._every is not None and (self.engine.steps_done + 1) % self._every == 0:
            self._before = hashes(self.engine, before=True)
        return nullcontext()

    def taken(self) -> Hashes:
        """Returns {name: hash} of this rank's tensors now, and of those before the update where asked for."""
        taken, self._before = {**self._before, **hashes(self.engine)}, {}
        return taken

    def __call__(self) -> None:
        """Raises `ReplicasDiffer`, on all ranks, naming a tensor and the rank that has other bits. Collective."""
        engine = self.engine
        mine = self.taken()
        places: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for rank, by_name in enumerate(gather_json(mine, engine.mesh.world, engine.device)):
            for key, (piece, value) in by_name.items():
                places[key, piece][rank] = value
        differing = {key: by_name for (key, _), by_name in places.items() if len(set(by_name.values())) > 1}
        if self.unlike is None:  # buffers that are each rank's own differ from the first check on
            self.unlike = sorted({name for key in differing if (name := _plain(key)).startswith("buffer/")})
            if self.unlike:
                names = ", ".join(self.unlike[:3])
                engine.notices.append(f"not compared between ranks, since each had its own at the first look: {names}")
        wrong = {key: by_name for key, by_name in differing.items() if _plain(key) not in self.unlike}
        first = {key: by_name for key, by_name in wrong.items() if key.startswith(BEFORE)}
        if wrong:
            raise ReplicasDiffer(engine.steps_done, first or wrong)


def hashes(engine: Engine, before: bool = False) -> Hashes:
    """Returns hashes of every tensor that several ranks may hold alike; `before`: of modules' own weights alone."""
    holdings = _used(engine) if before else (*weights(engine), *state_of(engine)[1], *_used_beside(engine))
    return {BEFORE * before + h.key: (str(to_json(h.piece)), bits_hash(h.flat())) for h in holdings}


def _plain(key: str) -> str:
    return key.removeprefix(BEFORE)


def _used(engine: Engine) -> Iterator[Holding]:
    """Yields a `Holding` of each tensor that modules compute with: masters, buffers, weights that are no masters."""
    yield from weights(engine)
    yield from _used_beside(engine)


def _used_beside(engine: Engine) -> Iterator[Holding]:
    """Yields a `Holding` of each weight that the module computes with and that is no master."""
    masters = {id(slot.master) for slot in engine.technique.slots}
    for name, param in engine.module.named_parameters():
        if name in engine.state.names and id(param) not in masters and not isinstance(param, DTensor):
            whole, runs = share_of(engine, name, param.shape)
            yield Holding(f"used/{name}", Piece(tuple(whole), tuple(runs), 0, param.numel()), param)


def _blamed(wrong: HashesByRank) -> list[int]:
    """Returns the ranks that differ from a majority, most often first."""
    blamed: Counter[int] = Counter()
    for by_rank in wrong.values():
        common, count = Counter(by_rank.values()).most_common(1)[0]
        if 2 * count > len(by_rank):
            blamed.update(rank for rank, value in by_rank.items() if value != common)
    return [rank for rank, _ in blamed.most_common()]


def _message(
    wrong: HashesByRank, step: int, blamed: list[int], why: str = "the other ranks agree", more: str = ""
) -> str:
    """Returns the message: which tensors differ, on which ranks where that is known, and `why`; `more`: added to it."""
    keys = sorted(_plain(key) for key in wrong)
    # four names are enough to see the pattern; the count says how much else
    names = ", ".join(f"'{key}'" for key in keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
    ranks = sorted(next(iter(wrong.values())))
    who = f"of ranks {', '.join(map(str, ranks))}, and two cannot tell which is right"
    # with two ranks no majority says who is wrong
    if blamed:
        who = f"on rank {', '.join(map(str, blamed))}: {why}"
    when = f"after {step} steps"
    # the loss of that step was already computed with the wrong weight
    if any(key.startswith(BEFORE) for key in wrong):
        when += ", before the last one's update,"
    return (
        f"{when} {names} differ between ranks that hold the same, {who}{more}. Memory or a device of that rank "
        "changed a bit, or its update was another one: go on from the last checkpoint, on another host if it returns"
    )


def verdict(first: HashesByRank, again: HashesByRank) -> tuple[list[int], str]:
    """Returns (ranks at fault, the most blamed first, ""), or ([], why none can be named).

    first   of the steps: name -> rank -> hash
    again   of the same steps taken again: name -> rank that took them in the place of one of those -> hash

    Each rank has one voice for each hash that it came to. The hash with the most voices is right, if one of the first
    had it; where two ranks each stay with their own, one that came to two different hashes is wrong.
    """
    blamed: Counter[int] = Counter()
    why = "what others come to in their place is what none of them had: it went wrong before the last step"
    for name, by_rank in first.items():
        came_to: dict[int, set[int]] = {rank: {value} for rank, value in by_rank.items()}
        for rank, value in again.get(name, {}).items():
            came_to.setdefault(rank, set()).add(value)
        (best, voices), *others = Counter(value for mine in came_to.values() for value in mine).most_common()
        # a majority; else a tie, in which a rank that came to two hashes is at fault
        if not others or voices > others[0][1]:
            # else all of the first are wrong: what was right was lost before these steps
            if best in by_rank.values():
                blamed.update(rank for rank, value in by_rank.items() if value != best)
            continue
        unsteady = [rank for rank in by_rank if len(came_to[rank]) > 1]
        if len(unsteady) == 1:
            blamed.update(unsteady)
        else:
            why = "each comes to its own again in the other's place: one of them computes otherwise each time"
    return [rank for rank, _ in blamed.most_common()], "" if blamed else why
