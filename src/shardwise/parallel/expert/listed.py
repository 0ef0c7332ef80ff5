"""Find mixtures whose experts are modules in a list, and try whether two forwards can run them (`two_passes`).

A candidate is a module that calls members of a list (`nn.ModuleList`, `nn.ModuleDict`) of one class and one set of
shapes, on rows that it chose. That is, an operation that chooses (`topk`, `argmax`, `nonzero`, a mask) ran in it,
outside of the experts, and members were given different tensors. On random weights it must then show that

    two forwards give the results and gradients of one
    an expert treats rows independently, f([a, b]) = [f(a), f(b)]

Names are not used. A chain of blocks fails the first, since a block's rows are another block's results.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.comm import Axis
from shardwise.errors import RunError
from shardwise.parallel.expert.choosing import Chosen, read_rows, sums_of_rows
from shardwise.parallel.expert.expert_forward import Stack
from shardwise.parallel.expert.expert_tensor import ReadOtherwise
from shardwise.parallel.expert.trial_weights import alike_weights, random_weights
from shardwise.parallel.expert.two_passes import Key, ListedExperts, RowsAsked, rows_of
from shardwise.python_seeds import python_restored
from shardwise.random.modes import ConstantRandom
from shardwise.trace.deferred import Built
from shardwise.trace.known_values import shadow
from shardwise.trace.leaves import tensors_in
from shardwise.trace.module_state import ModuleState
from shardwise.trace.stand_in import standing_in

_ATEN = torch.ops.aten
_CHOOSE = {_ATEN.topk, _ATEN.argmax, _ATEN.sort, _ATEN.argsort}
_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # times the largest absolute value
_IN_16_BITS = 0.02  # the same for 16-bit dtypes
_ROWS = 5  # of an expert's trial
_PLAIN = (bool, int, float, str)
_COMPARED = 2**16  # gradients of larger weights are not compared, since they follow from those of the rows


@dataclass(frozen=True)
class ListedCall:
    """A call of a mixture, and how it calls its experts.

    path          of the mixture;  members  paths of its experts
    args, kwargs  arguments of the mixture, with a `Described` in place of each tensor
    keys          the arguments by which an expert gets its rows, all of them; None: experts are called in other ways
    """

    path: str
    members: tuple[str, ...]
    args: tuple
    kwargs: dict
    keys: tuple[Key, ...] | None


@dataclass
class _List:
    """What a watched forward shows of one list of alike modules.

    members  module -> its path
    caller   the module that called a member first, with (args, kwargs) `given`; None: no member was called
    keys     as in `ListedCall`, of the first call
    rows     the first tensor of each member's call; None: no member was called
    alike    whether all calls come from one caller and use the same keys
    """

    members: dict[nn.Module, str]
    caller: nn.Module | None = None
    given: tuple[tuple, dict] = ((), {})
    keys: tuple[Key, ...] | None = None
    rows: list[torch.Tensor] | None = None
    alike: bool = True

    def note(self, caller: tuple[nn.Module, tuple, dict], args: tuple, kwargs: dict) -> None:
        """Records a call of a member with `args` and `kwargs`. `caller`: (calling module, its own args, kwargs)."""
        keys = (*range(len(args)), *kwargs)
        tensors = rows_of(keys, args, kwargs)
        if self.rows is None:
            self.caller, self.given = caller[0], caller[1:]
            self.keys, self.rows = keys if tensors else None, []
        self.alike &= self.caller is caller[0] and (keys if tensors else None) == self.keys
        self.rows += tensors_in((args, kwargs))[:1]

    @property
    def routed(self) -> bool:
        """Whether members got different tensors (if all got the same one, no rows were chosen), or one was called."""
        return self.rows is not None and (len(self.rows) == 1 or len(set(map(id, self.rows))) > 1)


class ListedCalls(TorchDispatchMode):
    """Mode that records how the members of lists of alike modules are called in a forward.

    paths    module -> its path;  lists  one `_List` for each list;  watched  whether there is anything to record
    outside  names of members' parameters that an operation read while no member of their list was running
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.paths = {child: path for path, child in module.named_modules()}
        self.lists = [_List({child: self.paths[child] for child in alike}) for alike in alike_lists(module)]
        self._of = {member: group for group in self.lists for member in group.members}
        self._weights = {id(param): (name, group) for group in self.lists for member, path in group.members.items()
                         for name, param in member.named_parameters(prefix=path)}  # fmt: skip
        self.watched = bool(self.lists)
        self._running: list[tuple[nn.Module, tuple, dict]] = []
        self._chose: set[tuple[nn.Module, ...]] = set()  # the modules that ran while something was chosen
        self.outside: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inside = [self._of.get(child) for child, _, _ in self._running]
        for leaf in tensors_in((args, kwargs or {})):
            name, group = self._weights.get(id(leaf), ("", None))
            if group is not None and group not in inside:
                self.outside.add(name)
        if func._overloadpacket in _CHOOSE or any(tag in func.tags for tag in _BY_VALUES):
            self._chose.add(tuple(child for child, _, _ in self._running))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the mode is active and knows which modules are running."""
        handles = []
        for child in self.paths if self.watched else ():
            handles += [
                child.register_forward_pre_hook(self._entered, with_kwargs=True),
                child.register_forward_hook(lambda m, a, o: self._left(), always_call=True),
            ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, child: nn.Module, args: tuple, kwargs: dict) -> None:
        if child in self._of and self._running:
            self._of[child].note(self._running[-1], args, kwargs)
        self._running.append((child, args, kwargs))

    def _left(self) -> None:
        self._running.pop()

    def calls(self) -> list[ListedCall]:
        """Returns one `ListedCall` for each list whose members may be experts, since their caller chose rows."""
        calls = []
        for group in self.lists:
            if group.caller is not None and group.routed and self._chooses(group):
                args, kwargs = tree_map_only(torch.Tensor, described, group.given)
                keys = group.keys if group.alike else None
                calls.append(ListedCall(self.paths[group.caller], tuple(group.members.values()), args, kwargs, keys))
        return calls

    def rows_alone(self, path: str) -> Chosen | None:
        """Returns the call of the mixture at `path` if rows (..., H) are its only tensor; else None."""
        group = next(group for group in self.lists if group.caller is not None and self.paths[group.caller] == path)
        return read_rows(*group.given)

    def _chooses(self, group: _List) -> bool:
        """Whether the caller, or a module that it called other than members, ran an operation that chooses."""
        chose = (running[running.index(group.caller) :] for running in self._chose if group.caller in running)
        return any(not any(child in group.members for child in inside) for inside in chose)


def alike_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields, for each list in `module`, its members that have weights, if these are two or more and alike.

    Alike are modules of one class whose weights have the same names and shapes.
    """
    for holder in module.modules():
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
            continue
        members = [child for child in holder.children() if next(child.parameters(), None) is not None]
        forms = {(type(child), *((name, tuple(p.shape)) for name, p in child.named_parameters())) for child in members}
        if len(members) > 1 and len(forms) == 1:
            yield members


