"""Compare bit for bit what several ranks hold copies of: weights, optimizer state, buffers.

A rank's piece of a tensor has a place in the whole one (`holdings`); ranks with the same piece must hold the same. Each
takes a hash of integers (exact, in any order), and all see all hashes: the majority tells which rank is wrong.

    h = sum of w_i * m_i mod 2^64    w_i the words of the tensor's bytes, m_i odd: one changed word always changes h
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.holdings import Holding, share_of, weights
from shardwise.checkpoint.optimizers import state_of
from shardwise.checkpoint.pieces import Piece, to_json
from shardwise.comm import gather_json
from shardwise.engine.engine import Engine
from shardwise.errors import RunError
from shardwise.host import read

_CHUNK = 2**20  # words hashed at once
_FACTOR = -0x61C8864680B583EB  # 2^64 / the golden ratio, as a signed number
_MASK = 2**64 - 1


class ReplicaCheck:
    """Compares what ranks hold alike. Every rank makes one and calls it at the same steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._unlike: set[str] | None = None  # buffers that differed at the first check: ranks keep their own

    def __call__(self) -> None:
        """Raises `RunError`, on all ranks, naming a tensor and the rank that has other bits. Collective."""
        engine = self.engine
        mine = {one.key: [str(to_json(one.piece)), _hash(one.flat())] for one in _compared(engine)}
        told = gather_json(mine, engine.mesh.world, engine.device)
        places: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        for rank, held in enumerate(told):
            for key, (piece, found) in held.items():
                places[key, piece][rank] = found
        differing = {key: held for (key, _), held in places.items() if len(set(held.values())) > 1}
        if self._unlike is None:
            self._unlike = {key for key in differing if key.startswith("buffer/")}
            if self._unlike:
                names = ", ".join(sorted(self._unlike)[:3])
                engine.notices.append(f"not compared between ranks, since each had its own at the first look: {names}")
        wrong = {key: held for key, held in differing.items() if key not in self._unlike}
        if wrong:
            raise RunError(_told(wrong, engine.steps_done))


def _compared(engine: Engine) -> Iterator[Holding]:
    yield from weights(engine)
    yield from state_of(engine)[1]
    masters = {id(slot.master) for slot in engine.technique.slots}
    for name, param in engine.module.named_parameters():  # as the module computes with them, where that is another
        if name in engine.state.names and id(param) not in masters and not isinstance(param, DTensor):
            whole, runs = share_of(engine, name, param.shape)
            yield Holding(f"used/{name}", Piece(tuple(whole), tuple(runs), 0, param.numel()), param)


def _hash(flat: torch.Tensor) -> int:
    """A hash of a tensor's bytes, the same on any device."""
    if not flat.numel():
        return 0
    held = flat.contiguous().view(torch.uint8)
    padded = torch.cat([held, held.new_zeros(-held.numel() % 8)]) if held.numel() % 8 else held
    if padded.storage_offset() % 8:
        padded = padded.clone()
    words, total = padded.view(torch.int64), torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        some = words[start : start + _CHUNK]
        places = torch.arange(start, start + some.numel(), dtype=torch.int64, device=flat.device)
        total = total + (some * (places * _FACTOR | 1)).sum()
    return (int(read(total, "replica hashes")) + flat.numel()) & _MASK


def _told(wrong: dict[str, dict[int, int]], step: int) -> str:
    """Which tensor, and which rank by majority."""
    blamed: Counter[int] = Counter()
    for held in wrong.values():
        common, count = Counter(held.values()).most_common(1)[0]
        if 2 * count > len(held):
            blamed.update(rank for rank, found in held.items() if found != common)
    names = ", ".join(f"'{key}'" for key in sorted(wrong)[:4]) + (
        f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    )
    ranks = sorted(next(iter(wrong.values())))
    who = f"of ranks {', '.join(map(str, ranks))}, and two cannot tell which is right"
    if blamed:
        who = f"on rank {', '.join(str(rank) for rank, _ in blamed.most_common())}: the other ranks agree"
    return (
        f"after {step} steps {names} differ between ranks that hold the same, {who}. Memory or a device of that rank "
        "changed a bit, or its update was another one: go on from the last checkpoint, on another host if it returns"
    )
