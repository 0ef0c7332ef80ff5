"""Digests of what entered a script's losses from outside of their step (`kept`), compared over ranks."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardwise.comm import gather_json
from shardwise.errors import RefusedPlan
from shardwise.mesh import Mesh
from shardwise.part.levels import Distributed

_MOST = 2**20  # elements of a tensor that are looked at
_APART = 1e-6  # of a tensor's norm
AHEAD = "of another batch than the one at hand"
_OFTEN = 4  # times that a tensor is looked at each time it has changed; then at every power of two


@dataclass(frozen=True, eq=False)
class Outside:
    """What entered a loss from outside its step.

    number   it is one, or was made of numbers: of this batch, where ranks' batches have other shapes
    read     a number that the script read of its rank's samples in this step, and made arguments of the model of
    trained  a leaf with a gradient that no prepared model has
    model    id of the model whose forward gave it, and whose rows it may be
    carried  a model's forward kept it, in an attribute of its own
    """

    where: str
    what: str
    check: int
    like: tuple[float, float]  # a projection and the norm: other roundings are no difference
    number: bool = False
    read: bool = False
    trained: bool = False
    model: int = 0
    shape: tuple[int, ...] = ()
    carried: bool = False
    place: int = field(default_factory=count().__next__)  # in the order in which they entered


class _Looked(NamedTuple):
    """A tensor, when it was last looked at."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    times: int
    check: int
    like: tuple[float, float]


class Digests:
    """Digests of tensors from outside, taken again when they have changed; now and then of those that often do."""

    def __init__(self) -> None:
        self._looked: dict[int, _Looked] = {}

    def forget(self) -> None:
        """Forget the digests of tensors that no longer exist."""
        self._looked = {key: one for key, one in self._looked.items() if one.tensor() is not None}

    def of(self, tensor: torch.Tensor, held: torch.Tensor) -> tuple[int, tuple[float, float]]:
        """Returns `digest` of what this rank has of a tensor, `held`; zeros where it is not looked at this time."""
        seen = self._looked.get(id(tensor))
        if seen is None or seen.tensor() is not tensor:
            seen = _Looked(weakref.ref(tensor), -1, 0, 0, (0.0, 0.0))
        if seen.version != held._version:
            times, check, like = seen.times + 1, 0, (0.0, 0.0)
            if times <= _OFTEN or times & (times - 1) == 0:
                check, like = digest(held)
            seen = self._looked[id(tensor)] = _Looked(seen.tensor, held._version, times, check, like)
        return seen.check, seen.like


def refuse_apart(mesh: Mesh, shapes: list[list[int]], found: Sequence[Outside]) -> None:
    """Raise `RefusedPlan` where what entered this rank's losses differs from another's. Collective.

    shapes  of this rank's batch: a number of Python's may differ with them
    """
    mine: dict[str, Any] = {}
    for one in sorted(found, key=lambda one: one.place):
        key = f"{one.where}\n{one.number}{one.what if one.carried else ''}"  # of another shape: a cache has grown
        while key in mine:
            key += "'"
        mine[key] = [one.where, one.what, one.check, *one.like, one.number, one.trained, one.read, one.carried]
    told = gather_json([mesh.data.ranks[0], shapes, mine], mesh.world, mesh.device)
    for rank, (group, theirs_shapes, theirs) in enumerate(told):
        first = next(at for at, row in enumerate(told) if row[0] == group)
        for key, (where, what, check, projected, norm, number, trained, read, carried) in theirs.items():
            other = told[first][2].get(key)
            if other is None or other[2] == check or (number and not read and theirs_shapes != told[first][1]):
                continue
            if (what != other[1] and not number) or abs(other[3] - projected) > _APART * max(norm, other[4]):
                raise (
                    _carried(where, what, first, rank) if carried
                    else _of_samples(where, what) if read
                    else _differs(where, other[1], what, trained, first, rank)
                )  # fmt: skip


def checksum(found: Sequence[Outside]) -> int:
    """Returns one number for what entered the losses: equal on ranks where the same did."""
    return zlib.crc32(repr([(one.where, one.check) for one in sorted(found, key=_order)]).encode()) if found else 0


