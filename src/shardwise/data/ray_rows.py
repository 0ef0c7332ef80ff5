"""Rows of a Ray Dataset as a source: Ray computes the dataset's blocks once, and each rank fetches blocks as needed.

    one actor of the cluster   runs the dataset in order; holds each block's number of rows and object reference
    each rank                  sample i --> its block, from Ray's object store (the last few are cached) --> its row

The actor is found by its name, so the ranks of a job share it; it ends with the rank that first asked for it. If it or
the node of a block is lost, the blocks are computed again. They must then be the same: a dataset that is random, or
whose files change, would give other samples, which is refused if the numbers of rows differ.
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

KEPT = 8  # blocks that a rank caches
AGAIN_S = 60.0  # seconds for which a lost actor or block is asked for again
_POLL_S = 0.5
NAMESPACE = "shardwise"


class RaySource(DatasetSource):
    """A `Source` of the rows of a `ray.data.Dataset`, dicts of columns, which `default_collate` joins to batches.

    make     returns the dataset; called once in the cluster, by the actor
    name     of the dataset in the cluster; ranks that give the same name share its blocks
    shuffle  Whether each epoch has another order; without it, samples have the dataset's order, which reads fastest
    collate  joins a list of rows into a batch; None: torch's `default_collate`

    Ray must run where a rank does (`ray start`, or a job of `shardwise.ray`).
    """

    def __init__(
        self, make: Callable[[], Any], *, name: str = "dataset", shuffle: bool = False,
        collate: Callable[[list], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(RayRows(make, name), collate)
        self.shuffle = shuffle

    def order(self, seed: int) -> Order:
        """Returns the order in which a loader reads this source, shuffled by `seed` if `shuffle` is set."""
        return Order(len(self), seed, self.shuffle)


class RayRows:
    """The rows of a Ray Dataset, by index. `make` and `name` as in `RaySource`; `kept`: blocks to cache."""

    def __init__(self, make: Callable[[], Any], name: str, kept: int = KEPT) -> None:
        self.make, self.name, self.kept = make, f"shardwise-rows-{name}", kept
        self._forget()
        self._rows: list[int] | None = None

    def _forget(self) -> None:
        self._actor: Any = None
        self._references: list[Any] = []
        self._blocks: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Returns {"make", "name", "kept"}; another process fetches blocks itself."""
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
        """Returns {column: array of the rows} of block `at`, from the cache or from Ray."""
        if at not in self._blocks:
            while len(self._blocks) >= self.kept:
                self._blocks.popitem(last=False)
            self._blocks[at] = self._fetched(at)
        self._blocks.move_to_end(at)
        return self._blocks[at]

    def _fetched(self, at: int) -> dict[str, Any]:
        """Fetches block `at` from Ray as {column: array}; if it is lost, retries for `AGAIN_S` s, then `RunError`."""
        import ray
        from ray.data.block import BlockAccessor

        until = time.monotonic() + AGAIN_S
        while True:
            try:
                if not self._references:
                    self._ask()
                columns = BlockAccessor.for_block(ray.get(self._references[at])).to_numpy()
                # rows of single values have no column name; Ray's is "item"
                return columns if isinstance(columns, dict) else {"item": columns}
            except ray.exceptions.RayError as error:  # the actor, or the node of a block, is lost
                self._forget()
                if time.monotonic() > until:
                    raise RunError(f"{self.name}: Ray does not give its blocks: {first_line(error)}") from error
                time.sleep(_POLL_S)

    def _ask(self) -> None:
        """Gets or makes the actor, and sets the blocks' references and running totals of rows.

        Raises `InputError` for a dataset that fails or is empty, `RunError` if Ray fails or the rows have changed.
        """
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
            except ray.exceptions.RayError as error:  # the actor of an earlier attempt may be ending: ask again
                if time.monotonic() > until:
                    raise RunError(f"{self.name}: Ray does not make it: {first_line(error)}") from error
                time.sleep(_POLL_S)
        ends = list(accumulate(rows))
        if not ends or not ends[-1]:
            raise InputError(f"{self.name}: the dataset has no rows")
        # a new actor must give the same blocks, since positions in the data count their rows
        if self._rows is not None and self._rows != ends:
            raise RunError(f"{self.name}: made again, the dataset has other blocks: its rows must not depend on chance")
        self._rows = ends


class _Maker:
    """The Ray actor, which runs the dataset that `packed` (a pickled function) returns, once, and holds its blocks."""

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
    """Returns a pickled function, by value with its module, which workers of Ray may be unable to import."""
    from ray import cloudpickle

    module = sys.modules.get(make.__module__)
    installed = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib", "stdlib")]
    path = Path(getattr(module, "__file__", None) or sys.prefix)
    # a function of an installed package is pickled by its name, which workers can import
    if module is None or any(path.is_relative_to(folder) for folder in installed):
        return bytes(cloudpickle.dumps(make))
    # registered for this one pickling only, or other pickles would carry the module too
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(make))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _join_ray() -> None:
    """Connects to the Ray cluster that runs on this host, unless connected; `InputError` if there is none."""
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
