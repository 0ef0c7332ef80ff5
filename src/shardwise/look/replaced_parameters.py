"""Hold parameters that a forward replaces by other objects as buffers, as which they behave in one process.

    self.codes.weight = nn.Parameter(averages)    the optimizer still holds the first object, which nobody reads

No optimizer updates such a weight after the first forward: each forward sets it, and the value stays. A buffer behaves
the same on any ranks, and a graph that used the earlier value keeps that.

What this does not do: notice a replacement in code that `forward` reaches other than by names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.errors import RefusedPlan
from shardwise.part.parameters import unannounced
from shardwise.precision import Precision
from shardwise.step.forward import output_alone
from shardwise.task import Task
from shardwise.trace.deferred import Built
from shardwise.trace.recorded import trace_forward

_BUFFERS = "_set_as_buffers"  # on a module: names of parameters that are held as buffers
_CLASSES: dict[type, type] = {}
Replaced = tuple[nn.Module, str]  # (module, name of its parameter)


@contextmanager
def replacements(met: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Context in which `met(module, name)` is called before a module's parameter is replaced by another object."""

    def hook(module: nn.Module, name: str, param: Any) -> None:
        old = module._parameters.get(name)
        of_units = isinstance(old, DTensor) or isinstance(param, DTensor)  # FSDP2 exchanges its parameters itself
        if old is not None and param is not None and param is not old and not of_units:
            met(module, name)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def refuse_replaced(module: nn.Module, names: dict[int, str], leaf: str) -> None:
    """Raises `RefusedPlan`, always, since a forward replaced a parameter that `hold_replaced` had not found.

    names  id of a module -> its path
    leaf   the attribute of `module` that held the parameter
    """
    path = names.get(id(module), "")
    raise RefusedPlan(
        f"the forward replaces parameter '{f'{path}.' if path else ''}{leaf}' by another nn.Parameter, which no "
        "optimizer knows: register it as a buffer, or write into it (.data.copy_)"
    )


def may_replace(module: nn.Module) -> bool:
    """Whether code that a forward reaches by names uses the name `Parameter`, and so may create one."""
    return any("Parameter" in code.co_names for code in codes_of_forward(module))


def codes_of_forward(module: nn.Module) -> Iterator[CodeType]:
    """Yields the code of methods that the forwards of a module and its children reach by names."""
    kinds = {kind for child in module.modules() for kind in type(child).__mro__ if not _of_torch(kind)}
    reached, ahead = set[str](), ["forward", "__call__"]
    while ahead:
        name = ahead.pop()
        for kind in kinds:
            for code in _codes(vars(kind).get(name)):
                yield code
                # Names of attributes and functions alike: which object a name stands for is not known without running.
                ahead += [called for called in code.co_names if called not in reached]
                reached.update(code.co_names)


def _of_torch(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] in ("torch", "typing")


def _codes(function: Any) -> Iterator[CodeType]:
    """Yields the code objects of a function (static or wrapped ones too) and of functions defined in it."""
    function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
    ahead = [function.__code__] if isinstance(function, FunctionType) else []
    while ahead:
        code = ahead.pop()
        yield code
        ahead += [const for const in code.co_consts if isinstance(const, CodeType)]


def hold_replaced(task: Task, precision: Precision, built: Built, sample: Any) -> list[str]:
    """Turns parameters that a forward on `sample` replaces into buffers; returns notices for the user.

    Raises `RefusedPlan` for such a weight that another module shares, since the replacement unties them.
    """
    met = dict[tuple[int, str], Replaced]()
    # A forward that fails here is refused later, when the plan runs it; what it replaced until then counts.
    with suppress(Exception), replacements(lambda module, leaf: met.update({(id(module), leaf): (module, leaf)})):
        trace_forward(built, output_alone(task, precision), sample, 0, precision.dtype_of)
    names = []
    for path, child in built.module.named_modules():
        names += [f"{path}.{leaf}" if path else leaf for module, leaf in met.values() if module is child]
    places = [param for child in built.module.modules() for param in child._parameters.values()]
    for module, leaf in met.values():
        # a tied weight, which the replacement unties in one process
        if sum(param is module._parameters[leaf] for param in places) > 1:
            raise RefusedPlan(
                f"the forward replaces parameter '{leaf}' of a {type(module).__name__} by another nn.Parameter, which "
                "unties it from the module that shares it: make it a parameter of its own"
            )
        _hold(module, leaf)
    what = "is replaced by another nn.Parameter in the forward, so that no optimizer moves it: it is held as a buffer"
    return [f"'{names[0]}'{f' (and {len(names) - 1} more)' if len(names) > 1 else ''} {what}"] if names else []


def _hold(module: nn.Module, leaf: str) -> None:
    """Makes a module's parameter a buffer, and any parameter that is assigned to that name later too."""
    param = module._parameters.pop(leaf)
    assert param is not None
    module._buffers[leaf] = param.detach()
    module.__dict__[_BUFFERS] = module.__dict__.get(_BUFFERS, frozenset()) | {leaf}
    # by the instance's class, since `nn.Module.__setattr__` would drop the buffer and register a parameter
    module.__class__ = _setting_buffers(type(module))


def _setting_buffers(kind: type) -> type:
    """Returns a subclass of a module's class that stores a parameter assigned over such a buffer as a buffer."""
    if kind in _CLASSES.values():
        return kind

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and name in self.__dict__.get(_BUFFERS, ()):
            value = value.detach()
        kind.__setattr__(self, name, value)  # type: ignore[call-arg]

    _CLASSES[kind] = _CLASSES.get(kind) or unannounced(kind, {"__setattr__": __setattr__})
    return _CLASSES[kind]
