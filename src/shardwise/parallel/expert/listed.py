"""Find mixtures whose experts are modules of their own, in a list, and try whether two forwards can run them.

A candidate is a module that calls members of a list (`nn.ModuleList`, `nn.ModuleDict`) of one class and one set of
shapes, on rows that it chose: an operation that chooses (`topk`, `argmax`, `nonzero`, a mask) ran in it, outside of the
experts, and they were given different tensors. On random weights it must then show that

    two forwards (`two_passes`) give what one gives, results and gradients
    an expert treats rows apart: f([a, b]) = [f(a), f(b)]

Names mean nothing. A chain of blocks fails the first: a block's rows are what another gave.
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
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest value
_IN_16_BITS = 0.02
_ROWS = 5
_PLAIN = (bool, int, float, str)
_COMPARED = 2**16  # elements of an expert's weight whose gradient is compared: those of others follow from its rows'


@dataclass(frozen=True)
class ListedCall:
    """A mixture's call: its path, its arguments without tensors' values, and how its experts are called.

    members  paths of the experts
    keys     the arguments by which an expert gets its rows; None: it is called otherwise
    """

    path: str
    members: tuple[str, ...]
    args: tuple
    kwargs: dict
    keys: tuple[Key, ...] | None


@dataclass
class _List:
    """A list of alike modules while a forward is watched; see `ListedCall`."""

    members: dict[nn.Module, str]
    caller: nn.Module | None = None
    given: tuple[tuple, dict] = ((), {})  # to the caller
    keys: tuple[Key, ...] | None = None
    rows: list[torch.Tensor] | None = None  # the first tensor of each call
    alike: bool = True  # all calls come from one caller, by the same keys

    def note(self, caller: tuple[nn.Module, tuple, dict], args: tuple, kwargs: dict) -> None:
        """Add a call of a member."""
        keys = (*range(len(args)), *kwargs)
        tensors = rows_of(keys, args, kwargs)
        if self.rows is None:
            self.caller, self.given = caller[0], caller[1:]
            self.keys, self.rows = keys if tensors else None, []
        self.alike &= self.caller is caller[0] and (keys if tensors else None) == self.keys
        self.rows += tensors_in((args, kwargs))[:1]

    @property
    def routed(self) -> bool:
        """Whether members were given different tensors: where all get one, none of its rows was chosen."""
        return self.rows is not None and (len(self.rows) == 1 or len(set(map(id, self.rows))) > 1)


class ListedCalls(TorchDispatchMode):
    """Mode that watches which lists of alike modules are called as experts are.

    outside  names of members' parameters that an operation read while none of their list ran
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
        """Context: notes which modules run."""
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
        """Returns the calls of lists whose members may be experts."""
        calls = []
        for group in self.lists:
            if group.caller is not None and group.routed and self._chooses(group):
                args, kwargs = tree_map_only(torch.Tensor, described, group.given)
                keys = group.keys if group.alike else None
                calls.append(ListedCall(self.paths[group.caller], tuple(group.members.values()), args, kwargs, keys))
        return calls

    def rows_alone(self, path: str) -> Chosen | None:
        """Returns the call of a mixture where rows (..., H) are its only tensor; else None."""
        group = next(group for group in self.lists if group.caller is not None and self.paths[group.caller] == path)
        return read_rows(*group.given)

    def _chooses(self, group: _List) -> bool:
        """Whether the caller chose something itself, or a module that it called, members aside."""
        chose = (running[running.index(group.caller) :] for running in self._chose if group.caller in running)
        return any(not any(child in group.members for child in inside) for inside in chose)


def alike_lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the members of each list of two or more modules of one class, with weights of the same shapes."""
    for holder in module.modules():
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
            continue
        members = [child for child in holder.children() if next(child.parameters(), None) is not None]
        forms = {(type(child), *((name, tuple(p.shape)) for name, p in child.named_parameters())) for child in members}
        if len(members) > 1 and len(forms) == 1:  # a dropout may lie beside them
            yield members


@dataclass(frozen=True)
class Described:
    """A tensor of a call: its shape and dtype, and the values of integers where they are known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor | None


def described(tensor: torch.Tensor) -> Described:
    values = shadow(tensor) if isinstance(tensor, FakeTensor) else tensor.detach()
    return Described(tuple(tensor.shape), tensor.dtype, None if tensor.is_floating_point() else values)


# --- what is dealt


def dealt_lists(built: Built, listed: ListedCalls, ranks: int) -> tuple[list[Stack], list[str]]:
    """Returns (mixtures whose experts, modules in a list, can be dealt, [why another one's cannot])."""
    stacks, reasons = [], []
    tried: dict[str, Exception | bool] = {}  # layers of a model are mostly alike
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
        except Chained:  # as most lists of a module are: no experts
            continue
        except FailedTrial as failed:
            reasons.append(f"{told}, but {failed}")
            continue
        used = sorted(listed.outside & set(names))
        if used:
            reasons.append(f"{told}, but '{used[0]}' is used outside of its module, where a rank has only its own")
            continue
        # one whose input is no tensor of rows, or where one row hangs on others, is dealt all the same, but not
        # beside axes that cut positions, where it would be given a rank's rows alone (engine/experts: rows_alone)
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
    """Returns text that is the same for mixtures of the same classes, plain attributes, shapes and arguments."""
    child = module.get_submodule(call.path)
    modules = [
        (path, type(inner), {key: _told_of(value) for key, value in vars(inner).items()})
        for path, inner in child.named_modules()
    ]
    shapes = [(name, tuple(param.shape), param.requires_grad) for name, param in child.named_parameters()]
    members = [path.removeprefix(call.path) for path in call.members]
    return repr((modules, shapes, members, call.keys, call.args, call.kwargs))


