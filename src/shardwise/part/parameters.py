"""A module's parameters as its code reads them: `self.weight` gives a `Part` of the whole weight.

The parameter itself is this rank's share, a plain tensor, so that data parallelism, recompute and the optimizer need
to know nothing. The read is an operation of autograd whose backward makes the gradient, however activations are cut:

    over an axis that cuts weights        the gradient of the share, or of the whole weight if it is not cut
    over an axis that cuts activations    this rank's summand; sums over ranks are taken once, with those of a step

A weight that is only *kept* in shares reads as the whole weight, gathered at each read. Inside a transform of
`torch.func` a weight is read as if before the transform, so that this backward lies outside of it.

A module that treats tokens independently (experts) may run on this rank's tokens as plain tensors (`own_rows`); the
gradients of weights that are read there are summands over the sequence's ranks already.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.part.assigned import follow_data
from shardwise.part.crossing import dealt_beside
from shardwise.part.cuts import Owners
from shardwise.part.levels import Distributed
from shardwise.part.moves import to_part
from shardwise.part.position_tables import cut_ranges, run_under
from shardwise.part.sums import whole_gradient, whole_over_axis, with_summed_gradient
from shardwise.trace.functional import before_transforms, innermost
from shardwise.trace.leaves import replaced, tensors_in
from shardwise.trace.own_calls import by_a_module


class _Own(threading.local):
    """Switches of this thread; thread-local, because backward, which recomputes blocks, runs in threads of its own."""

    axes: tuple[Axis, ...] = ()  # those of the `own_rows` that is entered
    ahead: bool = False  # as `read_ahead` set it


_OWN = _Own()


def read_ahead(on: bool) -> None:
    """Switches on or off that weights read by this thread are recorded by autograd even under `no_grad`.

    For a pipeline stage, which runs its forward without gradients until its own part begins, since its own part may use
    a weight that was read before.
    """
    _OWN.ahead = on


@contextmanager
def own_rows(axes: tuple[Axis, ...]) -> Iterator[None]:
    """Context in which a module computes on this rank's tokens, its share over `axes`, as plain tensors.

    The gradient of a weight read inside is then this rank's summand over `axes` without further conversion.
    """
    before, _OWN.axes = _OWN.axes, axes
    try:
        yield
    finally:
        _OWN.axes = before


_CLASSES: dict[tuple[type, tuple[str, ...]], type] = {}  # (class, its cut parameters) -> the subclass that reads parts
CUT_MODULES: WeakSet[nn.Module] = WeakSet()  # modules of this process whose positions are cut
ON_CUT: list[Callable[[], None]] = []  # called when a module is added to `CUT_MODULES`
FLAT = "_flat_weights"
KEPT = "kept"  # role of a parameter that ranks hold in shares, and gather whenever it is read
ONCE = "kept, read once"  # the same, gathered once in a forward that itself differentiates by what it has read
IN_SHARES = (KEPT, ONCE)


class ParameterCut(Protocol):
    """The cut of one parameter: its name, the dim that is cut, the owners of its indices, its role (`KEPT`, ...)."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def owners(self) -> Owners: ...
    @property
    def role(self) -> str: ...


