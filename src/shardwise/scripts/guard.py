"""Guard a script's model where a rank holds pieces: to read gradients or weights gathers, or is refused.

Under zero=1 and 2 (and with masters of their own) a parameter has no gradient that a script could use, and torch's
`clip_grad_norm_` would find none and do nothing. Reading `param.grad` therefore gathers (`gradients`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.comm import Axis
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.parallel.flat import Flat
from shardwise.part import with_summed_gradient
from shardwise.part.tensor import FUNCTIONS
from shardwise.scripts.script_lines import names_line
from shardwise.trace.leaves import replaced

_PROPERTIES = {
    "size", "dim", "stride", "is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "element_size", "storage_offset", "untyped_storage", "data_ptr", "__hash__",
    "get_device", "__delete__", "backward", "has_names", "is_shared", "new_zeros", "new_ones", "new_empty", "new_full",
}  # fmt: skip
OF_A_SHARE = (
    "a parameter is read ({}) within the model's forward or a backward in a way that is not followed, and this rank "
    "holds a share of it: read it as the module's attribute, or beside the forward in `with prepared.whole():`"
)
READ = (
    "{} of a weight of which this rank holds a piece: take it in `with prepared.whole():`, where model.parameters() "
    "are whole; for an average, average.update_parameters(prepared)"
)
OUTSIDE = (
    "{} into a weight, or a gradient, of which this rank holds a piece: write in `with prepared.whole():` (grads=True: "
    "gradients too), where model.parameters() are whole"
)
TAKEN = (
    "torch.autograd.grad(..., parameters): what it gives is the gradient of this rank's samples alone, or of its part "
    "of the batch, and no rank has one process's: weigh losses by their values (prepared.sum), or read param.grad "
    "after prepared.backward(loss, retain_graph=True) of each; or, for an inner step of its own (MAML), without tp, "
    'prepare(..., loss_scope="model"), by which every rank has whole batches'
)
Answer = Callable[[Any, tuple, dict], Any]  # (function of torch, args, kwargs) -> its result


class WholeGradients(Protocol):
    """What knows the whole gradients."""

    def get(self, param: nn.Parameter) -> torch.Tensor | None:
        """Returns the whole gradient of a parameter, None where it has none. Collective."""

    def set(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """Replace the whole gradient of a parameter; None: it has none in this step."""

    def refuse_early(self, param: torch.Tensor) -> None:
        """Raise `InputError` where ranks have not added up their gradients yet."""


Known = Callable[[], WholeGradients | None]


class Gate:
    """Open while the engine itself reads."""

    def __init__(self) -> None:
        self._opened = 0

    @property
    def is_open(self) -> bool:
        """Whether it is the engine that reads parameters now, and not the script."""
        return self._opened > 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context: the engine reads parameters, so that it gets this rank's pieces."""
        self._opened += 1
        try:
            yield
        finally:
            self._opened -= 1


