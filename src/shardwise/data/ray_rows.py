"""Rows of a Ray Dataset as a source: Ray makes its blocks once and keeps them; a rank fetches those that it reads from.

    one actor of the cluster   runs the dataset, keeping the order of its rows, and holds the blocks: rows, reference
    each rank                  sample i --> its block --> from Ray's object store, the last few kept --> its row

The actor is found by its name, so the ranks of a job share it, and ends with the rank that asked for it first; where
it, or the node of a block, is lost, the blocks are made again. The rows must then be the same: a dataset that draws, or
whose files change, gives other samples, and its source is refused where the numbers of rows tell.
"""

from __future__ import annotations

import bisect
import pickle
import sys
import sysconfig
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise.data.order import Order
from shardwise.dataset import DatasetSource
from shardwise.errors import InputError, RunError, first_line

KEPT = 8  # blocks that a rank keeps
AGAIN_S = 60.0  # in which the end of an actor, or of a node, is over
_POLL_S = 0.5
NAMESPACE = "shardwise"


class RaySource(DatasetSource):
    """Rows of a `ray.data.Dataset` as a `Source`: each a dict of its columns, joined by torch's `default_collate`.

    make     returns the dataset; called in the cluster, where the actor that makes the blocks runs it
    name     of the dataset in the cluster: ranks that give the same share its blocks
    shuffle  False: samples in the dataset's own order, the cheapest to read; True: another order in each epoch
    collate  joins a list of rows into a batch, in place of `default_collate`

    Ray must run where a rank does (`ray start`, or a job of `shardwise.ray`).
    """

    def __init__(
        self, make: Callable[[], Any], *, name: str = "dataset", shuffle: bool = False,
        collate: Callable[[list], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(RayRows(make, name), collate)
        self.shuffle = shuffle

    def order(self, seed: int) -> Order:
        """Returns the order in which a loader reads this source: shuffled by the seed, where `shuffle` is set."""
        return Order(len(self), seed, self.shuffle)


class RayRows:
    """The rows of a Ray Dataset by their index."""

    def __init__(self, make: Callable[[], Any], name: str, kept: int = KEPT) -> None:
        self.make, self.name, self.kept = make, f"shardwise-rows-{name}", kept
        self._forget()
        self._rows: list[int] | None = None

    def _forget(self) -> None:
        self._actor: Any = None
        self._references: list[Any] = []
        self._blocks: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Returns {"make", "name", "kept"}, from which another process asks for the blocks itself."""
        return {"make": self.make, "name": self.name, "kept": self.kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**{**state, "name": state["name"].removeprefix("shardwise-rows-")})  # type: ignore[misc]

    def __len__(self) -> int:
        return self._ends()[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the rows at these indices, each a dict of its columns."""
        ends, rows = self._ends(), []
        for index in indices:
            if not 0 <= index < ends[-1]:
                raise IndexError(f"row {index} of {ends[-1]}")
            at = bisect.bisect_right(ends, index)
            block = self._block(at)
            first = ends[at - 1] if at else 0
            rows.append({name: column[index - first] for name, column in block.items()})
        return rows

    def _ends(self) -> list[int]:
        """Returns the running total of rows at the end of each block."""
        if self._rows is None:
            self._ask()
        assert self._rows is not None
        return self._rows

    def _block(self, at: int) -> dict[str, Any]:
        """Returns {column: array of the block's rows}."""
        if at not in self._blocks:
            while len(self._blocks) >= self.kept:
                self._blocks.popitem(last=False)
            self._blocks[at] = self._fetched(at)
        self._blocks.move_to_end(at)
        return self._blocks[at]

    def _fetched(self, at: int) -> dict[str, Any]:
        """Returns {column: array} of a block; a lost one is asked for again, for `AGAIN_S` seconds, then `RunError`."""
        import ray
        from ray.data.block import BlockAccessor

        until = time.monotonic() + AGAIN_S
        while True:
            try:
                if not self._references:
                    self._ask()
                columns = BlockAccessor.for_block(ray.get(self._references[at])).to_numpy()
                # rows that are single values have no column: named as Ray names it, "item"
                return columns if isinstance(columns, dict) else {"item": columns}
            except ray.exceptions.RayError as error:  # the actor, or the node of a block, is lost
                self._forget()
                if time.monotonic() > until:
                    raise RunError(f"{self.name}: Ray does not give its blocks: {first_line(error)}") from error
                time.sleep(_POLL_S)

    def _ask(self) -> None:
        """Ask the actor, made by the first rank, for blocks' rows and references; raises `InputError`, `RunError`."""
        import ray

        _join_ray()
        until, packed = time.monotonic() + AGAIN_S, _packed(self.make)
        while True:
            try:
                maker = ray.remote(num_cpus=0)(_Maker).options(
                    name=self.name, namespace=NAMESPACE, get_if_exists=True, max_concurrency=2
                )
                self._actor = maker.remote(packed)
                rows, self._references = ray.get(self._actor.blocks.remote())
                break
            except ray.exceptions.RayTaskError as error:
                raise InputError(f"{self.name}: the dataset cannot be made: {first_line(error.cause)}") from error
            except ray.exceptions.RayError as error:  # that of an attempt before this one is about to end
                if time.monotonic() > until:
                    raise RunError(f"{self.name}: Ray does not make it: {first_line(error)}") from error
                time.sleep(_POLL_S)
        ends = list(accumulate(rows))
        if not ends or not ends[-1]:
            raise InputError(f"{self.name}: the dataset has no rows")
        # the actor was lost and made again: positions in the data count rows as they were
        if self._rows is not None and self._rows != ends:
            raise RunError(f"{self.name}: made again, the dataset has other blocks: its rows must not depend on chance")
        self._rows = ends


class _Maker:
    """The actor: runs a dataset once, and holds its blocks."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._made: Any = None

    def blocks(self) -> tuple[list[int], list[Any]]:
        """Returns (number of rows of each block, Ray's reference to each block), in the dataset's order."""
        import ray
        from ray.data import DataContext
        from ray.data.block import BlockAccessor

        if self._made is None:
            DataContext.get_current().execution_options.preserve_order = True
            self._made = pickle.loads(self._packed)().materialize()
        references = [ref for bundle in self._made.iter_internal_ref_bundles() for ref in bundle.block_refs]
        count = ray.remote(num_cpus=0)(lambda block: BlockAccessor.for_block(block).num_rows())
        return ray.get([count.remote(ref) for ref in references]), references


def _packed(make: Callable[[], Any]) -> bytes:
    """Returns a function pickled with all that it uses of its own file, which workers of Ray cannot import."""
    from ray import cloudpickle

    module = sys.modules.get(make.__module__)
    installed = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib", "stdlib")]
    path = Path(getattr(module, "__file__", None) or sys.prefix)
    # a function of an installed package is pickled by its name, which workers can import
    if module is None or any(path.is_relative_to(folder) for folder in installed):
        return bytes(cloudpickle.dumps(make))
    # by value for this one pickling: registered for good, other pickles would carry the file too
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(make))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _join_ray() -> None:
    """Join the Ray that runs here; `InputError` where none does."""
    try:
        import ray
    except ImportError:
        raise InputError("a source of Ray's rows needs Ray: pip install 'shardwise[ray]'") from None
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="warning", namespace=NAMESPACE)
    except ConnectionError as error:
        raise InputError(
            f"no Ray runs here, which holds the rows ({first_line(error)}): start it with `ray start --head`"
        ) from None
