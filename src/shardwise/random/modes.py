"""Modes that compute random ops from hashes of global indices, by `DRAWS` (draws.py). Forecasts: rehearsal/gpu_kernels.

In `global` mode a mask is a function of seed, step, micro-batch, module path, call and global index. Element i of the
whole micro-batch's tensor is hash(key, i), and a rank computes only its own elements:

    key     one number for each random op, from (seed, step, micro-batch), the path of the module that is running, and
            how many modules and random ops ran before it there
    i       linear index in the unsharded tensor, in which the batch dim begins with this rank's first sample; a row of
            a packed sequence is indexed by time and sample (packed.py)

The key is carried in the seed of torch's CPU generator. Recompute of a block (torch's checkpoint, ours, a library's)
restores that generator, and so draws the same masks.

In `fast` mode torch's own generators are used, seeded by (seed, step, micro-batch, data rank).

Python's and numpy's generators are seeded by (seed, step, micro-batch), the same on all ranks (python_seeds).

What this does not do: follow random ops inside a compiled graph, or ops whose draws do not lie along a batch dim
(`randperm` over the batch, dropout on the rows that a mask selects, or on those of a packed sequence in a module that
was not called with it), which are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.device import allow_cudnn, seed_generators
from shardwise.errors import RefusedPlan
from shardwise.python_seeds import python_restored, seed_python
from shardwise.random.dims import PACKED, UNCLEAR, BatchDims, Drawn
from shardwise.random.draws import DRAWS, BitSource
from shardwise.random.hashing import below_at, bits_at, has_kernel, hashed, is_below, mix
from shardwise.random.packed import PackedRows, packed_among
from shardwise.trace.deferred import seed_of
from shardwise.trace.elementwise import draws_each, is_random
from shardwise.trace.functional import with_values

_aten = torch.ops.aten


@dataclass(frozen=True)
class Samples:
    """The samples of the micro-batch that this rank has: [start, start + count) of `total`."""

    start: int = 0
    count: int = 1
    total: int = 1


EACH_ITS_OWN = (  # a remedy at every door: a proof has no such option, since it would have nothing to compare
    "train with train.randomness=fast (randomness='fast' in Python), by which each rank draws its own, and prove the "
    "module with that draw off (its rate at 0)"
)
_SAME_LEVEL = 8  # draws of an op that `ConstantRandom` makes alike before it varies them, so that rejection loops end
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


class _Paths:
    """The path of the module that is running, and the key carried in the CPU generator's seed.

    packed  for each module that runs, the packed sequence that it was called with
    """

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []  # (path, key to go on with behind it) of modules that run
        self.packed: list[PackedRows | None] = []
        self.path_of: dict[int, str] = {}  # key of a draw -> path of its module

    @staticmethod
    def key() -> int:
        return torch.default_generator.initial_seed() & (2**64 - 1)

    def clear(self) -> None:
        self.stack.clear()
        self.packed.clear()

    def enter(self, path: str, packed: PackedRows | None = None) -> None:
        """Pushes a module that begins to run, and seeds its draws by the current key and its path."""
        # draws after the module depend on the key before it, not on the number of draws inside
        after = mix(self.key())
        self.stack.append((path, after))
        self.packed.append(packed)
        torch.default_generator.manual_seed(seed_of(after, path))

    def leave(self) -> None:
        _, after = self.stack.pop()
        self.packed.pop()
        torch.default_generator.manual_seed(after)

    def draw(self) -> tuple[int, str]:
        """Returns (key of the random op that runs, path of its module), the same again in a recompute."""
        key = self.key()
        # a block that is computed again in backward has the key, and not the stack of modules
        path = self.path_of.setdefault(key, self.stack[-1][0] if self.stack else "")
        torch.default_generator.manual_seed(mix(key))
        return key, path

    def rows_of(self, shape: tuple[int, ...]) -> tuple[PackedRows, tuple[int, ...]] | None:
        """Returns (packed sequence of the innermost module called with one, `shape` as (rows, ...)), or None."""
        packed = next((rows_here for rows_here in reversed(self.packed) if rows_here is not None), None)
        rows = packed.as_rows(shape) if packed is not None else None
        return None if packed is None or rows is None else (packed, rows)


def _draws_inside(module: nn.RNNBase) -> bool:
    """Whether cuDNN would draw this layer's dropout masks inside its kernel, where no mode can intercept them."""
    return module.training and module.dropout > 0 and module.num_layers > 1