def see_parts(
    module: nn.Module, cuts: Mapping[str, ParameterCut], axis: Axis, absent: Collection[str] = (),
    summed: tuple[Axis, ...] = (),
) -> Callable[[], None]:  # fmt: skip
    """Makes a module read its parameters, which are shares, as `Part`s of the whole; returns the undo function.

    cuts    parameter name -> its cut; parameters that are missing here are whole on every rank of `axis`
    absent  names of parameters whose attributes are left as they are
    summed  axes that cut activations and no weights, outermost first; a gradient stays this rank's summand over them
    """
    names = {id(param): name for name, param in module.named_parameters()}
    before: list[tuple[nn.Module, type]] = []
    for child in list(module.modules()):
        leaf_names = {leaf: names[id(param)] for leaf, param in child._parameters.items() if param is not None}
        leaf_names = {leaf: name for leaf, name in leaf_names.items() if name not in absent}
        mine = {leaf: cuts.get(name) for leaf, name in leaf_names.items()}  # whole ones too: see `whole_gradient`
        if mine:
            before.append((child, type(child)))
            child.__dict__["_tensor_cuts"] = (mine, axis, summed)
            child.__class__ = _seeing_parts(type(child), tuple(sorted(mine)))

    hooks, reads = list[Any](), _Reads()
    if any(cut.role == ONCE for cut in cuts.values()):  # gathered weights live from a forward's begin to its end
        hooks.append(module.register_forward_pre_hook(reads.begin))
        hooks.append(module.register_forward_hook(reads.end, always_call=True))
        for child, _ in before:
            child.__dict__["_reads"] = reads
    if any(each.positions for each in summed):  # other libraries' masks follow (`ON_CUT`), and ranges are dealt
        CUT_MODULES.add(module)
        for each in ON_CUT:
            each()
    undo_ranges = cut_ranges(module, dealt_beside) if module in CUT_MODULES else lambda: None
    undo_data = follow_data(module)

    def undo() -> None:
        undo_ranges()
        undo_data()
        for hook in hooks:
            hook.remove()
        CUT_MODULES.discard(module)
        for child, kind in before:
            child.__class__ = kind
            del child.__dict__["_tensor_cuts"]
            child.__dict__.pop("_read_outside", None)
            child.__dict__.pop("_set_outside", None)
            child.__dict__.pop("_reads", None)

    return undo


def shares_in(child: nn.Module) -> list[tuple[torch.Tensor, ParameterCut]]:
    """Returns (this rank's share, its cut) of each cut parameter that `child` itself has, not its submodules."""
    cuts = child.__dict__.get("_tensor_cuts", ({},))[0]
    return [(child._parameters[leaf], cut) for leaf, cut in cuts.items() if cut is not None]


def read_outside(module: nn.Module, outside: Callable[[], bool], refuse: Callable[[str], None]) -> None:
    """Makes the module's attributes give the plain shares while `outside()` is True, for code outside its forward.

    refuse  called with the attribute's name if a tensor is assigned to a parameter's attribute, at any time; it should
            raise, else `AttributeError` is raised
    """
    for child in module.modules():
        if "_tensor_cuts" in child.__dict__:
            child.__dict__["_read_outside"] = outside
            child.__dict__["_set_outside"] = refuse


def _seeing_parts(kind: type, leaves: tuple[str, ...]) -> type:
    """Returns a subclass whose named parameters read as parts of the whole."""
    if (kind, leaves) not in _CLASSES:
        body: dict[str, Any] = {leaf: property(_reader(leaf), _setter(leaf)) for leaf in leaves}
        if issubclass(kind, nn.RNNBase):
            # torch's recurrent layers read this list, past the attributes that are replaced here
            body[FLAT] = property(_flat_weights, lambda self, value: self.__dict__.__setitem__(FLAT, value))
        _CLASSES[kind, leaves] = unannounced(kind, body)
    return _CLASSES[kind, leaves]


def _flat_weights(self: nn.Module) -> Any:
    """Returns the list of weights on which torch's recurrent layers run, past their attributes."""
    cuts = self.__dict__.get("_tensor_cuts", ({},))[0]
    if not any(cut is not None and cut.role in IN_SHARES for cut in cuts.values()):
        return self.__dict__[FLAT]
    # the list that torch made holds the shares: attributes give the whole weights
    return [getattr(self, name, None) for name in self._flat_weights_names]