@dataclass(frozen=True)
class Described:
    """A tensor of a call as its shape, dtype, and values; `values` is None for floats and for unknown integers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None


def described(tensor: torch.Tensor) -> Described:
    """Returns a tensor's description, for a fake tensor with the values that are known of it."""
    values = shadow(tensor) if isinstance(tensor, FakeTensor) else tensor.detach()
    return Described(tuple(tensor.shape), tensor.dtype, None if tensor.is_floating_point() else values)


# --- what is dealt


def dealt_lists(built: Built, listed: ListedCalls, ranks: int) -> tuple[list[Stack], list[str]]:
    """Returns (stacks of mixtures whose experts, modules in a list, can be dealt, [why others cannot]).

    listed  what one forward has shown;  ranks  size of ep
    """
    stacks, reasons = [], []
    # text of a mixture's form -> outcome of its trial, since most layers of a model are alike
    tried: dict[str, Exception | bool] = {}
    for call in listed.calls():
        told, experts = f"'{call.path}' gives rows to the modules of a list", len(call.members)
        try:
            if experts % ranks:
                raise FailedTrial(f"there are {experts}, which cannot be dealt evenly over {ranks} ranks")
            names = _names_of_members(built.module, call.members)
            form = form_of(built.module, call)
            if form not in tried:
                tried[form] = _outcome(built, call)
            outcome = tried[form]
            if isinstance(outcome, Exception):
                raise outcome
        except Chained:  # an ordinary list of blocks
            continue
        except FailedTrial as failed:
            reasons.append(f"{told}, but {failed}")
            continue
        used = sorted(listed.outside & set(names))
        if used:
            reasons.append(f"{told}, but '{used[0]}' is used outside of its module, where a rank has only its own")
            continue
        # without `call`, if its input is no single tensor of rows or rows interact, it is still dealt, but refused
        # together with axes that cut positions, which need a call with a rank's rows alone (engine/experts)
        own = listed.rows_alone(call.path)
        sums = None if own is None else sums_of_rows(
            built.module.get_submodule(call.path), own, random_weights(built, call.path)
        )  # fmt: skip
        stacks.append(Stack(
            call.path, experts, names, None if own is None or sums is None else own.call, (),
            tuple((sums or {}).items()), call.members, call.keys or (), outcome,
        ))  # fmt: skip
    return stacks, reasons


