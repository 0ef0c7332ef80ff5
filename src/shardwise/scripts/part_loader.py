"""Cuts a script's loader so that it yields this rank's part of each batch; reports batches to `Events` (scripts/calls).

    script's batches     [7 2 9 4] [0 5 1 3] [6 8]
    rank 0 of 2 reads     7 2       0 5       6
    rank 1 of 2 reads         9 4       1 3     8

A `DataLoader` over a map-style dataset keeps its sampler, collate function and workers; only the indices of each
batch are cut, so that a rank reads its own samples alone. Every rank reads whole batches and keeps its part if the
other samples may change its own (`reading`), that is if the loader has a collate function of the script's own or if
reading the first batch drew random numbers, and if there are no indices (an iterable dataset, any other iterable).

What this does not do: make samplers alike that draw from a generator of their own. Ranks compare in every step which
samples they drew.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shardwise.errors import InputError
from shardwise.layout.dealing import Share
from shardwise.scripts.dealt import Dealer, Dealt, OwnBatches
from shardwise.scripts.proof.recorder import ScriptRecorder, content_of
from shardwise.scripts.reading import (
    Collated,
    Generators,
    Indices,
    Unfit,
    Watched,
    dims_of_samples,
    from_workers,
    joins_by_itself,
    look_of,
    part_of_whole,
    refuse_unguarded,
    samples_of,
)
from shardwise.scripts.script_lines import refuse
from shardwise.scripts.spread import tensors_of

Reads = Literal["auto", "whole", "part"]
SINGLE = (
    "with batch_size=None it gives single samples (a tensor without dims), which ranks cannot share: give a "
    'batch_size, or prepare(..., loss_scope="model"), by which every rank has each one whole'
)
BatchPart = tuple[Any, Dealt, int]  # (this rank's part, which samples these are, checksum equal on all ranks)


class PartLoader:
    """Yields this rank's part of each batch of a script's loader, `whole`.

    part     which samples of the current batch count on this rank, and of how many; None before the first
    reads    "part": only this rank's samples; "whole": all of a batch, of which the part is kept; "auto": only this
             rank's, unless other samples of the batch may change them
    dim      the dim of a batch's tensors that counts its samples; None: the first
    events   what is called between batches
    notices  sentences on what "auto" chose, if that costs something

    `len()`, `dataset`, `batch_size` and the like are those of the script's loader.
    Raises `InputError` for a loader that cannot be iterated or deals samples itself; when iterated, for batches that
    cannot be cut.
    """

    def __init__(
        self, loader: Any, data_rank: int, data_ranks: int, events: Events | None = None, reads: Reads = "part",
        dim: int | None = None,
    ) -> None:  # fmt: skip
        """Cuts `loader` for data rank `data_rank` of `data_ranks`; see the class for the other arguments."""
        _refuse(loader, data_ranks)
        if reads not in ("auto", "whole", "part"):
            raise InputError(f"prepare: reads is 'auto', 'whole' or 'part', got {reads!r}")
        self.whole = loader
        self.part: Share | None = None
        self._rank, self._ranks = data_rank, data_ranks
        if dim is not None and dim < 0:
            raise InputError(f"prepare: batch_dim counts from the first, got {dim}")
        self._dim, self._dim_is_known = dim or 0, dim is not None
        self.events = self._told = events or Events()
        self.notices: list[str] = []
        self.recorder: ScriptRecorder | None = None  # of a proof, which records batches
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext  # around the wait for a batch
        self._place: tuple[int, dict | None] | None = None  # (batches to skip, generators' states) of a checkpoint
        self._began: Generators | None = None  # generators at the start of this epoch
        self._look: list[float] = []  # `look_of` what every rank read of the current batch
        self._compared = False  # Whether ranks have compared a batch
        self._out = self._skip = 0  # batches of the epoch handed out so far; to skip at its start
        self._skipped: Callable[[], None] | None = None  # called once the skipped batches are drawn
        self._persistent: dict[bool, tuple[DataLoader, PartSampler]] = {}  # watched -> kept for later epochs
        self._ways = self._possible(reads) if _by_indices(loader) else [self._sliced]

    def _possible(self, reads: str) -> list[Any]:
        """Returns the methods of reading to try in order; the first that fits the first batch is kept."""
        # one rank reads by indices as the script does
        if self._ranks == 1:
            return [self._indexed]
        if reads != "auto":
            return [self._indexed if reads == "part" and not self._dim else self._whole]
        # a collate function of the script's own may pad to the longest: whole batches first
        return [self._whole, self._watched] if joins_by_itself(self.whole) else [self._watched, self._whole]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator over this rank's parts of an epoch; the loader draws its order now, before any batch."""
        self._told = self.events.here()
        self._told.before_epoch()
        now, (self._skip, began), self._place = Generators(self.whole), self._place or (0, None), None
        if began is not None:
            Generators.from_json(self.whole, began).restore()
        self._skipped = now.restore if began is not None else None
        self._began, self._out = Generators(self.whole), self._skip
        batches = self._first_way()
        return self._handed_out(self._began, batches)

    def _handed_out(self, began: Generators, batches: Iterator[BatchPart]) -> Iterator[Any]:
        """Yields this rank's part of each batch of an epoch, and reports it to `Events` and to a proof.

        began  the generators at the start of the epoch
        """
        most = total = 0
        if not self.is_pushed:  # batches that the script makes have no last one
            self._told.begin_epoch()
        try:
            for batch, dealt, checksum in self._read(self._batches(began, batches)):
                # read beside the batch, since the next one may be fetched before the script has used this one
                self.part = dealt.part
                self._out += 1
                total = dealt.part.total
                most = max(most, total)
                self._tell_proof(batch, dealt)
                # ranks compare the first batch that they read at all
                if not self._compared:
                    self._compared = True
                    self._told.before_first(self._look, checksum)
                self._told.before_batch(batch, dealt, checksum, self._dim_in(batch, dealt), own=self.is_pushed)
                yield batch
                self._told.after_batch()
            self._told.after_all()
            # of a last batch with fewer samples a proof must have seen one
            if self.recorder is not None:
                self.recorder.epoch_ends(uneven=total < most)
        finally:
            self._began = None
            if not self.is_pushed:
                self._told.after_epoch()

    def _read(self, batches: Iterator[BatchPart]) -> Iterator[BatchPart]:
        """Yields the batches unchanged; waits for each inside the context `reading`."""
        while True:
            with self.reading():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _tell_proof(self, batch: Any, dealt: Dealt) -> None:
        """Records for a proof how many samples the batch has on all ranks, and a digest of this rank's."""
        if self.recorder is None:
            return
        first = dealt.part.start - dealt.local.start
        rows = slice(first, first + dealt.part.count)
        content = content_of(batch, rows if self._ranks > 1 else None, dealt.local.count, self._dim)
        self.recorder.batch(dealt.part.total, content)

    def position(self) -> list[Any] | None:
        """Returns [batches handed out in this epoch, generators' states at its start] as JSON; None between epochs."""
        return None if self._began is None or self.is_pushed else [self._out, self._began.as_json()]

    @property
    def is_pushed(self) -> bool:
        """Returns whether the script makes the batches itself (`Prepared.deal`)."""
        return isinstance(self.whole, OwnBatches)

    def go_on(self, position: list[Any] | None) -> None:
        """Starts the next epoch at `position`, which the method of that name returned; None: at its beginning."""
        self._place = None if position is None else (position[0], position[1])

    def _dim_in(self, batch: Any, dealt: Dealt) -> int | None:
        """Returns the dim of this part's tensors that counts its samples; None if it is ambiguous."""
        # whole batches are cut by a dim that is known
        if self._dim_is_known or self._ways[0] in (self._whole, self._sliced):
            return self._dim
        fits = dims_of_samples(batch, dealt.local.count)
        if len(fits) == 1:  # in every batch of the loader
            self._dim, self._dim_is_known = fits[0], True
        # of several dims with that size the first, unless the loader joins samples in its own way
        return fits[0] if len(fits) == 1 or (fits and not joins_by_itself(self.whole)) else None

    def _first_way(self) -> Iterator[BatchPart]:
        """Returns an iterator over this rank's parts, read by the first method of `_ways`."""
        self._dealer = Dealer(self._ranks, self._rank, self.events.goes_beside)
        way: Any = self._ways[0]
        if way == self._sliced:
            return way(iter(self.whole))
        dealer = Dealer(1, 0) if way == self._whole else self._dealer
        return way(*self._source(dealer, watched=way == self._watched))

    def _batches(self, began: Generators, batches: Iterator[BatchPart]) -> Iterator[BatchPart]:
        """Yields parts, read by the first method that fits the first batch; before each retry generators are restored.

        began    the generators when the epoch was asked for
        batches  parts read by the first method
        """
        stood, why_not = Generators(self.whole), ""  # the script may have drawn since `began`
        while True:
            try:
                first = next(batches, None)
                break
            except Unfit as error:
                if len(self._ways) == 1:
                    also = f"; and {why_not}" if why_not else ""
                    refuse(InputError(f"prepare: the loader's batches cannot be cut over ranks: {error}{also}"))
                why_not = str(error)
                self._ways = self._ways[1:]
                began.restore()
                batches = self._first_way()
                stood.restore()
        # settled for later epochs too, unless it is `_watched`: the first batch of a later epoch may draw after all
        if why_not or (len(self._ways) > 1 and self._ways[0] != self._watched):
            self._ways = self._ways[:1]
            self._tell(why_not)
        # no batch was left to hand out, so the reader has not put the generators back to where the checkpoint left them
        if first is None and self._skipped is not None:
            self._skipped()
        if first is not None:
            yield first
            yield from batches

    def _tell(self, reason: str) -> None:
        """Adds a notice if whole batches are read, or cannot be (`reason`), because either costs something."""
        if self._ways[0] == self._whole:
            why = reason or "the loader joins samples by a function of its own, which may pad or draw by what is beside"
            self.notices.append(
                f'every rank reads whole batches and keeps its part: {why}. prepare(..., reads="part") reads its '
                "samples alone, which then may differ from one process's"
            )
        elif reason:
            self.notices.append(f"each rank joins its own samples alone, for whole batches cannot be cut: {reason}")

    def _source(self, dealer: Dealer, *, watched: bool) -> tuple[Iterator[Any], PartSampler]:
        """Returns (iterator over an epoch of the script's loader on indices of `sampler`, that `PartSampler`).

        watched  Whether batches come with what `Collated` found

        Persistent workers are kept from epoch to epoch, since a loader draws a seed for those that it makes.
        """
        loader, sampler = self._persistent.get(watched) or (None, PartSampler(self.whole.batch_sampler))
        sampler.dealer, sampler.skip, sampler.skipped = dealer, self._skip, self._skipped
        if loader is None:
            loader = _like(self.whole, sampler, watched=watched)
        if loader.persistent_workers:
            self._persistent[watched] = loader, sampler
        return from_workers(iter(loader)), sampler

    def _indexed(self, source: Iterator[Any], sampler: PartSampler) -> Iterator[BatchPart]:
        """Yields parts whose samples alone are read, as `sampler` dealt their indices."""
        for batch in source:
            if self._ranks == 1:  # other ranks (tp) read all of it too, so it can be compared
                self._look = [] if self._compared else look_of(batch)
            yield (batch, *sampler.dealt.popleft())

    def _watched(self, source: Iterator[Any], sampler: PartSampler) -> Iterator[BatchPart]:
        """Yields parts as `_indexed` does; raises `Unfit` if reading the first batch drew random numbers."""
        for number, (batch, drew, look) in enumerate(source):
            if drew and number == 0:
                raise Unfit("random numbers are drawn where samples are read")
            self._look = look
            yield (batch, *sampler.dealt.popleft())

    def _whole(self, source: Iterator[Any], sampler: PartSampler) -> Iterator[BatchPart]:
        """Yields parts cut out of whole batches; raises `Unfit` if a batch cannot be cut."""
        for batch in source:
            whole, checksum = sampler.dealt.popleft()
            self._look = [] if self._compared else look_of(batch)
            dealt = self._dealer.deal(whole.part.total)
            try:
                part = part_of_whole(batch, dealt.local, whole.part.total, self._dim)
            except InputError as error:
                raise Unfit(str(error)) from error
            yield part, dealt, checksum

    def _sliced(self, batches: Iterator[Any]) -> Iterator[BatchPart]:
        """Yields parts cut out of the batches of a loader without indices, after the first `_skip` of them."""
        # no sampler to skip by: batches are read, which moves generators as in the epoch that was saved
        for _ in range(self._skip):
            next(batches, None)
        # generators are put where they stood when the checkpoint was written
        if self._skipped is not None:
            self._skipped()
        for number, batch in enumerate(batches, self._skip):
            # ranks compare the first batch they read; later ones need no look
            self._look = [] if self._compared else look_of(batch)
            # a DataLoader with batch_size=None: dim 0 would be taken for samples that it does not count
            if self._ranks > 1 and isinstance(self.whole, DataLoader) and not all(t.dim() for t in tensors_of(batch)):
                raise Unfit(SINGLE)
            total = samples_of(batch, self._dim)
            dealt = self._dealer.deal(total)
            part = part_of_whole(batch, dealt.local, total, self._dim) if self._ranks > 1 else batch
            yield part, dealt, zlib.crc32(f"{number} {total}".encode())


