"""`Fake`: tensors without values, faster than torch's, since results are remembered by what an op was given.

torch's `FakeTensorMode` spends a tenth of a millisecond on each operation, most of it to describe the arguments to a
cache of its own and to build the answer again. A plan of a large module asks for hundreds of thousands. `Fake` gives
the same answers from a table: an operation on fake tensors is a function of their metadata, so the second time its
arguments look alike, its results are made from those of the first.

    arguments   the operation; of each tensor dtype, shape, strides, offset, device, bits; numbers, and their types
    results     an argument itself | a view of an argument's storage | a new tensor with a storage of its own

What is anything else (values, tensors with constants, sparse or complex ones, shapes that hang on values, real tensors
among the arguments, subclasses) goes to torch as before, and so does everything the first time.

*What this does not do*: symbolic shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.trace.tape import storage_key

MOST = 2**17  # operations that are remembered; beyond, all are forgotten
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_DEVICE, _STRIDED = torch.ops.prim.device.default, torch.ops.aten.as_strided.default
_MASKS = (torch.bool, torch.uint8, torch.int8)  # an index of these selects a count of elements that values decide


@contextmanager
def unlogged() -> Iterator[None]:
    """Context: torch's log of failures on fake tensors is off, since an exception tells the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


class Made(NamedTuple):
    """One result: the argument tensor `place` itself (`shape` None), a view of it, or (`place` None) a new tensor."""

    place: int | None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


class OpResult(NamedTuple):
    """All results of an operation: `Made` for tensors, ints and None as they are. `kind`: tuple, list, None for one."""

    kind: type | None
    made: tuple[Any, ...]


_results: dict[tuple, OpResult | None] = {}  # None: torch has to be asked each time


class Fake(FakeTensorMode):
    """torch's `FakeTensorMode`, real tensors allowed among arguments, with a table of operations' results."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._state: dict[torch.device, dict[str, Any]] = {}  # what torch notes at a tensor of a device
        self._torch_remembers: bool = getattr(self, "cache_enabled")  # noqa: B009 - of no type that mypy sees

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and being asked for each operation costs more than an answer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind in types:
            if kind is not FakeTensor and getattr(kind, "observes_inside", False):
                return NotImplemented  # a sharded tensor: its own rule runs next, on plain tensors
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # the most frequent call of all, so it is answered without a look-up
        if func is torch.ops.aten._grouped_mm.default:  # torch's own rule for its shape takes bfloat16 alone
            return _grouped(self, *args, **(kwargs or {}))
        if not _of_metadata(func):
            if func.namespace == "profiler":
                return func(*args, **(kwargs or {}))  # a label of no tensor
            return self._by_torch(func, types, args, kwargs)
        tensors: list[FakeTensor] = []
        look = self._look(func, args, kwargs, tensors)
        # None in the table: torch has to be asked each time
        if look is not None and (answer := _results.get(look)) is not None:
            return self._answer(answer, tensors)
        # met for the first time: torch's answer is noted, if it can be given again from the arguments
        first = look is not None and look not in _results
        output = self._by_torch(func, types, args, kwargs, first)
        if look is not None and first:
            kept = self._look(func, args, kwargs, []) == look  # else it changed an argument's metadata
            answer = self._noted(tensors, output) if kept and _may_be_noted(func, tensors) else None
            if len(_results) >= MOST:
                _results.clear()
            # None too where the table would give another answer than torch did
            _results[look] = answer if answer is not None and self._same(answer, tensors, output) else None
        return output

    def _by_torch(self, func: Any, types: Any, args: tuple, kwargs: dict | None, first: bool = False) -> Any:
        """Returns torch's result. `first`: whether torch's own cache is off, as nobody would read that entry again."""
        self.cache_enabled = self._torch_remembers and not first
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _look(self, func: Any, args: tuple, kwargs: dict | None, tensors: list[FakeTensor]) -> tuple | None:
        """Returns an op's key in the table, None if it has none; appends the op's fake tensors to `tensors`."""
        # inference mode makes inference tensors, which results from the table are not
        if torch.is_inference_mode_enabled():
            return None
        key = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        complete = self._tell(key, tensors, args)
        if func is _STRIDED:  # raises if the view exceeds the storage, so the storage's size is part of the key
            key.append(args[0].untyped_storage().nbytes())
        if complete and kwargs:
            key += kwargs
            complete = self._tell(key, tensors, kwargs.values())
        return tuple(key) if complete else None

    def _tell(self, key: list, tensors: list[FakeTensor], values: Iterable) -> bool:
        """Appends arguments' metadata to `key`, fake tensors to `tensors`; False if an argument is more than that."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or value.layout is not torch.strided:
                    return False
                key += (kind, value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device,
                        value.requires_grad, value.is_neg(), value.is_inference())  # fmt: skip
                tensors.append(value)
            elif kind in _PLAIN:  # 1, 1.0 and True are equal, and give other dtypes
                key += (kind, value)
            elif kind is list or kind is tuple or kind is torch.Size:
                key += (kind, len(value))
                if not self._tell(key, tensors, value):
                    return False
            else:
                return False
        return True

    def _noted(self, tensors: list[FakeTensor], output: Any) -> OpResult | None:
        """Returns the results as an `OpResult` of the arguments `tensors`; None if they cannot be written as one."""
        kind = type(output) if type(output) in (tuple, list) else None
        leaves = (output,) if kind is None else tuple(output)
        made = [_made(leaf, tensors) if type(leaf) is FakeTensor else leaf for leaf in leaves]
        # a result that is no tensor and no number cannot be given back from here
        plain = all(type(result) is Made or type(result) in (int, type(None)) for result in made)
        pairs = zip(leaves, made, strict=True)
        new_storages = [storage_key(leaf) for leaf, result in pairs if type(result) is Made and result.place is None]
        # results without any tensor (numbers alone) are left to torch
        any_tensor = output is None or any(type(result) is Made for result in made)
        # `Made` cannot say that two new results share a storage
        if not plain or not any_tensor or len(set(new_storages)) < len(new_storages):
            return None
        return OpResult(kind, tuple(made))

    def _same(self, answer: OpResult, tensors: list[FakeTensor], output: Any) -> bool:
        """Whether tensors made from the answer equal torch's in all their metadata."""
        again = self._answer(answer, tensors)
        pairs = zip(*((out,) if answer.kind is None else out for out in (output, again)), strict=True)
        return all(_alike(was, now) for was, now in pairs)

    def _answer(self, answer: OpResult, tensors: list[FakeTensor]) -> Any:
        results = [self._make(result, tensors) if type(result) is Made else result for result in answer.made]
        return results[0] if answer.kind is None else answer.kind(results)

    def _make(self, made: Made, tensors: list[FakeTensor]) -> FakeTensor:
        """Returns the fake tensor that `made` describes; `tensors`: the op's arguments, of which it may be a view."""
        if made.place is not None and made.shape is None:
            return tensors[made.place]
        if made.place is None:
            meta = torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=made.dtype, device="meta")
            meta.set_(tensors[made.place].untyped_storage(), made.offset, made.shape, made.strides)
        # the attributes of a fake tensor depend on its device alone: taken once from one that torch has made
        state = self._state.get(made.device)
        if state is None:
            state = self._state[made.device] = dict(vars(FakeTensor(self, meta, made.device)))
        fake = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=made.device
        )
        # as torch's own constructor does, which is too slow to call (test_data_pointers_are_as_torch_has_them)
        if self._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(state)
        return fake


