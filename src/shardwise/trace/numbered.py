"""`Recorder`: a dispatch mode that numbers tensors and records a forward's operations. Used by trace/recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.host import hangs_on_values
from shardwise.trace.backwards import SEVERAL_AT_ONCE, Taken, listed
from shardwise.trace.elementwise import is_random
from shardwise.trace.flow import FlowOp
from shardwise.trace.functional import innermost, with_values
from shardwise.trace.leaves import tensors_in, unsaid_writes, written_tensors
from shardwise.trace.own_calls import OwnCalls

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention,
}  # fmt: skip
ELEMENT_COST = 50.0  # floating-point operations in the time that one element of an op's result takes in memory


class Recorder(TorchDispatchMode):
    """Dispatch mode that numbers tensors and appends each operation to `ops`; attributes as in `Flow` (trace/flow).

    parameters, buffers  id of the tensor that the forward runs on -> id under which the flow records it
    earlier              recorders of the forwards before this one, whose tensors this one may find
    """

    def __init__(self, parameters: dict[int, int], buffers: dict[int, int], earlier: Sequence[Recorder] = ()):
        super().__init__()
        self.earlier = earlier
        self.carried: dict[int, tuple[int, int]] = {}
        self.time = 0
        self.ops: list[FlowOp] = []
        self.made: list[int] = []  # lists are by tensor number
        self.depends: list[bool] = []
        self.drawn: list[bool] = []
        self.sized: set[int] = set()  # tensors whose size depends on values that depend on parameters
        self.last_use: list[int] = []
        self.overwritten: dict[int, int] = {}  # number -> time of the write that gave the tensor another number
        self.rewrites: list[dict[int, int]] = []  # per write: old -> new numbers of the tensors on that storage
        self.number_of: dict[int, int] = {}  # id of a tensor -> number
        self.on_storage: dict[int, list[int]] = {}  # storage -> ids of tensors on it
        self.alive: list[Any] = []  # all tensors met, so that no id or storage is reused
        self.taken: list[Taken] = []
        self.backwards: list[int] = []
        self.differentiating = False  # whether a backward that the forward runs is in progress
        self.stateful: set[int] = set()  # ids of parameters and buffers into which an op has written
        self.is_parameter, self.is_buffer = parameters, buffers
        self.parameters: dict[int, int] = {}  # number -> id of the parameter, as for buffers
        self.buffers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number of `tensor`.

        One not met before gets that of another tensor on its storage, or a new one, as made before the forward.
        """
        tensor = innermost(tensor)
        number = self.number_of.get(id(tensor))
        if number is not None:
            return number
        others = self.on_storage.get(_storage(tensor))
        if others:
            # another tensor object on the same storage, which no operation made (`x.data`)
            self.number_of[id(tensor)] = self.number_of[others[-1]]
            self._keep(tensor)
            return self.number_of[id(tensor)]
        number = self._new(tensor, made=-1, depends=id(tensor) in self.is_parameter, drawn=False)
        # a tensor that an earlier forward made and left in the module; parameters exist anyway
        if (source := self._source(tensor)) is not None and number not in self.parameters:
            self.carried[number] = source
        return number

    def _source(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Returns (index of the earlier forward that made `tensor`, its number there); None if none did."""
        for which, recorder in reversed(list(enumerate(self.earlier))):
            number = recorder.number_of.get(id(tensor))
            if number is None and (others := recorder.on_storage.get(_storage(tensor))):
                number = recorder.number_of[others[-1]]
            if number is not None:
                return (which, number) if recorder.made[number] >= 0 else recorder.carried.get(number)
        return None

    def _new(self, tensor: torch.Tensor, *, made: int, depends: bool, drawn: bool) -> int:
        """Gives `tensor` the next number and returns it.

        made     time at which an op made it; -1 if before the forward
        depends  whether it depends on a parameter
        drawn    whether it depends on a random number and on no parameter
        """
        number = len(self.made)
        self.made.append(made)
        self.depends.append(depends)
        self.drawn.append(drawn)
        self.last_use.append(-1)
        self.number_of[id(tensor)] = number
        self._keep(tensor)
        if id(tensor) in self.is_parameter:
            self.parameters[number] = self.is_parameter[id(tensor)]
        if id(tensor) in self.is_buffer:
            self.buffers[number] = self.is_buffer[id(tensor)]
        return number

    def _keep(self, tensor: torch.Tensor) -> None:
        self.alive.append(tensor)
        self.on_storage.setdefault(_storage(tensor), []).append(id(tensor))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func, kwargs = with_values(func), dict(kwargs or {})
        inputs = tensors_in((args, kwargs))
        reads = [self.number(tensor) for tensor in inputs]
        output = func(*args, **kwargs)
        self.time += 1
        # reads in a backward of the forward's own do not count as uses, since it runs on the stages of its forward
        if not self.differentiating:
            self.use(reads)
        outputs = tensors_in(output)
        depends = any(self.depends[number] for number in reads)
        draws, hangs = is_random(func), hangs_on_values(func, args, kwargs)
        drawn = not depends and (draws or any(self.drawn[number] for number in reads))
        makes = []
        said = written_tensors(func, args, kwargs) if func._schema.is_mutable else unsaid_writes(func, args, kwargs)
        for tensor in said:
            makes += self._written(tensor, depends, drawn)
        if func._schema.is_mutable:
            self._note_state(makes)
        for tensor in outputs:
            # a written argument has got its new number above
            if not any(tensor is argument for argument in inputs):
                made = self._new(tensor, made=self.time, depends=depends, drawn=drawn)
                makes.append(made)
                # the size depends on parameters' values directly, or through an input that is `sized`
                if (depends and hangs) or self._takes_its_size(tensor, inputs, reads):
                    self.sized.add(made)
        cost = _cost(func, args, kwargs, output, outputs)
        reads_value = func is _aten._local_scalar_dense.default
        written = inputs if func._schema.is_mutable else []
        leads = func is not _aten.detach.default and any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in (*outputs, *written)
        )
        self.ops.append(
            FlowOp(self.time, tuple(reads), tuple(makes), cost, draws, reads_value, leads, self.differentiating)
        )
        return output

    def _takes_its_size(self, made: torch.Tensor, inputs: list[torch.Tensor], reads: list[int]) -> bool:
        """Whether the size of the result `made` comes from a `sized` input: no other input has the same shape."""
        if not made.dim() or self.sized.isdisjoint(reads):
            return False
        pairs = zip(inputs, reads, strict=True)
        return not any(tensor.shape == made.shape for tensor, number in pairs if number not in self.sized)

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Records `tensor.data = value`, which is no op: the tensor lies in the storage of `value` from now on."""
        read = self.number(value)
        self.time += 1
        self.use([read])
        old, new = self.number(tensor), len(self.made)
        self._new(tensor, made=self.time, depends=self.depends[read] or self.depends[old], drawn=self.drawn[read])
        self.overwritten[old] = self.time
        self._note_state([new])
        self.ops.append(FlowOp(self.time, (read,), (new,), 0.0, False, False, False, self.differentiating))

    def _note_state(self, made: Iterable[int]) -> None:
        """Adds to `stateful` the parameters and buffers among the numbers `made`, which were written."""
        self.stateful.update(table[n] for n in made for table in (self.parameters, self.buffers) if n in table)

    def use(self, numbers: Iterable[int]) -> None:
        """Records that the tensors of these numbers are used now."""
        for number in numbers:
            self.last_use[number] = self.time

    @contextmanager
    def take(self, own: OwnCalls, args: tuple, kwargs: dict) -> Iterator[None]:
        """Context in which the forward takes a gradient by `torch.autograd.grad(*args, **kwargs)`; adds to `taken`.

        `own`: follows the calls of torch functions; none is noted inside.
        """
        names = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | kwargs
        inputs = listed(names.get("inputs"))
        plain = all(isinstance(tensor, torch.Tensor) for tensor in inputs) and not names.get(SEVERAL_AT_ONCE)
        self.time += 1
        self.use(map(self.number, tensors_in((args, kwargs))))
        start, self.differentiating = self.time, True
        try:
            # module code that runs again inside (recompute) makes no calls of the forward
            with own.inside(None):
                yield
        finally:
            self.differentiating = False
        self.time += 1
        numbers = tuple(self.number(tensor) for tensor in inputs) if plain else ()
        self.taken.append(Taken(start, self.time, numbers, plain))

    @contextmanager
    def take_otherwise(self, *_unused: Any) -> Iterator[None]:
        """Context in which the forward runs `loss.backward()` or the like, which stages cannot share (`backwards`)."""
        if self.differentiating:  # this backward belongs to a gradient that `take` records
            yield
            return
        self.time += 1
        start, self.differentiating = self.time, True
        try:
            yield
        finally:
            self.differentiating = False
        self.time += 1
        self.backwards.append(start)

    def _written(self, tensor: torch.Tensor, depends: bool, drawn: bool) -> list[int]:
        """Gives all tensors on the storage of `tensor`, into which an op wrote, new numbers; returns these.

        depends, drawn  whether what was written depends on a parameter, or on a random number
        """
        fresh = []
        renumbered: dict[int, int] = {}
        for other in self.on_storage.get(_storage(tensor), []):
            old = self.number_of[other]
            if old not in renumbered:  # tensor objects with one number get one new number
                self.overwritten[old] = self.time
                renumbered[old] = len(self.made)
                fresh.append(len(self.made))
                self.made.append(self.time)
                self.depends.append(depends or self.depends[old])
                self.drawn.append((drawn or self.drawn[old]) and not (depends or self.depends[old]))
                self.last_use.append(-1)
                # a write does not change the size
                if old in self.sized:
                    self.sized.add(renumbered[old])
                for table in (self.parameters, self.buffers):
                    if old in table:
                        table[renumbered[old]] = table[old]
            self.number_of[other] = renumbered[old]
        self.rewrites.append(renumbered)
        return fresh


def _storage(tensor: torch.Tensor) -> int:
    """Returns a key that tensors on the same storage share; for a sparse tensor its own id."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _cost(func, args, kwargs, output, outputs: list[torch.Tensor]) -> float:
    """Returns an op's cost in FLOPs, plus `ELEMENT_COST` for each element of a result that is no view."""
    elements = sum(t.numel() for t in outputs) if not _is_view(func) else 0
    flops = 0.0
    if func._overloadpacket in _ATTENTION:  # torch 2.11 counts none whose keys have fewer heads
        (batch, heads, queries, width), keys, values = args[0].shape, args[1].shape[2], args[2].shape[3]
        flops = 2 * batch * heads * queries * keys * (width + values)
    elif func._overloadpacket in flop_counter.flop_registry:
        flops = flop_counter.flop_registry[func._overloadpacket](*args, **kwargs, out_val=output)
    return float(flops) + ELEMENT_COST * elements


def _is_view(func) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


class Assignments(TorchFunctionMode):
    """Function mode that calls `recorder.assign` for every `tensor.data = value`."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:
            self.recorder.assign(*args)
        return result