def _told_of(value: Any) -> Any:
    """Returns what tells attributes apart that decide what a forward computes: a plain value, a function's name."""
    return value if isinstance(value, _PLAIN) else getattr(value, "__qualname__", "")


def _outcome(built: Built, call: ListedCall) -> Exception | bool:
    """Returns what the trial of a mixture raises; where it may be dealt, whether its experts draw."""
    try:
        return try_listed(built.module, call, partial(alike_weights, built, call.path, call.members))
    except (FailedTrial, Chained) as failed:
        return failed


def _names_of_members(module: nn.Module, members: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of all their weights; `FailedTrial` for one that others hold too, or that has no rows."""
    names = [(name, param) for path in members for name, param in module.get_submodule(path).named_parameters(path)]
    homes = Counter(id(param) for child in module.modules() for param in child._parameters.values())
    several = Counter(id(param) for _, param in names)  # those of one module that several members hold
    for name, param in names:
        if homes[id(param)] > 1 or several[id(param)] > 1:
            raise FailedTrial(f"'{name}' is held by several modules, and lies on the ranks of one expert alone")
        if not param.dim():
            raise FailedTrial(f"'{name}' is one number without dims, of which a rank cannot hold no rows")
    return tuple(name for name, _ in names)


# --- the trial


class FailedTrial(Exception):
    """The reason why modules in a list are no experts that can be dealt, for a refusal's text."""


class Chained(Exception):
    """Modules of a list whose rows hang on what another of them gave, as a chain of blocks is, or on earlier calls."""


Make = Callable[[torch.dtype, torch.Generator], Callable[[str, torch.Tensor], torch.Tensor]]


def try_listed(module: nn.Module, call: ListedCall, make: Make, listed: ListedExperts | None = None) -> bool:
    """Returns whether experts draw. Raises `FailedTrial`, or `Chained`, where two forwards do not give what one gives.

    make    (dtype, generator) -> function that gives random weights by (name in the mixture, parameter)
    listed  what runs the mixture twice; None: the call's members
    """
    if call.keys is None:
        raise FailedTrial("its modules are called with other things than rows (n, ...) alone, or in several ways")
    try:
        return _try_in(torch.float64, module, call, make, listed)
    except (FailedTrial, Chained):
        raise
    except Exception as error:  # kernels without float64, or anything of the module's own
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
    """Returns whether experts draw. Raises `FailedTrial`, or `Chained`, unless two forwards give what one gives.

    On random weights of this dtype. What is drawn by torch's operations is one number for all: two forwards draw in
    another order.
    """
    child = module.get_submodule(call.path)
    generator = torch.Generator().manual_seed(0)
    experts = [module.get_submodule(path) for path in call.members]
    state, training = ModuleState(child), {inner: inner.training for inner in child.modules()}
    for inner in training:
        inner.training = True  # as in a step: a constructor may leave it otherwise, and what draws does so then
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
    """Returns arguments of a mixture's call: random floats, integers as they were."""

    def made(form: Described) -> torch.Tensor:
        if form.dtype.is_floating_point:
            return torch.randn(form.shape, generator=generator, dtype=dtype).requires_grad_()
        if form.values is None:
            raise FailedTrial("it is called with integers whose values are not known before the first step")
        return form.values.clone()

    return tree_map_only(Described, made, (call.args, call.kwargs))


Outcome = tuple[list[torch.Tensor], list[torch.Tensor | None]]


def _result(
    run: Callable[..., Any], inputs: tuple[tuple, dict], weights: Sequence[torch.Tensor], generator: torch.Generator
) -> Outcome:
    """Returns ([float tensors that a mixture gives], [gradient of each input and weight]); raises `FailedTrial`."""
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
    pairs = [*zip(one[0], two[0], strict=True), *zip(one[1], two[1], strict=True)]
    return all(_close(a, b, dtype) if a is not None and b is not None else a is b for a, b in pairs)


def _close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    if a.shape != b.shape or not b.numel():
        return a.shape == b.shape
    return bool(((a - b).abs().max() <= _TOLERANCE.get(dtype, _IN_16_BITS) * b.abs().max()) & b.isfinite().all())


def _rows_apart(
    listed: ListedExperts, asked: Sequence[RowsAsked], dtype: torch.dtype, generator: torch.Generator
) -> bool:
    """Returns whether experts draw. Raises `FailedTrial` where their result for a row depends on other rows."""
    draws = False
    for call in asked[:1]:  # they are of one class and one set of shapes
        # of its own dtype, which a cast of the module's may have made
        tensors = [torch.randn((_ROWS, *tensor.shape[1:]), generator=generator, dtype=dtype).to(tensor.dtype)
                   if tensor.is_floating_point() else tensor[:1].expand(_ROWS, *tensor.shape[1:])
                   for tensor in call.tensors]  # fmt: skip
        before, by_python = torch.get_rng_state(), random.getstate()
        listed.call(call.expert, tensors)
        draws = not torch.equal(before, torch.get_rng_state())
        if by_python != random.getstate():  # which all ranks draw alike, each for its own experts
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
