"""Find what keeps a module from being a unit of zero=3: weights read outside its forward, and arguments written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.trace.functional import innermost
from shardwise.trace.leaves import replaced, written_tensors
from shardwise.trace.tape import storage_key, tensors_in


def set_training(module: nn.Module, training: bool) -> nn.Module:
    """Puts the module into train mode (`training`) or eval mode and returns it. Collective under zero=3.

    A module's own `train` may read weights (a table made for eval mode), of which a rank holds a shard, so they are
    gathered. It is not called if all modules are in that mode, since a method of that name may be a training loop.
    """
    if all(child.training == training for child in module.modules()):
        return module
    with OutsideReads(module, root=True):
        return module.train(training)


class OutsideReads(TorchDispatchMode):
    """Mode that gathers a weight for ops that read it outside its unit's forward; adds that unit's path to `units`.

    module   the model, whose units are sharded by `FullShard`; none of them runs now
    gather   returns a weight's unsharded value
    units    paths of the units found: their parameters must move to the enclosing unit
    root     whether reads of the root unit's weights count too, as they do if the root does not run either

    Each read gathers, so every rank of dp_shard must run the same forward inside, without gradients. The root unit's
    weights are left alone by default, since no unit encloses it.
    """

    def __init__(
        self, module: nn.Module, gather: Callable[[DTensor], torch.Tensor] = DTensor.full_tensor, *, root: bool = False
    ):
        super().__init__()
        self.gather = gather
        self.units: set[str] = set()
        unit_of: dict[int, str] = {}
        self._sharded: dict[int, tuple[DTensor, str]] = {}  # by id: the weight, and the path of its unit
        for path, child in module.named_modules():
            above = unit_of.get(id(child), "")
            own = path if isinstance(child, FSDPModule) else above
            unit_of |= {id(inner): own for inner in child.children()}  # `named_modules` yields children later
            params = child._parameters.values() if own or root else ()
            self._sharded |= {id(param): (param, own) for param in params if isinstance(param, DTensor)}

    def __enter__(self) -> OutsideReads:
        # `Function.apply` passes its arguments around the dispatcher, so no op shows that it reads them
        kept = self._apply = Function.__dict__["apply"]

        # the arguments are not gathered, since the function's backward returns gradients for what it was given
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self.units |= {self._sharded[id(arg)][1] for arg in args if id(arg) in self._sharded}
            return kept.__func__(cls, *args, **kwargs)

        Function.apply = classmethod(apply)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        Function.apply = self._apply
        super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            args, kwargs = self.answered(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def answered(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns an op's (args, kwargs) with each sharded weight gathered; adds the weights' units to `units`."""
        return replaced(DTensor, self._whole, (args, kwargs))

    def _whole(self, leaf: DTensor) -> torch.Tensor:
        if id(leaf) not in self._sharded:
            return leaf
        self.units.add(self._sharded[id(leaf)][1])
        return self.gather(leaf)


class ArgumentWrites:
    """Collects in `paths` the modules during whose forward an op writes into a tensor among their arguments."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._running: list[tuple[nn.Module, str, dict[int, Any]]] = []  # module, path, storages of its arguments

    def watch(self, model: nn.Module) -> None:
        """Registers hooks that follow the forwards of all modules inside a model."""
        for path, child in model.named_modules():
            if path:
                child.register_forward_pre_hook(
                    lambda m, args, kwargs, path=path: self.enter(m, path, args, kwargs), with_kwargs=True
                )
                # called too where the forward raises: else the module would count as running from then on
                child.register_forward_hook(lambda m, a, o: self.leave(m), always_call=True)

    def enter(self, child: nn.Module, path: str, args: tuple, kwargs: dict) -> None:
        """Note the storages of a module's arguments as its forward begins."""
        self._running.append((child, path, _memory(tensors_in((args, kwargs)))))

    def leave(self, child: nn.Module) -> None:
        """Forget a module's arguments, since its forward is over."""
        if self._running and self._running[-1][0] is child:  # `clear` may have dropped it since
            self._running.pop()

    def clear(self) -> None:
        """Forget every module that was running, since a new forward of the model begins."""
        self._running.clear()

    def note(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Add to `paths` the running modules into whose arguments this operation writes."""
        if self._running:
            written = _memory(written_tensors(func, args, kwargs)).keys()
            self.paths |= {path for _, path, argument_memory in self._running if written & argument_memory.keys()}


def _memory(tensors: Iterable[torch.Tensor]) -> dict[int, Any]:
    """Returns key -> storage of the strided tensors; sparse and nested ones, with several storages, are left out.

    The storages are held, since a freed one's key could be given to another tensor's storage.
    """
    # of a DTensor the local shard is written; a wrapper of `torch.func` has no storage of its own
    plain = (innermost(tensor._local_tensor if isinstance(tensor, DTensor) else tensor) for tensor in tensors)
    return {storage_key(tensor): tensor.untyped_storage() for tensor in plain if tensor.layout is torch.strided}
