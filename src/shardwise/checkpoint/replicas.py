"""Compares replicas of weights, optimizer state and buffers bit for bit. Which rank is at fault: training/replay.

Ranks that hold the same piece of a tensor (`holdings`) must hold the same bits. Each rank hashes its pieces as integers
(exact in any order) and all ranks get all hashes; a rank whose hash differs from the majority's is wrong.

    h = sum of w_i * m_i mod 2^64    w_i the words of the tensor's bytes, m_i odd: one changed word always changes h

In a step whose result is compared, weights and buffers are hashed right before the update too, because an update
overwrites some copies and spreads an error in one rank's gradients to all ranks.
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

BEFORE = "before/"  # prefix of the names of hashes that were taken before the update
Hashes = dict[str, tuple[str, int]]  # name -> (piece, hash)
HashesByRank = dict[str, dict[int, int]]  # name -> rank -> hash, of one piece


class ReplicasDiffer(RunError):
    """Raised on all ranks alike if ranks hold different bits of the same piece.

    step    optimizer steps done
    hashes  name of each tensor that differs -> rank -> hash; if any hash from before the update differs, only those
    rank    the rank that differs from the majority most often; None if there is no majority
    """

    def __init__(self, step: int, hashes: HashesByRank) -> None:
        self.step, self.hashes = step, hashes
        blamed = _blamed(hashes)
        self.rank = blamed[0] if blamed else None
        super().__init__(_message(hashes, step, blamed))

    def judged(self, blamed: list[int], why: str) -> ReplicasDiffer:
        """Returns a copy of this error that blames the ranks found by replaying steps.

        blamed, why   as `verdict` returns them: ranks at fault, or [] and the reason why none can be named
        """
        error = ReplicasDiffer(self.step, self.hashes)
        error.rank = blamed[0] if blamed else None
        said = "another rank that took the steps in its place came to what the others have"
        error.args = (_message(self.hashes, self.step, blamed, said, "" if blamed else f" ({why})"),)
        return error


class ReplicaCheck:
    """A check, called after a step, that replicas on several ranks have equal bits. All ranks call at the same steps.

    every   number of steps between calls, so that `before_update` knows the steps to hash in; None: it never hashes
    """

    def __init__(self, engine: Engine, every: int | None = None) -> None:
        self.engine = engine
        self._every = every
        self._before: Hashes = {}
        self.unlike: list[str] | None = None  # buffers that differed at the first check, and are compared no more

    def before_update(self) -> AbstractContextManager[None]:
        """Hashes weights and buffers if this step's result will be compared; returns a context that does nothing.

        Called through `Engine.around("update", ...)`, which asks for a context.
        """
        if self._every is not None and (self.engine.steps_done + 1) % self._every == 0:
            self._before = hashes(self.engine, before=True)
        return nullcontext()

    def taken(self) -> Hashes:
        """Returns {name: (piece, hash)} of this rank's tensors now, and those that `before_update` took."""
        taken, self._before = {**self._before, **hashes(self.engine)}, {}
        return taken

    def __call__(self) -> None:
        """Raises `ReplicasDiffer` on all ranks if replicas of a tensor have different bits. Collective."""
        engine = self.engine
        mine = self.taken()
        places: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for rank, by_name in enumerate(gather_json(mine, engine.mesh.world, engine.device)):
            for key, (piece, value) in by_name.items():
                places[key, piece][rank] = value
        differing = {key: by_name for (key, _), by_name in places.items() if len(set(by_name.values())) > 1}
        if self.unlike is None:  # a buffer that is meant to differ between ranks does so from the first check on
            self.unlike = sorted({name for key in differing if (name := _plain(key)).startswith("buffer/")})
            if self.unlike:
                names = ", ".join(self.unlike[:3])
                engine.notices.append(f"not compared between ranks, since each had its own at the first look: {names}")
        wrong = {key: by_name for key, by_name in differing.items() if _plain(key) not in self.unlike}
        first = {key: by_name for key, by_name in wrong.items() if key.startswith(BEFORE)}
        if wrong:
            raise ReplicasDiffer(engine.steps_done, first or wrong)


def hashes(engine: Engine, before: bool = False) -> Hashes:
    """Returns {name: (piece, hash)} of this rank's weights, buffers and optimizer state.

    before   Whether the call is before the update: without optimizer state, and names begin with `BEFORE`
    """
    holdings = _used(engine) if before else (*weights(engine), *state_of(engine)[1], *_used_beside(engine))
    return {BEFORE * before + h.key: (str(to_json(h.piece)), bits_hash(h.flat())) for h in holdings}


def _plain(key: str) -> str:
    return key.removeprefix(BEFORE)


def _used(engine: Engine) -> Iterator[Holding]:
    """Yields a `Holding` of each master, buffer, frozen weight, and weight of the module that is no master itself."""
    yield from weights(engine)
    yield from _used_beside(engine)


def _used_beside(engine: Engine) -> Iterator[Holding]:
    """Yields a `Holding` of each trained weight of the module that is a copy of its master (bf16, a gathered piece)."""
    masters = {id(slot.master) for slot in engine.technique.slots}
    for name, param in engine.module.named_parameters():
        if name in engine.state.names and id(param) not in masters and not isinstance(param, DTensor):
            whole, runs = share_of(engine, name, param.shape)
            yield Holding(f"used/{name}", Piece(tuple(whole), tuple(runs), 0, param.numel()), param)


def _blamed(wrong: HashesByRank) -> list[int]:
    """Returns the ranks that differ from a strict majority in some tensor, the one that does so most often first."""
    blamed: Counter[int] = Counter()
    for by_rank in wrong.values():
        common, count = Counter(by_rank.values()).most_common(1)[0]
        if 2 * count > len(by_rank):
            blamed.update(rank for rank, value in by_rank.items() if value != common)
    return [rank for rank, _ in blamed.most_common()]


def _message(
    wrong: HashesByRank, step: int, blamed: list[int], why: str = "the other ranks agree", more: str = ""
) -> str:
    """Returns the text of a `ReplicasDiffer`.

    wrong   hashes of the tensors that differ
    blamed  ranks at fault; []: unknown
    why     reason for the blame, told only if there are blamed ranks; `more`: a text to append in any case
    """
    keys = sorted(_plain(key) for key in wrong)
    # four names show the pattern
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

    first   name -> rank -> hash after the steps
    again   name -> rank -> hash after a replay of the steps, in which ranks took each other's places

    Each rank votes once for each hash that it came to. The hash with the most votes is right, if one of `first` is
    equal to it. In a tie, the rank at fault is the only one that came to two different hashes, if there is one.
    """
    blamed: Counter[int] = Counter()
    why = "what others come to in their place is what none of them had: it went wrong before the last step"
    for name, by_rank in first.items():
        came_to: dict[int, set[int]] = {rank: {value} for rank, value in by_rank.items()}
        for rank, value in again.get(name, {}).items():
            came_to.setdefault(rank, set()).add(value)
        (best, voices), *others = Counter(value for mine in came_to.values() for value in mine).most_common()
        # one hash has the most votes
        if not others or voices > others[0][1]:
            # if no first hash is the best one, the right values were lost before these steps
            if best in by_rank.values():
                blamed.update(rank for rank, value in by_rank.items() if value != best)
            continue
        unsteady = [rank for rank in by_rank if len(came_to[rank]) > 1]
        if len(unsteady) == 1:
            blamed.update(unsteady)
        else:
            why = "each comes to its own again in the other's place: one of them computes otherwise each time"
    return [rank for rank, _ in blamed.most_common()], "" if blamed else why