def form_of(module: nn.Module, call: ListedCall) -> str:
    """Returns text that is equal for calls of mixtures of the same classes, plain attributes, shapes and arguments."""
    child = module.get_submodule(call.path)
    modules = [
        (path, type(inner), {key: _told_of(value) for key, value in vars(inner).items()})
        for path, inner in child.named_modules()
    ]
    shapes = [(name, tuple(param.shape), param.requires_grad) for name, param in child.named_parameters()]
    members = [path.removeprefix(call.path) for path in call.members]
    return repr((modules, shapes, members, call.keys, call.args, call.kwargs))


def _told_of(value: Any) -> Any:
    """Returns a plain value itself, the name of a function or class, and "" for any other attribute."""
    return value if isinstance(value, _PLAIN) else getattr(value, "__qualname__", "")


def _outcome(built: Built, call: ListedCall) -> Exception | bool:
    """Returns the exception that the trial of a mixture raises; if it passes, whether experts use random numbers."""
    try:
        return try_listed(built.module, call, partial(alike_weights, built, call.path, call.members))
    except (FailedTrial, Chained) as failed:
        return failed


def _names_of_members(module: nn.Module, members: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of all weights of the members.

    Raises `FailedTrial` for a weight that several modules hold, or without dims, since it cannot have size 0 elsewhere.
    """
    names = [(name, param) for path in members for name, param in module.get_submodule(path).named_parameters(path)]
    homes = Counter(id(param) for child in module.modules() for param in child._parameters.values())
    several = Counter(id(param) for _, param in names)  # more than 1 if several members hold the same submodule
    for name, param in names:
        if homes[id(param)] > 1 or several[id(param)] > 1:
            raise FailedTrial(f"'{name}' is held by several modules, and lies on the ranks of one expert alone")
        if not param.dim():
            raise FailedTrial(f"'{name}' is one number without dims, of which a rank cannot hold no rows")
    return tuple(name for name, _ in names)


# --- the trial


class FailedTrial(Exception):
    """Raised if experts cannot be dealt; its text is the reason, for a refusal."""


class Chained(Exception):
    """Raised if a member's rows depend on another member's result, as in a chain of blocks, or on earlier calls."""


Make = Callable[[torch.dtype, torch.Generator], Callable[[str, torch.Tensor], torch.Tensor]]


def try_listed(module: nn.Module, call: ListedCall, make: Make, listed: ListedExperts | None = None) -> bool:
    """Whether a mixture's experts use random numbers, if it passes the trial; else raises `FailedTrial` or `Chained`.

    call    of the mixture
    make    (dtype, generator) -> function from (name in the mixture, tensor) to what stands in for it
    listed  runs the mixture's forward twice; None: a `ListedExperts` of the call's members
    """
    if call.keys is None:
        raise FailedTrial("its modules are called with other things than rows (n, ...) alone, or in several ways")
    try:
        return _try_in(torch.float64, module, call, make, listed)
    except (FailedTrial, Chained):
        raise
    except Exception as error:  # a kernel without float64, or any error of the module's own
        try:
            return _try_in(torch.float32, module, call, make, listed)
        except (FailedTrial, Chained):
            raise
        except Exception:
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise FailedTrial(f"it fails on random weights ({told})") from error


def _try_in(
    dtype: torch.dtype, module: nn.Module, call: ListedCall, make: Make, given: ListedExperts | None
) -> bool:  # fmt: skip
    """Returns, or raises, what `try_listed` does, from a trial on random weights of this dtype.

    torch's random operations give a constant meanwhile, since two forwards call them in another order than one.
    """
    child = module.get_submodule(call.path)
    generator = torch.Generator().manual_seed(0)
    experts = [module.get_submodule(path) for path in call.members]
    state, training = ModuleState(child), {inner: inner.training for inner in child.modules()}
    for inner in training:
        inner.training = True  # as in a step, so that dropout is seen
    try:
        draws = torch.random.fork_rng(devices=[]), python_restored()
        with draws[0], draws[1], torch.enable_grad(), standing_in(child, make(dtype, generator)):
            inputs = _inputs(call, dtype, generator)
            compared = [param for param in child.parameters() if param.numel() <= _COMPARED]
            for param in child.parameters():
                param.requires_grad_(param.numel() <= _COMPARED)
            one = _result(child, inputs, compared, generator)
            state.restore()
            listed = given or ListedExperts(call.path, experts, call.keys or (), Axis.alone("ep"))
            own = child.forward
            try:
                two = _result(lambda *a, **k: listed.run(child, own, a, k), inputs, compared, generator)
            except RunError as error:
                if isinstance(error.__cause__, ReadOtherwise):
                    raise FailedTrial(str(error.__cause__)) from error
                raise Chained("rows change once experts give results") from error
            if not _same(one, two, dtype):
                raise Chained("two forwards do not give what one gives")
            with torch.no_grad():
                return _rows_apart(listed, listed.asked(child, own, *inputs), dtype, generator)
    finally:
        state.restore()
        for inner, was_training in training.items():
            inner.training = was_training


def _inputs(call: ListedCall, dtype: torch.dtype, generator: torch.Generator) -> tuple[tuple, dict]:
    """Returns (args, kwargs) of a mixture's call, with random floats, and integers as they were; or `FailedTrial`."""

    def made(form: Described) -> torch.Tensor:
        """Returns a tensor for a described one."""
        if form.dtype.is_floating_point:
            return torch.randn(form.shape, generator=generator, dtype=dtype).requires_grad_()
        if form.values is None:
            raise FailedTrial("it is called with integers whose values are not known before the first step")
        return form.values.clone()

    return tree_map_only(Described, made, (call.args, call.kwargs))


Outcome = tuple[list[torch.Tensor], list[torch.Tensor | None]]  # (float results, gradients; None: not reached)


def _result(
    run: Callable[..., Any], inputs: tuple[tuple, dict], weights: Sequence[torch.Tensor], generator: torch.Generator
) -> Outcome:
    """Returns ([float results of `run`], [gradient of each float input and weight, of a random weighting of these]).

    Raises `FailedTrial` if no result requires a gradient.
    """
    generator.manual_seed(1)
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor * 1, inputs)  # a forward may write into them
    with ConstantRandom().watching(nn.Module()):
        made = [tensor for tensor in tensors_in(run(*args, **kwargs)) if tensor.is_floating_point()]
    trained = [tensor for tensor in made if tensor.requires_grad]
    if not trained:
        raise FailedTrial("what it gives has no gradient")
    weighted = sum((tensor * torch.randn(tensor.shape, generator=generator)).sum() for tensor in trained)
    floats = [tensor for tensor in tensors_in(inputs) if tensor.is_floating_point()]
    gradients = torch.autograd.grad(weighted, [*floats, *weights], allow_unused=True)
    return [tensor.detach() for tensor in made], list(gradients)


