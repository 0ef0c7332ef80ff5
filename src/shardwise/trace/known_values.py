"""Known values of integer tensors in a forward on fake tensors, for routing and for code that reads the batch.

A mixture of experts asks how many tokens each expert got. Fake tensors cannot say; under `Values` an integer tensor
can carry real values beside it (its *shadow*), and so can a small float tensor computed from constants alone:

    topk, argmax, max over a dim    of scores without values: every choice equally often, token r taking the experts
                                    k r, k r + 1, ... modulo their number. A stated assumption: balanced load
    sort, argsort                   of scores without values: as if they were sorted already
    integers of the batch           the values of the task's own sample
    factories                       arange, zeros, ones_like, tensor([...]): their values
    any op on shadows alone         its own result, so that counts, offsets and masks follow
    rand of one number              its median: layers that are left out with a small chance (layerdrop) all run
    .item(), nonzero, x[mask]       record in `asked` the origin of the values read: `CHOSEN` or `BATCH`
    x[mask], masked_select          by the mask's shadow, so that the number of selected elements is known
    .numpy(), np.asarray(...)       the values, where they are known
    pack_padded_sequence            by lengths that are known (`packed`)
    ctc_loss                        by the longest target: of lengths that are known, else of the targets' shape

Floats of the batch, of weights, and all that is computed from them have no values, so a branch on a loss or an
activation is still refused. What is written without values into a tensor, or into a view of it, takes its values away.

*What this does not do*: skewed loads, dropped tokens beyond what a balanced load drops.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise.host import answered
from shardwise.trace.elementwise import is_random
from shardwise.trace.fake import unlogged
from shardwise.trace.leaves import tensors_in, written

MOST, MOST_FLOATS = 2**25, 2**20  # elements of a shadow: beyond, a tensor has no values
MEDIAN = 0.5
_ATEN = torch.ops.aten
_UNFILLED = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
_CHOICES = {_ATEN.topk: 1, _ATEN.max: 1, _ATEN.argmax: 0, _ATEN.sort: 1, _ATEN.argsort: 0}  # index of the result
_FILLED = {_ATEN.zeros_like: 0, _ATEN.new_zeros: 0, _ATEN.ones_like: 1, _ATEN.new_ones: 1}  # the value filled in
_FILLED_WITH = {_ATEN.full_like: 1, _ATEN.new_full: 2}  # position of the argument with the value
_SHADOW = "_shardwise_shadow"


CHOSEN, BATCH = "chosen", "batch"  # origins of values: chosen under the assumption of balance, or the batch's own


@dataclass(eq=False)
class _Memory:
    """State that a tensor and its views share: whether their known values still hold, and the origins of these."""

    valid: bool = True  # False once an op wrote values that are not known
    origins: frozenset[str] = frozenset()


def shadow(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the real values of a fake tensor, or None where they are not known."""
    values, memory = getattr(tensor, _SHADOW, (None, None))
    return values if memory is not None and memory.valid else None


def origins_of(leaves: Iterable[Any]) -> frozenset[str]:
    """Returns the origins (`CHOSEN`, `BATCH`) from which the known values among these tensors were computed."""
    origins = [getattr(leaf, _SHADOW)[1].origins for leaf in leaves if isinstance(leaf, FakeTensor) and known(leaf)]
    return frozenset().union(*origins)


def known(tensor: torch.Tensor) -> bool:
    """Whether the values of a fake tensor are known."""
    return shadow(tensor) is not None


