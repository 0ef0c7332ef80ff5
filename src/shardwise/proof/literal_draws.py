"""Compare the random numbers of a proof with torch's own: rates, means and variances.

Both sides of a proof make random numbers by `random/draws`, so a mask that drops half as much as was asked for, or
normal numbers of too small a variance, would be wrong on both. Each kind of random operation that the one process runs
is run again many times, by `DRAWS` and by torch with a generator of its own, and means of bounded functions of the
numbers are compared.

The random bits are computed again too: element i of a tensor for the whole micro-batch has the hash of i under the
operation's key. Packed sequences are numbered otherwise, so there only equal bits are looked for. Python's and numpy's
generators must have another state at the begin of each micro-batch.

What this does not do: compare more of a distribution than its first two moments, or operations without a rule.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from shardwise.random import GlobalRandom
from shardwise.random.draws import DRAWS, BitSource

NUMBERS = 2**15  # random numbers per comparison, enough to tell a rate of 0.1 from one of 0.085
SIGMAS = 6.0  # standard errors by which two means may differ
NARROW = (torch.float32, torch.bfloat16, torch.float16)
_KEY = 0x243F6A8885A308D3


class CheckedRandom(GlobalRandom):
    """Answers random operations as a proof does; `differences` collects a sentence for each unlike torch's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.differences: list[str] = []
        self._compared = set[str]()
        self._keys = set[int]()  # of the random operations of this micro-batch
        self._begun: dict[tuple, tuple] = {}  # ("Python" or "numpy", state) -> (seed, step, micro-batch) begun with it

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the result of a random operation, by global index, after checks that add to `differences`."""
        told = f"{func} with {[arg for arg in args if isinstance(arg, int | float)]}, {sorted(kwargs)}"
        # each kind of call once; multinomial takes two dims at most, so no dim of repetitions can be added
        if func in DRAWS and func is not torch.ops.aten.multinomial.default and told not in self._compared:
            self._compared.add(told)
            self.differences += difference(func, args, kwargs)
        key = self.paths.key()
        if torch._C._current_graph_task_id() < 0:  # not in backward, where recompute repeats keys on purpose
            if key in self._keys:
                self._tell(f"{func} draws what another operation of the same micro-batch has drawn")
            self._keys.add(key)
        return super().answer(func, args, kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # `trace/double` has left out the casts that a module asks for; one that arrives here would round on both sides
        narrow = (kwargs or {}).get("dtype") in NARROW and torch._C._current_graph_task_id() < 0
        # recomputation in backward casts again what forward did: once is enough
        if narrow and any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args):
            self._tell(f"{func} rounds float64 to {kwargs['dtype']}, on both sides")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self, seed: int, step: int, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        """Starts a micro-batch, and notes if Python's or numpy's generator is in the state of another one's start."""
        super().begin(seed, step, micro_batch, *args, **kwargs)
        self._keys.clear()
        place = (seed, step, micro_batch)
        for name, state in (
            ("Python", random.getstate()),
            ("numpy", np.random.get_state(legacy=False)["state"]["key"].tobytes()),
        ):
            if self._begun.setdefault((name, state), place) != place:
                self._tell(f"{name}'s generator begins two micro-batches alike")

    def _drawn(self, key: int, path: str, func, shape, device, like: Any, rate: float | None) -> torch.Tensor:
        """Returns 53 random bits of each element, a hash of its index; with `rate`, whether each is below it."""
        bits = super()._drawn(key, path, func, shape, device, like, None)
        # for a part of the samples, or packed sequences, indices are not those of this tensor's elements
        whole = self.samples.count == self.samples.total and not any(self.paths.packed)
        if whole and not torch.equal(bits.cpu(), bits_of(key, shape)):
            self._tell(f"{func} draws numbers for elements that are not those of their places")
        # in other layouts at least no two elements may have the same bits
        elif len(bits.unique()) < bits.numel():
            self._tell(f"{func} draws the same number for several elements")
        if rate is None:
            return bits
        # the same elements with `rate`, for which there is other code: both must agree
        below = super()._drawn(key, path, func, shape, device, like, rate)
        if not torch.equal(below, bits.double() * 2.0**-53 < rate):
            self._tell(f"{func} takes other elements for less than {rate:g} than those whose numbers are")
        return below

    def _tell(self, sentence: str) -> None:
        self.differences += [] if sentence in self.differences else [sentence]


def difference(func: Any, args: tuple, kwargs: dict) -> list[str]:
    """Returns [a sentence] if a rule of `DRAWS` gives numbers of other means than torch's operation; else []."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    sizes = [math.prod(arg) for arg in args if isinstance(arg, list | tuple)]
    # few elements say nothing of a mean, so the operation is repeated until there are `NUMBERS`
    held = max([tensor.numel() for tensor in tensors] + sizes, default=1)
    if held == 0:
        return []
    times = -(-NUMBERS // held)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = _moments(func(*_repeated(args, times), **kwargs))
    ours = _moments(DRAWS[func](BitSource(_bits, _below), _repeated(args, times), kwargs))
    for (mean, variance, count), (own, own_variance, _) in zip(theirs, ours, strict=True):
        # two sample means differ by chance, by up to `SIGMAS` standard errors, and by rounding
        if abs(mean - own) > SIGMAS * math.sqrt((variance + own_variance) / count) + 1e-9:
            return [f"{func} draws other numbers than torch's: a mean of {own:.4g} where torch's is {mean:.4g}"]
    return []


def _repeated(args: tuple, times: int) -> tuple:
    """Returns a random op's arguments with a new first dim of `times` on each tensor and in each size."""
    return tuple(
        arg.detach().expand(times, *arg.shape).clone() if isinstance(arg, torch.Tensor)
        else [times, *arg] if isinstance(arg, list | tuple) else arg
        for arg in args
    )  # fmt: skip


def bits_of(key: int, shape: Any) -> torch.Tensor:
    """Returns 53 random bits (int64) for each element of a tensor of this shape: splitmix64 of its index and `key`."""
    value = np.arange(math.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = (value ^ (value >> np.uint64(31))) >> np.uint64(11)
    return torch.from_numpy(value.astype(np.int64)).view(tuple(shape))


def _bits(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return bits_of(_KEY, shape).to(device)


def _below(shape: tuple[int, ...], device: torch.device, rate: float) -> torch.Tensor:
    return _bits(shape, device).double() * 2.0**-53 < rate


def _moments(drawn: Any) -> list[tuple[float, float, int]]:
    """Returns (mean, variance, count) of three bounded functions of each tensor, which itself may have no mean."""
    moments = []
    for leaf in tree_leaves(drawn):
        numbers = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).detach().double()
        numbers = numbers.nan_to_num()
        for bounded in (torch.tanh(numbers), torch.tanh(numbers).square(), torch.tanh(numbers / 1e6)):
            moments.append((float(bounded.mean()), float(bounded.var()), bounded.numel()))
    return moments
