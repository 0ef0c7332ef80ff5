"""Find the batch dim of each random tensor by running the module on two numbers of samples. Read by random/modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

UNCLEAR, PACKED = -2, -3  # in place of the index of a batch dim, see `BatchDims`


class Drawn(NamedTuple):
    """A random op that ran: path of its module, op name, shape, whether its first dim is rows of packed sequences."""

    path: str
    op: str
    shape: tuple[int, ...]
    packed: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.path, self.op, len(self.shape)


@dataclass
class BatchDims:
    """Records the batch dim of each random tensor, the dim that counts samples; in place of an index it may be

    -1  no dim counts samples
    -2  UNCLEAR: its shape depends on the samples in another way
    -3  PACKED: its first dim is the rows of the packed sequence that its module was called with

    Learnt before training from two runs on unequal numbers of samples, by the dim that changed. A batch dim may hold
    each sample several times: sample by sample, or, for keys in `blocks`, all samples and then all of them again (time
    before samples, two batches joined).

    dims_by_op  (module path, op, number of dims) -> [(shape, batch dim)] of each different draw that ran
    blocks      keys of `dims_by_op`
    """

    dims_by_op: dict[tuple[str, str, int], list[tuple[tuple[int, ...], int]]] = field(default_factory=dict)
    blocks: frozenset[tuple[str, str, int]] = frozenset()

    def orders(self, samples: int) -> Iterator[frozenset[tuple[str, str, int]]]:
        """Yields values of `blocks` to try: none, all, and each alone of the draws with a batch dim above `samples`."""
        several = [
            key
            for key, entries in self.dims_by_op.items()
            if any(dim >= 0 and shape[dim] > samples for shape, dim in entries)
        ]
        yield from dict.fromkeys([frozenset(), frozenset(several), *(frozenset([key]) for key in several)])

    def learn(self, whole: list[Drawn], part: list[Drawn], whole_count: int, part_count: int) -> None:
        """Records the batch dim of each draw; `whole`, `part`: draws of runs on `whole_count`, `part_count` samples."""
        for key in sorted({drawn.key for drawn in (*whole, *part)}):
            first = [drawn for drawn in whole if drawn.key == key]
            second = [drawn for drawn in part if drawn.key == key]
            if len(first) == len(second):
                pairs = zip(first, second, strict=True)
                met = [(drawn.shape, _batch_dim(drawn, other, whole_count, part_count)) for drawn, other in pairs]
            else:  # which ops run depends on the samples
                met = [(drawn.shape, UNCLEAR) for drawn in first or second]
            self.dims_by_op[key] = list(dict.fromkeys(self.dims_by_op.get(key, []) + met))

    def find(self, path: str, op: str, shape: tuple[int, ...], local_samples: int) -> int:
        """Returns the batch dim of a tensor that `op` draws in module `path`, -1, UNCLEAR or PACKED (`BatchDims`).

        If nothing was learnt, 0 if `local_samples` divides the first dim, else -1.
        """
        if not self.dims_by_op:
            return 0 if shape and local_samples and shape[0] % local_samples == 0 else -1
        entries = self.dims_by_op.get((path, op, len(shape)))
        if entries is not None and len({dim for _, dim in entries}) == 1:  # the same dim whenever it was met
            dims = {entries[0][1]}
        else:
            if entries is None:  # a module that was not reached at start: others where the same op has this shape
                entries = [e for key, met in self.dims_by_op.items() if key[1:] == (op, len(shape)) for e in met]
            dims = {dim for met, dim in entries if _alike(shape, met, dim, local_samples)}
        dim = dims.pop() if len(dims) == 1 else UNCLEAR
        # a dim that the samples held here do not divide is not their batch dim
        return UNCLEAR if dim >= 0 and local_samples and shape[dim] % local_samples else dim

    def of(self, op: str, shape: tuple[int, ...], samples: int) -> int | None:
        """Returns the batch dim of a tensor that `op` draws, from the recorded draws of all modules.

        -1: none; UNCLEAR: draws disagree; None: no draw with as many dims was recorded. It has size `samples`.
        """
        met = [entry for key, entries in self.dims_by_op.items() if key[1:] == (op, len(shape)) for entry in entries]
        fits = [(other, dim) for other, dim in met if dim < 0 or shape[dim] == samples]
        dims = {dim for _, dim in fits}
        # draws of several modules have this many dims: one whose other sizes agree decides
        if len(dims) > 1:
            # 0: that `samples` fit was seen above, and the other dims decide
            dims = {dim for other, dim in fits if _alike(shape, other, dim, 0)}
        return None if not met else dims.pop() if len(dims) == 1 else UNCLEAR

    def unclear(self) -> list[str]:
        """Returns "OP in module 'PATH'" for each draw whose batch dim is UNCLEAR, so that ranks cannot share it."""
        return [
            f"{op} in module '{path}'"
            for (path, op, _), entries in self.dims_by_op.items()
            if any(dim == UNCLEAR for _, dim in entries)
        ]


def _batch_dim(drawn: Drawn, other: Drawn, count: int, other_count: int) -> int:
    """Returns the batch dim of a draw (or -1, UNCLEAR, PACKED), from runs on `count` and `other_count` samples."""
    shape, shape_of_other = drawn.shape, other.shape
    differ = [d for d in range(len(shape)) if shape[d] != shape_of_other[d]]
    if not differ:
        return -1
    if drawn.packed and other.packed and differ == [0]:
        return PACKED
    # each sample has as many indices in both runs
    fits = len(differ) == 1 and shape[differ[0]] * other_count == shape_of_other[differ[0]] * count
    return differ[0] if fits else UNCLEAR


def _alike(shape: tuple[int, ...], met: tuple[int, ...], dim: int, local_samples: int) -> bool:
    """Whether `shape` equals `met` except in batch dim `dim`, and `local_samples` (0: any) divides its size there."""
    varies = 0 if dim == PACKED else dim
    same = all(a == b for place, (a, b) in enumerate(zip(shape, met, strict=True)) if place != varies)
    return same and (dim < 0 or not local_samples or shape[dim] % local_samples == 0)