def give(
    tensor: torch.Tensor, values: torch.Tensor, viewed: Iterable[torch.Tensor] = (),
    origins: frozenset[str] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Returns the fake tensor, with these real values attached to it where they are few enough.

    viewed    tensors from which it was computed, of which it may be a view; their origins become its own
    origins   the origins of the values, if not those of `viewed`
    """
    real = values.is_floating_point() or values.is_complex()
    if values.numel() <= (MOST_FLOATS if real else MOST):
        lies = values.untyped_storage()._cdata
        viewed = [source for source in viewed if isinstance(source, FakeTensor) and known(source)]
        pairs = [getattr(source, _SHADOW) for source in viewed]
        # a view of a tensor with values: what is written into one of them takes both their values
        shared = [memory for seen, memory in pairs if seen.untyped_storage()._cdata == lies]
        own = _Memory(origins=origins_of(viewed) if origins is None else origins)
        setattr(tensor, _SHADOW, (values, next(iter(shared), own)))
    return tensor


def given_to(fake: FakeMode, batch: Any) -> Any:
    """Returns a batch as fake tensors; those of integers and booleans carry their values."""

    def convert(leaf: torch.Tensor) -> torch.Tensor:
        made = fake.from_tensor(leaf)
        real = leaf.is_floating_point() or leaf.is_complex()
        return made if real else give(made, leaf, origins=frozenset({BATCH}))

    return pytree.tree_map_only(torch.Tensor, convert, batch)


@contextmanager
def numpy_by_values() -> Iterator[None]:
    """Context in which `tensor.numpy()`, and so `np.asarray`, of a fake tensor returns its known values."""
    theirs = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return theirs(tensor, *args, **kwargs)
        if tensor.numel():
            tensor.reshape(-1)[0].item()  # records that values were read, or raises if they are unknown
        values = shadow(tensor)
        with _disable_current_modes():
            return (torch.empty(tensor.shape, dtype=tensor.dtype) if values is None else values).numpy().copy()

    torch.Tensor.numpy = numpy
    try:
        yield
    finally:
        del torch.Tensor.numpy  # which finds torch's own again


def balanced(shape: torch.Size, dim: int, choices: int) -> torch.Tensor:
    """Returns integers in [0, `choices`) of this shape, each about equally often, those along `dim` different."""
    moved = list(shape)
    width = moved.pop(dim) if shape else 1
    index = torch.arange(max(1, torch.Size(moved).numel()) * width).remainder(max(1, choices))
    return index.view(*moved, width).movedim(-1, dim) if shape else index.view(())


class Values(TorchDispatchMode):
    """Mode that attaches values to the results of ops on fake tensors, if known. Enter it above the fake mode.

    chose   whether an op chose indices by scores without values (experts, for example)
    asked   origins of the values that branches or shapes of the forward depended on
    drawn   whether a single random number got a value: the median, or a random one if `draws`
    """

    def __init__(self, fake: FakeMode, *, draws: bool = False) -> None:
        super().__init__()
        self.fake, self.draws = fake, draws
        self.chose = self.drawn = False
        self.asked: set[str] = set()

    @property
    def assumed(self) -> bool:
        """Whether a branch or shape depended on indices chosen under the assumption of balanced load."""
        return CHOSEN in self.asked

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(getattr(kind, "observes_inside", False) for kind in types):
            return NotImplemented
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns an op's result, with values attached if they can be known."""
        leaves = tensors_in((args, kwargs))
        # an index beyond the table raises in a run, but would go unnoticed on fake tensors
        if func is _ATEN.embedding.default:
            _look_up(*args[:2])
        # packing reads the lengths in C++, which fails on fake tensors
        if func is PACK and (lengths := shadow(args[1])) is not None:
            self.asked |= origins_of([args[1]])
            with _disable_current_modes():
                sizes, rows = packed(lengths)
            return args[0].new_empty(rows, *args[0].shape[2:]), sizes
        shadows = [shadow(leaf) if isinstance(leaf, FakeTensor) else leaf for leaf in leaves]
        if any(values is not None for values in shadows) or not leaves:
            if all(values is not None for values in shadows):
                return self._on_values(func, args, kwargs, leaves)
            func, args = self._with_rows(func, args)  # some are known: a mask among the indices, perhaps
        out = self.answer(func, args, kwargs)
        self._forget(func, args)
        self._choose(func._overloadpacket, args, kwargs, out)
        self._fill(func._overloadpacket, args, out)
        return out

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns an op's result without values, by shape."""
        return _WITHOUT_META.get(func._overloadpacket, func)(*args, **kwargs)

    def _on_values(self, func: Any, args: tuple, kwargs: dict, leaves: list) -> Any:
        """Returns the result, with values, of an op whose tensors all have values or that takes none (a factory)."""
        # a random op has no known values; a factory of too many elements would take too long
        if is_random(func) or (not leaves and not _makes_values(func, args)):
            return self._draw(func, args, kwargs)

        def value_of(leaf: Any) -> Any:
            values = shadow(leaf) if isinstance(leaf, FakeTensor) else None
            return leaf if values is None else values

        real_args, real_kwargs = pytree.tree_map(value_of, (args, kwargs))
        with _disable_current_modes():
            real = func(*real_args, **real_kwargs)
            # an `empty` that a collective would fill stays unfilled here, and could hold indices out of range
            real = real.zero_() if func._overloadpacket in _UNFILLED else real
        # `.item()` and the like: Python may branch by the value, so its origin is recorded for the caller's notice
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(real)):
            self.asked |= origins_of(leaves)
            return real
        # so do the shapes behind `nonzero` and masks
        if torch.Tag.dynamic_output_shape in func.tags:
            self.asked |= origins_of(leaves)
        try:
            out = func(*args, **kwargs)
        # an op whose output shape depends on values: the real result has it
        except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError):
            out = pytree.tree_map(lambda t: self.fake.from_tensor(t) if isinstance(t, torch.Tensor) else t, real)
        for made, values in zip(pytree.tree_leaves(out), pytree.tree_leaves(real), strict=True):
            if isinstance(made, FakeTensor) and isinstance(values, torch.Tensor):
                give(made, values, leaves)
        return out

    def _with_rows(self, func: Any, args: tuple) -> tuple[Any, tuple]:
        """Returns (op, args) with known masks among its indices replaced by the indices that they select."""
        # how many elements a mask selects depends on its values; with integer indices the result has a shape
        if func is _ATEN.masked_select.default and (mask_values := shadow(args[1])) is not None:
            whole, mask = torch.broadcast_tensors(args[0], args[1])
            with _disable_current_modes():
                give(mask, mask_values.expand(mask.shape), origins=origins_of([args[1]]))
            func, args = _ATEN.index.Tensor, (whole, [mask])
        if func._overloadpacket not in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_):
            return func, args
        rows: list[Any] = []
        for index in args[1]:
            values = shadow(index) if isinstance(index, torch.Tensor) else None
            # uint8 too: torch takes such an index for a mask
            if values is None or values.dtype not in (torch.bool, torch.uint8):
                rows.append(index)
                continue
            self.asked |= (origins := origins_of([index]))
            with _disable_current_modes():
                selected = values.nonzero(as_tuple=True)
            rows += [give(self.fake.from_tensor(row_index), row_index, origins=origins) for row_index in selected]
        return func, (args[0], rows, *args[2:])

    def _forget(self, func: Any, args: tuple) -> None:
        """Drops the values of tensors into which an op wrote without values."""
        for place in written(func):
            if place < len(args) and isinstance(args[place], torch.Tensor) and shadow(args[place]) is not None:
                getattr(args[place], _SHADOW)[1].valid = False

    def _fill(self, packet: Any, args: tuple, out: Any) -> None:
        """Attaches values to the result of `zeros_like` and its kind on a tensor without values."""
        place = _FILLED_WITH.get(packet)
        number = _FILLED.get(packet) if place is None else args[place]
        # a tensor without values says its shape and dtype, all that these ops read of it
        if isinstance(out, FakeTensor) and isinstance(number, int | float) and out.numel() <= MOST_FLOATS:
            with _disable_current_modes():
                give(out, torch.full(out.shape, number, dtype=out.dtype))

    def _draw(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns a random op's or a large factory's result; a single random number has a value, for layerdrop."""
        out = func(*args, **kwargs)
        # one number without tensor arguments, on which code may branch, as layerdrop does
        single = isinstance(out, FakeTensor) and out.numel() == 1 and is_random(func) and not tensors_in((args, kwargs))
        # without `draws` only `rand` has a value that stands for it: with the median the usual branch is taken
        if single and (self.draws or func._overloadpacket is _ATEN.rand):
            with _disable_current_modes():
                give(out, func(*args, **kwargs) if self.draws else torch.full(out.shape, MEDIAN, dtype=out.dtype))
            self.drawn = True
        return out

    def _choose(self, packet: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Attaches balanced values to indices that an op chose by scores without values."""
        place = _CHOICES.get(packet)
        if place is None:
            return
        index = out[place] if isinstance(out, tuple | list) and len(out) > place else out
        if not isinstance(index, FakeTensor) or index.dtype != torch.int64 or index.numel() > MOST:
            return
        # position and default of the argument `dim`; max and argmax without one reduce all dims and are skipped
        place_of_dim, last = (2 if packet is _ATEN.topk else 1), None if packet in (_ATEN.max, _ATEN.argmax) else -1
        dim = kwargs.get("dim", args[place_of_dim] if len(args) > place_of_dim else last)
        if not isinstance(dim, int) or isinstance(dim, bool):  # a bool: `descending`, of sort's other signature
            return
        scores = args[0]
        keeps = index.dim() == scores.dim()  # else `dim` is gone, as of argmax without keepdim
        with _disable_current_modes():
            shape = index.shape if keeps else torch.Size((*index.shape, 1))
            chosen = balanced(shape, dim % scores.dim() if keeps else -1, scores.shape[dim])
            give(index, chosen if keeps else chosen.squeeze(-1), origins=frozenset({CHOSEN}))
        self.chose = True


def _ctc_loss(
    scores: torch.Tensor, targets: torch.Tensor, frames: Any, lengths: Any, *more: Any, **options: Any
) -> Any:  # fmt: skip
    """Returns fake losses (B,) and the log-probabilities (B, T, 2 longest target + 1) that backward reads.

    `scores` (T, B, C), `frames` and `lengths` of each sample. Raises RuntimeError for longer ones, as torch does.
    """
    steps, samples, _ = scores.shape
    frames, lengths = _numbers(frames), _numbers(lengths)
    if max(frames, default=0) > steps or (targets.dim() == 2 and max(lengths, default=0) > targets.shape[1]):
        raise RuntimeError(f"ctc_loss: lengths beyond {steps} frames or targets of shape {tuple(targets.shape)}")
    # unknown lengths: padded targets (B, S) count as full, concatenated ones as equally long
    whole = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(1, samples))
    longest = max(lengths) if len(lengths) else whole
    return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * longest + 1)