def as_class_gives(kind: type, module: nn.Module, leaf: str, seen: torch.Tensor) -> torch.Tensor:
    """Returns `seen`, the weight to read, passed through the class's own `__getattr__` if `kind` has one."""
    if kind.__getattr__ is nn.Module.__getattr__:  # type: ignore[attr-defined]
        return seen
    parameters = module.__dict__["_parameters"]
    module.__dict__["_parameters"] = {**parameters, leaf: seen}
    try:
        return kind.__getattr__(module, leaf)  # type: ignore[attr-defined]
    finally:
        module.__dict__["_parameters"] = parameters


def unannounced(kind: type[nn.Module], body: dict[str, Any]) -> type:
    """Returns a subclass of `kind` of the same name with the attributes `body`, made without `__init_subclass__`.

    A class's `__init_subclass__` may register subclasses, or require arguments.
    """
    body = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__, **body}
    # made below nn.Module, whose `__init_subclass__` does nothing; the real base is put in afterwards
    made = type.__new__(type(kind), kind.__name__, (nn.Module,), body)
    made.__bases__ = (kind,)
    return made


def _setter(leaf: str):
    """Returns the setter of a cut parameter's attribute, which raises (`read_outside`, else `AttributeError`)."""

    def put(self: nn.Module, value: Any) -> None:
        refuse = self.__dict__.get("_set_outside")
        if refuse is not None:
            refuse(leaf)
        raise AttributeError(f"'{leaf}' of {type(self).__name__} is cut, and no other tensor takes its place")

    return put