def _order(one: Outside) -> tuple[str, int]:
    return one.where, one.check


def number_of(where: str, value: float, *, read: bool = False) -> Outside:
    """Returns the record of a Python number that entered a loss at a line of the script."""
    check = zlib.crc32(repr(value).encode())
    return Outside(where, f"the number {value:.6g}", check, (value, abs(value)), number=True, read=read)


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor that this rank holds of a distributed one."""
    while isinstance(tensor, Distributed):
        tensor = tensor.local
    return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements can be read: no DTensor, torch.func wrapper, meta, sparse or quantised."""
    wrapped = isinstance(tensor, DTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not (wrapped or tensor.is_meta or tensor.is_quantized) and tensor.layout is torch.strided


def digest(tensor: torch.Tensor) -> tuple[int, tuple[float, float]]:
    """Returns a checksum of a tensor's elements (never 0), and a projection of them with their norm."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = flat[:: max(1, flat.numel() // _MOST)].cpu().contiguous()
    if not flat.numel():
        return 1, (0.0, 0.0)
    check = zlib.crc32(flat.view(torch.uint8).numpy()) or 1
    wide = torch.nan_to_num(
        (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double(), 0.0, 1e300, -1e300
    )
    signs = torch.cos(torch.arange(len(wide), dtype=torch.float64, device=wide.device) * 1.7)
    return check, (float(wide.dot(signs)), float(wide.norm()))


def _of_samples(where: str, what: str) -> RefusedPlan:
    told = (
        f"what the model is given is computed from {what}, which the script read of this rank's samples (a mean, a "
        "largest value) and which is another on another rank, where one process reads it of the whole batch: make it "
        'in the dataset or the collate function; or prepare(..., loss_scope="global"), by which a script has whole '
        "batches"
    )
    return with_line(told, where)


def _carried(where: str, what: str, first: int, rank: int) -> RefusedPlan:
    told = (
        f"the model's forward computes from {what}, which it keeps from step to step, and which differs between rank "
        f"{first} and rank {rank}: each made it of its own samples (a running mean, a queue), where one process makes "
        "it of all. Add up over ranks what it is made of (torch.distributed.all_reduce in the forward); or write it in "
        'the script, from outputs of all samples (prepare(..., loss_scope="global")) or from prepared.sum(tensor)'
    )
    return with_line(told, where)


def _differs(where: str, what: str, theirs: str, trained: bool, first: int, rank: int) -> RefusedPlan:
    if trained:
        told = (
            f"the loss is computed from {what}, which is trained outside of the prepared models, and it differs "
            f"between rank {first} and rank {rank}: its .grad is what this rank's samples ask for. Make it a parameter "
            "of the model before prepare; or prepare its module and optimizer too, and give them to "
            "prepared.backward(loss, also=[of_other])"
        )
    elif what.endswith(AHEAD):
        told = (
            f"the loss is computed from {what}, of which each rank has a part: the loader has handed out both, and "
            "rows of samples may be put together within one batch alone. Make it of one of them, or take "
            'prepare(..., loss_scope="global"), by which every rank has whole batches'
        )
    else:
        named = what if what == theirs else f"{what} on rank {first} and {theirs} on rank {rank}"
        told = (
            f"the loss is computed from {named}, which the script keeps from step to step, and it differs between rank "
            f"{first} and rank {rank}: each made it of its own samples (centers, a queue, a running mean), or drew it "
            "by itself, where one process makes it of all. Add up over ranks what it is made of (prepared.sum(tensor) "
            'gives the sum over all samples), or take prepare(..., loss_scope="global"), by which every rank computes '
            "it from whole batches"
        )
    return with_line(told, where)


def with_line(told: str, where: str) -> RefusedPlan:
    """Returns a `RefusedPlan` with this text and a line of the script."""
    error = RefusedPlan(f"{told} [{where}]")
    error.names_line = True  # type: ignore[attr-defined]
    return error
