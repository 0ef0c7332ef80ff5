"""Record one forward as a `Flow` (trace/flow): its ops, its submodules' calls, the gradients it takes itself.

The forward runs under a dispatch mode that numbers tensors. It runs without gradients, but for one that takes some
itself: then the ops of that backward are written down too, marked as its own, and neither calls nor uses inside it
count, since a pipeline stage does them where the forward was.

What this does not do: follow a value that leaves PyTorch (`.item()`, numpy) and comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.trace.deferred import Built
from shardwise.trace.drawn import is_random
from shardwise.trace.fake import Fake, unlogged
from shardwise.trace.flow import Flow, FlowOp, Leaf, ModuleCall, OwnCall
from shardwise.trace.functional import innermost, transforming, with_values
from shardwise.trace.leaves import tensors_in, unsaid_writes, written_tensors
from shardwise.trace.own_calls import OwnCalls
from shardwise.trace.stand_in import standing_in
from shardwise.trace.state import ModuleState
from shardwise.trace.taken import SEVERAL_AT_ONCE, GradientWatch, Taken, listed, other_backwards
from shardwise.trace.without_gradient import HooksLeftOut, switched_off

_aten = torch.ops.aten
ELEMENT_COST = 50.0  # floating-point operations in the time that one element of an op's result takes in memory
FEW_ELEMENTS = 2**27  # of parameters, up to which a trace on real tensors uses their values, and else zeros

Run = Callable[[nn.Module, Any], Any]  # (module, batch) -> output
DtypeOf = Callable[[torch.Tensor], torch.dtype]


class _Recorder(TorchDispatchMode):
    """Numbers tensors and writes ops down."""

    def __init__(self, parameters: dict[int, int], buffers: dict[int, int]):
        super().__init__()
        self.time = 0
        self.ops: list[FlowOp] = []
        self.made: list[int] = []
        self.depends: list[bool] = []
        self.drawn: list[bool] = []
        self.last_use: list[int] = []
        self.overwritten: dict[int, int] = {}
        self.number_of: dict[int, int] = {}  # id of a tensor -> number
        self.on_storage: dict[int, list[int]] = {}  # storage -> ids of tensors on it
        self.alive: list[Any] = []
        self.taken: list[Taken] = []
        self.backwards: list[int] = []
        self.differentiating = False
        self.stateful: set[int] = set()  # ids of parameters and buffers into which something was written
        self.is_parameter, self.is_buffer = parameters, buffers
        self.parameters: dict[int, int] = {}
        self.buffers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """The tensor's number; one not met before was there all along, unless it lies on a known storage."""
        tensor = innermost(tensor)
        found = self.number_of.get(id(tensor))
        if found is not None:
            return found
        others = self.on_storage.get(_storage(tensor))
        if others:
            self.number_of[id(tensor)] = self.number_of[others[-1]]
            self._keep(tensor)
            return self.number_of[id(tensor)]
        return self._new(tensor, made=-1, depends=id(tensor) in self.is_parameter, drawn=False)

    def _new(self, tensor: torch.Tensor, *, made: int, depends: bool, drawn: bool) -> int:
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
        if not self.differentiating:
            self.use(reads)
        outputs = tensors_in(output)
        depends = any(self.depends[number] for number in reads)
        draws = is_random(func)
        drawn = not depends and (draws or any(self.drawn[number] for number in reads))
        makes = []
        said = written_tensors(func, args, kwargs) if func._schema.is_mutable else unsaid_writes(func, args, kwargs)
        for tensor in said:
            makes += self._written(tensor, depends, drawn)
        if func._schema.is_mutable:
            self._note_state(makes)
        for tensor in outputs:
            if not any(tensor is known for known in inputs):
                made = self._new(tensor, made=self.time, depends=depends, drawn=drawn)
                makes.append(made)
        cost = _cost(func, args, kwargs, output, outputs)
        reads_value = func is _aten._local_scalar_dense.default
        written = inputs if func._schema.is_mutable else []
        leads = func is not _aten.detach.default and any(
            each.is_floating_point() or each.is_complex() for each in (*outputs, *written)
        )
        self.ops.append(
            FlowOp(self.time, tuple(reads), tuple(makes), cost, draws, reads_value, leads, self.differentiating)
        )
        return output

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Note `tensor.data = value`, which is no operation: the tensor lies in the other's memory from now on."""
        read = self.number(value)
        self.time += 1
        self.use([read])
        old, new = self.number(tensor), len(self.made)
        self._new(tensor, made=self.time, depends=self.depends[read] or self.depends[old], drawn=self.drawn[read])
        self.overwritten[old] = self.time
        self._note_state([new])
        self.ops.append(FlowOp(self.time, (read,), (new,), 0.0, False, False, False, self.differentiating))

    def _note_state(self, made: Iterable[int]) -> None:
        """Note which parameters and buffers got new contents under these numbers."""
        self.stateful.update(table[n] for n in made for table in (self.parameters, self.buffers) if n in table)

    def use(self, numbers: Iterable[int]) -> None:
        """Note that tensors of these numbers are used now."""
        for number in numbers:
            self.last_use[number] = self.time

    @contextmanager
    def take(self, own: OwnCalls, args: tuple, kwargs: dict) -> Iterator[None]:
        """Context: the forward takes a gradient, `torch.autograd.grad(*args, **kwargs)`."""
        names = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | kwargs
        by = listed(names.get("inputs"))
        plain = all(isinstance(one, torch.Tensor) for one in by) and not names.get(SEVERAL_AT_ONCE)
        self.time += 1
        self.use(map(self.number, tensors_in((args, kwargs))))
        start, self.differentiating = self.time, True
        try:
            with own.inside(None):
                yield
        finally:
            self.differentiating = False
        self.time += 1
        numbers = tuple(self.number(one) for one in by) if plain else ()
        self.taken.append(Taken(start, self.time, numbers, plain))

    @contextmanager
    def take_otherwise(self) -> Iterator[None]:
        """Context: the forward runs a backward by other means (`loss.backward()`), which stages cannot share."""
        if self.differentiating:
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
        """New numbers for everything on a storage that was written to: its content is another."""
        fresh = []
        renumbered: dict[int, int] = {}
        for other in self.on_storage.get(_storage(tensor), []):
            old = self.number_of[other]
            if old not in renumbered:
                self.overwritten[old] = self.time
                renumbered[old] = len(self.made)
                fresh.append(len(self.made))
                self.made.append(self.time)
                self.depends.append(depends or self.depends[old])
                self.drawn.append((drawn or self.drawn[old]) and not (depends or self.depends[old]))
                self.last_use.append(-1)
                for table in (self.parameters, self.buffers):
                    if old in table:
                        table[renumbered[old]] = table[old]
            self.number_of[other] = renumbered[old]
        return fresh