@contextmanager
def _watched(module: nn.Module, paths: _Paths) -> Iterator[None]:
    """Context in which `paths` tracks the running submodule, and cuDNN is off for layers that would draw inside it."""
    handles = []
    cudnn: list[bool | None] = []  # for each recurrent layer that runs: whether it was allowed, if it is not now
    for path, child in module.named_modules():

        def enter(module: nn.Module, args: tuple, kwargs: dict, path: str = path) -> None:
            paths.enter(path, packed_among((*args, *kwargs.values())))
            if isinstance(module, nn.RNNBase):
                cudnn.append(allow_cudnn(False) if _draws_inside(module) else None)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            before = cudnn.pop() if isinstance(module, nn.RNNBase) else None
            if before is not None:
                allow_cudnn(before)
            paths.leave()

        handles.append(child.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        # also where the forward raises: the stack of modules has to stay right
        handles.append(child.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def draws(func, args, kwargs) -> bool:
    """Whether an op with these arguments draws from torch's default generators."""
    return is_random(func) and kwargs.get("generator") is None and not _inert_dropout(func, args, kwargs)


class GlobalRandom(TorchDispatchMode):
    """Mode that computes random ops by global index. `samples`: the part of the micro-batch that this rank has.

    scores      Whether attention has dropout, so that it must not run as a fused kernel, which draws inside
    met         Whether a random op was computed
    all_here    () -> whether a module runs that gets the samples of all ranks
    one_kernel  Whether to return zeros, written once as by one kernel on a GPU (hashing.py), in a forecast
    """

    def __init__(self, dims: BatchDims, scores: bool = False, all_here: Callable[[], bool] = lambda: False):
        super().__init__()
        self.dims, self.scores, self.met = dims, scores, False
        self.one_kernel = False
        self._samples, self._all_here = Samples(), all_here
        self.paths = _Paths()

    @property
    def samples(self) -> Samples:
        """Returns the samples that random tensors have now; all of the micro-batch while `all_here()`."""
        total = self._samples.total
        return Samples(0, total, total) if self._all_here() else self._samples

    @samples.setter
    def samples(self, samples: Samples) -> None:
        self._samples = samples

    def begin(self, seed: int, step: int, micro_batch: int, samples: Samples, *, alone: bool = True) -> None:
        """Seeds a micro-batch. `alone`: whether no backward of another micro-batch is still to come."""
        self.samples = samples
        self.paths.clear()
        # kept while the backward of another micro-batch is to come: blocks that it computes again ask for their paths
        if alone:
            self.paths.path_of.clear()
        own = seed_of("mask", seed, step, micro_batch)
        torch.default_generator.manual_seed(own)
        seed_python(own)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Context in which random ops of `module` are computed by global index, around forward and backward."""
        with _watched(module, self.paths), self:
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        return self.answer(func, args, kwargs) if draws(func, args, kwargs) else with_values(func)(*args, **kwargs)

    def answer(self, func, args, kwargs):
        """Returns the result of a random op by global index; raises `RefusedPlan` if its batch dim is not clear."""
        key, path = self.paths.draw()
        self.met = True
        if func in DRAWS:
            like = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)

            def drawn(shape, device, rate: float | None = None) -> torch.Tensor:
                return self._drawn(key, path, func, tuple(shape), device, like, rate)

            return DRAWS[func](BitSource(drawn, drawn), args, kwargs)
        return self._same_everywhere(key, path, func, args, kwargs)

    def _drawn(self, key: int, path: str, func, shape, device, like: Any, rate: float | None) -> torch.Tensor:
        """Returns this rank's elements: 53 bits as int64 (`rate` None), else booleans, whether below `rate`."""
        packed = self._rows(path, func, shape)
        dim = self._batch_dim(path, func, shape) if packed is None else 0
        samples, blocks = self.samples, (path, str(func), len(shape)) in self.dims.blocks
        if _is_share(like, shape):  # its rules know which elements it has
            places, sizes = _places_of(packed, shape, dim, samples, device, blocks)
            zeros = torch.zeros_like(like, dtype=torch.int64).reshape([len(each) for each in places])
            index = _linear_index(places, sizes, zeros)
            return (hashed(key, index) if rate is None else is_below(key, index, rate)).view(shape)
        if self.one_kernel:  # in a forecast the values are not read, and hashing would be many ops
            return torch.zeros(shape, dtype=torch.int64 if rate is None else torch.bool, device=device)
        # with a kernel, making rows and columns is what takes the host longest; packed rows are no key of a cache
        table = _kept_rows_and_columns if packed is None and has_kernel(device) else _rows_and_columns
        rows, columns = table(packed, shape, dim, samples, device, blocks)
        drawn = bits_at(key, rows, columns) if rate is None else below_at(key, rows, columns, rate)
        return drawn.view(shape)

    def _rows(self, path: str, func, shape: tuple[int, ...]) -> tuple[PackedRows, tuple[int, ...]] | None:
        """Returns (the packed sequence whose rows the first dim of a draw is, its shape as (rows, ...)), or None."""
        packed, count = self.paths.rows_of(shape), max(self.samples.count, 1)
        if packed is None or packed[0].sequences % count:
            return None
        is_packed = not self.dims.dims_by_op or self.dims.find(path, str(func), packed[1], count) == PACKED
        return packed if is_packed else None

    def _batch_dim(self, path: str, func, shape: tuple[int, ...]) -> int:
        """Returns the batch dim of an op's result, -1 for none; raises `RefusedPlan` if it is not clear."""
        if self.samples.count == self.samples.total:
            return -1  # all samples are here
        dim = self.dims.find(path, str(func), shape, max(self.samples.count, 1))
        if dim in (UNCLEAR, PACKED):  # packed, and not of one sequence or as many for each sample
            raise RefusedPlan(_not_dealt(f"{func} in module '{path}' (shape {shape})"))
        return dim

    def _same_everywhere(self, key: int, path: str, func, args, kwargs):
        """Returns the result, the same on all ranks, of an op that `DRAWS` lacks; refuses one with a batch dim."""
        output = func(*args, **kwargs)
        # this first run shows the shapes; its numbers are dropped
        tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, torch.Tensor)]
        if any(self._batch_dim(path, func, tuple(t.shape)) != -1 for t in tensors):
            raise RefusedPlan(_not_dealt(f"{func} in module '{path}'"))
        seed_generators(key)  # a device draws by its own
        output = func(*args, **kwargs)
        torch.default_generator.manual_seed(mix(key))
        return output