class Events:
    """What is called between batches of a loader beside the main one (`Prepared.split`); `Loop` is the main one's.

    local    this rank's samples of the current batch; None outside of an epoch
    pauses   stops following random operations, while the loader makes its iterator
    goes_on  follows them again
    ran      Whether there was a batch, ever
    since    Whether there was one since the main loader's current batch
    """

    def __init__(self) -> None:
        self.local: Share | None = None
        self.pauses: Callable[[], None] = lambda: None
        self.goes_on: Callable[[], None] = lambda: None
        self.ran = self.since = False

    def here(self) -> Events:
        """Returns the events to use for an epoch that the calling thread iterates."""
        return self

    def before_epoch(self) -> None:
        """Called when the script asks for an iterator; what the loader draws now must be alike on every rank."""
        self.pauses()

    def begin_epoch(self) -> None:
        """Called when the script asks for an epoch's first batch."""

    def goes_beside(self) -> bool:
        """Returns whether batches are never dealt two samples to a rank (scripts count held-out ones by len(batch))."""
        return True

    def before_first(self, look: list[float], checksum: int) -> None:
        """Called before the first batch of all, with `look_of` a common sample and the batch's checksum."""

    def before_batch(self, batch: Any, dealt: Dealt, checksum: int, dim: int | None, *, own: bool = False) -> None:
        """Called before each batch is handed out.

        dealt     which of its samples are this rank's
        checksum  equal on ranks that have parts of the same samples
        dim       of its tensors that counts the samples, None if unknown
        own       Whether the script has made the batch itself
        """
        self.goes_on()
        self.local, self.ran, self.since = dealt.local, True, True

    def after_batch(self) -> None:
        """Called when the script asks for the next batch."""

    def after_all(self) -> None:
        """Called when the script asks for a batch beyond the epoch's last one, which happens on every rank."""

    def after_epoch(self) -> None:
        """Called when the script's loop over the loader has ended, or was left by `break`."""
        self.local = None


