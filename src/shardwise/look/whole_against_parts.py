"""Check that a module's results on a whole batch and on ranks' parts of it agree, also if they depend on its size.

The look at a few samples (first_samples) does not reach branches, groups or chunks that depend on the number of
samples. So the module runs once, without gradients, on as many as a micro-batch has, and on each rank's part of them:

    loss        the sum over the parts must be that of the whole
    batch norm  normalises the parts by the statistics of the whole; those of the parts, combined, must be the same. For
                example a batch of 16 that a module splits into groups of at most 6 has 3 groups, and 2 in each half

What this does not do: run more samples than eight ranks have, or than fit a GiB of the largest output of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.look.added_up import added_up, against, bar_of, finite
from shardwise.look.first_samples import with_attributes_alone
from shardwise.look.mixing import MixesSamples
from shardwise.look.samples import COSTLY_BYTES, repeated
from shardwise.look.watched_run import Evaluate, Functions, Runner, Seen
from shardwise.parallel.batchnorm import KnownStatistics, Statistics
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.loss import Loss

_MOST_RANKS = 8

_FEW_ROWS = 8  # values of a channel below which a batch norm divides by a spread near 0
_FOR_PARTS = "of which each rank has a part"


@dataclass(frozen=True)
class Many:
    """A batch and its parts, one for each rank; `sizes`: the parts' numbers of samples."""

    whole: Any
    parts: list[Any]
    sizes: list[int]


def sizes_to_try(sizes: Sequence[int], sample_bytes: float) -> list[int]:
    """Returns the numbers of samples of the parts that are run: those of as many ranks as fit; [] for one part alone.

    sizes         of all ranks' parts
    sample_bytes  bytes per sample of the largest output of any module
    """
    tried: list[int] = []
    for size in sizes:
        fits = (sum(tried) + size) * sample_bytes <= COSTLY_BYTES
        # a rank of the last, short batch may have no sample
        if size and len(tried) < _MOST_RANKS and fits:
            tried.append(size)
    return tried if len(tried) > 1 else []


def too_many(sizes: Sequence[int], widest: str) -> list[str]:
    """Returns [a notice] if several ranks have samples but no two parts fit into memory together; else [].

    widest   the path of the module with the largest output
    """
    if sum(size > 0 for size in sizes) < 2:  # one rank has the whole batch: there are no parts
        return []
    return [
        "that each module gives for a whole batch what it gives for ranks' parts was not checked: a result of "
        f"'{widest}' takes too much memory for that"
    ]


def many_of(batch: Any, sizes: Sequence[int]) -> Many:
    """Returns the `Many` of sum(sizes) samples: the first of `batch`, repeated if there are fewer."""
    count, total = samples_in(batch), sum(sizes)
    batch = slice_samples(batch, 0, total) if count >= total else repeated(batch, times_of(count, total))
    ends = np.cumsum(sizes).tolist()
    return Many(batch, [slice_samples(batch, end - size, end) for size, end in zip(sizes, ends, strict=True)], [*sizes])