def _storage(tensor: torch.Tensor) -> int:
    """What is one number for tensors that share memory; a sparse one has none to share."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _cost(func, args, kwargs, output, outputs: list[torch.Tensor]) -> float:
    """Floating-point operations, and elements of the result as `ELEMENT_COST` each."""
    elements = sum(t.numel() for t in outputs) if not _is_view(func) else 0
    flops = 0.0
    if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
        flops = flop_counter.sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
    elif func._overloadpacket in flop_counter.flop_registry:
        flops = flop_counter.flop_registry[func._overloadpacket](*args, **kwargs, out_val=output)
    return float(flops) + ELEMENT_COST * elements


def _is_view(func) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


class _Assignments(TorchFunctionMode):
    """Tells the recorder of every `tensor.data = value`."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:
            self.recorder.assign(*args)
        return result


@contextmanager
def _calls(module: nn.Module, recorder: _Recorder, root: ModuleCall, own: OwnCalls) -> Iterator[None]:
    """Write down every call of a submodule, but for those inside a `torch.func` transform: their caller is one op."""
    stack = [root]
    counts: dict[int, int] = {}
    handles = []

    def enter(child: nn.Module, args: tuple, kwargs: dict, path: str) -> None:
        if transforming() or recorder.differentiating:
            return
        recorder.time += 1
        leaves, _ = tree_flatten((args, kwargs))
        numbers = [recorder.number(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        place = counts.get(id(child), 0)
        counts[id(child)] = place + 1
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        call = ModuleCall(path, place, recorder.time, numbers, shapes)
        stack[-1].inside.append(call)
        stack.append(call)
        own.enter(call)

    def leave(child: nn.Module, args: tuple, output: Any) -> None:
        if transforming() or recorder.differentiating:
            return
        own.leave()
        recorder.time += 1
        call = stack.pop()
        call.exit = recorder.time
        leaves, call.spec = tree_flatten(output)
        call.leaves = [_leaf(leaf, recorder) for leaf in leaves]

    def begin(_: nn.Module, args: tuple, kwargs: dict) -> None:
        own.enter(root)  # what Task.inputs calls is not the forward's
        leaves, _ = tree_flatten((args, kwargs))
        root.arguments = [recorder.number(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

    handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
    handles.append(module.register_forward_hook(lambda m, a, o: own.leave()))
    seen: set[int] = set()
    for path, child in module.named_modules():
        if child is module or id(child) in seen:
            continue
        seen.add(id(child))
        handles.append(
            child.register_forward_pre_hook(lambda m, a, k, path=path: enter(m, a, k, path), with_kwargs=True)
        )
        handles.append(child.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaf(leaf: Any, recorder: _Recorder) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        return Leaf(recorder.number(leaf), None, tuple(leaf.shape), leaf.dtype)
    return Leaf(None, leaf)


def _flow(module: nn.Module, run: Callable[[], Any], known: dict[str, int]) -> Flow:
    """The flow of `run()`; `known`: name -> id under which the flow tells of a parameter or buffer.

    Without gradients; with them where the forward takes some itself.
    """
    try:
        flow = _followed(module, run, known, gradients=False)
        if not flow.taken and not flow.backwards:
            return flow
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    return _followed(module, run, known, gradients=True)


def _followed(module: nn.Module, run: Callable[[], Any], known: dict[str, int], *, gradients: bool) -> Flow:
    recorder = _Recorder(
        {id(param): known[name] for name, param in module.named_parameters()},
        {id(buffer): known[name] for name, buffer in module.named_buffers()},
    )
    root = ModuleCall("", 0, 0, [], [])
    made: dict[int, OwnCall] = {}
    functions: list[ModuleCall] = []
    begun = 0

    def before(whose: ModuleCall, place: int, name: str) -> None:
        nonlocal begun
        recorder.time += 1
        begun = recorder.time

    def note(whose: ModuleCall, place: int, name: str, output: Any) -> None:
        for leaf, tensor in enumerate(tree_flatten(output)[0]):
            number = recorder.number_of.get(id(tensor)) if isinstance(tensor, torch.Tensor) else None
            if number is not None:
                made.setdefault(number, OwnCall(whose, place, leaf, name))
        functions.append(ModuleCall(whose.path, whose.place, begun, [], [], recorder.time, own=(place, name)))

    own = OwnCalls(note, None, before)
    as_written = torch.jit.optimized_execution(False)  # else a scripted function does other operations every time
    taken = GradientWatch(partial(recorder.take, own))
    with (
        as_written, torch.set_grad_enabled(gradients), HooksLeftOut(), recorder, taken,
        _Assignments(recorder), own, other_backwards(recorder.take_otherwise), _calls(module, recorder, root, own),
    ):  # fmt: skip
        output = run()
    recorder.time += 1
    root.exit = end = recorder.time
    returned = [recorder.number(leaf) for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
    for number in returned:
        recorder.last_use[number] = end
    with torch.enable_grad(), HooksLeftOut(), switched_off(module) as off:
        run()  # the ops are written down without gradients, which hides where the forward itself does without
    return Flow(
        root, recorder.ops, recorder.made, recorder.depends, recorder.drawn, recorder.last_use,
        recorder.overwritten, recorder.parameters, recorder.buffers, returned, end, frozenset(off), made, functions,
        recorder.taken, recorder.backwards, recorder.stateful,
    )  # fmt: skip


def trace_forward(
    built: Built, run: Run, batch: Any, seed: int = 0, dtype_of: DtypeOf = lambda tensor: tensor.dtype
) -> tuple[Flow, str]:
    """The flow of `run(module, batch)` for a module without weights, and a notice where fake tensors did not do.

    dtype_of  the dtype in which a parameter or buffer is held when the module runs

    The module is left as it was. What the forward itself raises is raised.
    """
    module = built.module
    state = ModuleState(module)
    kept = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            try:
                return _fake(built, run, batch, dtype_of), ""
            except Exception as error:
                state.restore()
                first = str(error).splitlines()[0] if str(error) else ""
                few = not built.notice and sum(param.numel() for param in module.parameters()) <= FEW_ELEMENTS
                weights = "" if few else ", with all weights zero"
                notice = f"traced on real tensors{weights}, since shapes alone do not do: {first}"
                return _real(built, run, batch, dtype_of, few), notice
    finally:
        random.setstate(kept)
        state.restore()


def _known(module: nn.Module) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _fake(built: Built, run: Run, batch: Any, dtype_of: DtypeOf) -> Flow:
    module, known = built.module, _known(built.module)

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype_of(tensor), device="cpu")

    with unlogged(), Fake() as mode, standing_in(module, make):
        fake = tree_map_only(torch.Tensor, mode.from_tensor, batch)
        return _flow(module, lambda: run(module, fake), known)


def _real(built: Built, run: Run, batch: Any, dtype_of: DtypeOf, few: bool) -> Flow:
    """On real tensors; `few`: with their values, else with zeros for weights, whose pages are never written to."""
    module, known = built.module, _known(built.module)

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) and not few:
            return torch.zeros(tensor.shape, dtype=dtype_of(tensor))
        return built.value(name).to("cpu", dtype_of(tensor), copy=True)

    with standing_in(module, make):
        return _flow(module, lambda: run(module, batch), known)
