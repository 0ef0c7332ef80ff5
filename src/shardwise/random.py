"""Randomness inside a module that does not depend on the layout.

In `global` mode a mask is a function of seed, step, micro-batch, module path, call and global index. Element i of the
whole micro-batch's tensor is hash(key, i), and a rank computes only its own elements:

    key     one number for each random op, from (seed, step, micro-batch), the path of the module that is running, and
            how many modules and random ops ran before it there
    i       linear index in the tensor as one process would have it: the batch dim counts from this rank's first sample

The key is carried in the seed of torch's CPU generator. Whoever recomputes a block (torch's checkpoint, ours, a
library's) restores that generator, and so meets the same masks.

In `fast` mode torch's own generators are used, seeded by (seed, step, micro-batch, data rank).

Python's and numpy's generators are seeded by (seed, step, micro-batch), the same on all ranks.

What this does not do: follow random ops inside a compiled graph, or ops whose draws do not lie along a batch dim
(`randperm` over the batch, dropout on the rows that a mask selects), which are refused.

The hash is splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import RefusedPlan
from shardwise.trace.deferred import seed_of

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_aten = torch.ops.aten


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (tensor >> bits) & ((1 << (64 - bits)) - 1)


def hashed(key: int, index: torch.Tensor) -> torch.Tensor:
    """53 random bits, as int64, for each index (int64)."""
    value = index * _signed(_GOLDEN) + _signed(key)
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return _shift(value ^ _shift(value, 31), 11)


@dataclass
class Samples:
    """Which samples of the micro-batch this rank holds: [start, start + count) of `total`."""

    start: int = 0
    count: int = 1
    total: int = 1


_UNCLEAR = -2


@dataclass
class BatchDims:
    """Which dim of a random tensor is the batch; -1: none of them; -2: it follows the samples in another way.

    Learnt at start by running a few samples and fewer, and looking at which dim changed. `known` has the shapes and
    dims met, by (module path, op, number of dims).
    """

    known: dict[tuple[str, str, int], list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)

    def learn(self, whole: list[tuple], part: list[tuple], whole_count: int, part_count: int) -> None:
        """Compare the random ops of two runs, each a list of (path, op, shape)."""
        for key in sorted({_op_key(call) for call in (*whole, *part)}):
            shapes = [shape for path, op, shape in whole if _op_key((path, op, shape)) == key]
            others = [shape for path, op, shape in part if _op_key((path, op, shape)) == key]
            if len(shapes) == len(others):
                pairs = zip(shapes, others, strict=True)
                met = [(shape, _batch_dim(shape, other, whole_count, part_count)) for shape, other in pairs]
            else:  # which ops run depends on the samples
                met = [(shape, _UNCLEAR) for shape in shapes or others]
            self.known[key] = list(dict.fromkeys(self.known.get(key, []) + met))

    def find(self, path: str, op: str, shape: tuple[int, ...], local_samples: int) -> int:
        """The batch dim of this tensor; where nothing at all was learnt, the first dim if the samples divide it."""
        if not self.known:
            return 0 if shape and local_samples and shape[0] % local_samples == 0 else -1
        entries = self.known.get((path, op, len(shape)))
        if entries is not None and len({dim for _, dim in entries}) == 1:
            found = {entries[0][1]}
        else:
            if entries is None:  # a module that was not reached at start: others where the same op has this shape
                entries = [e for (_, o, ndim), es in self.known.items() if o == op and ndim == len(shape) for e in es]
            found = {dim for met, dim in entries if _alike(shape, met, dim, local_samples)}
        dim = found.pop() if len(found) == 1 else _UNCLEAR
        return _UNCLEAR if dim >= 0 and local_samples and shape[dim] % local_samples else dim

    def unclear(self) -> list[str]:
        """The ops, with their modules, whose draws cannot be dealt over samples."""
        return [
            f"{op} in module '{path}'"
            for (path, op, _), entries in self.known.items()
            if any(dim == _UNCLEAR for _, dim in entries)
        ]


def _op_key(call: tuple) -> tuple[str, str, int]:
    path, op, shape = call
    return path, op, len(shape)


def _batch_dim(shape: tuple[int, ...], other: tuple[int, ...], count: int, other_count: int) -> int:
    differ = [d for d in range(len(shape)) if shape[d] != other[d]]
    if not differ:
        return -1
    fits = len(differ) == 1 and shape[differ[0]] * other_count == other[differ[0]] * count
    return differ[0] if fits else _UNCLEAR


def _alike(shape: tuple[int, ...], met: tuple[int, ...], dim: int, local_samples: int) -> bool:
    """Whether a tensor may be the same op's as one met, with another number of samples."""
    same = all(a == b for place, (a, b) in enumerate(zip(shape, met, strict=True)) if place != dim)
    return same and (dim < 0 or not local_samples or shape[dim] % local_samples == 0)


