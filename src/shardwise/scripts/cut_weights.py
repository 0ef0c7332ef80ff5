"""Weights that tp cuts, as a script's code beside the forward reads, draws and sets them: whole. zero=3: pieces.

    0.9 * t + 0.1 * p    the whole weight, gathered; with gradients each rank takes its share of what comes back
    p.clamp_(-c, c)      element by element: on this rank's share; nothing is sent
    p.data.copy_(t)      written into the whole weight, of which each rank takes its share
    p.data = x           this rank's share of x becomes the parameter's memory
    p.lerp_(state[p]["z"], c)   what the optimizer keeps of a cut weight is a share too

What this does not do: write into a view of a weight (`p.data[0].zero_()`; refused: `p.data[0] = 0`), hand out gradients
(`param.grad`), or see the whole of a weight that zero=3 shards too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import Axis, broadcast
from shardwise.engine.whole import put_together
from shardwise.errors import InputError, RefusedPlan
from shardwise.part import with_summed_gradient
from shardwise.part.pairs import as_complex, as_pairs
from shardwise.scripts import draws, guard, saying
from shardwise.scripts.complexes import of_itself
from shardwise.scripts.guard import TAKEN, Gate, reads_values
from shardwise.scripts.own_pieces import answered_by_elements
from shardwise.scripts.pieces import for_reading, writes_into
from shardwise.scripts.saying import is_called_by_engine, names_line
from shardwise.scripts.state import share_of
from shardwise.step.state import RankState
from shardwise.trace.leaves import replaced, tensors_in

_ABOUT = {"size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "is_contiguous"}
_ATTRIBUTES = {"shape", "ndim"}
_PASSAGES = (__file__, *(str(module.__file__) for module in (draws, guard, saying)))


def answer_of(known: weakref.ref[Any]) -> guard.Answer:
    """What functions of the cut weights of a prepared script become. A script keeps its last loss, which is not to keep
    its run alive."""

    def answer(func: Any, args: tuple, kwargs: dict) -> Any:
        script = known()
        assert script is not None
        return script.cut_weights.answer(func, args, kwargs)

    return answer


class CutData(torch.Tensor):
    """A cut weight's `.data`, or what `detach` gives of it: this rank's share, which a script sees whole."""

    weights: CutWeights
    path: str
    answers_first = True  # beside parts that a model gave

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        weights = tensors_in((args, kwargs or {}), CutData)[0].weights
        return weights.answer(func, args, kwargs or {})


class CutWeights:
    """What a script's operations on the cut parameters of one model become."""

    def __init__(
        self, state: RankState, gate: Gate, meet: Callable[[str], None], summed: tuple[Axis, ...],
        drawn_by: Axis | None,
    ) -> None:  # fmt: skip
        """
        gate      open while the engine reads
        meet      waits until every rank has come to a call
        summed    axes whose ranks compute the same of a weight, so that its gradient counts once
        drawn_by  ranks whose generators differ, of which the first draws; None: they draw alike
        """
        assert state.tensor is not None
        self._state, self._gate, self._meet = state, gate, weakref.WeakMethod(meet)
        self._summed, self._drawn_by = summed, drawn_by
        held = dict(state.module.named_parameters())
        masters = {slot.name: slot.master for slot in state.technique.slots if slot.whole}
        self._params = {name: masters.get(name, held[name]) for name in state.tensor.cuts if name in held}
        self._paths = {id(held[name]): name for name in state.tensor.cuts if name in held}

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `func` of the whole weights, as the script means it, or of shares for the engine."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._gate.is_open:
                return func(*args, **kwargs)
            return names_line(self._answer)(func, args, kwargs)

    def _answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        if func is torch.autograd.grad:
            raise RefusedPlan(TAKEN)
        if name in _ABOUT or attribute in _ATTRIBUTES:
            if is_called_by_engine(*_PASSAGES):
                return func(*args, **kwargs)
            return func(*replaced(torch.Tensor, self._without_values, args), **kwargs)
        if (name, attribute) == ("__set__", "data"):
            return self._assign(*args)
        if not reads_values(func):
            about = replaced(torch.Tensor, self._numbers, args) if not of_itself(name, attribute) else args
            return func(*about, **kwargs)
        args, kwargs = self._with_state((args, kwargs))
        if name == "detach" or attribute == "data":
            return self._as_data(func(*replaced(torch.Tensor, self._numbers, args), **kwargs), self._path(args[0]))
        target = kwargs["out"] if "out" in kwargs else (*args, *kwargs.values())[0] if writes_into(name) else ()
        if any(self._is_cut(one) for one in tensors_in(target)):
            return self._write(func, name, target, args, kwargs)
        return self._read(func, args, kwargs)

    def _come(self, what: str) -> None:
        meet = self._meet()
        if meet is not None:
            meet(what)

    # --- of one tensor

    def _is_cut(self, tensor: Any) -> bool:
        return isinstance(tensor, CutData) or id(tensor) in self._paths

    def _path(self, tensor: torch.Tensor) -> str:
        return tensor.path if isinstance(tensor, CutData) else self._paths[id(tensor)]

    def _numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """A share that is held as pairs as complex numbers on the same memory; another tensor as it is."""
        path = self._paths.get(id(tensor), "")
        return as_complex(tensor.detach()) if path in self._state.pairs else tensor

    def _shape(self, tensor: torch.Tensor) -> torch.Size:
        assert self._state.tensor is not None
        return self._state.tensor.full_shape(self._path(tensor), self._numbers(tensor).shape)

    def _without_values(self, tensor: torch.Tensor) -> torch.Tensor:
        kind = self._numbers(tensor).dtype
        return torch.empty(self._shape(tensor), dtype=kind, device="meta") if self._is_cut(tensor) else tensor

    def _as_data(self, local: torch.Tensor, path: str) -> CutData:
        seen = local.as_subclass(CutData)
        seen.weights, seen.path = self, path
        return seen

    def _with_state(self, given: tuple[tuple, dict]) -> tuple[tuple, dict]:
        """An operation's arguments; what the optimizer keeps of a cut weight among them is a share of the same cut."""
        of_shares: dict[int, str] = {}
        for one in tensors_in(given):
            path = self._path(one) if self._is_cut(one) else ""
            states: Any = self._state.optimizer.state
            kept = getattr(states, "raw", states).get(self._params[path]) if path else None
            tensors = [value for value in (kept or {}).values() if isinstance(value, torch.Tensor)]
            shape = self._numbers(one).shape
            of_shares.update({id(value): path for value in tensors if value.dim() and value.shape == shape})
        if not of_shares:
            return given

        def share(tensor: torch.Tensor) -> torch.Tensor:
            path = of_shares.get(id(tensor))
            return tensor if path is None else self._as_data(tensor, path)

        return replaced(torch.Tensor, share, given)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a cut weight, newly made; another tensor as it is. Collective."""
        if not self._is_cut(tensor):
            return tensor
        local = self._numbers(tensor).detach().as_subclass(torch.Tensor)
        return put_together(self._state, self._path(tensor), local).clone()

    def share(self, path: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the whole weight at `path`."""
        return share_of(self._state, path, whole)

    # --- operations

    def _read(self, func: Any, args: tuple, kwargs: dict) -> Any:
        self._come("a cut weight that is read")
        if torch.is_grad_enabled() and any(
            one.requires_grad for one in tensors_in((args, kwargs)) if self._is_cut(one)
        ):
            return func(*replaced(torch.Tensor, self._with_gradient, args),
                        **replaced(torch.Tensor, self._with_gradient, kwargs))  # fmt: skip
        wholes = set()

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            found = self.whole(tensor)
            if found is not tensor:
                wholes.add(found.untyped_storage()._cdata)
            return found

        args, kwargs = replaced(torch.Tensor, whole, (args, kwargs))
        return for_reading(func(*args, **kwargs), wholes)

    def _with_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_cut(tensor) or not tensor.requires_grad:
            return self.whole(tensor)
        return with_summed_gradient(_Whole.apply(tensor, self, self._path(tensor)), self._summed)

    def _write(self, func: Any, name: str, target: Any, args: tuple, kwargs: dict) -> Any:
        """On shares where each element's value hangs on itself alone, else on whole tensors."""
        given = tensors_in((args, kwargs))
        sized = [one for one in given if one.dim()]
        cut = all(self._is_cut(one) for one in sized)
        if cut and answered_by_elements(name) and len({self._path(one) for one in sized}) == 1:
            func(*replaced(torch.Tensor, self._numbers, args), **replaced(torch.Tensor, self._numbers, kwargs))
            return target
        self._come("a cut weight that is written")
        wholes = {id(one): self.whole(one) for one in given if self._is_cut(one)}

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            return wholes.get(id(tensor), tensor)

        func(*replaced(torch.Tensor, whole, args), **replaced(torch.Tensor, whole, kwargs))
        with torch.no_grad():
            for one in tensors_in(target):
                if self._is_cut(one):
                    self._put(one, wholes[id(one)])
        return target

    def _put(self, into: torch.Tensor, whole: torch.Tensor) -> None:
        if self._drawn_by is not None:
            whole = whole.contiguous()
            broadcast(whole, self._drawn_by, 0, "control")
        self._numbers(into).detach().copy_(self.share(self._path(into), whole))

    def _assign(self, param: torch.Tensor, value: torch.Tensor) -> None:
        path, shape = self._path(param), self._shape(param)
        if isinstance(value, CutData) and value.path == path:
            local = value.detach().as_subclass(torch.Tensor)  # memory of its own, put back
        else:
            value, kind = self.whole(value).detach(), self._numbers(param).dtype
            if (value.shape, value.dtype, value.device) != (shape, kind, param.device):
                raise InputError(
                    f"param.data = a tensor of {tuple(value.shape)}, {value.dtype} on {value.device}, where the weight "
                    f"is {tuple(shape)}, {kind} on {param.device}: the plan holds its shares as they were"
                )
            local = self.share(path, value).detach().clone()
        torch.Tensor.data.__set__(param, as_pairs(local) if path in self._state.pairs else local)


class _Whole(torch.autograd.Function):
    """A cut weight, whole; of its gradient, which all ranks that hold shares have alike, each takes its share."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, weights: CutWeights, path: str) -> torch.Tensor:
        ctx.weights, ctx.path = weakref.ref(weights), path  # a script keeps its last loss
        return weights.whole(share)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return as_pairs(ctx.weights().share(ctx.path, gradient).contiguous()), None, None
