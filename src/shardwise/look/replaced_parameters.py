"""Parameters that a forward replaces by others: held as buffers, which is what they are in one process.

    self.codes.weight = nn.Parameter(averages)    the optimizer goes on holding the first object, which nobody reads

No optimizer moves such a weight after the first forward: each forward sets it, and what it sets is kept. As a buffer it
is all that, on any ranks, and what was computed with the one before keeps that one.

What this does not do: notice a replacement by code that `forward` comes to in ways that names do not tell.
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
    """Context: `met(module, name)` is called before a module's parameter is replaced by another object."""

    def hook(module: nn.Module, name: str, param: Any) -> None:
        old = module._parameters.get(name)
        of_units = isinstance(old, DTensor) or isinstance(param, DTensor)  # zero=3 puts its own in place
        if old is not None and param is not None and param is not old and not of_units:
            met(module, name)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def refuse_replaced(module: nn.Module, names: dict[int, str], leaf: str) -> None:
    """Raises `RefusedPlan`, always: a forward has replaced a parameter, and no look saw it before weights were dealt.

    names  paths of modules, by id
    leaf   the attribute of `module` under which the parameter lay
    """
    path = names.get(id(module), "")
    raise RefusedPlan(
        f"the forward replaces parameter '{f'{path}.' if path else ''}{leaf}' by another nn.Parameter, which no "
        "optimizer knows: register it as a buffer, or write into it (.data.copy_)"
    )


def may_replace(module: nn.Module) -> bool:
    """Whether code that a forward reaches, by names, uses the name `Parameter`, and so may make one."""
    return any("Parameter" in code.co_names for code in codes_of_forward(module))


def codes_of_forward(module: nn.Module) -> Iterator[CodeType]:
    """Yields the code of methods that the forwards of a module and its children come to, by names."""
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
    """Yields the code objects of a function (also static or wrapped) and of functions that it defines."""
    function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
    ahead = [function.__code__] if isinstance(function, FunctionType) else []
    while ahead:
        code = ahead.pop()
        yield code
        ahead += [const for const in code.co_consts if isinstance(const, CodeType)]


def hold_replaced(task: Task, precision: Precision, built: Built, sample: Any) -> list[str]:
    """Turn parameters that a forward on a few samples replaces into buffers; returns notices for the user.

    Raises `RefusedPlan` for such a weight that another module holds too, since the replacement unties them.
    """
    met = dict[tuple[int, str], Replaced]()
    # A forward that fails is refused where the plan itself runs it; what it replaced until then counts.
    with suppress(Exception), replacements(lambda module, leaf: met.update({(id(module), leaf): (module, leaf)})):
        trace_forward(built, output_alone(task, precision), sample, 0, precision.dtype_of)
    names = []
    for path, child in built.module.named_modules():
        names += [f"{path}.{leaf}" if path else leaf for module, leaf in met.values() if module is child]
    places = [param for child in built.module.modules() for param in child._parameters.values()]
    for module, leaf in met.values():
        # a tied weight: in one process the replacement would untie the two from the first forward on
        if sum(param is module._parameters[leaf] for param in places) > 1:
            raise RefusedPlan(
                f"the forward replaces parameter '{leaf}' of a {type(module).__name__} by another nn.Parameter, which "
                "unties it from the module that shares it: make it a parameter of its own"
            )
        _hold(module, leaf)
    what = "is replaced by another nn.Parameter in the forward, so that no optimizer moves it: it is held as a buffer"
    return [f"'{names[0]}'{f' (and {len(names) - 1} more)' if len(names) > 1 else ''} {what}"] if names else []


def _hold(module: nn.Module, leaf: str) -> None:
    """Make a module's parameter a buffer, and a parameter that is set in its place later one too."""
    param = module._parameters.pop(leaf)
    assert param is not None
    module._buffers[leaf] = param.detach()
    module.__dict__[_BUFFERS] = module.__dict__.get(_BUFFERS, frozenset()) | {leaf}
    # on the instance's class: `nn.Module.__setattr__` would drop the buffer and register a parameter
    module.__class__ = _setting_buffers(type(module))


def _setting_buffers(kind: type) -> type:
    """Returns a subclass of a module's class that stores a parameter set over such a buffer as a buffer too."""
    if kind in _CLASSES.values():
        return kind

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and name in self.__dict__.get(_BUFFERS, ()):
            value = value.detach()
        kind.__setattr__(self, name, value)  # type: ignore[call-arg]

    _CLASSES[kind] = _CLASSES.get(kind) or unannounced(kind, {"__setattr__": __setattr__})
    return _CLASSES[kind]