def _in_pieces(gate: Gate, gradients_of: Known) -> type[nn.Parameter]:
    """Returns the class of parameters whose `.grad` is the whole gradient while the gate is closed."""
    own = torch.Tensor.grad

    class InPieces(nn.Parameter):
        @property
        def grad(self) -> torch.Tensor | None:
            gradients = None if gate.is_open or torch._C._current_graph_task_id() != -1 else gradients_of()
            return own.__get__(self) if gradients is None else gradients.get(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            gradients = None if gate.is_open or torch._C._current_graph_task_id() != -1 else gradients_of()
            if gradients is None:
                own.__set__(self, value)
            else:
                gradients.set(self, value)

        @grad.deleter
        def grad(self) -> None:
            own.__delete__(self)

    return InPieces


def _added_up_later(gate: Gate, gradients_of: Known) -> type[nn.Parameter]:
    """Returns the class of parameters that refuse to show a gradient which ranks have not added up yet."""
    own = torch.Tensor.grad

    class PendingGradParameter(nn.Parameter):
        @property
        def grad(self) -> torch.Tensor | None:
            gradients = None if gate.is_open or torch._C._current_graph_task_id() != -1 else gradients_of()
            if gradients is not None:
                gradients.refuse_early(self)
            return own.__get__(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            own.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            own.__delete__(self)

    return PendingGradParameter


def guard_gradients(
    model: nn.Module, technique: Any, *, all: bool, shares: Collection[str], summed: tuple[Axis, ...],
    beside: tuple[Axis, ...], inside: Callable[[], bool], gradients: Known, whole: Answer | None = None,
    later: bool = False,
) -> Gate:  # fmt: skip
    """Make `param.grad` the whole one where gradients are elsewhere than in the parameters; returns the gate that is
    open while the engine reads what a rank holds.

    all     under any technique: the parameters are shares, or lower-precision copies of masters
    shares  names of those that are shares
    gradients   knows the whole gradients; not yet there while the model is spread
    whole   what a function of shares is for the script's own code (`WholeWeights.outside`); None: they raise. Within
            the model's forward and in backward they always do
    summed  axes whose ranks have the same samples: what the script itself computes of a weight (a penalty) every one
            of them computes, and its gradient counts once
    beside  more of them, whose ranks have other samples while `inside`, in the model's forward
    later   a step has several micro-batches, after the last of which ranks add up their gradients
    """
    gate = Gate()
    if not isinstance(technique, Flat) and not all:
        base: Any = _added_up_later(gate, gradients) if later else nn.Parameter
        for param in model.parameters() if later else ():
            if param.requires_grad and type(param) is nn.Parameter:
                param.__class__ = base
        if summed or beside:
            _count_once(model, gate, summed, beside, inside, base)
        return gate
    if shares:
        FUNCTIONS[torch.autograd.grad] = _grad_beside_weights
    pieces: Any = _in_pieces(gate, gradients)

    class WeightShare(pieces):
        answers_first = True  # beside parts that a model gave

        @staticmethod
        def answers_as_complex() -> bool:
            """Whether it is the script's own code that asks now."""
            return whole is not None and not (gate.is_open or inside() or torch._C._current_graph_task_id() != -1)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if not gate.is_open:
                modules = inside() or torch._C._current_graph_task_id() != -1
                if whole is not None and not modules:
                    return whole(func, args, kwargs or {})
                if reads_values(func):
                    _raise(TAKEN if func is torch.autograd.grad else OF_A_SHARE.format(getattr(func, "__name__", func)))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    class WholeWeight(pieces):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.autograd.grad and not gate.is_open:
                _raise(TAKEN)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    for name, param in model.named_parameters():
        if (param.requires_grad or name in shares) and type(param) is nn.Parameter:
            param.__class__ = WeightShare if name in shares else WholeWeight if shares else pieces
    if summed or beside:
        _count_once(model, gate, summed, beside, inside, WholeWeight if shares else pieces)
    return gate


def _count_once(
    model: nn.Module, gate: Gate, summed: tuple[Axis, ...], beside: tuple[Axis, ...], inside: Callable[[], bool],
    base: type,
) -> None:  # fmt: skip
    """Let what is computed of a parameter of class `base` beside the model's forward give it one rank's gradient."""

    class CountOnceParameter(base):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            reads = reads_values(func) and getattr(func, "__name__", "") != "__set__"
            if func is torch.autograd.grad and not gate.is_open:
                _raise(TAKEN)
            with torch._C.DisableTorchFunctionSubclass():
                if reads and not gate.is_open and torch.is_grad_enabled():
                    modules = inside() or torch._C._current_graph_task_id() != -1  # or a block that runs again
                    axes = summed if modules else (*beside, *summed)
                    args, kwargs = replaced(cls, lambda param: with_summed_gradient(param, axes), (args, kwargs))
                return func(*args, **kwargs)

    for param in model.parameters():
        mine: bool = type(param) is base  # a share is asked nothing: the script answers, once it can
        if mine and param.requires_grad:
            param.__class__ = CountOnceParameter


def retire(left: Iterable[tuple[nn.Parameter, nn.Parameter]], gate: Gate) -> None:
    """Let parameters that the model had before the plan put others in their place answer as those: a script may have
    kept them in a list. What was computed of them before cannot be followed, and raises.
    """

    class ReplacedParameter(nn.Parameter):
        @property
        def grad(self) -> torch.Tensor | None:
            held = self.__dict__.get("successor")
            return torch.Tensor.grad.__get__(self) if held is None or gate.is_open else held.grad

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            held = self.__dict__.get("successor")
            if held is None or gate.is_open:
                torch.Tensor.grad.__set__(self, value)
            else:
                held.grad = value

        @grad.deleter
        def grad(self) -> None:
            torch.Tensor.grad.__delete__(self)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if gate.is_open or getattr(func, "__name__", "") == "__hash__":
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            args, kwargs = replaced(cls, lambda param: param.__dict__["successor"], (args, kwargs or {}))
            return func(*args, **kwargs)

    for param, successor in left:
        _move_along(param, successor)
        if type(param) is nn.Parameter:
            if param.requires_grad:
                param.register_hook(_refuse_left)
            param.__dict__["successor"] = successor
            param.__class__ = ReplacedParameter


def mark_like(other: torch.Tensor, param: nn.Parameter) -> None:
    """Give a tensor that stands for a parameter the attributes that the script put on that (`p.lr_scale`)."""
    for name, value in vars(param).items():
        vars(other).setdefault(name, value)


def _move_along(param: nn.Parameter, successor: nn.Parameter) -> None:
    """Give the parameter that the plan trains what the script put on the one before: attributes, and gradient hooks."""
    mark_like(successor, param)
    for hook in (param._backward_hooks or {}).values():
        successor.register_hook(hook)


@names_line
def _refuse_left(gradient: torch.Tensor) -> None:
    """A gradient of what the script computed of a parameter before the plan put another in its place."""
    raise RefusedPlan(
        "the loss is computed from a parameter as it was before the model's first forward in training, by which the "
        "plan put another in its place: compute what is made of model.parameters() (a penalty) after model(x)"
    )


@names_line
def _grad_beside_weights(*args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`, which is given a weight as the model shows it: a part that is made anew for each read."""
    try:
        return torch.autograd.grad(*args, **kwargs)
    except RuntimeError as error:
        if "not have been used" not in str(error):
            raise
        raise RefusedPlan(TAKEN) from error


@names_line
def _raise(message: str) -> None:
    raise RefusedPlan(message)


def reads_values(func: Any) -> bool:
    """Whether a function of torch reads or writes a tensor's elements, not only its properties."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in ("data", "T", "mT", "H", "real", "imag")
    return name not in _PROPERTIES


def writes_into(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name in _IN_PLACE


_IN_PLACE = frozenset(name for name in dir(torch.Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(int))


def refuse_hooks(model: nn.Module, plan: Plan) -> None:
    """Raise `RefusedPlan` for a script's hook on a parameter's gradient that would not run, or run on a summand alone.

    A rank's gradient is a summand until ranks have added theirs up: what is right for summands (a mask) is right there
    too, and `shardwise verify` tells. Shares of weights and pieces of units have no hooks, and a hook behind the sum
    that backward accumulates runs before ranks have added theirs up.
    """
    spread = plan.tp > 1 or plan.ep > 1 or (plan.zero == 3 and plan.dp_shard > 1)
    for name, param in model.named_parameters():
        late = _of_script(param._post_accumulate_grad_hooks)
        if plan.world_size > 1 and (late or (spread and _of_script(param._backward_hooks))):
            raise RefusedPlan(
                f"parameter '{name}' has a hook on its gradient, which is given this rank's part of a sum over ranks "
                f"where one process gives it the whole gradient (plan {plan}): change gradients after "
                "prepared.backward, by param.grad, or clip with prepared.clip_grad_norm_"
            )


def _of_script(hooks: Any) -> bool:
    """Whether a hook is neither ours nor torch's (FSDP's)."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith(("shardwise.", "torch.")) for hook in (hooks or {}).values()
    )


def guard_conversion(model: nn.Module) -> None:
    """Make `model.to`, `.double()` and the like raise where they would change a tensor; a copy keeps its own."""

    def apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if module is not model:
            return type(module)._apply(module, function, recurse)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            found = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (found.dtype, found.device) != (tensor.dtype, tensor.device):
                raise InputError(
                    f"the model is converted or moved after prepare ('{name}': {tensor.dtype} on {tensor.device} to "
                    f"{found.dtype} on {found.device}), and the plan holds its weights as they were: do that before "
                    "prepare"
                )
        return module

    vars(model)["_apply"] = types.MethodType(apply, model)
