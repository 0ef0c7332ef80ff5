"""Evaluate a loss, restore the module as it was, and record what ran and which weights were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.device import attention_as_ops
from shardwise.errors import RefusedPlan
from shardwise.look.mixing import known_rows
from shardwise.look.replaced_parameters import refuse_replaced, replacements
from shardwise.parallel.batchnorm import FindBatchNorm, KnownStatistics
from shardwise.parallel.fsdp import IN_TRANSFORM, UNITS_IN_TRANSFORMS
from shardwise.part import plain
from shardwise.part.levels import Distributed
from shardwise.random import ConstantRandom, GlobalRandom, Samples
from shardwise.step.loss import Loss
from shardwise.trace.backwards import watching_backwards
from shardwise.trace.functional import differentiating, transforming, with_values
from shardwise.trace.leaves import tensors_in, written_tensors
from shardwise.trace.module_state import ModuleState
from shardwise.trace.outside_reads import ArgumentWrites
from shardwise.trace.outside_state import CONTAINERS, Reached, is_own

Evaluate = Callable[[Any], Loss]
Functions = tuple[Callable, ...]
WEIGHTS_FREED = (
    "the loss takes gradients through the model itself (torch.autograd.grad with create_graph=True), whose own "
    "backward needs weights that zero=3 has freed by then: take them in the model's forward, or use zero=2"
)


class TakesGradients(Exception):
    """Raised if a forward takes gradients itself through units of zero=3, whose weights are freed before backward."""


class WritesWeights(TakesGradients):
    """Raised if a forward writes into weights, at the paths `names`, which zero=3 keeps as shards between forwards."""

    def __init__(self, names: list[str]):
        super().__init__(", ".join(names))
        self.names = names


class InsideTransform(TakesGradients):
    """Raised if a unit of zero=3, named by its path, runs inside a transform of `torch.func` that refuses it."""


class Runner:
    """Evaluates the loss, then restores the module and all objects that its code and the user's `functions` reach.

    evaluate  batch -> the loss, computed by `module`
    seen      records what runs
    """

    def __init__(self, module: nn.Module, evaluate: Evaluate, seen: Seen, functions: Functions = ()):
        self.module = module
        self.evaluate = evaluate
        self.seen = seen
        self.functions = functions
        self.statistics: KnownStatistics | None = None  # with which batch norms normalise; None: mean 0, variance 1
        self._reached: Reached | None = None  # the same for each run, since each leaves all as it was

    def __call__(self, batch: Any, level: float = 0.5, start: Mapping[str, torch.Tensor] | None = None):
        """Returns (loss, random calls, name -> value of buffers and written parameters as the forward left them).

        level  the uniform number, in [0, 1), from which every random number is made
        start  name -> value of buffers before the forward, in place of the module's
        """
        random = ConstantRandom(level)
        with self._put_back():
            self._set_buffers(start or {})
            with self._neutral(), random.watching(self.module):
                loss = self.evaluate(batch)
            self.seen.reads_values |= random.reads_values
            # taken before the module is put back
            changes = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            changes |= self.seen.restore_parameters()
        return loss, random.calls, changes

    @property
    def own_backwards(self) -> list[str]:
        """Returns texts that name custom backwards and hooks which were reached, whose gradients may mix samples."""
        return self._reached.own_backwards if self._reached is not None else []

    def masked(self, batch: Any, random: GlobalRandom, samples: Samples) -> Loss:
        """Returns the loss with random masks that follow the samples' global indices.

        random, samples  the mode that makes them, and which samples `batch` has
        """
        random.begin(0, 0, 0, samples)
        with self._put_back(), self._neutral(), random.watching(self.module):
            return self.evaluate(batch)

    def second(self, batch: Any, joined: Mapping[str, torch.Tensor]) -> Loss:
        """Returns the loss of the second of two forwards in a row, which reads what the first left in the module.

        joined  name -> value after a forward on all samples, for buffers that ranks join
        """
        with self._put_back():
            for at in range(2):
                self._set_buffers(joined if at else {})
                with self._neutral(), ConstantRandom(0.5).watching(self.module):
                    loss = self.evaluate(batch)
        return loss

    def _set_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                buffer = self.module.get_buffer(name)
                # a forward may have assigned a sharded tensor in place of a plain one
                buffer.copy_(value if isinstance(buffer, Distributed) else plain(value))

    def _left(self, state: ModuleState, changed: list[tuple[dict[str, Any], str]]) -> list[str]:
        """Returns the names of what a forward changed for the next one, except statistics of batch norms.

        changed  (table, key) of `ModuleState.changed`
        """
        # Batch norms are joined over ranks, so their statistics are no state of a rank's own samples.
        norms = {id(table) for child in self.seen.batch_norms for table in (child._buffers, vars(child))}
        outside = state.outside.changed() if state.outside is not None else []
        return sorted({key for table, key in changed if id(table) not in norms}.union(outside))

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Context after which the module is restored, also if its forward failed and is to be run another way."""
        self._reached = self._reached or Reached(self.module, self.functions)
        state = ModuleState(self.module, functions=self.functions, reached=self._reached)
        try:
            yield
            changed = state.changed()
            # of the first forward that leaves something; not reached if the forward failed
            self.seen.left = self.seen.left or self._left(state, changed)
            self.seen.kept_shapes.append(_shapes_of([table.get(key) for table, key in changed]))
        finally:
            self.seen.restore_parameters()
            state.restore()

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """Context in which batch norms use mean 0 and variance 1, or given statistics, so that samples do not mix."""
        # SyncBatchNorm in training asks for a GPU and other ranks; in evaluation it is a plain batch norm
        syncing = [child for child in self.module.modules() if isinstance(child, SyncBatchNorm) and child.training]
        for child in syncing:
            child.training = False
        # with given statistics norms use these, else they are found by the ops that they run
        finder = self.statistics or FindBatchNorm(self.seen.running)
        if self.statistics is not None:
            self.statistics.running, self.statistics.syncing = self.seen.running, syncing
        try:
            with finder:
                yield
        finally:
            for child in syncing:
                child.training = True
            # recorded also if the forward failed, since the caller tries it another way
            self.seen.batch_norms += [norm for norm in finder.modules if norm not in self.seen.batch_norms]
            self.seen.norm_calls.append(finder.calls)