def times_of(count: int, total: int) -> list[int]:
    """Returns how often to repeat each of `count` samples in a row to get `total`; in a row, so that parts differ."""
    return [total * (at + 1) // count - total * at // count for at in range(count)]


def look_at_many(
    module: nn.Module, evaluate: Evaluate, many: Many, *, dtype: torch.dtype,
    joined: Callable[[], Loss] | None = None, functions: Functions = (), mixes: bool = False,
) -> list[str]:  # fmt: skip
    """Returns sentences on differences between a run on a batch and on its parts; [] if there are none.

    dtype      in which the module computes
    mixes      whether modules that mix samples may run on all of them: raises `MixesSamples` for a norm's parent then
    joined     for a loss that does not add up over samples: called after all runs, the loss on the joined outputs
    functions  of the user's that `evaluate` calls beside the module
    """
    seen = Seen(module)
    with torch.random.fork_rng(devices=[]), seen.watching():
        run = Runner(module, with_attributes_alone(module, evaluate), seen, functions)
        names = {child: path for path, child in module.named_modules()}
        of_whole = run.statistics = KnownStatistics(names)
        whole = run(many.whole)[0]
        parts, of_parts = [], []
        for part in many.parts:
            # with the whole's statistics, as if joined over ranks, since else each part's loss would differ
            run.statistics = KnownStatistics(names, of_whole.noted)
            parts.append(run(part)[0])
            of_parts.append(run.statistics.noted)
    # norms first, since if they differ the losses do too, and norms name the module
    unlike = _norms_differ(of_whole.noted, of_parts, many.sizes, dtype)
    if unlike and mixes:
        raise MixesSamples([unlike[0].rpartition(".")[0]], unlike[1])
    few = min(of_whole.noted, key=lambda norm: norm.rows, default=None)
    return [*unlike[1:]] or _sums_differ(whole, parts if joined is None else [joined()], many.sizes, dtype, few)


def _sums_differ(
    whole: Loss, parts: list[Loss], sizes: list[int], dtype: torch.dtype, few: Statistics | None
) -> list[str]:  # fmt: skip
    """Returns [the problem] if the parts' losses do not add up; else []. `few`: the batch norm of the fewest values."""
    why = "a branch by len(x), the first few samples, groups of a fixed size): let nothing depend on it"
    if few is not None and few.rows < _FEW_ROWS:
        why = (
            f"batch norm in '{few.path}', of {few.rows} values of a channel): take more samples in a micro-batch, by "
            "a smaller accumulate or a larger batch"
        )
    # if a value is not finite, the first step names it
    for name, value in whole.numbers().items() if finite(whole, *parts) else ():
        added = sum(part.numbers().get(name, 0.0) for part in parts)
        if not added_up(name, whole, added, dtype):
            return [
                f"what the module gives for a sample hangs on how many there are: the loss's {name} on {sum(sizes)} "
                f"samples is {against(value, added)} on {_joined(sizes)} of them, {_FOR_PARTS} ({why}"
            ]
    return []


def _norms_differ(whole: list[Statistics], parts: list[list[Statistics]], sizes: list[int],
                  dtype: torch.dtype) -> tuple[str, ...]:  # fmt: skip
    """Returns (path, problem) of a batch norm that runs otherwise, or on other groups, on parts; () if none does."""
    paths_by_run = [[norm.path for norm in noted] for noted in (whole, *parts)]
    # Numbers of calls first, since statistics can be paired only if these are equal.
    for path in dict.fromkeys(path for paths in paths_by_run for path in paths):
        times, *of_parts = [paths.count(path) for paths in paths_by_run]
        other = next((at for at, count in enumerate(of_parts) if count != times), None)
        if other is not None:
            return path, (
                f"batch norm in '{path}' runs {times} times on {sum(sizes)} samples and {of_parts[other]} times on "
                f"{sizes[other]} of them, {_FOR_PARTS}: {_GROUPS}"
            )
    # each norm has as many calls in every run, but perhaps in another order
    pairs = zip(*(sorted(noted, key=attrgetter("path")) for noted in (whole, *parts)), strict=True)
    for norm, *of_each_part in pairs:
        if _apart(norm, of_each_part, dtype):
            return norm.path, (
                f"batch norm in '{norm.path}' puts other samples together on {sum(sizes)} samples than on "
                f"{_joined(sizes)} of them, {_FOR_PARTS}: {_GROUPS}"
            )
    return ()


_GROUPS = (
    "samples are cut into groups (ghost batch norm, splits of a batch), which come out otherwise on ranks' parts. "
    "Normalise all samples that the module is given at once"
)


def _apart(whole: Statistics, parts: list[Statistics], dtype: torch.dtype) -> bool:
    """Whether mean and variance of the parts, combined, differ from the whole's by more than rounding."""
    if sum(part.rows for part in parts) != whole.rows:
        return True
    mean = _weighed([(part.rows, part.mean) for part in parts], whole.rows)
    # the variance of all is the mean variance within parts, plus that of the parts' means
    var = _weighed([(part.rows, part.var + (part.mean - mean).square()) for part in parts], whole.rows)
    # the size of the values, not their spread, since in a channel that hardly varies differences are rounding
    scale = float((whole.var + whole.mean.square()).max().sqrt())
    bar = 10 * bar_of(dtype)
    means, variances = (mean - whole.mean).abs(), (var - whole.var).abs()
    return float(means.max()) > bar * scale or float(variances.max()) > bar * scale**2


def _weighed(values: list[tuple[int, torch.Tensor]], rows: int) -> torch.Tensor:
    return torch.stack([value * (count / rows) for count, value in values]).sum(0)


def _joined(sizes: list[int]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