class PartSampler:
    """A batch sampler that yields this rank's indices of each batch of the script's own.

    dealt           (`Dealt`, checksum of the indices) of each batch that was yielded and not yet read
    dealer          deals a batch's samples over ranks; another one in each epoch
    skip, skipped   number of batches to draw and leave out, and what is called after these, or None
    """

    dealer: Dealer
    skip: int
    skipped: Callable[[], None] | None

    def __init__(self, batches: Iterable[list[Any]]) -> None:
        self.batches = batches
        self.dealt: deque[tuple[Dealt, int]] = deque()

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        # an epoch that was left by `break` had drawn batches that nobody read
        self.dealt.clear()
        for number, batch in enumerate(self.batches):
            # drawn all the same, so that the sampler's generator stands as when the checkpoint was written
            if number < self.skip:
                continue
            if number == self.skip and self.skipped is not None:
                self.skipped()
            indices = list(batch)
            dealt = self.dealer.deal(len(indices))
            self.dealt.append((dealt, zlib.crc32(repr(indices).encode())))
            mine = Indices(indices[dealt.local.start : dealt.local.start + dealt.local.count])
            # one sample of the first batch is read by every rank beside its own, to compare what they read
            mine.shared = indices[0] if number == self.skip and indices else None
            yield mine


def _by_indices(loader: Any) -> bool:
    """Returns whether a loader reads samples by index, so that a rank can be given its own indices."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _like(loader: DataLoader, sampler: PartSampler, watched: bool = False) -> DataLoader:
    """Returns a DataLoader with the settings of the script's, over the indices of `sampler`.

    watched  Whether it yields (batch, whether reading it drew random numbers, `look_of` a common sample)
    """
    kept = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers", "in_order")  # fmt: skip
    settings = {name: getattr(loader, name) for name in kept if hasattr(loader, name)}
    dataset = loader.dataset
    if watched:
        dataset, settings["collate_fn"] = Watched(dataset), Collated(settings["collate_fn"])
    return DataLoader(dataset, batch_sampler=sampler, **settings)


def _refuse(loader: Any, data_ranks: int) -> None:
    """Raises `InputError` for a loader that cannot be iterated, or that deals samples over ranks itself."""
    refuse_unguarded(loader)
    if not isinstance(loader, Iterable):
        batched = ", a dataset: give DataLoader(dataset, batch_size=...)" if hasattr(loader, "__getitem__") else ""
        raise InputError(f"prepare: the loader is of type {type(loader).__name__}, which cannot be iterated{batched}")
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    samplers += [getattr(samplers[1], "sampler", None)]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise InputError(
            "prepare: the loader has a DistributedSampler, which would deal the samples over ranks a second time: give "
            "the loader that one process would use (shuffle=True, or a plain sampler)"
        )