def _shapes_of(kept: Any) -> list[torch.Size]:
    """Returns the shapes of the tensors in a value, also in lists, dicts and objects of the user's classes."""
    if isinstance(kept, torch.Tensor):
        return [kept.shape]
    # user's objects by their attributes, containers by their entries; anything else has none
    below = list(kept.values()) if isinstance(kept, dict) else list(iter(kept)) if isinstance(kept, CONTAINERS) else []
    return [shape for item in (vars(kept).values() if is_own(kept) else below) for shape in _shapes_of(item)]


class Seen(TorchDispatchMode):
    """Dispatch mode that records what runs (modules, reentrant checkpoints) and writes into parameters.

    It keeps the values of written parameters from before, for `restore_parameters`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._tables = [(f"{path}." if path else "", child._parameters) for path, child in module.named_modules()]
        self._buffers = {id(buffer): name for name, buffer in module.named_buffers()}
        self.running: list[nn.Module] = []
        self.batch_norms: list[nn.Module] = []
        # for each forward: (norm, number of values of a channel) of each call
        self.norm_calls: list[list[tuple[nn.Module | None, int]]] = []
        self.reads_values = False  # whether Python read a tensor's values
        self.calls: list[dict[str, int]] = []  # for each forward: path of a module -> number of its calls
        self.reentrant = False  # whether a reentrant checkpoint ran
        self.twice: set[str] = set()  # units of zero=3 that ran more than once in a forward
        self.into_arguments = ArgumentWrites()  # of the units of zero=3
        self.widest = 0, ""  # bytes of the largest tensor that a module gave, and its path
        self.written: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # name -> (parameter, copy from before)
        self.ever_written: set[str] = set()  # names of parameters
        self.in_pieces = {name for name, param in module.named_parameters() if isinstance(param, DTensor)}
        self.given_to_pieces: set[str] = set()  # names of shards set by `p.data = x` while their units did not run
        self.read: set[str] = set()  # names of buffers that ops of a forward read
        self.attends = False  # whether attention with dropout ran
        self.left: list[str] = []  # names of what a forward left for the next one
        self.kept_shapes: list[list[torch.Size]] = []  # for each forward: shapes of the tensors that it left
        self.replaced: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # name -> (parameter, its `.data` before)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context around evaluations, in which what runs is recorded."""
        handles, units = [], dict[str, int]()

        def enter(path: str, child: nn.Module, args: tuple, kwargs: dict) -> None:
            """Hook before a module's forward: counts its calls, and finds units of zero=3 that run twice."""
            if child is self.module:  # a new forward of the whole
                units.clear()
                self.into_arguments.clear()
                self.calls.append({})
            if self.calls:
                self.calls[-1][path] = self.calls[-1].get(path, 0) + 1
            if isinstance(child, FSDPModule):
                units[path] = units.get(path, 0) + 1
                if units[path] > 1:
                    self.twice.add(path)
                if path:  # no unit encloses the outermost one
                    self.into_arguments.enter(child, path, args, kwargs)
            self.running.append(child)

        def leave(path: str, child: nn.Module, args: Any, output: Any) -> None:
            self.into_arguments.leave(child)
            wide = max((leaf.nbytes for leaf in tree_leaves(output) if torch.is_tensor(leaf)), default=0)
            if wide > self.widest[0]:  # not >=, so that of modules that pass a tensor on the one that made it counts
                self.widest = wide, path
            if self.running[-1:] == [child]:  # else the call was refused before `enter`
                self.running.pop()  # must return None: a hook's result would replace the output

        for path, child in self.module.named_modules():
            if isinstance(child, FSDPModule):  # before its own hook
                refuse = partial(_refuse_transformed, path)
                handles.append(child.register_forward_pre_hook(lambda m, a, refuse=refuse: refuse(), prepend=True))
            handles.append(child.register_forward_pre_hook(partial(enter, path), with_kwargs=True))
            # always: a forward that raises must not stay among those that run
            handles.append(child.register_forward_hook(partial(leave, path), always_call=True))
        # A reentrant checkpoint runs a backward of its own, so a weight's gradient may come in several summands.
        original = torch_checkpoint.CheckpointFunction.apply

        def reentrant(*args):
            self.reentrant = True
            return original(*args)

        torch_checkpoint.CheckpointFunction.apply = reentrant
        paths = {id(child): path for path, child in self.module.named_modules()}
        other = replacements(lambda child, leaf: refuse_replaced(child, paths, leaf))
        try:
            with (
                self.noting_writes(),
                watching_backwards(self._refuse_freed),
                other,
                known_rows(self.module, self.aside),
            ):
                yield
        finally:
            del torch_checkpoint.CheckpointFunction.apply  # uncovers the inherited one
            for handle in handles:
                handle.remove()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context whose calls are not counted among a forward's calls."""
        counted = dict(self.calls[-1]) if self.calls else {}
        try:
            yield
        finally:
            if self.calls:
                self.calls[-1] = counted

    @contextmanager
    def noting_writes(self) -> Iterator[None]:
        """Context that records writes into parameters, and assignments to their `.data`."""
        with self, _Functions(self):
            yield

    def _refuse_freed(self, roots: Any, create_graph: bool, inputs: Any) -> AbstractContextManager[None]:
        """Returns an empty context; raises if a graph of gradients is taken through weights that zero=3 has freed.

        `RefusedPlan` if the loss takes them, `TakesGradients` if the forward does. The outermost unit's weights are
        freed only after the forward.
        """
        if not create_graph:
            return nullcontext()
        if isinstance(self.module, FSDPModule) and not self.running:  # the forward is over, so the loss takes them
            raise RefusedPlan(WEIGHTS_FREED)
        if has_units(self.module):
            raise TakesGradients(
                "the forward takes gradients itself, through units of zero=3 that are freed before its end"
            )
        return nullcontext()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and func.namespace == "aten":
            for tensor in written_tensors(func, args, kwargs or {}):
                self._keep(tensor)  # before it is written
            self.into_arguments.note(func, args, kwargs or {})
        for tensor in tensors_in((args, kwargs or {})) if self.running else ():
            if (name := self._buffers.get(id(tensor))) is not None:
                self.read.add(name)
        return with_values(func)(*args, **(kwargs or {}))

    def _weights(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yields (path of the module and a dot, name in it, parameter), a tied one once, as `named_parameters` does.

        Called at each write of a forward; covers the modules that existed when this object was made.
        """
        met: set[int] = set()
        for prefix, table in self._tables:
            for key, param in table.items():  # zero=3 exchanges what is in them
                if param is not None and id(param) not in met:
                    met.add(id(param))
                    yield prefix, key, param

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keeps a copy of the parameter whose memory `tensor` shares, which is about to be written."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        while isinstance(tensor, Distributed):  # a share of a weight is this rank's parameter
            tensor = tensor.stored
        storage = tensor.untyped_storage()._cdata
        for prefix, key, param in self._weights():
            local = param._local_tensor if isinstance(param, DTensor) else param
            if local.untyped_storage()._cdata != storage or (name := f"{prefix}{key}") in self.written:
                continue
            weight = local.detach()
            if 0 in weight.stride():  # an expanded placeholder: another pipeline stage holds the values
                self.ever_written.add(name)
                continue
            # A storage may hold several weights (a flat bucket), so the address tells which one is written.
            start, at = weight.data_ptr(), tensor.data_ptr()
            if start <= at < start + weight.numel() * weight.element_size():
                self.written[name] = (weight, weight.clone())
                self.ever_written.add(name)

    def keep_data(self, tensor: torch.Tensor) -> None:
        """Keeps a parameter's memory before `tensor.data = ...`, an assignment that no dispatch mode sees."""
        for name, param in self.module.named_parameters():
            if param is tensor:
                self.replaced.setdefault(name, (tensor, tensor.data))
                self.ever_written.add(name)
                if isinstance(tensor, DTensor):
                    self.given_to_pieces.add(name)

    def repeats(self, sizes: tuple[int, int, int]) -> str:
        """Returns a text on a module that runs another number of times on other numbers of samples, or "".

        sizes  samples of the first forwards, the whole's and its parts'
        """
        if len(self.calls) < len(sizes):  # a look at one sample runs no parts
            return ""
        for path in self.calls[0]:
            counts = [calls.get(path, 0) for calls in self.calls[: len(sizes)]]
            # a module without any call, such as an expert without tokens, is not run in a loop over samples
            if min(counts) and len(set(counts)) > 1:
                of = ", ".join(f"{count} times on {size}" for count, size in zip(counts, sizes, strict=True))
                return f"runs '{path}' {of} samples"
        return ""

    def restore_parameters(self) -> dict[str, torch.Tensor]:
        """Undoes writes into parameters; returns name -> written value."""
        values = {name: weight.clone() for name, (weight, _) in self.written.items() if weight.untyped_storage().size()}
        for weight, value in self.written.values():
            if weight.untyped_storage().size():  # else zero=3 has freed the memory, and the write with it
                weight.copy_(value)
        self.written.clear()
        for param, data in self.replaced.values():
            param.data = data
        self.replaced.clear()
        return values

    def problems(self) -> list[str]:
        """Returns a sentence for each way in which zero=3 would compute this module wrongly."""
        if not isinstance(self.module, FSDPModule):
            return []
        if not (self.reentrant and self.twice):
            return []
        return [
            f"unit '{min(self.twice)}' runs more than once under a reentrant checkpoint, and zero=3 would reduce "
            "its gradient before it is whole: use torch.utils.checkpoint(use_reentrant=False), or zero=2"
        ]


def _refuse_transformed(path: str) -> None:
    """Raises if a unit of zero=3 at `path` runs in a `torch.func` transform that it cannot run in.

    `InsideTransform` for a unit with a path, `RefusedPlan` for the root. A unit copies its weights into place when its
    forward begins, which transforms that take derivatives forbid, and torch before 2.13 in every transform.
    """
    # derivatives forbid what a unit does at its entry; a plain transform does in older versions of torch alone
    refused = differentiating() or (transforming() and not UNITS_IN_TRANSFORMS)
    # the caller can merge a named unit with others; for the root there is none to merge with
    if refused and path:
        raise InsideTransform(path)
    if refused:
        raise RefusedPlan(
            "the whole model runs inside a torch.func transform with a backward (grad, vjp, jacrev), where zero=3 "
            "cannot gather its weights: use zero=2"
            if differentiating()
            else f"the whole model{IN_TRANSFORM}"
        )


def has_units(module: nn.Module) -> bool:
    """Whether a module has units of zero=3 (FSDP2) beside the outermost one."""
    return any(isinstance(child, FSDPModule) for child in module.modules() if child is not module)


class _Functions(TorchFunctionMode):
    """Function mode that reports to `seen` what no dispatch mode sees: `tensor.data = x`, and attention with dropout.

    Such attention runs as single operations, since the fused kernel would hide its random numbers.
    """

    def __init__(self, seen: Seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.data.__set__:  # == since it is made anew at each access
            self.seen.keep_data(args[0])
        # the fused kernel draws random numbers where no mode sees them; args[4] is dropout_p
        elif func is _ATTENTION and (args[4] if len(args) > 4 else (kwargs or {}).get("dropout_p")):
            self.seen.attends = True
            with attention_as_ops():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_ATTENTION = torch.nn.functional.scaled_dot_product_attention