def _not_dealt(what: str) -> str:
    """Returns the refusal of a random operation that cannot be dealt over ranks."""
    return (
        f"random op {what} draws for samples in a way that cannot be dealt over ranks, so its masks would differ from "
        "one process's; draw tensors with a batch dim by dropout, rand, randn, randint, normal, bernoulli, poisson, "
        f"gamma or multinomial, those of a packed sequence in a module that is called with it; or {EACH_ITS_OWN}"
    )


def _inert_dropout(func, args, kwargs) -> bool:
    """Whether an op that can draw (dropout, fused attention, recurrent layers) has its dropout off."""
    arguments = {
        argument.name: args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        for place, argument in enumerate(func._schema.arguments)
    }
    if arguments.get("train") is False:
        return True
    # fused attention calls its rate `dropout_p`, recurrent layers `dropout`
    rate = arguments.get("dropout_p", arguments.get("dropout"))
    return ("dropout_p" in arguments or "dropout" in arguments) and not rate


def _is_share(like: Any, shape: tuple[int, ...]) -> bool:
    """Whether `like` is a tensor cut over ranks of this shape, so that random numbers for it have to be cut alike."""
    return isinstance(like, torch.Tensor) and type(like) not in _PLAIN and tuple(like.shape) == shape


def _zeros(shape: tuple[int, ...], device, like: Any) -> torch.Tensor:
    """Returns an int64 zero () to broadcast to `shape`; if `like` is cut over ranks, zeros cut alike."""
    if _is_share(like, shape):
        return torch.zeros_like(like, dtype=torch.int64)
    return torch.zeros((), dtype=torch.int64, device=device)