def _read_once(module: nn.Module, leaf: str, param: torch.Tensor, read: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Returns `read()`; of a parameter of role `ONCE` the tensor that the running forward has read before."""
    mine, reads = module.__dict__["_tensor_cuts"][0], module.__dict__.get("_reads")
    cut = mine[leaf]
    if reads is None or cut is None or cut.role != ONCE or not reads.running:
        return read()
    # a weight that was written since, or is read under `no_grad` this time, is another one to autograd
    key = id(param), param._version, torch.is_grad_enabled()
    if key not in reads.weights:
        reads.weights[key] = read()
    return reads.weights[key]


class _Reads:
    """Cache of the weights that one forward of a module has read, for those of role `ONCE`."""

    def __init__(self) -> None:
        self.weights: dict[tuple[int, int, bool], torch.Tensor] = {}  # (id, version, whether grad is on) -> as read
        self.running = False

    def begin(self, *_: Any) -> None:
        """Begins a forward with an empty cache."""
        self.weights.clear()
        self.running = True

    def end(self, *_: Any) -> None:
        """Ends a forward and empties the cache."""
        self.weights.clear()
        self.running = False


def _stands_for_whole(tensor: torch.Tensor, cut: Any, axis: Axis) -> bool:
    """Whether `tensor` is no share but a whole or distributed one in a cut parameter's place (`functional_call`)."""
    size = tensor.shape[cut.dim] if cut.dim < tensor.dim() else -1
    share = cut.owners.counts[axis.index]
    return isinstance(tensor, Distributed) or (size == cut.owners.size and (size != share or cut.role in IN_SHARES))


def _reader(leaf: str):
    """Returns the property getter that gives a module the parameter `leaf` as a part of the whole weight."""

    def read(self: nn.Module) -> torch.Tensor:
        param, cutting = self._parameters.get(leaf), self.__dict__.get("_tensor_cuts")
        if param is None or cutting is None:  # another object that the module made of its own class
            raise AttributeError(leaf)  # Python then asks `__getattr__`
        if leaf in self.__dict__:  # what stands for the experts of all ranks (parallel/expert/stacked)
            return self.__dict__[leaf]
        outside = self.__dict__.get("_read_outside")
        # code beside the forward (a script's optimizer, say) works on this rank's own share
        if outside is not None and outside():
            return param
        # inside a transform of torch.func a weight is read as before it, unless the transform has wrapped the weight
        outermost = before_transforms() if innermost(param) is param else nullcontext()
        # a pipeline's stage runs other stages' layers under no_grad, and may use this weight in its own layers too
        with outermost, torch.enable_grad() if _OWN.ahead else nullcontext():
            weight = _read_once(self, leaf, param, lambda: seen(param, *cutting))
        return as_class_gives(type(self), self, leaf, weight)  # complex numbers of pairs

    def seen(param: torch.Tensor, cuts: Mapping[str, Any], axis: Axis, summed: tuple[Axis, ...]) -> torch.Tensor:
        """Returns the weight as the forward reads it, a part or whole, with the backward that its cut needs."""
        if isinstance(param, DTensor):
            return param  # sharded by zero=3 and not gathered now: for its dtype or device
        cut = cuts[leaf]
        if cut is not None and _stands_for_whole(param, cut, axis):  # put in its place by `functional_call`
            return param
        with torch._C.DisableTorchFunctionSubclass():  # a script's parameter, which beside this counts otherwise
            # inside `own_rows` a gradient is this rank's summand as it comes
            weight = with_summed_gradient(param, tuple(each for each in summed if each not in _OWN.axes))
        # every rank has all of it, and has to add the same gradient
        if cut is None:
            weight = whole_gradient(weight, axis)
        else:
            with torch._C.DisableTorchFunctionSubclass():  # a script's parameter, whose share nobody else may read
                weight = to_part(weight, cut.dim, cut.owners, axis, cut.name)
                # its products are not cut, and it lies in shares to spare memory
                weight = whole_over_axis(weight, axis) if cut.role in IN_SHARES else weight
        if weight is not param:
            weight.reads_weight = True  # for `self.weight.data = ...`: see `part.assigned`
        return weight

    return read


TAKE_TENSOR_ITSELF = frozenset(("grad", "backward", "register_hook", "data_ptr"))
_PLAIN = frozenset(("__get__", "__set__", "requires_grad_", "size", "numel", "dim", "stride", "is_floating_point"))


class PastAttributes(TorchFunctionMode):
    """Mode that gives a torch function, called by a module's code on a trained parameter, what its attribute reads.

    met  called, without arguments, each time that this happens
    """

    def __init__(self, module: nn.Module, met: Callable[[], None] = lambda: None):
        super().__init__()
        self.met = met
        self.places = {
            id(param): (child, leaf)
            for child in module.modules()
            for leaf, param in child._parameters.items()
            if param is not None and param.requires_grad
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        # these take the parameter itself, or read attributes that a share answers as well
        if name in TAKE_TENSOR_ITSELF or name in _PLAIN or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        found = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self.places]
        # the engine, optimizers and torch's own code mean the share; a module's code means the whole weight
        if not found or not by_a_module(sys._getframe(1)):
            return func(*args, **kwargs)
        self.met()
        args, kwargs = replaced(nn.Parameter, self._read, (args, kwargs))
        return func(*args, **kwargs)

    def _read(self, param: nn.Parameter) -> Any:
        child, leaf = self.places.get(id(param), (None, ""))
        return param if child is None else getattr(child, leaf)


def read_past(module: nn.Module) -> None:
    """Makes every forward of the module run under `PastAttributes`."""
    run_under(module, lambda args, kwargs: PastAttributes(module))


def refuse_past(plan: Plan) -> None:
    """Raises `RefusedPlan` if the plan runs parts of the forward elsewhere or later, or shards the weights.

    Called for a forward that takes parameters past their attributes; under such plans it would not find all of them.
    """
    others = {f"zero={plan.zero}": plan.sharded.weights, f"pp={plan.pp}": plan.pp > 1}
    others |= {
        f"remat={plan.remat}": plan.remat != "none",
        "compile": plan.compile,
        "position_chunks": plan.position_chunks > 1,
    }
    for key in (key for key, wanted in others.items() if wanted):
        raise RefusedPlan(
            "the forward computes with parameters past their attributes, as by parameters(), where positions are cut, "
            f"and {key} runs parts of the forward elsewhere or has not all of them there: read them as attributes "
            f"(self.weight), leave a penalty on weights to the optimizer (weight_decay), or leave {key} out"
        )
