"""A script's loader, cut so that it yields this rank's part of each batch. It tells of batches by `Events` (calls).

    script's batches     [7 2 9 4] [0 5 1 3] [6 8]
    rank 0 of 2 reads     7 2       0 5       6
    rank 1 of 2 reads         9 4       1 3     8

A `DataLoader` over a map-style dataset keeps its sampler, collate function and workers; only the indices of each
batch are cut, so a rank reads its own samples, unless the others change them (`reading`): where the loader joins
samples by a function of the script's own, or the first batch was drawn for, every rank reads whole batches and keeps
its part. So it does with what has no indices (an iterable dataset, any other iterable).

What this does not do: order what a sampler draws from a generator of its own making. That ranks drew the same
samples is checked in every step.
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
BatchPart = tuple[Any, Dealt, int]  # its batch, where it lies, and a number that is the same for parts of one batch


class PartLoader:
    """Yields this rank's part of each batch of `loader`. `part` tells which samples it holds, and of how many.

    reads    "part": only this rank's samples; "whole": all of a batch, of which the part is kept; "auto": the part,
             unless its neighbours change it
    dim      of a batch's tensors that counts its samples; None: the first
    notices  what "auto" came to, where it costs something

    len(), `dataset`, `batch_size` and the like are the script's loader's own.
    Raises `InputError` for a loader that cannot be iterated or deals samples by itself; iterating, for batches that
    cannot be cut.
    """

    def __init__(
        self, loader: Any, data_rank: int, data_ranks: int, events: Events | None = None, reads: Reads = "part",
        dim: int | None = None,
    ) -> None:  # fmt: skip
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
        self.recorder: ScriptRecorder | None = None  # of a proof, which is told of batches
        self.reading: Callable[[], AbstractContextManager[None]] = nullcontext  # around the wait for a batch
        self._place: tuple[int, dict | None] | None = None  # to go on from
        self._began: Generators | None = None  # where generators stood at the start of the epoch under way
        self._look: list[float] = []  # numbers of what every rank read alike of the batch at hand
        self._compared = False  # with what other ranks read
        self._out = self._skip = 0  # batches of it that were handed out, or are left out
        self._skipped: Callable[[], None] | None = None  # called where what is left out has been drawn
        self._persistent: dict[bool, tuple[DataLoader, PartSampler]] = {}  # whose workers outlive an epoch, if watched
        self._ways = self._possible(reads) if _by_indices(loader) else [self._sliced]

    def _possible(self, reads: str) -> list[Any]:
        """Returns the methods of reading that are tried in turn; the first that fits the first batch is kept."""
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
        """Returns an iterator over an epoch's parts. The loader draws for it now, before any batch."""
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
        """Yields this rank's part of each batch of an epoch, and tells `Events` and a proof of it."""
        most = total = 0
        if not self.is_pushed:  # whose batches have no last one
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
        """Yields the batches unchanged, each waited for within the context `reading`."""
        while True:
            with self.reading():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _tell_proof(self, batch: Any, dealt: Dealt) -> None:
        """Record a batch for a proof: how many samples all ranks have, and a number of the content of this rank's."""
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
        """Returns whether the script makes the batches by itself."""
        return isinstance(self.whole, OwnBatches)

    def go_on(self, position: list[Any] | None) -> None:
        """Let the next epoch be the rest of the one from which `position` was taken; None: a whole one."""
        self._place = None if position is None else (position[0], position[1])

    def _dim_in(self, batch: Any, dealt: Dealt) -> int | None:
        """Returns the dim of this part's tensors that counts its samples; None where it cannot be known."""
        # whole batches are cut by a dim that is known
        if self._dim_is_known or self._ways[0] in (self._whole, self._sliced):
            return self._dim
        fits = dims_of_samples(batch, dealt.local.count)
        if len(fits) == 1:  # in every batch of the loader
            self._dim, self._dim_is_known = fits[0], True
        # of several dims with that size the first, unless the loader joins samples in its own way
        return fits[0] if len(fits) == 1 or (fits and not joins_by_itself(self.whole)) else None

    def _first_way(self) -> Iterator[BatchPart]:
        """Returns an iterator over this rank's parts, read in the way that is tried next."""
        self._dealer = Dealer(self._ranks, self._rank, self.events.goes_beside)
        way: Any = self._ways[0]
        if way == self._sliced:
            return way(iter(self.whole))
        dealer = Dealer(1, 0) if way == self._whole else self._dealer
        return way(*self._source(dealer, watched=way == self._watched))

    def _batches(self, began: Generators, batches: Iterator[BatchPart]) -> Iterator[BatchPart]:
        """Yields parts, read in the first way that fits the first batch; the generators then start again from there.

        began   where they stood when the epoch was asked for, since when the script may have drawn
        """
        stood, why_not = Generators(self.whole), ""
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
        """Add a notice where whole batches are read, or could not be read (`reason`), since either costs something."""
        if self._ways[0] == self._whole:
            why = reason or "the loader joins samples by a function of its own, which may pad or draw by what is beside"
            self.notices.append(
                f'every rank reads whole batches and keeps its part: {why}. prepare(..., reads="part") reads its '
                "samples alone, which then may differ from one process's"
            )
        elif reason:
            self.notices.append(f"each rank joins its own samples alone, for whole batches cannot be cut: {reason}")

    def _source(self, dealer: Dealer, *, watched: bool) -> tuple[Iterator[Any], PartSampler]:
        """Returns (iterator over an epoch of the script's loader with other indices, the sampler that deals these).

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
        for batch in source:
            if self._ranks == 1:  # of the data axis: every rank reads it
                self._look = [] if self._compared else look_of(batch)
            yield (batch, *sampler.dealt.popleft())

    def _watched(self, source: Iterator[Any], sampler: PartSampler) -> Iterator[BatchPart]:
        """Yields parts as `_indexed` does; raises `Unfit` where reading the first batch drew random numbers."""
        for number, (batch, drew, look) in enumerate(source):
            if drew and number == 0:
                raise Unfit("random numbers are drawn where samples are read")
            self._look = look
            yield (batch, *sampler.dealt.popleft())

    def _whole(self, source: Iterator[Any], sampler: PartSampler) -> Iterator[BatchPart]:
        """Yields parts cut out of whole batches; raises `Unfit` where a batch cannot be cut."""
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
        """Yields this rank's parts, cut out of whole batches; the first `_skip` batches are drawn and left out."""
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
    """What is done between a loader's batches (of the main one: `Loop`); here for one beside it (`Prepared.split`)."""

    def __init__(self) -> None:
        self.local: Share | None = None  # what this rank has of the batch at hand
        self.pauses: Callable[[], None] = lambda: None  # stops dealing draws, while the loader makes its iterator
        self.goes_on: Callable[[], None] = lambda: None
        self.ran = self.since = False  # there was a batch, ever, and since the main one's is at hand

    def here(self) -> Events:
        """Returns the events of an epoch that the calling thread goes through."""
        return self

    def before_epoch(self) -> None:
        """Called when the script asks for an iterator: what the loader draws now must be alike on every rank."""
        self.pauses()

    def begin_epoch(self) -> None:
        """Called when the script asks for an epoch's first batch."""

    def goes_beside(self) -> bool:
        """Whether each sample is to be held once where there are enough: scripts count held-out ones by len(batch)."""
        return True

    def before_first(self, look: list[float], checksum: int) -> None:
        """Called before the first batch of all. `look`: a few numbers of a sample that every rank read."""

    def before_batch(self, batch: Any, dealt: Dealt, checksum: int, dim: int | None, *, own: bool = False) -> None:
        """Called before each batch is handed out. `checksum`: equal on ranks that have parts of the same samples.

        dim     of its tensors that counts the samples, where known
        own     the script has made it by itself
        """
        self.goes_on()
        self.local, self.ran, self.since = dealt.local, True, True

    def after_batch(self) -> None:
        """Called when the script asks for the next batch."""

    def after_all(self) -> None:
        """Called when the script asks for a batch beyond the last one, which every rank does."""

    def after_epoch(self) -> None:
        """Called when the script's loop over the loader has ended, or was left by `break`."""
        self.local = None


class PartSampler:
    """Batches of this rank's indices. `dealt` has (dealt, checksum) of each batch that was drawn and not yet read.

    dealer          deals a batch's samples over ranks; another one in each epoch
    skip, skipped   batches that are drawn and left out, and what is called then
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
    """Whether a loader reads samples by index, so that ranks can be given their own."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _like(loader: DataLoader, sampler: PartSampler, watched: bool = False) -> DataLoader:
    """Returns a DataLoader with the script's settings over the indices of `sampler`.

    watched  it yields (batch, whether reading it drew random numbers, a few of its numbers, to compare ranks by)
    """
    kept = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers", "in_order")  # fmt: skip
    settings = {name: getattr(loader, name) for name in kept if hasattr(loader, name)}
    dataset = loader.dataset
    if watched:
        dataset, settings["collate_fn"] = Watched(dataset), Collated(settings["collate_fn"])
    return DataLoader(dataset, batch_sampler=sampler, **settings)


def _refuse(loader: Any, data_ranks: int) -> None:
    """Raise `InputError` for a loader that cannot be iterated, or that deals samples over ranks by itself."""
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
