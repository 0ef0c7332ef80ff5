"""What torch itself draws, held against what stands for it in a proof: rates, means and widths of random numbers.

Both sides of a proof draw by `random/draws`, so a mask that drops half as much as was asked for, or normal numbers that
are too narrow, would be on both. Each random operation that the one process meets is drawn once more, many times over:
by `DRAWS`, and by torch with a generator of its own. Means of bounded functions of the numbers are compared.

The bits that numbers are made of are computed again too: element i of a tensor of the whole micro-batch has the hash of
i under the operation's key. Rows of packed sequences, which count otherwise, are looked at for equal ones alone.
Python's generator and numpy's have to begin each micro-batch otherwise.

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

NUMBERS = 2**15  # of each draw that is compared: a rate of 0.1 is told from one of 0.085
SIGMAS = 6.0
NARROW = (torch.float32, torch.bfloat16, torch.float16)
_KEY = 0x243F6A8885A308D3


class CheckedRandom(GlobalRandom):
    """Answers random operations as a proof does; `differences` tells which are not distributed as torch's are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.differences: list[str] = []
        self._compared = set[str]()
        self._keys = set[int]()  # of this micro-batch's draws
        self._begun: dict[tuple, tuple] = {}  # by the state of Python's generator or numpy's: the micro-batch begun

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the result of a random operation, drawn by global index."""
        told = f"{func} with {[arg for arg in args if isinstance(arg, int | float)]}, {sorted(kwargs)}"
        # each kind of call once; multinomial's weights have two dims at most, and no room for one more to draw often
        if func in DRAWS and func is not torch.ops.aten.multinomial.default and told not in self._compared:
            self._compared.add(told)
            self.differences += difference(func, args, kwargs)
        key = self.paths.key()
        if torch._C._current_graph_task_id() < 0:  # what runs again in backward draws the same
            if key in self._keys:
                self._tell(f"{func} draws what another operation of the same micro-batch has drawn")
            self._keys.add(key)
        return super().answer(func, args, kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # what casts there were inside is left out by now (`trace/double`), on both sides
        narrow = (kwargs or {}).get("dtype") in NARROW and torch._C._current_graph_task_id() < 0
        # recomputation in backward casts again what forward did: once is enough
        if narrow and any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args):
            self._tell(f"{func} rounds float64 to {kwargs['dtype']}, on both sides")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begin(self, seed: int, step: int, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        """Starts a micro-batch."""
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
        """Returns 53 random bits of each element, a hash of its place; with `rate`, whether below that share."""
        bits = super()._drawn(key, path, func, shape, device, like, None)
        # a share of the samples, or sequences packed into rows, is numbered otherwise than by place in this tensor
        whole = self.samples.count == self.samples.total and not any(self.paths.packed)
        if whole and not torch.equal(bits.cpu(), bits_of(key, shape)):
            self._tell(f"{func} draws numbers for elements that are not those of their places")
        # of other layouts at least: no two elements have one number
        elif len(bits.unique()) < bits.numel():
            self._tell(f"{func} draws the same number for several elements")
        if rate is None:
            return bits
        # asked for once more with a rate: the two ways to draw must agree element by element
        below = super()._drawn(key, path, func, shape, device, like, rate)
        if not torch.equal(below, bits.double() * 2.0**-53 < rate):
            self._tell(f"{func} takes other elements for less than {rate:g} than those whose numbers are")
        return below

    def _tell(self, sentence: str) -> None:
        self.differences += [] if sentence in self.differences else [sentence]


def difference(func: Any, args: tuple, kwargs: dict) -> list[str]:
    """Returns a sentence where a rule of `DRAWS` gives other numbers than torch's operation, else nothing."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    sizes = [math.prod(arg) for arg in args if isinstance(arg, list | tuple)]
    # few elements say nothing of a mean, so the draw is repeated until there are `NUMBERS`
    held = max([tensor.numel() for tensor in tensors] + sizes, default=1)
    if held == 0:
        return []
    times = -(-NUMBERS // held)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = _moments(func(*_repeated(args, times), **kwargs))
    ours = _moments(DRAWS[func](BitSource(_bits, _below), _repeated(args, times), kwargs))
    for (mean, variance, count), (own, own_variance, _) in zip(theirs, ours, strict=True):
        # two means of random numbers differ by chance: up to `SIGMAS` standard deviations, and rounding
        if abs(mean - own) > SIGMAS * math.sqrt((variance + own_variance) / count) + 1e-9:
            return [f"{func} draws other numbers than torch's: a mean of {own:.4g} where torch's is {mean:.4g}"]
    return []


def _repeated(args: tuple, times: int) -> tuple:
    """Returns a random operation's arguments with a first dim of `times` before each tensor's dims and each size."""
    return tuple(
        arg.detach().expand(times, *arg.shape).clone() if isinstance(arg, torch.Tensor)
        else [times, *arg] if isinstance(arg, list | tuple) else arg
        for arg in args
    )  # fmt: skip


def bits_of(key: int, shape: Any) -> torch.Tensor:
    """Returns 53 random bits for each element of a tensor of this shape: splitmix64's hash of its place under a key."""
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
    """Returns (mean, variance, count) of three bounded functions of each drawn tensor: a draw may have no mean."""
    moments = []
    for leaf in tree_leaves(drawn):
        numbers = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).detach().double()
        numbers = numbers.nan_to_num()
        for bounded in (torch.tanh(numbers), torch.tanh(numbers).square(), torch.tanh(numbers / 1e6)):
            moments.append((float(bounded.mean()), float(bounded.var()), bounded.numel()))
    return moments
