"""`Part`: a tensor of which a rank holds some indices of one dim; `rule` and `FUNCTIONS` register operations.

Its shape is the whole tensor's; its storage holds this rank's share. An operation on parts is answered by a rule that
gives exactly what the whole tensors would: local where indices stay apart, with a collective where they meet. Since
autograd runs above the rules, backward is made of the same operations and needs no bookkeeping of its own:

    x (plain)  @ W' cut by columns      -> cut by columns              no communication
    y (cut)    @ W' cut by rows         -> plain                       all-reduce
    backward   dy (cut) @ W (cut)       -> dx plain                    all-reduce

A plain tensor is the same on all ranks of the axis. What has no rule raises `Uncut`, naming the operation, on all
ranks alike, since rules look at global metadata alone.

Several axes: what a part of an outer axis holds may itself be a part, or a sum, over an axis further in. Rules are
written for one axis. Each is applied for the outermost axis among an operation's inputs; what it does with the local
tensors is again an operation, which is answered for the next axis, until tensors are plain:

    (B, S, H) cut over cp along S, over tp along H       Part[cp, dim 1] of Part[tp, dim 2] of (B, S/cp, H/tp)
    the same summed over tp                              Part[cp, dim 1] of Sum[tp] of (B, S/cp, H)
    gradient of a weight cut by tp, from cut positions   Sum[cp] of Part[tp, dim 0] of (O/tp, H)
    S cut over cp, then over tp (sequence parallelism)   Part[cp, dim 1] of Part[tp, dim 1]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch

from shardwise.comm import Axis
from shardwise.part.cuts import REMEMBERED, Owners, Uncut
from shardwise.part.levels import Distributed, answered, here
from shardwise.trace.elementwise import draws_each
from shardwise.trace.leaves import tensors_in

Rule = Callable[[Any, tuple, dict], Any]
# dtypes that no communication backend sends -> the dtype as which they are sent
UNSENT = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
RESHAPES = ("transpose_", "t_", "unsqueeze_", "squeeze_", "swapaxes_", "swapdims_")  # change a tensor's shape in place
RULES: dict[str, Rule] = {}  # name of an ATen operation -> how it is done on parts
FUNCTIONS: dict[Callable, Callable] = {}  # functions above autograd whose backward would otherwise not see the part
GATHERS: list[Callable[[str, Any], None]] = []  # called with (description, part) gathered over an axis of positions
MARGINS: list[Callable] = []  # (function, args, kwargs) of parts with a margin -> result, or None if it has no answer


def tell(what: str, part: Part) -> None:
    """Calls the listeners in `GATHERS` with `what` (a description for the user) and the `part` that is gathered."""
    for listener in GATHERS:
        listener(what, part)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that registers a function as the rule of these ATen operations.

    The operations' label rule (`part/labels`) says whether weights may be cut along dims that go through them.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


class Part(Distributed):
    """This rank's share of a tensor: `local`, cut along `dim_cut`, whose indices `owners` deals over `axis`.

    may_gather  Whether an operation without a rule may gather it, since the plan gathers it anyway (sequence
                parallelism); the constructor makes it False for floats and complex numbers over an axis of positions
    origin      name of the weight whose cut it derives from, "" if none
    rows        (B, S) if this is a (B, S, K) tensor viewed as (B * S, K), else None
    """

    __module__ = "torch"  # where opt_einsum and others look for the library whose functions an array takes

    dim_cut: int
    owners: Owners
    may_gather: bool
    origin: str
    rows: tuple[int, int] | None
    copied: bool  # whether it is a view that does not share memory with its base, as it would in one process
    factors: tuple[int, int, int] | None  # (outer, cut, inner) sizes of the dims that views joined into the cut dim
    whole_strides: tuple[int, ...]  # strides that one process has, where a share (of a sum) lies otherwise in memory
    margin: Any = None  # `Margin` (part/tiles/deep): neighbours' cells around the share that this rank has too
    # (owners, column) if the values are indices, dealt by these owners, that this rank owns; `column` is the one of a
    # matrix of places (`nonzero`) that holds them, None: all values
    own: tuple[Owners, int | None] | None = None
    values: tuple[object, bool]  # (token shared by parts of the same values in the same order, whether transposed)

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, dim: int, owners: Owners, axis: Axis, may_gather: bool = False, origin: str = ""
    ) -> Part:
        shape = list(local.shape)
        if shape[dim] != owners.counts[axis.index]:  # sums would count what nobody owns, or miss what somebody does
            raise RuntimeError(
                f"a share of {shape} is not what rank {axis.index} of {axis.name} has of dim {dim}, {owners.counts}: "
                "a defect of shardwise"
            )
        shape[dim] = owners.size
        part = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides_of(local, shape), dtype=local.dtype, device=local.device, requires_grad=False
        )
        if axis.positions and (local.is_floating_point() or local.is_complex()):
            may_gather = False  # of positions, integers and masks alone are small enough
        part.local, part.dim_cut, part.owners, part.axis, part.may_gather = local, dim, owners, axis, may_gather
        part.origin, part.copied, part.rows, part.factors = origin, False, None, None
        part.values, part.whole_strides = (object(), False), part.stride()
        return part

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"Part(shape={tuple(self.shape)}, dim {self.dim_cut} over {self.axis.name}: {self.owners.counts}, "
            f"dtype={self.dtype})"
        )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # a `Written` tensor beside this one puts what it stands for in its place first
        if len(types) > 1 and any(getattr(kind, "answers_first", False) for kind in types):
            return NotImplemented
        override = FUNCTIONS.get(func)
        # torch's functions in Python are run here, so that those that they call are asked for their overrides
        if override is None and _made_of_others(func):
            return _body(func)(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            # a tile may have a margin of its neighbours' cells (`domain_depth`), and elementwise functions keep it
            if override is None and any(isinstance(each, Part) and each.margin is not None for each in args):
                for widened in MARGINS:
                    if (found := widened(func, args, kwargs or {})) is not None:
                        return found
            return (override or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        try:
            with torch._C.DisableTorchFunctionSubclass():  # as in forward, where the function above has switched it off
                return answered(func, args, kwargs or {})
        except Uncut as error:
            error.origins |= {part.origin for part in tensors_in((args, kwargs), Part) if part.origin}
            raise

    def like(self, local: torch.Tensor) -> Part:
        """Returns `local` as the share of a part with this part's dim, owners and axis."""
        return self.with_local(local)

    def with_local(self, local: torch.Tensor, dim: int | None = None, owners: Owners | None = None) -> Part:
        """Returns `local` as a part cut along `dim` by `owners` over the same axis; None: as this part is."""
        # dims that were joined into one stay known only while the cut dim keeps its place and size
        same = owners is None or (dim in (None, self.dim_cut) and owners.size == self.owners.size)
        dim, owners = self.dim_cut if dim is None else dim, self.owners if owners is None else owners
        made = Part(local, dim, owners, self.axis, self.may_gather, self.origin)
        made.factors = self.factors if same else None
        # tables of positions that are made beside it are dealt as it is (part/position_tables)
        if self.deals:
            made.deals = True
        return made

    def shell(self) -> Part:
        """Returns a part of the same shape and cut without memory of its values, for a backward that reads none.

        Recompute cannot free a tensor that a `Function` stores on `ctx` itself instead of by `save_for_backward`.
        """
        local = self.local
        bare = local.shell() if isinstance(local, Part) else local.new_empty(()).expand(local.shape)
        return self.with_local(bare)

    def share(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's share along `dim` of the plain tensor `whole`, by this part's owners."""
        return self.owners.take(whole, dim, self.axis.index)

    def names_own(self, owners: Owners) -> bool:
        """Whether the values are indices dealt by `owners` that this rank owns; False once the part was written."""
        return self.own == (owners, None) and not self.is_inference() and not self._version

    def beside(self, other: Part) -> bool:
        """Whether `other` is cut over the same axis with equal owners, along whichever dim."""
        return self.axis is other.axis and self.owners == other.owners


# the names by which torch's Python functions check for overrides
_ASKS = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})


@cache
def _made_of_others(function: Any) -> bool:
    """Whether `_body` can run `function`, a Python function (no tensor method) that checks for overrides by `_ASKS`.

    A function that checks under another name (`torch.nn.init`) runs as it is; its ATen operations have the rules.
    """
    python = isinstance(function, FunctionType) and function.__module__ != torch._tensor.__name__
    return python and bool(_ASKS & set(function.__code__.co_names) & set(function.__globals__))


class _Names(dict):
    """A dict of a function's globals: `own` names first, the rest looked up in its module's, `others`, when read."""

    def __init__(self, own: dict[str, Any], others: dict[str, Any]):
        super().__init__(own)
        self.others = others

    def __missing__(self, name: str) -> Any:
        return self.others[name]


@cache
def _body(function: FunctionType) -> FunctionType:
    """Returns a copy of torch's Python function whose own check for `__torch_function__` overrides always fails.

    The functions that it calls still dispatch, for example attention inside `multi_head_attention_forward`.
    """
    names = _Names(dict.fromkeys(_ASKS, lambda *tensors: False), function.__globals__)
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_part(tensor: Any) -> bool:
    """Whether a tensor is cut over the axis for which a rule is being applied."""
    return isinstance(tensor, Part) and here(tensor)


class LastGathered:
    """Cache of the last `may_gather` part that was gathered, since queries, keys and values read the same input.

    The key never contains addresses or strides, because a share of one index lies in memory in several ways, and ranks
    whose caches differ would issue different collectives.
    """

    key: tuple | None = None  # (part.values, shape, dim_cut, owners), see `gathering.gather`
    whole: torch.Tensor | None = None


def forget() -> None:
    """Empties the cache of the tensor that was gathered last (`LastGathered`)."""
    LastGathered.key = LastGathered.whole = None


def in_backward() -> bool:
    """Whether autograd is computing gradients."""
    return torch._C._current_graph_task_id() >= 0


@dataclass(frozen=True)
class Facts:
    """Facts of an operation, read from its schema once, that rules need each time it runs."""

    name: str  # of the ATen operation; of another library's with its namespace
    rule: Rule | None  # None: it has none
    writes: bool  # whether it writes into its first argument and returns it; False if it writes into another argument
    reshapes: bool  # whether it changes the shape of its first argument in place
    is_view: bool  # whether its result shares memory with its input
    composite: bool  # whether it decomposes into other operations, which can be answered in its place
    apart: Any  # the out-of-place operation of one that writes (`add` for `add_`); None if there is none


@cache
def facts(func: Any) -> Facts:
    """Returns an operation's `Facts`; cached, since schemas are slow to read."""
    space, _, bare = func._schema.name.partition("::")
    # rules go by ATen's names: another library's operation may have the same one and do something else
    name = bare if space == "aten" else func._schema.name
    registered = RULES.get(name)
    # operations without a rule of their own, by torch's tags: elementwise ones, and those that draw for each element
    if registered is None and (draws_each(func) or torch.Tag.pointwise in func.tags):
        registered = RULES["bernoulli" if draws_each(func) else "add"]
    returned = func._schema.returns
    # only the first argument is written in place; others are outputs
    first = func._schema.arguments[0].alias_info if func._schema.arguments else None
    writes = first is not None and first.is_write
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    is_view = bool(returned) and returned[0].alias_info is not None and not func._schema.is_mutable
    # the operation that does not write in place: its schema tells what the written one does
    other = getattr(torch.ops.aten, name.removesuffix("_"), None) if writes and name.endswith("_") else None
    apart = getattr(other, func._overloadname, None)
    return Facts(name, registered, writes, name in RESHAPES, is_view, composite, apart)


def reshaped_in_place(tensor: Distributed, func: Any, args: tuple, kwargs: dict) -> Any:
    """Applies an in-place reshape `func` to the wrapper's own shape and strides, not to `local`; returns `tensor`."""
    with torch._C._DisableTorchDispatch():
        func(tensor, *args[1:], **kwargs)
    return tensor


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return _stored(a).untyped_storage()._cdata == _stored(b).untyped_storage()._cdata


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor that holds this rank's values, inside any nesting of parts and sums."""
    while isinstance(tensor, Distributed):
        tensor = tensor.stored
    return tensor


def strides_of(local: torch.Tensor, shape: list[int]) -> tuple[int, ...]:
    """Returns dense strides of the whole `shape`, its dims in the same memory order as those of the share `local`."""
    return strides_in_the_order_of(local.stride(), tuple(local.shape), tuple(shape))


@lru_cache(maxsize=REMEMBERED)
def strides_in_the_order_of(
    strides_now: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:  # fmt: skip
    """Returns strides of a dense tensor of `shape` whose dims lie in memory in the order of a tensor's present ones.

    strides_now, sizes  strides and sizes of the tensor that gives the order
    """
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (strides_now[d], -d)):
        # a stride of zero repeats (expand): that dim has no memory of its own, unless it has one index here
        if strides_now[d] or sizes[d] <= 1:
            strides[d] = step
            step *= max(shape[d], 1)
    return tuple(strides)


def parts_in(tree: Any) -> list[Part]:
    """Returns the parts in `tree` (arguments, nested) that are cut over the axis for which a rule is being applied."""
    return [part for part in tensors_in(tree, Part) if here(part)]


def no_rule(func: Any, parts: list[Part]) -> str:
    """Returns the message of an `Uncut` for operation `func`, with the shapes and cut dims of its `parts`."""
    first = parts[0]
    shapes = ", ".join(f"{tuple(p.shape)} cut along dim {p.dim_cut}" for p in parts)
    return f"{func} is not known to be right on tensors cut over {first.axis.name} (here {shapes})"