def _numbers(lengths: Any) -> Sequence[int]:
    """Returns lengths as a sequence of ints; [] for a tensor whose values are not known."""
    if not isinstance(lengths, torch.Tensor):
        return lengths
    values = shadow(lengths) if isinstance(lengths, FakeTensor) else lengths
    with _disable_current_modes():
        return [] if values is None else values.tolist()


def _ctc_loss_backward(grad: torch.Tensor, scores: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    return torch.empty_like(scores)


# operations that torch cannot run on tensors without values, since a size inside them hangs on values
_WITHOUT_META = {_ATEN._ctc_loss: _ctc_loss, _ATEN._ctc_loss_backward: _ctc_loss_backward}


def _look_up(table: torch.Tensor, index: torch.Tensor) -> None:
    """Raises IndexError, as a run would, if a known index exceeds the table's rows (a position beyond the last)."""
    values = shadow(index) if isinstance(index, FakeTensor) else None
    if values is not None and values.numel():
        with _disable_current_modes():
            last = int(values.max())
        if last >= table.shape[0]:
            raise IndexError(f"row {last} is asked for of a table (Embedding) of {table.shape[0]} rows")


_FACTORIES = {_ATEN.arange, _ATEN.linspace, _ATEN.eye, _ATEN.zeros, _ATEN.ones, _ATEN.full, _ATEN.scalar_tensor}


def _makes_values(func: Any, args: tuple) -> bool:
    """Whether an op is a factory of at most `MOST` elements, whose values are computed."""
    if func._overloadpacket not in _FACTORIES:
        return False
    sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
    return math.prod(sizes) <= MOST


def known_values_read() -> AbstractContextManager[None]:
    """Context in which `shardwise.host` reads tensors' known values, or the tensors themselves if unknown."""

    def answer(tensor: torch.Tensor, what: str) -> Any:
        values = shadow(tensor)
        if values is None:
            return tensor.detach().cpu().tolist()
        with _disable_current_modes():
            return values.tolist()

    return answered(answer, known)


@contextmanager
def as_real() -> Iterator[None]:
    """Context for a forward on fake tensors in which library code reads known values and torch logs no failures."""
    with unlogged(), padding_by_values(), numpy_by_values():
        yield


@contextmanager
def unpadded() -> Iterator[None]:
    """Context in which transformers' mask functions, which read values, take input as unpadded and not packed."""
    # what no module has imported is not imported here: it takes a second
    masks, kept = sys.modules.get("transformers.masking_utils"), {}
    for name, value in (("find_packed_sequence_indices", lambda *a, **k: None), ("is_tracing", lambda *a, **k: False)):
        if hasattr(masks, name):
            kept[name] = getattr(masks, name)
            setattr(masks, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(masks, name, value)


@contextmanager
def values(fake: FakeMode, *, draws: bool = False) -> Iterator[Values]:
    """Context that enters `fake` and a `Values` above it; yields the `Values`.

    draws  whether single random numbers get random values; else one of `rand` gets its median, and others none
    """
    mode = Values(fake, draws=draws)
    with fake, mode:
        yield mode


PACK = torch.ops.aten._pack_padded_sequence.default


def packed(lengths: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns (int64 tensor: sequences running at each time step, elements in all) for descending `lengths`.

    Raises ValueError for a length of 0, or without lengths.
    """
    if not lengths.numel() or int(lengths.min()) < 1:
        raise ValueError("a sequence of length 0 cannot be packed")
    times = torch.arange(int(lengths[0]))
    return (lengths[None] > times[:, None]).sum(1), int(lengths.sum())


@contextmanager
def padding_by_values() -> Iterator[None]:
    """Context in which `pad_packed_sequence` works on fake data if the batch size of each time step is known."""
    name = "_pad_packed_sequence"
    theirs = getattr(torch._VF, name)

    def pad(
        rows: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(rows, FakeTensor) or isinstance(sizes, FakeTensor):
            return theirs(rows, sizes, batch_first, value, total)
        with _disable_current_modes():
            of_each = sizes.tolist()
            lengths = (sizes[:, None] > torch.arange(of_each[0])).sum(0)
        return _padded(rows, of_each, batch_first, value, total), lengths

    setattr(torch._VF, name, pad)
    try:
        yield
    finally:
        delattr(torch._VF, name)  # which finds torch's own again


def _padded(rows: torch.Tensor, sizes: list[int], batch_first: bool, value: float, total: int) -> torch.Tensor:
    """Returns packed data as (max(`total`, times), sequences, ...), or batch first, filled up with `value`."""
    if 0 < total < len(sizes):
        raise ValueError(f"total_length={total} is less than the longest sequence, {len(sizes)}")
    out = rows.new_full((max(total, len(sizes)), sizes[0], *rows.shape[1:]), value)
    began = at = 0
    for time, size in enumerate([*sizes[1:], 0], start=1):
        if size != sizes[began]:  # the time steps with equally many sequences, copied as one block, end here
            many = sizes[began] * (time - began)
            stretch = rows[at : at + many].view(time - began, sizes[began], *rows.shape[1:])
            out[began:time, : sizes[began]].copy_(stretch)
            began, at = time, at + many
    return out.transpose(0, 1) if batch_first else out