class _Paths:
    """The path of the module that is running, and the key carried in the CPU generator's seed."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []
        self.path_of: dict[int, str] = {}

    @staticmethod
    def key() -> int:
        return torch.default_generator.initial_seed() & _MASK

    def enter(self, path: str) -> None:
        after = _mix(self.key())
        self.stack.append((path, after))
        torch.default_generator.manual_seed(seed_of(after, path))

    def leave(self) -> None:
        _, after = self.stack.pop()
        torch.default_generator.manual_seed(after)

    def draw(self) -> tuple[int, str]:
        """This op's key and the path it belongs to, the same again when recomputed."""
        key = self.key()
        path = self.path_of.setdefault(key, self.stack[-1][0] if self.stack else "")
        torch.default_generator.manual_seed(_mix(key))
        return key, path


@contextmanager
def _watched(module: nn.Module, paths: _Paths) -> Iterator[None]:
    handles = []
    for path, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda m, a, path=path: paths.enter(path), prepend=True))
        handles.append(child.register_forward_hook(lambda m, a, o: paths.leave(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_random(func) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class GlobalRandom(TorchDispatchMode):
    """Answers random ops by global index. `samples` says which part of the micro-batch runs here."""

    def __init__(self, dims: BatchDims):
        super().__init__()
        self.dims = dims
        self.samples = Samples()
        self.paths = _Paths()

    def begin(self, seed: int, step: int, micro_batch: int, samples: Samples) -> None:
        """Start a micro-batch."""
        self.samples = samples
        self.paths.stack.clear()
        self.paths.path_of.clear()
        torch.default_generator.manual_seed(seed_of("mask", seed, step, micro_batch))
        _seed_python(seed_of("mask", seed, step, micro_batch))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Active around forward and backward of `module`."""
        with _watched(module, self.paths), self:
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if not _is_random(func) or kwargs.get("generator") is not None or _inert_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        key, path = self.paths.draw()
        if func in _DRAWS:
            return _DRAWS[func](lambda shape, device: self._bits(key, path, func, shape, device), args, kwargs)
        return self._same_everywhere(key, path, func, args, kwargs)

    def _bits(self, key: int, path: str, func, shape, device) -> torch.Tensor:
        shape = tuple(shape)
        return hashed(key, _global_index(shape, self._batch_dim(path, func, shape), self.samples, device))

    def _batch_dim(self, path: str, func, shape: tuple[int, ...]) -> int:
        if self.samples.count == self.samples.total:
            return -1  # all samples are here
        dim = self.dims.find(path, str(func), shape, max(self.samples.count, 1))
        if dim == _UNCLEAR:
            raise RefusedPlan(_not_dealt(f"{func} in module '{path}' (shape {shape})"))
        return dim

    def _same_everywhere(self, key: int, path: str, func, args, kwargs):
        output = func(*args, **kwargs)
        tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, torch.Tensor)]
        if any(self._batch_dim(path, func, tuple(t.shape)) != -1 for t in tensors):
            raise RefusedPlan(_not_dealt(f"{func} in module '{path}'"))
        torch.default_generator.manual_seed(key & (2**63 - 1))
        output = func(*args, **kwargs)
        torch.default_generator.manual_seed(_mix(key))
        return output


def _not_dealt(what: str) -> str:
    return (
        f"random op {what} draws for samples in a way that cannot be dealt over ranks, so its masks would differ from "
        "one process's; use randomness='fast', or draw tensors with a batch dim by dropout, rand, randn, randint, "
        "bernoulli or multinomial"
    )


def _seed_python(seed: int) -> None:
    """Python's and numpy's generators, the same on all ranks: what they draw cannot be dealt over samples."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def _python_restored() -> Iterator[None]:
    kept = random.getstate()
    numpy = sys.modules.get("numpy")
    kept_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(kept)
        if numpy is not None:
            numpy.random.set_state(kept_numpy)


def _inert_dropout(func, args, kwargs) -> bool:
    """Whether an op that can draw (fused attention, recurrent layers) has its dropout off."""
    if func is _aten.native_dropout.default:
        return args[2] is False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            rate = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return not rate
    return False


def _global_index(shape: tuple[int, ...], dim: int, samples: Samples, device) -> torch.Tensor:
    """Linear index of each local element in the tensor of the whole micro-batch."""
    sizes = list(shape)
    start = 0
    if dim >= 0:
        for_each = shape[dim] // max(samples.count, 1)
        sizes[dim] = for_each * samples.total
        start = for_each * samples.start
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for place in reversed(range(len(shape))):
        along = torch.arange(shape[place], device=device) + (start if place == dim else 0)
        index = index + (along * stride).view(-1, *([1] * (len(shape) - place - 1)))
        stride *= sizes[place]
    return index.expand(shape) if shape else index


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.float64) * 2.0**-53


def _normal(bits: torch.Tensor) -> torch.Tensor:
    """Box and Muller 1958, the second uniform hashed from the first's bits."""
    radius = torch.sqrt(-2 * torch.log1p(-_uniform(bits)))
    return radius * torch.cos(2 * math.pi * _uniform(hashed(_GOLDEN, bits)))


def _fill(draw):
    """For `op_(self, ...)`: overwrite self."""

    def run(bits, args, kwargs):
        tensor = args[0]
        return tensor.copy_(draw(bits(tensor.shape, tensor.device), args[1:], kwargs))

    return run


def _like(draw):
    """For `op_like(self, ...)`: a new tensor of self's shape."""

    def run(bits, args, kwargs):
        like = torch.empty_like(args[0], **_factory(kwargs))
        return like.copy_(draw(bits(like.shape, like.device), args[1:], kwargs))

    return run


def _new(draw, size_at: int = 0):
    """For `op(..., size, ...)`: a new tensor."""

    def run(bits, args, kwargs):
        size = args[size_at]
        integral = draw in (_draw_range, _draw_below)
        options = {"dtype": torch.int64} if integral and kwargs.get("dtype") is None else {}
        new = torch.empty(size, **{**_factory(kwargs), **options})
        return new.copy_(draw(bits(new.shape, new.device), (*args[:size_at], *args[size_at + 1 :]), kwargs))

    return run


def _factory(kwargs: dict) -> dict:
    return {k: kwargs[k] for k in ("dtype", "layout", "device", "memory_format") if kwargs.get(k) is not None}


def _argument(args, kwargs, place: int, name: str, default: float) -> float:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _draw_uniform(bits, args, kwargs):
    low, high = _argument(args, kwargs, 0, "from", 0.0), _argument(args, kwargs, 1, "to", 1.0)
    return _uniform(bits) * (high - low) + low


def _draw_unit(bits, args, kwargs):
    return _uniform(bits)


def _draw_normal(bits, args, kwargs):
    return _normal(bits) * _argument(args, kwargs, 1, "std", 1.0) + _argument(args, kwargs, 0, "mean", 0.0)


def _draw_standard_normal(bits, args, kwargs):
    return _normal(bits)


def _draw_bernoulli(bits, args, kwargs):
    return _uniform(bits) < _argument(args, kwargs, 0, "p", 0.5)


def _normal_of_floats(bits, args, kwargs):
    mean, std, size = args[:3]
    new = torch.empty(size, **_factory(kwargs))
    return new.copy_(_normal(bits(new.shape, new.device)) * std + mean)


def _multinomial(bits, args, kwargs):
    """With replacement by inverting the cumulative sum; without, by a race of exponentials, as torch does it."""
    weights, count = args[0], args[1]
    if _argument(args, kwargs, 2, "replacement", False) and count > 1:
        cumulative = weights.double().cumsum(-1)
        u = _uniform(bits((*weights.shape[:-1], count), weights.device)) * cumulative[..., -1:]
        return torch.searchsorted(cumulative, u, right=True).clamp_(max=weights.shape[-1] - 1)
    waits = -torch.log1p(-_uniform(bits(weights.shape, weights.device)))
    return (weights.double() / waits.clamp_min(1e-300)).topk(count, dim=-1).indices


def _draw_exponential(bits, args, kwargs):
    return -torch.log1p(-_uniform(bits)) / _argument(args, kwargs, 0, "lambd", 1.0)


def _draw_range(bits, args, kwargs):
    low, high = args[0], args[1]
    return low + bits % (high - low)


def _draw_below(bits, args, kwargs):
    return bits % args[0]


def _bernoulli_of(bits, args, kwargs):
    probabilities = args[0]
    return (_uniform(bits(probabilities.shape, probabilities.device)) < probabilities).to(probabilities.dtype)


def _native_dropout(bits, args, kwargs):
    tensor, rate = args[0], args[1]
    keep = _uniform(bits(tensor.shape, tensor.device)) >= rate
    scale = 0.0 if rate == 1 else 1 / (1 - rate)
    return tensor * keep.to(tensor.dtype) * scale, keep


_DRAWS = {
    _aten.bernoulli_.float: _fill(_draw_bernoulli),
    _aten.bernoulli_.Tensor: _fill(_draw_bernoulli),
    _aten.bernoulli.default: _bernoulli_of,
    _aten.bernoulli.p: _like(_draw_bernoulli),
    _aten.native_dropout.default: _native_dropout,
    _aten.uniform_.default: _fill(_draw_uniform),
    _aten.normal_.default: _fill(_draw_normal),
    _aten.exponential_.default: _fill(_draw_exponential),
    _aten.random_.default: _fill(lambda bits, args, kwargs: bits % 2**24),
    getattr(_aten.random_, "from"): _fill(_draw_range),
    _aten.random_.to: _fill(_draw_below),
    _aten.rand.default: _new(_draw_unit),
    _aten.rand_like.default: _like(_draw_unit),
    _aten.randn.default: _new(_draw_standard_normal),
    _aten.randn_like.default: _like(_draw_standard_normal),
    _aten.randint.default: _new(_draw_below, 1),
    _aten.randint.low: _new(_draw_range, 2),
    _aten.randint_like.default: _like(_draw_below),
    _aten.randint_like.low_dtype: _like(_draw_range),
    _aten.normal.float_float: _normal_of_floats,
    _aten.multinomial.default: _multinomial,
}


class ConstantRandom(TorchDispatchMode):
    """Random ops draw the same for every sample, and are written down as (path, op, shape).

    Under it a module is a function of each sample alone, so that additivity of its loss can be checked with dropout
    on, and two runs of unequal size show which dim of each random tensor is the batch.
    """

    def __init__(self, level: float = 0.5) -> None:
        super().__init__()
        self.bits = int(level * 2**53)
        self.calls: list[tuple[str, str, tuple[int, ...]]] = []
        self.reads_values = False  # whether control flow may depend on a tensor's value
        self.paths = _Paths()

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Active around a forward of `module`."""
        torch.default_generator.manual_seed(0)
        with _python_restored(), _watched(module, self.paths), self:
            _seed_python(0)
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        self.reads_values |= func is _aten._local_scalar_dense.default
        if not _is_random(func) or _inert_dropout(func, args, kwargs):
            return func(*args, **kwargs)
        path = self.paths.stack[-1][0] if self.paths.stack else ""

        def middling(shape, device) -> torch.Tensor:
            self.calls.append((path, str(func), tuple(shape)))
            return torch.full(tuple(shape), self.bits, dtype=torch.int64, device=device)

        if func in _DRAWS:
            return _DRAWS[func](middling, args, kwargs)
        output = func(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        self.calls.append((path, str(func), tuple(first.shape)))
        return output
