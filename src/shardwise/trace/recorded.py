"""Record one forward as a `Flow` (trace/flow): its ops, its submodules' calls, the gradients it takes itself.

The forward runs under a dispatch mode that numbers tensors. It runs without gradients, unless it asks whether they are
on, or takes some itself. The ops of that backward are recorded too, marked as `inner`; calls and uses inside it do not
count, since a pipeline stage runs it where its forward was.

What this does not do: follow a value that leaves PyTorch (`.item()`, numpy) and comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.device import seed_generators
from shardwise.trace.backwards import GradientWatch, watching_backwards
from shardwise.trace.deferred import Built
from shardwise.trace.fake import Fake, unlogged
from shardwise.trace.flow import Attribute, Flow, Leaf, ModuleCall, OwnCall
from shardwise.trace.functional import transforming
from shardwise.trace.generators import shared_states
from shardwise.trace.module_state import ModuleState
from shardwise.trace.numbered import Assignments, Recorder
from shardwise.trace.own_calls import OwnCalls, Spot
from shardwise.trace.remembered import AttributeWatch, ForwardState, structure
from shardwise.trace.stand_in import standing_in
from shardwise.trace.tensors_in_objects import hidden
from shardwise.trace.without_gradient import HooksLeftOut, switched_off

IN_A_ROW = 3  # forwards that are recorded if one leaves state for the next
FEW_ELEMENTS = 2**27  # of parameters, up to which a trace on real tensors uses their values, and else zeros

Run = Callable[[nn.Module, Any], Any]  # (module, batch) -> output
DtypeOf = Callable[[torch.Tensor], torch.dtype]


@contextmanager
def _calls(
    module: nn.Module, recorder: Recorder, root: ModuleCall, own: OwnCalls, watch: AttributeWatch | None
) -> Iterator[None]:  # fmt: skip
    """Context that records every call of a submodule below `root`; a `torch.func` transform counts as one op.

    own    follows calls of torch functions, by the module whose forward runs
    watch  told of each begin and end of a call; None: attributes are not watched
    """
    stack, structures = [root], list[Any]()
    counts: dict[int, int] = {}
    handles = []

    def enter(child: nn.Module, args: tuple, kwargs: dict, path: str) -> None:
        # inside a transform, and inside a gradient, a module's call is part of that operation
        if transforming() or recorder.differentiating:
            return
        recorder.time += 1
        # tells inside which call an attribute changed
        if watch is not None:
            watch.moment(recorder.time, stack)
        # `leave` compares: what the call has changed beside tensors
        structures.append(structure(child))
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
        if watch is not None:
            watch.moment(recorder.time, stack)
        # numbers or structure of its attributes changed: neither it nor a call around it may be left out by a stage
        if structures.pop() != structure(child):
            for caller in stack:
                caller.moves = True
        call = stack.pop()
        call.exit = recorder.time
        leaves, call.spec = tree_flatten(output)
        call.leaves = [_leaf(leaf, recorder) for leaf in leaves]

    def begin(_: nn.Module, args: tuple, kwargs: dict) -> None:
        own.enter(root)  # only now, since calls by Task.inputs are not the forward's
        leaves, _ = tree_flatten((args, kwargs))
        root.arguments = [recorder.number(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]

    handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
    handles.append(module.register_forward_hook(lambda m, a, o: own.leave()))
    seen: set[int] = set()
    for path, child in module.named_modules():
        if child is module or id(child) in seen:  # one module under two names is entered once a call
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


def _leaf(leaf: Any, recorder: Recorder) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        return Leaf(recorder.number(leaf), None, tuple(leaf.shape), leaf.dtype)
    return Leaf(None, leaf)


def _flow(module: nn.Module, forward: Callable[[], Any], ids: dict[str, int], seed: int) -> Flow:
    """Returns the flow of `forward()`, run without gradients unless it takes some itself or asks whether they are on.

    ids   name -> id under which the flow records a parameter or buffer
    seed  of the random generators, which are set to it before each run
    """
    state, left, stood = ModuleState(module), ForwardState(module), list[Any]()

    def run() -> Any:
        seed_generators(seed)
        random.seed(seed)
        np.random.seed(seed)
        stood[:] = [shared_states()]
        return forward()

    gradients = False
    try:
        flow, _ = _followed(module, run, ids, gradients=False)
        gradients = bool(flow.taken or flow.backwards)
    except RuntimeError as error:
        # a backward that the forward runs itself fails where gradients are off
        if "does not require grad" not in str(error):
            raise
        gradients = True
    if gradients:
        state.restore()  # the second run must find the module as the first one did
        flow, _ = _followed(module, run, ids, gradients=True)
    places = left.changed()
    state.restore()
    with torch.enable_grad(), HooksLeftOut(), switched_off(module) as seen:
        run()  # with gradients on, to see where the forward itself switches them off
        moved = shared_states() != stood[0]
    state.restore()
    # another number of calls with gradients on: the forward asks whether they are, and does more then
    if not gradients and seen.calls != len(flow.order) + len(flow.functions):
        gradients = True
        flow, _ = _followed(module, run, ids, gradients=True)
        state.restore()
    if places:
        # it changes attributes, and only further forwards show whether they read what it left
        flow = _in_a_row(module, run, ids, gradients, places) or flow
        state.restore()
    flow.without_gradient, flow.moved = frozenset(seen.off), moved
    return flow


def _in_a_row(
    module: nn.Module, run: Callable[[], Any], ids: dict[str, int], gradients: bool, places: list[Attribute]
) -> Flow | None:
    """Returns the first of `IN_A_ROW` forwards' flows, its `later` the others; None if it leaves nothing for them.

    run, ids   as in `_followed`
    gradients  whether gradients are on
    places     the attributes that a forward changes
    """
    recorders, flows, structures = list[Recorder](), list[Flow](), list[Any]()
    for _ in range(IN_A_ROW):
        watch = AttributeWatch(module, places)
        flow, recorder = _followed(module, run, ids, gradients=gradients, earlier=list(recorders), watch=watch)
        flow.changes = watch.changes
        recorders.append(recorder)
        flows.append(flow)
        structures.append(watch.structure())
    first = flows[0]
    first.later = flows[1:]
    same = all(flow.outline == first.outline and structures[0] == structures[-1] for flow in flows)
    changes = [change for flow in flows for change in flow.changes]
    # a buffer that its own layer sets, with no call inside, lies in the stage of that layer whatever the cut
    within = all(change.call.path == change.place[0] and not change.call.inside for change in changes)
    # all forwards run the same ops, and what they carry over are buffers that their own layers set
    if same and not any(number not in flow.buffers or not within for flow in flows for number in flow.carried):
        return None
    for flow in flows:
        flow.forget_what_is_left()
    return first


def _followed(
    module: nn.Module, run: Callable[[], Any], ids: dict[str, int], *, gradients: bool,
    earlier: Sequence[Recorder] = (), watch: AttributeWatch | None = None,
) -> tuple[Flow, Recorder]:  # fmt: skip
    """Returns (one forward's flow, the recorder that wrote it).

    run        runs the forward and returns its output
    ids        name -> id under which the flow records a parameter or buffer
    gradients  whether gradients are on
    earlier    recorders of the forwards before, whose tensors this one may find
    watch      records changes of attributes; None: nothing does
    """
    recorder = Recorder(
        {id(param): ids[name] for name, param in module.named_parameters() if name in ids},
        {id(buffer): ids[name] for name, buffer in module.named_buffers() if name in ids},  # not those made since
        earlier,
    )
    root = ModuleCall("", 0, 0, [], [])
    made: dict[int, OwnCall] = {}
    functions: list[ModuleCall] = []
    begun = 0

    # a stage may also begin at a torch function that a module's own code calls, so these calls have times too
    def before(whose: ModuleCall, place: Spot, name: str) -> None:
        nonlocal begun
        recorder.time += 1
        begun = recorder.time

    def note(whose: ModuleCall, place: Spot, name: str, output: Any) -> None:
        for leaf, tensor in enumerate(tree_flatten(output)[0]):
            number = recorder.number_of.get(id(tensor)) if isinstance(tensor, torch.Tensor) else None
            if number is not None:
                made.setdefault(number, OwnCall(whose, place, leaf, name))
        functions.append(ModuleCall(whose.path, whose.place, begun, [], [], recorder.time, own=(place, name)))

    own = OwnCalls(note, None, before)
    as_written = torch.jit.optimized_execution(False)  # else a scripted function may run other ops each time
    taken = GradientWatch(partial(recorder.take, own))
    with (
        as_written, torch.set_grad_enabled(gradients), HooksLeftOut(), recorder, taken, Assignments(recorder), own,
        watching_backwards(recorder.take_otherwise), _calls(module, recorder, root, own, watch),
    ):  # fmt: skip
        output = run()
    recorder.time += 1
    if watch is not None:
        watch.moment(recorder.time, [root])
    root.exit = end = recorder.time
    leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
    returned = [recorder.number(leaf) for leaf in (*leaves, *hidden(output))]
    for number in returned:
        recorder.last_use[number] = end
    flow = Flow(
        root, recorder.ops, recorder.made, recorder.depends, recorder.drawn, recorder.last_use,
        recorder.overwritten, recorder.parameters, recorder.buffers, returned, end, frozenset(), made, functions,
        recorder.taken, recorder.backwards, recorder.sized, recorder.rewrites, recorder.stateful,
        carried=recorder.carried,
    )  # fmt: skip
    return flow, recorder


def trace_forward(
    built: Built, run: Run, batch: Any, seed: int = 0, dtype_of: DtypeOf = lambda tensor: tensor.dtype
) -> tuple[Flow, str]:
    """Returns (flow of `run(module, batch)` for a module without weights, notice).

    The notice says why real tensors were needed; "" if the forward ran on fake ones.

    seed      of the random generators
    dtype_of  parameter or buffer -> the dtype in which it is held when the module runs

    The module is left as it was. What the forward itself raises is raised.
    """
    module = built.module
    state = ModuleState(module)
    kept = random.getstate(), np.random.get_state()
    try:
        # the caller's generators are restored: torch's here, Python's and numpy's below
        with torch.random.fork_rng(devices=[]):
            try:
                return _fake(built, run, batch, dtype_of, seed), ""
            # retried on real tensors: an error of the forward's own comes again, one due to fake tensors does not
            except Exception as error:
                state.restore()
                first = str(error).splitlines()[0] if str(error) else ""
                few = not built.notice and sum(param.numel() for param in module.parameters()) <= FEW_ELEMENTS
                weights = "" if few else ", with all weights zero"
                notice = f"traced on real tensors{weights}, since shapes alone do not do: {first}"
                return _real(built, run, batch, dtype_of, few, seed), notice
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        state.restore()


def _ids(module: nn.Module) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _fake(built: Built, run: Run, batch: Any, dtype_of: DtypeOf, seed: int) -> Flow:
    """Returns the flow of a forward on fake tensors. `dtype_of`, `seed`: as in `trace_forward`."""
    module, ids = built.module, _ids(built.module)

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype_of(tensor), device="cpu")

    with unlogged(), Fake() as mode, standing_in(module, make):
        fake = tree_map_only(torch.Tensor, mode.from_tensor, batch)
        return _flow(module, lambda: run(module, fake), ids, seed)


def _real(built: Built, run: Run, batch: Any, dtype_of: DtypeOf, few: bool, seed: int) -> Flow:
    """Returns the flow on real tensors. `few`: whether weights get their values; else unwritten pages of zeros."""
    module, ids = built.module, _ids(built.module)

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) and not few:
            return torch.zeros(tensor.shape, dtype=dtype_of(tensor))
        return built.value(name).to("cpu", dtype_of(tensor), copy=True)

    with standing_in(module, make):
        return _flow(module, lambda: run(module, batch), ids, seed)
