"""`Loader` iterates over the steps of a run, endlessly or for some epochs; each is a list of this rank's parts.

How: the only state is a position, the number of samples of the global order handed out so far. A step takes the next
`batch_size` positions, at most to the end of the epoch, and `steps.Steps` reads this rank's share of them.
The position does not depend on ranks, so a state saved on one number of ranks loads on any other.

The last batch of an epoch may be shorter. It is kept, as uneven parts (a rank without a sample runs a
stand-in that counts 0), or dropped with `drop_last`. A batch of fewer samples than `accumulate` has one
sample in each micro-batch and so fewer micro-batches, the same number on every rank.

Without workers one thread reads ahead, which hides reads that release the interpreter lock (files, decoding,
numpy, torch). The caller waits for the first step, and for every step if reading uses random numbers, since a thread
shares the process's RNGs. With `workers` processes read steps in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.data.blend import BlendOrder
from shardwise.data.order import Order
from shardwise.data.prefetch import Prefetch
from shardwise.data.steps import Steps, length_of
from shardwise.data.workers import read_in_workers
from shardwise.dataset import Source
from shardwise.errors import InputError
from shardwise.layout.dealing import Share


class Loader:
    """Iterates the steps of a source, each a `list[Share]`, one part for each micro-batch.

    source           what is read; of each batch, only this rank's samples
    order            an `Order`, or a seed for one
    batch_size       samples of a GLOBAL batch
    accumulate       micro-batches of a batch
    data_rank        this rank's index among the `data_ranks` that samples are dealt to
    start            position to begin at, in samples of the global order
    epochs           whole epochs counted from position 0; None: no end
    drop_last        Whether the short last batch of an epoch is dropped
    workers          processes that read; 0: a thread of this one
    prefetch         steps read ahead, by the thread or by each worker; 0, without workers, reads in the caller
    read_timeout_s   seconds that reading a step may take, else a `RunError`; not if the caller reads

    A loader is its own iterator, so a loop that was left early continues at the next step. `close` ends the thread.
    """

    def __init__(
        self, source: Source, order: Order | int, batch_size: int, *, accumulate: int = 1, data_rank: int = 0,
        data_ranks: int = 1, start: int = 0, drop_last: bool = False, epochs: int | None = None, prefetch: int = 2,
        workers: int = 0, read_timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        length = length_of(source)
        self.order = order if isinstance(order, Order) else order_of(source, order)
        draws = getattr(source, "draws", None)  # a source may declare whether reading it uses random numbers
        self._steps = Steps(source, self.order, batch_size, accumulate, data_rank, data_ranks, drop_last, draws)
        _check(self._steps, length, start, epochs, prefetch, workers)
        self._workers = workers
        self._end = None if epochs is None else epochs * length
        self._position = start
        self._prefetch = prefetch
        self._read_timeout_s = read_timeout_s
        self._ahead: Prefetch[tuple[list[Share], int]] | None = None

    @property
    def position(self) -> int:
        """Returns how many samples of the global order were handed out so far, over all ranks (with dropped ones)."""
        return self._position

    @property
    def epoch(self) -> int:
        """Returns the epoch that the next step reads from."""
        return self._steps.span(self._position)[0] // self.order.length

    @property
    def steps_per_epoch(self) -> int:
        """Returns how many steps a whole epoch has."""
        whole, rest = divmod(self.order.length, self._steps.batch_size)
        return whole + (1 if rest and not self._steps.drop_last else 0)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Share]:
        try:
            parts, self._position = self._next()
        except BaseException:
            self.close()
            raise
        return parts

    def _next(self) -> tuple[list[Share], int]:
        """Returns (this rank's parts of the next step, the position after it)."""
        # reading ahead is only safe once reading is known to use no random numbers
        if self._workers == 0 and (self._prefetch == 0 or self._steps.draws is not False):
            return self._in_turn()
        if self._ahead is None:
            self._ahead = self._read_ahead(self._position)
        return next(self._ahead)

    def _read_ahead(self, position: int) -> Prefetch[tuple[list[Share], int]]:
        return self._thread(self._reading(position), max(1, self._prefetch))

    def _thread(self, items: Iterator[tuple[list[Share], int]], ahead: int) -> Prefetch[tuple[list[Share], int]]:
        what = f"{type(self._steps.source).__name__}.read"
        return Prefetch(items, ahead, timeout_s=self._read_timeout_s, what=what)

    def _in_turn(self) -> tuple[list[Share], int]:
        """Reads the next step while the caller waits; returns (this rank's parts, position after it).

        Random numbers that reading uses are seeded by position, and the process's RNGs stay as they were.
        """
        start, stop = self._steps.span(self._position)
        if self._end is not None and stop > self._end:
            raise StopIteration
        # without a thread there is no deadline for a read that hangs
        if self._prefetch == 0:
            parts, self._steps = self._steps.read(start, stop)
            return parts, stop
        thread = self._thread(self._looked(start, stop), 1)
        try:
            step = next(thread)
        finally:
            thread.close()
        # this read used no random numbers, so the next ones can be made ahead in a thread
        if self._steps.draws is False:
            self._ahead = self._read_ahead(stop)
        return step

    def _looked(self, start: int, stop: int) -> Iterator[tuple[list[Share], int]]:
        parts, steps = self._steps.read(start, stop)
        self._steps = steps if steps.draws else replace(steps, draws=False)
        yield parts, stop

    def _reading(self, position: int) -> Iterator[tuple[list[Share], int]]:
        """Returns an iterator of (this rank's parts, position after them) from `position` on, read by any workers."""
        if self._workers == 0:
            return self._steps.walk(position, self._end)
        return read_in_workers(
            self._steps, position, self._end,
            workers=self._workers, ahead=self._prefetch,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Returns {"position", "length", "seed", "shuffle"}, equal on all ranks; for a blend also "blend"."""
        state = {
            "position": self._position,
            "length": self.order.length,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
        }
        return state | ({"blend": self.order.state(self._position)} if isinstance(self.order, BlendOrder) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to the position of a saved `state`, of any number of ranks; `InputError` for another data order."""
        own = self.state_dict()
        # `continued` raises for a blend that is missing or has other sources
        own.pop("blend", None)
        missing = [key for key in own if key not in state]
        if missing:
            raise InputError(f"the saved loader state has no {', '.join(missing)}: it is not one of a Loader")
        for key in ("length", "seed", "shuffle"):
            if state[key] != own[key]:
                raise InputError(
                    f"the saved run read its data with {key}={state[key]}, this one has {key}={own[key]}: "
                    "continue with the same data and seed, or start anew"
                )
        self.close()
        self._position = int(state["position"])
        if isinstance(self.order, BlendOrder):
            self.order = self.order.continued(state.get("blend"), self._position)
            self._steps = replace(self._steps, order=self.order)

    def close(self) -> None:
        """Ends the background thread; the next step starts it again at the present position."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def order_of(source: Source, seed: int) -> Order:
    """Returns the order that the source's own `order` method gives (as a blend's), else a shuffled `Order`."""
    ask = getattr(source, "order", None)
    own = ask(seed) if callable(ask) else None
    return own if isinstance(own, Order) else Order(length_of(source), seed=seed)


def _check(steps: Steps, length: int, start: int, epochs: int | None, prefetch: int, workers: int) -> None:
    """Raises `InputError` if batch size, ranks, accumulation and the source's length contradict each other."""
    if steps.order.length != length:
        raise InputError(f"the order is over {steps.order.length} samples but the source has {length}")
    # otherwise some micro-batch would be empty in every step
    if steps.batch_size < steps.accumulate:
        raise InputError(
            f"batch_size {steps.batch_size} is smaller than accumulate {steps.accumulate}: every micro-batch "
            f"needs a sample; give batch_size {steps.accumulate} or more, or lower accumulate"
        )
    # the largest batch, which may be a short epoch
    whole = min(steps.batch_size, length)
    if whole < steps.data_ranks:
        raise InputError(
            f"a whole batch has {whole} samples for {steps.data_ranks} data ranks, so some would never have "
            f"one: give batch_size {steps.data_ranks} or more (and as many samples), or use fewer ranks"
        )
    if steps.drop_last and length < steps.batch_size:
        raise InputError(
            f"drop_last leaves no batch at all: the source has {length} samples and batch_size is {steps.batch_size}"
        )
    # `epochs or 0`, since None means no end
    if min(start, prefetch, workers, epochs or 0) < 0:
        raise InputError(
            f"start, prefetch, workers and epochs cannot be negative, got {start}, {prefetch}, {workers} and {epochs}"
        )