def _grouped(
    mode: FakeTensorMode, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns a fake result of `_grouped_mm` by shape, for any dtype; torch's own shape rule takes bfloat16 alone."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape = [a.shape[0] if a.dim() == 3 or offs is None else offs.numel(), *shape]
    with mode:
        return torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)


def _may_be_noted(func: Any, tensors: list[FakeTensor]) -> bool:
    """Whether an op on these tensors can be in the table: no index that may be a mask, no complex tensors."""
    # how many elements a mask selects depends on its values
    if func is torch.ops.aten.index.Tensor and any(tensor.dtype in _MASKS for tensor in tensors[1:]):
        return False
    return not any(tensor.dtype.is_complex for tensor in tensors)


@cache
def _of_metadata(func: Any) -> bool:
    """Whether an op's results depend on its arguments' metadata alone, as in torch's cache (`_validate_cache_key`).

    Also True of FSDP2's own ops, of indexing, and of ops without results, which write into their arguments.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return False
    # an operation of a library's own may read values
    if not torch._library.utils.is_builtin(func) and func.namespace != "fsdp":
        return False
    if func in FakeTensorMode.lift_fns or func.name().startswith(("aten::as_strided_", "aten::set_", "aten::resize")):
        return False  # these depend on constants, or on the size of a storage
    returns = func._schema.returns
    returns_tensors = not returns or any(isinstance(made.type, torch.TensorType | torch.ListType) for made in returns)
    # indexing reads values, but only in their place: its shape does not depend on them
    return returns_tensors and (func is torch.ops.aten.index.Tensor or not _OF_VALUES & set(func.tags))


def _made(leaf: FakeTensor, tensors: list[FakeTensor]) -> Made | None:
    """Returns the `Made` that describes a result in terms of the arguments `tensors`; None if there is none."""
    places = [place for place, tensor in enumerate(tensors) if storage_key(tensor) == storage_key(leaf)]
    # of two arguments on one storage it is unknown which one it is a view of; nor is a complex view described
    if len(places) > 1 or leaf.constant is not None or leaf.layout is not torch.strided or leaf.dtype.is_complex:
        return None
    seen = Made(None, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.fake_device)
    if not places:
        return seen
    place = places[0]
    # the result is an argument itself
    if leaf is tensors[place]:
        return Made(place)
    return seen._replace(place=place) if leaf.dtype == tensors[place].dtype else None


def _alike(was: Any, now: Any) -> bool:
    if type(was) is not FakeTensor or was is now:
        return type(was) is type(now) and (was is now or was == now)
    return _whole(was) == _whole(now) and vars(was) == vars(now)


def _whole(tensor: FakeTensor) -> tuple:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes(),
            tensor.requires_grad, tensor.is_neg(), tensor.is_inference(), tensor.is_leaf,
            torch._C._dispatch_key_set(tensor))  # fmt: skip
