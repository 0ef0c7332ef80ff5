"""Answers a script's reads of a prepared model's parameters as one process would, or raises.

    p.grad                      the whole gradient, wherever ranks have it; raises before they have added it up
    (p ** 2).sum(), p.shape     of the whole weight, gathered for it; its gradient counts once (`whole_weights`)
    p.mul_(0.9), p.data         if a rank holds a piece: raises, with `prepared.whole()` as the remedy
    optimizer.param_groups      this rank's pieces: raise (`OptimizerGuard`)

While the engine reads (`Gate`), in the model's forward and in a backward, a parameter is what this rank holds. The
class of a parameter, which is changed in place, says how the script may use it (`ParameterUse`).
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from shardwise.comm import Axis
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.parallel.flat import Flat
from shardwise.parallel.full import FullShard
from shardwise.part import with_summed_gradient
from shardwise.part.pairs import as_pairs
from shardwise.scripts.guard import TAKEN, Gate, mark_like, reads_values
from shardwise.scripts.joint_optimizer import members_of
from shardwise.scripts.script_lines import names_line, refuse
from shardwise.trace.leaves import replaced, tensors_in

_OF_A_SHARE = (
    "a parameter is read ({}) within the model's forward or a backward in a way that is not followed, and this rank "
    "holds a share of it: read it as the module's attribute, or beside the forward in `with prepared.whole():`"
)
_PIECE = (
    "{} of a tensor in optimizer.param_groups, which holds this rank's pieces of the weights: read and write whole "
    "ones in `with prepared.whole(grads=True):`, where groups list them; clip by prepared.clip_grad_norm_(max_norm)"
)
_GRAD = torch.Tensor.grad


@dataclass(frozen=True)
class ParameterUse:
    """How the script's own reads of a parameter are answered.

    gradient    "own": torch's own; "later": likewise, once ranks have added up; "whole": gathered; "never": raises;
                "successor": of the parameter that took its place
    values      "own": torch's own; "once": likewise, with a gradient that counts once; of the whole weight: "share" (of
                tp, ep), "sharded" (FSDP's), "pairs" (complex numbers held as real ones); "never"; "successor"
    """

    gradient: Literal["own", "later", "whole", "never", "successor"] = "own"
    values: Literal["own", "once", "share", "sharded", "pairs", "never", "successor"] = "own"


_PIECES = {"share", "sharded", "pairs"}  # values of which this rank holds a piece


class ScriptWeights:
    """Answers the script's reads of one model's parameters, and of its optimizer's pieces of them."""

    def __init__(self, prepared: Any, engine: Engine, whole: Any, cuts: set[str]) -> None:
        """Changes the classes of the model's parameters, by what each rank holds of them.

        whole   the model's `WholeWeights` if ranks hold pieces; else None
        cuts    names of the parameters that are shares of tp or ep
        """
        state, mesh = engine.state, prepared.mesh
        self.gate, self._gradients, self._calls, self._whole = prepared._gate, prepared.gradients, prepared.calls, whole
        # axes whose ranks have the same samples: what the script itself computes of a weight (a penalty) every one of
        # them computes, and its gradient counts once; the second ones beside the model's forward
        self._once: tuple[Axis, ...] = mesh.inner
        self._once_beside: tuple[Axis, ...] = prepared.calls.counted_once
        self._kinds: dict[tuple[type, ParameterUse], type] = {}
        elsewhere = prepared._shares or state.precision.mixed
        later = engine.plan.accumulate > 1 and mesh.world.size > 1  # ranks add up after several micro-batches
        values: Any = "once" if cuts or self._once or self._once_beside else "own"
        gradient: Any = "whole" if elsewhere or isinstance(engine.technique, Flat) else "later" if later else "own"
        for name, param in prepared.model.named_parameters():
            # FSDP2's pieces
            if type(param) is DTensor:
                param.__class__ = self.kind(DTensor, ParameterUse("whole", "sharded"))
                # a Function of the script's own may send a whole gradient to this piece: it is cut
                if param.requires_grad and whole is not None:
                    param.register_hook(_cut(weakref.ref(whole), weakref.ref(param)))
            # shares of tp or ep, or complex numbers held as pairs of real ones
            elif type(param) is nn.Parameter and (name in cuts or name in state.pairs):
                param.__class__ = self.kind(nn.Parameter, ParameterUse("whole", "share" if name in cuts else "pairs"))
            # whole here: a frozen one has no gradient to answer for, and its values are as they lie
            elif type(param) is nn.Parameter and param.requires_grad:
                param.__class__ = self.kind(nn.Parameter, ParameterUse(gradient, values))

    def kind(self, base: type, use: ParameterUse) -> type:
        """Returns the subclass of `base` for parameters of this use, made once; `base` for the default use."""
        if use == ParameterUse():
            return base
        if (base, use) not in self._kinds:
            self._kinds[base, use] = _kind(base, use, weakref.ref(self))
        return self._kinds[base, use]

    def retire(self, left: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Lets parameters that the plan replaced answer as their successors; a script may have kept them in a list.

        left    (replaced parameter, successor) pairs
        """
        once = {id(param): (param, successor) for param, successor in left}  # a tied one has several names
        for param, successor in once.values():
            mark_like(successor, param)
            for hook in (param._backward_hooks or {}).values():
                successor.register_hook(hook)
            if type(param) is nn.Parameter:
                param.__dict__["successor"] = successor
                param.__class__ = self.kind(nn.Parameter, ParameterUse("successor", "successor"))

    # --- what the script asks

    @property
    def is_asked(self) -> bool:
        """Whether the script's own code reads now, and not the engine, the model's forward or a backward."""
        return not (self.gate.is_open or self._runs())

    def _runs(self) -> bool:
        """Whether the model's forward runs, or a backward, in which a block may run again."""
        return self._calls.in_forward or _in_backward()

    def gradient(self, param: Any, use: str) -> torch.Tensor | None:
        """Returns what `param.grad` gives the script, by `use` (`ParameterUse.gradient`). Collective if gathered."""
        # a script that puts its own parameter in this one's place asks for that one's gradient
        if use == "successor":
            return param.__dict__["successor"].grad if not self.gate.is_open else _GRAD.__get__(param)
        # the engine's own read, or the model's: the gradient as torch has it
        if self._passes_gradient(use):
            return _GRAD.__get__(param)
        # a piece in the optimizer's groups; torch's GradScaler alone may read it, to scale it
        if use == "never" and sys._getframe(2).f_code.co_filename != grad_scaler.__file__:
            refuse(RefusedPlan(_PIECE.format(".grad")))
        # the plan has not added it up yet (a scaler may come to a step with fewer micro-batches than the plan has)
        if use in ("later", "never"):
            self._gradients.make_whole()
        return self._gradients.get(param) if use == "whole" else _GRAD.__get__(param)

    def set_gradient(self, param: Any, use: str, value: torch.Tensor | None) -> None:
        """Sets `param.grad = value`; for a script's own write `value` is whole and the same on every rank."""
        # outside of the gate the script means the parameter that it put in this one's place
        if use == "successor" and not self.gate.is_open:
            param.__dict__["successor"].grad = value
        # what the engine, FSDP2 or the model's forward sets is theirs
        elif self._passes_gradient(use) or use not in ("whole", "never") or isinstance(value, DTensor):  # FSDP's own
            _GRAD.__set__(param, value)
        # a piece's own gradient may be cleared, and nothing else
        elif use == "never":
            _GRAD.__set__(param, None) if value is None else refuse(RefusedPlan(_PIECE.format(".grad")))
        else:
            self._gradients.set(param, value)

    def _passes_gradient(self, use: str) -> bool:
        """Whether torch answers `param.grad` itself: the engine reads, or the model runs (FSDP swaps parameters)."""
        return self.gate.is_open or (use != "never" and self._runs())

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `func(*args, **kwargs)`, with parameters answered by their use; may raise `RefusedPlan`."""
        name = getattr(func, "__name__", "")
        again = _in_backward() and any(isinstance(one, DTensor) for one in tensors_in((args, kwargs)))
        # a backward opens the gate, yet a recomputed forward may read weights there; FSDP's own calls read no values
        if (self.gate.is_open and not again) or name == "__hash__":
            return func(*args, **kwargs)
        args, kwargs = replaced(nn.Parameter, lambda param: vars(param).get("successor", param), (args, kwargs))
        uses = {type(one).script_use.values for one in tensors_in((args, kwargs)) if hasattr(type(one), "script_use")}
        if "never" in uses and reads_values(func):
            refuse(RefusedPlan(_PIECE.format(name or str(func))))
        if func is torch.autograd.grad and uses & _PIECES:
            # a Function's own backward passes these on to the pieces; elsewhere they are one rank's alone
            if again:
                return self._whole.taken(*args, **kwargs)
            refuse(RefusedPlan(TAKEN))
        # read in the forward of another unit than the one that holds it, where it is not gathered
        in_forward = "sharded" in uses and (again or self._calls.in_forward)
        if in_forward and func == torch.Tensor.data.__set__:
            return self._whole.assign(*args)
        # `param.data` alone is read to be assigned
        in_forward = in_forward and reads_values(func) and func != torch.Tensor.data.__get__
        # the script's own code, or the forward of another unit: computed of the whole weight, gathered for it
        if in_forward or (uses & _PIECES and not self._runs()):
            assert self._whole is not None
            return names_line(self._whole.outside)(func, args, kwargs)
        # what is followed reads the module's attribute, which gives a part: this function has the bare share
        if "share" in uses and reads_values(func):
            refuse(RefusedPlan(_OF_A_SHARE.format(name or func)))
        if "once" in uses:
            args, kwargs = self._counted_once(func, args, kwargs)
        return func(*args, **kwargs)

    def _counted_once(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns (args, kwargs) in which gradients of "once" parameters count once, though every rank has them."""
        # it would return this rank's gradient to the script, which no hook adds up
        if func is torch.autograd.grad:
            refuse(RefusedPlan(TAKEN))
        # the script's own code (a penalty) is computed alike by data ranks too; the model's forward on each one's
        # samples
        axes = self._once if self._runs() else (*self._once_beside, *self._once)
        writes = getattr(func, "__name__", "") == "__set__"
        # a write to an attribute, or what reads no values, has no gradient to count
        if not axes or writes or not reads_values(func) or not torch.is_grad_enabled():
            return args, kwargs

        def once(param: Any) -> Any:
            use = getattr(type(param), "script_use", None)
            return with_summed_gradient(param, axes) if use is not None and use.values == "once" else param

        return replaced(nn.Parameter, once, (args, kwargs))


def _cut(whole: weakref.ref[Any], piece: weakref.ref[Any]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Returns a hook for an FSDP piece that shards the whole gradients that a script's own Function sends to it."""

    def arrives(gradient: torch.Tensor) -> torch.Tensor | None:
        weights = whole()
        return None if isinstance(gradient, DTensor) or weights is None else weights.cut(piece(), gradient)

    return arrives


def _kind(base: Any, use: ParameterUse, weights_ref: weakref.ref[ScriptWeights]) -> type:
    """Returns a subclass of `base` whose `grad`, and functions of it, ask `ScriptWeights` according to `use`."""

    class ScriptWeight(base):
        script_use = use

        @property
        def grad(self) -> torch.Tensor | None:
            weights = weights_ref()
            return _GRAD.__get__(self) if weights is None else weights.gradient(self, use.gradient)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            weights = weights_ref()
            if weights is None:
                _GRAD.__set__(self, value)
            else:
                weights.set_gradient(self, use.gradient, value)

        @grad.deleter
        def grad(self) -> None:
            _GRAD.__delete__(self)

    if use.values == "own":  # torch's functions are as fast as of any parameter
        return ScriptWeight

    class ScriptWeightInFunctions(ScriptWeight):
        answers_first = use.values == "share"  # before the tensor parts of a model's output do

        @staticmethod
        def answers_as_complex() -> bool:
            """Returns whether the script's own code reads the parameter now, so that it is shown complex."""
            weights = weights_ref()
            return weights is not None and weights.is_asked

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            weights = weights_ref()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {})) if weights is None else weights.call(func, args, kwargs or {})

    return ScriptWeightInFunctions


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class OptimizerGuard:
    """Makes the pieces in a prepared optimizer's groups raise when the script's own code reads them."""

    def __init__(self, weights: ScriptWeights) -> None:
        self._gate, self._kind = weights.gate, weights.kind(nn.Parameter, ParameterUse("never", "never"))
        self._masters: list[nn.Parameter] = []

    def watch(self, optimizer: Optimizer, model: nn.Module, *, state: bool) -> None:
        """Guards an optimizer's pieces from now on; `state`: its state too.

        Parameters of `model` answer for themselves.
        """
        # a second `watch`, for groups that were added, finds the state guarded already
        for one in members_of(optimizer):
            if state and not isinstance(one.state, StateOfPieces):
                one.state = StateOfPieces(self._gate, one.state)
        own = {id(param) for param in model.parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # the model's own parameters answer for themselves; of other classes are pieces that an earlier call has
        # guarded
        self._masters = [param for param in params if id(param) not in own and type(param) is nn.Parameter]
        for master in self._masters:
            master.__class__ = self._kind

    def leave(self) -> None:
        """Stops guarding the pieces, before the engine uses them or whole tensors take their place."""
        for master in self._masters:
            master.__class__ = nn.Parameter
        self._masters = []


class StateOfPieces(defaultdict[Any, Any]):
    """An optimizer's state by pieces, as torch keeps it; raises when the script asks for a missing key or iterates."""

    def __init__(self, gate: Gate, state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._gate = gate

    def __missing__(self, key: Any) -> Any:
        self._refuse_outside()
        return super().__missing__(key)

    def __iter__(self) -> Any:
        self._refuse_outside()
        return super().__iter__()

    def keys(self) -> Any:
        self._refuse_outside()
        return super().keys()

    def values(self) -> Any:
        self._refuse_outside()
        return super().values()

    def items(self) -> Any:
        self._refuse_outside()
        return super().items()

    @names_line
    def _refuse_outside(self) -> None:
        """Raises `RefusedPlan` unless the engine reads (the gate is open)."""
        if not self._gate.is_open:
            raise RefusedPlan(
                "optimizer.state holds this rank's pieces of the state: read and write it in "
                "`with prepared.whole(state=True):`; optimizer.state_dict() gives all of it"
            )


class OfPieces(torch.autograd.Function):
    """Autograd function: forward gives a whole weight for a piece, backward the piece's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, values: torch.Tensor, weights: Any) -> torch.Tensor:
        ctx.piece, ctx.weights = piece, weakref.ref(weights)  # a script keeps its last loss, and not its run
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return ctx.weights().cut(ctx.piece, gradient), None, None


def assign(trained: tuple[FullShard, int] | None, of_unit: Any, param: DTensor, value: torch.Tensor) -> None:
    """Stands for `param.data = value` in a forward, for a parameter whose zero=3 unit does not run.

    trained     (its technique, its index there); None for a frozen parameter
    of_unit     FSDP's record of the parameter
    value       the whole value; each rank keeps its shard in new memory, as one process would
    Raises `InputError` for another shape, dtype or device than the weight's.
    """
    value = value.detach()
    value = as_pairs(value) if value.is_complex() and not param.is_complex() else value
    if (value.shape, value.dtype, value.device) != (param.shape, param.dtype, param.device):
        raise InputError(
            f"param.data = a tensor of {tuple(value.shape)}, {value.dtype} on {value.device}, where the weight is "
            f"{tuple(param.shape)}, {param.dtype} on {param.device}: the plan holds its pieces as they were"
        )
    if isinstance(value, DTensor):
        local = value.redistribute(param.device_mesh, param.placements).to_local().contiguous()
    else:
        local = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local().clone()
    param._local_tensor = local
    _take_up(of_unit)
    if trained is not None:
        technique, index = trained
        technique.slots[index].master.data = technique.piece(index, param.detach())


def _take_up(of_unit: Any) -> None:
    """Makes FSDP use a shard's new memory, also while the script has the parameter under another name (pruning)."""
    within, leaf = of_unit._module_info.module._parameters, of_unit._module_info.param_name
    stands, within[leaf] = leaf in within, of_unit.sharded_param
    of_unit.reset_sharded_param()
    if not stands:
        del within[leaf]
