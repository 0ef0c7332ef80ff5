"""Weights sharded by FSDP2 (zero=3), as a script's code beside the forward reads and sets them. tp: cut_weights.

    p.data = x           the piece of x becomes the weight, in the parameter, in FSDP2's unit, and for the optimizer
    p.uniform_()         drawn for the whole weight, alike on every rank, which keeps its piece
    p.abs().sum()        with gradients: of the whole weight, whose gradient is summed over ranks
    0.9 * t + 0.1 * p    beside a plain tensor: the whole weight; written into, the plain tensor's piece
    p[0].zero_()         right where the view lies in this rank's piece, else refused
    torch.autograd.grad(loss, p)     refused: it would be of this rank's samples; where every rank has all, whole

What this does not do: let `p.data = x` and a whole tensor x share memory from then on; see the whole of a weight that
tp or ep cut too (reading one of those is refused).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from shardwise.comm import Axis, all_reduce, broadcast
from shardwise.errors import InputError, RefusedPlan
from shardwise.parallel.full import FullShard
from shardwise.part import with_summed_gradient
from shardwise.part.pairs import as_pairs
from shardwise.scripts.complexes import complex_of, of_itself, pairs_of
from shardwise.scripts.gradients import Gradients
from shardwise.scripts.guard import OF_A_SHARE, TAKEN, Gate, reads_values
from shardwise.scripts.saying import names_line
from shardwise.scripts.units import Beside, held_by_units, reset
from shardwise.trace.leaves import replaced, tensors_in

_ITSELF = frozenset(  # the tensor itself is wanted, to be written into perhaps, or what is known without its elements
    {"detach", "numel", "nelement", "ndimension", "__len__", "__repr__", "__deepcopy__", "__reduce_ex__"}
)

_LOST = (
    "{} into a view of a weight of which this rank holds a piece that is no piece of the view, so that what is written "
    "would be lost: write into the weight itself (weight[0] = ..., weight.data.copy_(...)), or use zero=2 without tp"
)


class Pieces:
    """What a script's operations on the parameters of one `FullShard` become."""

    def __init__(
        self, technique: FullShard, gate: Gate, *, inside: Callable[[], bool], meet: Callable[[str], None],
        summed: tuple[Axis, ...], holders: Axis, shares: Collection[str], draws_apart: bool, gradients: Gradients,
        everywhere: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """
        everywhere   where every rank has all samples: told before weights come into a graph beside the forward, whose
                backward is to find them in units that are gathered; None: ranks have parts of a batch
        gradients   the whole ones
        inside   whether the model's forward runs, in which FSDP2 itself swaps parameters
        summed   axes whose ranks compute the same of a weight, so that its gradient counts once
        holders  ranks over which gradients are summed
        shares   names of the parameters that tp or ep cut too
        draws_apart  ranks' generators differ
        """
        self.technique, self.gate, self.inside, self.meet = technique, gate, inside, meet
        self.summed, self.holders, self.draws_apart, self.gradients = summed, holders, draws_apart, gradients
        self._index = {id(param): at for at, param in enumerate(technique.params)}
        self._shares = {id(p) for p, slot in zip(technique.params, technique.slots, strict=True) if slot.name in shares}
        self._everywhere = everywhere
        self._kind = _kind_of(weakref.ref(self))
        held = [param for param in technique.module.parameters() if type(param) is DTensor]  # what is frozen too
        self._held = {id(param) for param in held}
        self._pairs = {id(param) for name, param in technique.module.named_parameters() if name in technique.pairs}
        self._in_units = {id(one.sharded_param): one for one in held_by_units(technique.module)}
        for param in held:
            param.__class__ = self._kind

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `func` of the whole weights, as the script means it. Subclasses' own answers are off."""
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        if func is torch.autograd.grad:
            return self._taken(func, args, kwargs)
        if not of_itself(name, attribute) and (name, attribute) != ("__set__", "data"):
            args, kwargs = replaced(self._kind, self._numbers, (args, kwargs))
        if name.startswith("new_"):  # like the weight in dtype and device alone
            return func(*replaced(DTensor, lambda one: one.to_local(), args), **kwargs)
        if not reads_values(func):
            return func(*args, **kwargs)
        pieces = tensors_in((args, kwargs), self._kind)
        if any(id(one.__dict__.get("pairs", one)) in self._shares for one in pieces):
            raise RefusedPlan(OF_A_SHARE.format(name))
        if (name, attribute) == ("__set__", "data"):
            return self.assign(*args)
        if attribute or name in _ITSELF:
            return self._seen(func(*args, **kwargs))
        if writes_into(name):
            target = args[0] if args else next(iter(kwargs.values()))
            if tensors_in(target, DTensor):
                return self._write(func, name, target, args, kwargs)
        if torch.is_grad_enabled() and any(one.__dict__.get("pairs", one).requires_grad for one in pieces):
            self.meet("a sharded weight that is read with gradients")
            return func(*replaced(self._kind, self._whole, args), **replaced(self._kind, self._whole, kwargs))
        how = answered_by_pieces(name)
        if how == "element" and not _plain_beside(args, kwargs):
            return self._seen(func(*args, **kwargs))
        if how == "view":
            made = self._view(func, *_beside_pieces((args, kwargs)))
            if made is not None:
                return made
        return self._of_whole(func, args, kwargs)

    def _taken(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Gradients by weights for the script's own use, each whole: of the gathered weights, which graphs are of."""
        if self._everywhere is None or tensors_in((args, kwargs), self._kind) == []:
            raise RefusedPlan(TAKEN)
        self._everywhere()
        args, kwargs = replaced(self._kind, self._gathered, (args, kwargs))
        return func(*args, **kwargs)

    def _gathered(self, piece: DTensor) -> torch.Tensor:
        """The weight that stands for a piece in graphs, and has no memory while its unit is not gathered."""
        found = self._in_units.get(id(piece))
        if found is None or not hasattr(found, "_unsharded_param") or id(piece) in self._shares | self._pairs:
            raise RefusedPlan(TAKEN)
        gathered: torch.Tensor = found._unsharded_param
        return gathered

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """The view of a piece, where it is this rank's piece of the view; None where torch has to move elements."""
        try:
            made = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # what torch cannot do with pieces is done with whole tensors
            return None
        storages = {_storage(one) for one in tensors_in((args, kwargs), DTensor)}
        found = tensors_in(made, DTensor)
        plain = all(type(place) in (Shard, Replicate) for one in found for place in one.placements)
        return self._seen(made) if plain and all(_storage(one) in storages for one in found) else None

    def _of_whole(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What it is of whole tensors, which are copies: a view of one would lose what is written into it."""
        self.meet("a sharded weight that is read")
        wholes: dict[int, None] = {}

        def whole(piece: DTensor) -> torch.Tensor:
            found = piece.detach().full_tensor()
            wholes[found.untyped_storage()._cdata] = None
            return found

        args, kwargs = replaced(DTensor, whole, (args, kwargs))
        return for_reading(func(*args, **kwargs), wholes)

    def _write(self, func: Any, name: str, target: Any, args: tuple, kwargs: dict) -> Any:
        """Into one piece or several: each element's value by itself, or else the whole tensor's, of which it is cut."""
        self.technique.written = True
        into = tensors_in(target, DTensor)
        sharded = [one for one in tensors_in((args, kwargs), DTensor) if one.dim()]
        alike = len({one.placements for one in sharded}) == 1 and not _plain_beside(args, kwargs)
        if alike and answered_by_pieces(name):
            return self._seen(func(*args, **kwargs))
        self.meet("a sharded weight that is written")
        wholes = {id(one): one.detach().full_tensor().clone() for one in tensors_in((args, kwargs), DTensor)}
        made = func(*replaced(DTensor, lambda one: wholes[id(one)], args),
                    **replaced(DTensor, lambda one: wholes[id(one)], kwargs))  # fmt: skip
        for one in into:
            _copy_piece(one, self._same(wholes[id(one)]))
        return target if made is not None else None

    def _same(self, whole: torch.Tensor) -> torch.Tensor:
        """The tensor of the first rank, where ranks' generators differ; else each one's own."""
        if self.draws_apart:
            whole = whole.contiguous()
            broadcast(whole, self.holders, 0, "control")
        return whole

    def _seen(self, made: Any) -> Any:
        def see(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is DTensor:
                tensor.__class__ = self._kind
            return tensor

        return tree_map_only(torch.Tensor, see, made)

    def _numbers(self, one: DTensor) -> DTensor:
        """A weight that is held as pairs as the complex one that it is; another tensor as it is."""
        if id(one) not in self._pairs:
            return one
        seen = self._seen(complex_of(one))
        seen.pairs = one
        return seen

    def _whole(self, piece: DTensor) -> torch.Tensor:
        pairs = piece.__dict__.get("pairs")
        if (
            self._everywhere is not None
            and pairs is None
            and hasattr(self._in_units.get(id(piece)), "_unsharded_param")
        ):
            self._everywhere()
            return Beside.apply(self._gathered(piece), piece.detach().full_tensor())
        whole = with_summed_gradient(_Whole.apply(piece if pairs is None else pairs, self), self.summed)
        return whole if pairs is None else torch.view_as_complex(whole)

    def gradient(self, param: DTensor) -> torch.Tensor | None:
        """`param.grad`, answered as the weight itself is; of a weight that tp or ep cut too, the whole one."""
        if id(param) in self._shares:
            return self.gradients.get(param)
        self.gradients.refuse_early(param)
        found = torch.Tensor.grad.__get__(param) if self._index.get(id(param)) in self.technique._used else None
        return self._seen(complex_of(found) if found is not None and id(param) in self._pairs else found)

    def set_gradient(self, param: DTensor, value: torch.Tensor | None) -> None:
        """`param.grad = value`, which every rank has alike, whole or in pieces; None: it is left out of this step."""
        if id(param) in self._shares:
            self.gradients.set(param, value)
            return
        if value is not None and not isinstance(value, DTensor):
            value = distribute_tensor(self._same(value), param.device_mesh, param.placements, src_data_rank=None)
        if value is not None and id(param) in self._pairs:
            value = pairs_of(value)
        if id(param) in self._index:
            self.gradients.by_hand = True
            self.technique.set_gradient(self._index[id(param)], value)

    def reached(self, piece: DTensor) -> None:
        """Note that a gradient comes to a parameter outside of its unit's forward."""
        if id(piece) in self._index:
            self.technique._used_now.add(self._index[id(piece)])
            self.technique.heard(piece)

    def assign(self, param: DTensor, value: torch.Tensor) -> None:
        """`param.data = value`: the storage is another one from here on, as in one process."""
        if id(param) in self._pairs and value.is_complex():
            value = pairs_of(value) if isinstance(value, DTensor) else as_pairs(value.detach())
        if (value.shape, value.dtype, value.device) != (param.shape, param.dtype, param.device):
            raise InputError(
                f"param.data = a tensor of {tuple(value.shape)}, {value.dtype} on {value.device}, where the weight is "
                f"{tuple(param.shape)}, {param.dtype} on {param.device}: the plan holds its pieces as they were"
            )
        of = next((one for one in self.technique.params if torch.Tensor.grad.__get__(one) is param), None)
        if of is not None:
            self.set_gradient(of, value.detach())
            return
        value, self.technique.written = value.detach(), True
        if isinstance(value, DTensor):
            local = value.redistribute(param.device_mesh, param.placements).to_local().contiguous()
        else:
            pieces = distribute_tensor(self._same(value), param.device_mesh, param.placements, src_data_rank=None)
            local = pieces.to_local().clone()
        param._local_tensor = local
        if id(param) not in self._held:
            return  # a tensor that the script has made of one
        reset(self._in_units[id(param)])
        at = self._index.get(id(param))
        if at is not None:
            self.technique.slots[at].master.data = self.technique.piece(at, param.detach())


def _asked(known: weakref.ref[Pieces]) -> Pieces | None:
    """What answers the script's own code; None where the engine, the model's forward or a backward asks."""
    pieces = known()
    if pieces is None or pieces.gate.is_open or pieces.inside() or torch._C._current_graph_task_id() != -1:
        return None
    return pieces


def _kind_of(known: weakref.ref[Pieces]) -> type[DTensor]:
    own = torch.Tensor.grad

    class ShardedWeight(DTensor):
        @staticmethod
        def answers_as_complex() -> bool:
            """Whether it is the script's own code that asks now."""
            return _asked(known) is not None

        @property
        def grad(self) -> torch.Tensor | None:
            pieces = _asked(known)
            return own.__get__(self) if pieces is None else pieces.gradient(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            pieces = _asked(known)
            if pieces is None:
                own.__set__(self, value)
            else:
                pieces.set_gradient(self, value)

        @grad.deleter
        def grad(self) -> None:
            own.__delete__(self)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            pieces = _asked(known)
            with torch._C.DisableTorchFunctionSubclass():
                if pieces is None:
                    script = known()
                    if func == _SET_DATA and script is not None and script.inside() and not script.gate.is_open:
                        return script.assign(*args)
                    return func(*args, **(kwargs or {}))
                return names_line(pieces.answer)(func, args, kwargs or {})

    return ShardedWeight


_SET_DATA = torch.Tensor.data.__set__


class _Lost(torch.Tensor):
    """A view of a whole weight, for reading: what is written into it would not come to any rank's piece."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if writes_into(name) and args and tensors_in(args[0], _Lost):
                names_line(_refuse_lost)(name)
            made = func(*args, **(kwargs or {}))
            given = {one.untyped_storage()._cdata for one in tensors_in((args, kwargs or {}), _Lost)}
            if not isinstance(made, torch.Tensor) or made.untyped_storage()._cdata not in given:
                return made
            return made.as_subclass(_Lost)


def for_reading(made: Any, wholes: Collection[int]) -> Any:
    """Returns what was made of whole weights (known by their storages) so that views of it can only be read."""
    if isinstance(made, np.ndarray):
        made.setflags(write=False)
        return made.view(_ForReading)
    return replaced(
        torch.Tensor, lambda one: one.as_subclass(_Lost) if one.untyped_storage()._cdata in wholes else one, made
    )


class _ForReading(np.ndarray):
    """A whole weight as NumPy has it: what is written into it would not come to any rank's piece."""

    def __setitem__(self, key: Any, value: Any) -> None:
        names_line(_refuse_lost)("NumPy writes")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, _ForReading) for one in kwargs.get("out", ())):
            names_line(_refuse_lost)(f"NumPy's {ufunc.__name__}")
        plain = [one.view(np.ndarray) if isinstance(one, _ForReading) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)


def _refuse_lost(name: str) -> None:
    raise RefusedPlan(_LOST.format(name))


class _Whole(torch.autograd.Function):
    """A sharded weight, whole; its gradient is summed over ranks, of which each keeps its piece."""

    @staticmethod
    def forward(ctx: Any, piece: DTensor, pieces: Pieces) -> torch.Tensor:
        ctx.piece, ctx.pieces = piece, weakref.ref(pieces)  # a script keeps its last loss
        return piece.full_tensor().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        total, piece, pieces = gradient.clone(memory_format=torch.contiguous_format), ctx.piece, ctx.pieces()
        all_reduce(total, pieces.holders, "gradients")
        pieces.reached(piece)
        return distribute_tensor(total, piece.device_mesh, piece.placements, src_data_rank=None), None


def _beside_pieces(given: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """Arguments whose plain tensors, alike on every rank, are as torch takes them beside its sharded ones."""
    if not _plain_beside(*given):
        return given
    mesh = tensors_in(given, DTensor)[0].device_mesh

    def everywhere(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not tensor.dim():
            return tensor
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)

    return replaced(torch.Tensor, everywhere, given)


def _plain_beside(args: tuple, kwargs: dict) -> bool:
    """Whether there is a plain tensor with dims among the arguments, which torch does not take beside sharded ones."""
    return any(one.dim() and not isinstance(one, DTensor) for one in tensors_in((args, kwargs)))


def _storage(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage()._cdata


def _copy_piece(into: DTensor, whole: torch.Tensor) -> None:
    """This rank's piece of a whole tensor, in place."""
    piece = distribute_tensor(whole, into.device_mesh, into.placements, src_data_rank=None)
    into._local_tensor.detach().copy_(piece.to_local())


def writes_into(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE


_IN_PLACE = frozenset(name for name in dir(torch.Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(int))


@cache
def answered_by_pieces(name: str) -> str:
    """How torch's sharded tensors answer by their pieces: "view", "element" (each by itself, or a sum); "" if not.

    Of what else a function may be, the whole tensors are computed.
    """
    if name == "__getitem__":
        return "view"
    if name.startswith("__"):
        name = name.strip("_").removeprefix("i" if name in _IN_PLACE else "") + "_" * (name in _IN_PLACE)
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    if any({torch.Tag.pointwise, torch.Tag.reduction} & set(each.tags) for each in overloads):
        return "element"
    first = [each._schema.arguments[0].alias_info for each in overloads if each._schema.arguments]
    return "view" if any(alias is not None and not alias.is_write for alias in first) else ""