def _places_of(
    packed: tuple[PackedRows, tuple[int, ...]] | None, shape: tuple[int, ...], dim: int, samples: Samples,
    device: torch.device, blocks: bool = False,
) -> tuple[list[torch.Tensor], list[int]]:  # fmt: skip
    """Returns (for each dim the indices of local elements in the micro-batch's tensor, the sizes of that tensor).

    packed, dim  as of `_rows` and `_batch_dim`;  blocks  whether the batch dim is in `BatchDims.blocks`
    """
    if packed is not None:
        rows, sizes = packed
        along = rows.numbers(samples.start, samples.count, samples.total, device)
        return [along, *(torch.arange(size, device=device) for size in sizes[1:])], list(sizes)
    places, whole = [torch.arange(size, device=device) for size in shape], list(shape)
    if dim >= 0:  # else no dim counts samples
        count, along = max(samples.count, 1), places[dim]
        of_each = shape[dim] // count
        if blocks:
            # all samples, then all of them again: the repetition is the outer dim, of all samples of the micro-batch
            places[dim] = along // count * samples.total + samples.start + along % count
        else:
            places[dim] = along + of_each * samples.start
        whole[dim] = of_each * samples.total
    return places, whole


def _rows_and_columns(
    packed: tuple[PackedRows, tuple[int, ...]] | None, shape: tuple[int, ...], dim: int, samples: Samples,
    device: torch.device, blocks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns int64 rows (R,) and columns (C,): element (i, j) of the local (R, C) has index rows[i] + columns[j]."""
    places, sizes = _places_of(packed, shape, dim, samples, device, blocks)
    zeros = torch.zeros((), dtype=torch.int64, device=device)
    if not places:
        return zeros.view(1), zeros.view(1)
    return _linear_index(places[:-1], sizes[:-1], zeros).flatten() * sizes[-1], places[-1]


_kept_rows_and_columns = lru_cache(256)(_rows_and_columns)  # with a kernel, making them takes the host longest


def _linear_index(places: list[torch.Tensor], sizes: Sequence[int], zeros: torch.Tensor) -> torch.Tensor:
    """Returns the linear index, in a tensor of `sizes`, of elements at these places along its dims."""
    index = zeros
    stride = 1
    for dim in reversed(range(len(places))):
        index = index + (places[dim] * stride).view(-1, *([1] * (len(places) - dim - 1)))
        stride *= sizes[dim]
    shape = tuple(len(each) for each in places)
    return index if tuple(index.shape) == shape else index.expand(shape)


class ConstantRandom(TorchDispatchMode):
    """Mode in which a random op gives all its elements the same bits, and is recorded in `calls`.

    level  the uniform number, in [0, 1), of which all random numbers are made

    Under it a module is a function of each sample alone, so that additivity of its loss can be checked with dropout
    on, and two runs of unequal size show which dim of each random tensor is the batch.
    """

    def __init__(self, level: float = 0.5) -> None:
        super().__init__()
        self.bits = int(level * 2**53)
        self.calls: list[Drawn] = []
        self.times: Counter[tuple[str, str, int]] = Counter()  # draws so far, by `Drawn.key`
        self.reads_values = False  # whether control flow may depend on a value that is, or came of, a real number
        self.from_reals = _FromReals()
        self.paths = _Paths()

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Context in which random ops of `module` are constant; enter it around a forward."""
        torch.default_generator.manual_seed(0)
        with python_restored(), _watched(module, self.paths), self:
            seed_python(0)
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        # what becomes a number in Python may steer what runs next
        self.reads_values |= func is _aten._local_scalar_dense.default and self.from_reals.has(args[0])
        output = self._run(func, args, kwargs)
        self.from_reals.note(func, args, kwargs, output)
        return output

    def _run(self, func, args: tuple, kwargs: dict) -> Any:
        """Returns the operation's result; a random one is recorded, and gets the same bits for every element."""
        if not is_random(func) or _inert_dropout(func, args, kwargs):
            return with_values(func)(*args, **kwargs)

        def middling(shape, device) -> torch.Tensor:
            bits = self._bits(self._note(func, tuple(shape)))
            zeros = _zeros(tuple(shape), device, args[0] if args else None)
            return (zeros + bits).expand(tuple(shape))

        if func in DRAWS:  # it is made of bits by a function of that table
            return DRAWS[func](BitSource(middling, lambda s, d, rate: middling(s, d) < rate * 2.0**53), args, kwargs)
        output = func(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        self._note(func, tuple(first.shape))
        return output.zero_() if draws_each(func) else output  # else the look would take it for a mix of samples

    def _note(self, func, shape: tuple[int, ...]) -> Drawn:
        """Appends a draw to `calls`, counts it in `times`, and returns it."""
        path = self.paths.stack[-1][0] if self.paths.stack else ""
        packed = self.paths.rows_of(shape)
        drawn = Drawn(path, str(func), shape if packed is None else packed[1], packed is not None)
        self.calls.append(drawn)
        self.times[drawn.key] += 1
        return drawn

    def _bits(self, drawn: Drawn) -> int:
        """Returns the 53 bits of all elements of a draw: those of `level`, after `_SAME_LEVEL` calls others."""
        again = self.times[drawn.key] - _SAME_LEVEL
        return self.bits if again <= 0 else mix(again) >> 11


_SHAPE_ALONE = re.compile(r"aten::(new_|(zeros|ones|full|empty)_like)")  # nothing of the tensor that it is called on


class _FromReals:
    """Tracks, by memory, which integer and boolean tensors were computed from floating-point or random numbers.

    Control flow by other tensors (lengths, positions, whether a mask is full) is the same in any precision, so that
    rounding cannot change it.
    """

    def __init__(self) -> None:
        self.memory: set[int] = set()

    def has(self, leaf: Any) -> bool:
        """Whether a tensor is floating-point or complex, or was computed from such a tensor or a draw."""
        if not isinstance(leaf, torch.Tensor):
            return False
        return not _is_whole(leaf) or leaf.untyped_storage()._cdata in self.memory

    def note(self, func: Any, args: tuple, kwargs: dict, output: Any) -> None:
        """Records the integer results of a random operation, or one with such inputs or floating-point ones."""
        leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
        memory = {
            leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor) and _is_whole(leaf)
        }
        if not memory:
            return
        given = () if _SHAPE_ALONE.match(func._schema.name) else tree_leaves((args, kwargs))
        if is_random(func) or any(self.has(leaf) for leaf in given):
            self.memory |= memory
        else:
            self.memory -= memory  # given out again, after what came of real numbers was freed


def _is_whole(leaf: Any) -> bool:
    """Whether `leaf` is a plain tensor of integers or booleans."""
    return type(leaf) is torch.Tensor and not (leaf.is_floating_point() or leaf.is_complex())