def _same(one: Outcome, two: Outcome, dtype: torch.dtype) -> bool:
    """Whether two outcomes agree up to rounding, and gradients are None in the same places."""
    pairs = [*zip(one[0], two[0], strict=True), *zip(one[1], two[1], strict=True)]
    return all(_close(a, b, dtype) if a is not None and b is not None else a is b for a, b in pairs)


def _close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors have one shape, agree up to rounding in `dtype`, and `b` is finite."""
    if a.shape != b.shape or not b.numel():
        return a.shape == b.shape
    return bool(((a - b).abs().max() <= _TOLERANCE.get(dtype, _IN_16_BITS) * b.abs().max()) & b.isfinite().all())


def _rows_apart(
    listed: ListedExperts, asked: Sequence[RowsAsked], dtype: torch.dtype, generator: torch.Generator
) -> bool:
    """Whether experts use torch's random numbers; raises `FailedTrial` if a row's result depends on other rows.

    asked   the calls of experts in one forward, of which the first is tried
    """
    draws = False
    for call in asked[:1]:  # one is enough, since experts are of one class and one set of shapes
        # in the dtypes of the call, in which the mixture may have cast its rows
        tensors = [torch.randn((_ROWS, *tensor.shape[1:]), generator=generator, dtype=dtype).to(tensor.dtype)
                   if tensor.is_floating_point() else tensor[:1].expand(_ROWS, *tensor.shape[1:])
                   for tensor in call.tensors]  # fmt: skip
        before, by_python = torch.get_rng_state(), random.getstate()
        listed.call(call.expert, tensors)
        draws = not torch.equal(before, torch.get_rng_state())
        if by_python != random.getstate():  # one sequence of numbers for all experts, of which a rank runs only some
            raise FailedTrial("an expert draws by Python's generator, and its rank runs other experts than one process")
        with ConstantRandom().watching(nn.Module()):
            together = listed.call(call.expert, tensors)
        if together.shape[:1] != (_ROWS,):
            raise FailedTrial("an expert does not give one row for each that it is given")
        with ConstantRandom().watching(nn.Module()):
            each = [listed.call(call.expert, [tensor[row, None] for tensor in tensors]) for row in range(_ROWS)]
        if not _close(torch.cat(each), together, together.dtype):
            raise FailedTrial("an expert's result for a row depends on its other rows (batch norm)")
    return draws
