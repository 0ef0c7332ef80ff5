"""Follows a script's loop over its loader: which batch is current, and when random numbers are for its samples.

    for x in loader                 a batch is current from when it is handed out
    x, ahead = ahead, next(it)      read ahead: a batch waits, and is current from the first forward that is given it
    batches = list(loader)          kept from a loop that is over: likewise, the one after the last being expected next

A forward belongs to the batch whose tensors it is given. If it is given tensors made from a batch, it belongs to the
batch after whose tensor random numbers were last shaped (randn_like), else to the first that waits. Numbers shaped
after a batch's tensor are for its samples; numbers of a given size are for the current batch, or for the first waiting
one with that many samples. Between the backward of a batch and the next batch random numbers are the script's own.

What this does not do: tell batches apart that hold no tensors; they are current when they are handed out. If a batch is
passed over without a forward, copies of the next one are taken for it.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from shardwise.comm import gather_json
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.guard.points import reach
from shardwise.layout.dealing import Share
from shardwise.mesh import Mesh
from shardwise.scripts.agreement import Meeting, same_samples
from shardwise.scripts.dealt import UNFED, Dealt, deal
from shardwise.scripts.gradient_arrivals import Heard, weakly
from shardwise.scripts.part_loader import Events
from shardwise.scripts.reading import share_generators
from shardwise.scripts.sample_draws import SampleDraws
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.spread import tensors_of
from shardwise.scripts.whole_batch import WholeBatch
from shardwise.step.batching import samples_in

_ELSEWHERE = (
    "the loader is gone through in a thread of the script's own (a background generator), in which ranks cannot meet "
    "and what is drawn is drawn in no order: go through it in the thread that trains, and let it read ahead by itself "
    "(num_workers, prefetch_factor); a prefetcher without a thread is followed"
)


class Handed:
    """This rank's part of a batch that the loader yielded.

    number    of the batch, in the order in which they are handed out, from 1
    dealt     which of its samples are this rank's
    checksum  the same on all ranks
    dim       of its tensors that counts samples, None if unknown
    traced    Whether it has tensors, by which a forward is known to be of it
    met       Whether a forward of it has begun
    spent     Whether a backward of it is over
    own       Whether the script has made it itself (`Prepared.deal`)
    """

    def __init__(
        self, number: int, batch: Any, dealt: Dealt, checksum: int, dim: int | None, *, own: bool = False
    ) -> None:
        self.number, self.dealt, self.checksum, self.dim, self.own = number, dealt, checksum, dim, own
        self._tensors = [weakref.ref(tensor) for tensor in tensors_of(batch)]
        self.traced, self.met, self.spent = bool(self._tensors), False, False

    @property
    def lives(self) -> bool:
        """Whether anything still holds a tensor of this batch, which is held weakly here."""
        return any(tensor() is not None for tensor in self._tensors)

    @property
    def awaits(self) -> bool:
        """Whether the batch has tensors, and no forward of it has begun, nor a backward of it ended."""
        return self.traced and not (self.spent or self.met)

    def fits(self, call: Any) -> bool:
        """Whether a tensor in `call`, a forward's (args, kwargs), has this rank's number of samples of this batch."""
        dim, samples = self.dim or 0, self.dealt.local.count
        return any(tensor.dim() > dim and tensor.shape[dim] == samples for tensor in tensors_of(call))

    def is_in(self, storages: Collection[int]) -> bool:
        """Whether a tensor of this batch lies in one of these storages, given by `_storage`."""
        return any((held := tensor()) is not None and _storage(held) in storages for tensor in self._tensors)


class Loop(Heard, Events):
    """The main loader's `Events`, for each model that one loop trains.

    leader    the loop of the first model, which has the batches
    together  the loops of all these models
    other     the `Events` of loaders beside the main one
    """

    def __init__(self, model: nn.Module, mesh: Mesh, randomness: str, leader: Any, loss_scope: str) -> None:
        """Joins the loop of `leader`, the `Loop` of the first model of this loader; None: this is the first."""
        super().__init__()
        self.model, self.mesh, self.randomness = model, mesh, randomness
        self.whole: WholeBatch | None = None
        # with one data rank its batch is the whole batch, whatever the loss_scope
        if loss_scope != "sample" and mesh.data.size > 1:
            self.whole = WholeBatch(mesh.data, mesh.device, spreads=loss_scope == "global")
        self.engine: Engine | None = None
        self.leader: Any = leader or self
        self.together: list[Any] = leader.together if leader is not None else []
        self.together.append(self)
        self.other: Events = leader.other if leader is not None else Events()
        if leader is None:
            self.other.pauses, self.other.goes_on = weakly(self.suspend), weakly(self.go_on)
        self.dealt: Dealt | None = leader.dealt if leader is not None else None  # of the current batch
        self.used: Dealt | None = None  # by the model's last forward in training
        self.checksum = 0  # of the sample indices of all batches so far
        self._meeting: Meeting | None = None
        self._watched: SampleDraws | None = None
        self._spent = False  # Whether the backward of its last forward is over
        self._done = False  # Whether its backward of the current batch is over
        self._dim: int | None = 0  # of a batch's tensors that counts samples
        self._now: Handed | None = None  # the current batch
        self._ahead: deque[Handed] = deque()  # batches that were read ahead and wait
        self._last = 0  # number of the last batch handed out
        self._gone_to = 0  # number of the last batch of the loader that was current
        self._open_epochs = 0  # loops over loaders that have begun and not ended
        self._over = False  # Whether all of these have ended
        self._handed: list[Handed] = []  # batches of this epoch of which a tensor still lives
        self._drawn_like: Handed | None = None  # the batch after whose tensor random numbers were shaped
        self._elsewhere = False  # a thread of the script's own goes through the loader
        self._draws_on = False  # Whether random operations are followed
        self.in_loop = False  # between a batch and the next
        self._thread = threading.get_ident()
        self.unfed = False  # there is no loader, and nothing was dealt

    def before_epoch(self) -> None:
        """Sets every rank's generators to rank 0's, so that samplers and datasets draw alike. Collective."""
        self.unfed = False
        self.suspend()
        self._passes("an epoch over the loader")
        if self.mesh.world.size > 1:
            share_generators(self.mesh.world, self.mesh.device)
        self._comes_to("input")

    def begin_epoch(self) -> None:
        """Counts an epoch when its first batch is asked for, because an iterator that is never used never ends."""
        if self._over:  # batches of it that were looked at are not waited for
            self._now = None
            self._ahead.clear()
        if not self._open_epochs:  # within another loader's loop its batch may be at hand, and is trained on later
            self._over, self._handed = False, []
        self._open_epochs += 1

    def begin_unfed(self) -> None:
        """Seeds all ranks alike for a script without a loader, so that it draws equal batches. Collective."""
        self.unfed = True
        if self.mesh.world.size > 1:
            share_generators(self.mesh.world, self.mesh.device)

    def _comes_unfed(self, call: Any) -> None:
        """Takes a training forward's (args, kwargs) `call` as the next batch, for a script without a loader.

        Raises `InputError` if the number of its samples cannot be known.
        """
        if self.whole is None:
            raise InputError(UNFED)
        try:
            total = samples_in(call, name="the model's arguments")
        except InputError as error:
            if self.whole.spreads:
                raise InputError(f'{error}. loss_scope="model" runs the model on all of them on every rank') from None
            total = 1  # which every rank has, whatever counts them
        self._last += 1
        self._begin(Handed(self._last, call, self._of_whole(total), 0, 0))

    def _of_whole(self, total: int) -> Dealt:
        """Returns this rank's `Dealt` of a batch of `total` samples that every rank has."""
        spreads = self.whole is not None and self.whole.spreads
        return deal(total, *((self.mesh.data.size, self.mesh.data.index) if spreads else (1, 0)))

    def here(self) -> Events:
        """Returns this loop; in a thread other than the one of `prepare`, `Events` that do nothing.

        Ranks cannot meet in such a thread; the next forward raises `RefusedPlan`.
        """
        if threading.get_ident() == self._thread:
            return self
        self._elsewhere = True
        return Events()

    def _passes(self, what: str) -> None:
        if self._meeting is not None:
            self._meeting.passes(what)

    def _comes_to(self, point: str) -> None:
        """Notes a point of the script's step ("input", "forward") in the rank's record; tests inject faults there."""
        engine = self.engine
        reach(point, 0 if engine is None else engine.steps_done, None if engine is None else engine.state)

    def goes_beside(self) -> bool:
        """Whether losses are of another loader's samples too."""
        return self.other.ran

    def before_first(self, look: list[float], checksum: int) -> None:
        """Raises `InputError` if ranks read different samples; not checked under "fast". Collective."""
        if self.mesh.world.size > 1 and self.randomness == "global":
            same_samples(look, checksum, self.mesh.world, self.mesh.device)

    def before_batch(self, batch: Any, dealt: Dealt, checksum: int, dim: int | None, *, own: bool = False) -> None:
        """Makes a batch that is handed out the current one, or lets it wait while another is still to be trained on."""
        dealt = dealt if self.whole is None else self._of_whole(dealt.part.total)
        self._last += 1
        handed = Handed(self._last, batch, dealt, checksum, dim, own=own)
        # batches of which nothing is left can meet no forward
        self._handed = [*(one for one in self._handed if one.lives), handed]
        # the loop reads ahead: the batch at hand has met no forward yet, or others wait already, so this one queues
        # behind
        if handed.traced and (self._ahead or (self._now is not None and self._now.awaits)):
            self._ahead.append(handed)
            self.resume()
            self.in_loop = True
        else:
            self._begin(handed)
        self._comes_to("forward")

    def _begin(self, handed: Handed) -> None:
        """Makes `handed` the current batch, which losses and random numbers are for from now on."""
        self._now, handed.spent, handed.met, self._drawn_like = handed, False, False, None
        self._gone_to = self._gone_to if handed.own else handed.number
        self.other.since = False
        # batches that the script has passed over are not waited for
        while self._ahead and self._ahead[0].number <= handed.number:
            self._ahead.popleft()
        dealt, dim = handed.dealt, handed.dim
        # every model of the loop gets this batch; one whose backward is over begins anew
        for each in self.together:
            each.used = None if each._spent else each.used
            each.dealt, each._done, each._dim = dealt, False, dim
            each.checksum = zlib.crc32(str(handed.checksum).encode(), each.checksum)
            # None until the model's first forward, where cuts are derived from that
            if each.engine is not None:
                each.engine.state.phase.samples = dealt.part.count
        # draws from here on are for this batch's samples, of which the whole batch is drawn
        if self._watched is not None:
            self._watched.dim = dim or 0
            if self._draws_on:
                self._watched.part = dealt.local
        self.resume()
        self.in_loop = True

    def select_batch_for_forward(self, call: Any, *, trains: bool) -> None:
        """Makes the batch current that a forward with (args, kwargs) `call` is of, by the rules of this module.

        Raises `RefusedPlan` if another thread goes through the loader.
        """
        now = self._now
        if self._elsewhere:
            raise RefusedPlan(_ELSEWHERE)
        others = (
            self._over or self._ahead or self._drawn_like or any(one is not now and one.lives for one in self._handed)
        )
        if now is not None and not others:  # no other batch it could be of
            now.met = True
            return
        storages = {_storage(tensor) for tensor in tensors_of(call)}
        known = (one for one in (now, *self._ahead, *self._handed) if one is not None and one.is_in(storages))
        handed = next(known, self._drawn_like)
        if handed is None:
            handed = self._first_that_fits(call, trains=trains)
        if handed is None and trains and self._over and now is not None and now.spent:
            handed = self._expected()
        # `again`: trained on once more after its loop; `beside`: a used batch, or an evaluation, while one still waits
        again = handed is now and now is not None and now.spent and trains and self._over
        beside = now is not None and now.awaits and handed is not None and (handed.spent or not trains)
        # what is kept of an earlier batch, or made of a later one, and used beside this one makes neither current
        if handed is not None and not beside and (again or (handed is not now and (trains or not handed.spent))):
            self._begin(handed)
        if self._now is not None:
            self._now.met = True

    def after_batch(self) -> None:
        """Stops following random operations, since the script asks for its next batch."""
        self.in_loop = False
        self.suspend()
        self._comes_to("input")

    @names_line
    def after_all(self) -> None:
        """Compares what ranks hold alike, when the script asks for a batch beyond an epoch's last. Collective."""
        for each in self.together:
            each.compares()

    def after_epoch(self) -> None:
        """Stops following random operations at the loop's end, unless batches of it are still to be trained on."""
        self._open_epochs -= 1
        self._over = not self._open_epochs
        self.suspend()
        waits = bool(self._ahead) or (self._now is not None and self._now.awaits)
        self.in_loop = waits
        if waits or len([one for one in self._handed if one.lives]) > 1:  # kept ones may be trained on
            self.resume()

    def _expected(self) -> Handed | None:
        """Returns the batch to expect next of a script that goes through batches it has kept; None without one."""
        kept = [one for one in self._handed if one.lives and not one.own]
        return next((one for one in kept if one.number > self._gone_to), kept[0] if kept else None)

    def resume(self) -> None:
        """Begins to follow random operations, for the samples of the current batch."""
        lead = self.leader
        if lead._watched is not None and lead.dealt is not None and not lead._draws_on:
            lead._watched.begin(lead.dealt.local, whole=lead.whole is not None)
            lead._draws_on = True

    def suspend(self) -> None:
        """Stops following random operations; the script's own are the same on every rank."""
        lead = self.leader
        if lead._watched is not None and lead._draws_on:
            lead._watched.end()
            lead._draws_on = False

    def go_on(self) -> None:
        """Begins to follow random operations again if a batch is current and not yet trained on."""
        if self.leader.in_loop and not self.leader._done:
            self.resume()

    def after_backward(self) -> None:
        """Stops following random operations once every model of the loop has had its backward of the batch."""
        self._done = self._spent = True
        lead = self.leader
        if lead._now is not None:
            lead._now.spent = True
        if lead._watched is not None:
            lead._watched.steps += 1
        # the batch is used up only when every model that trains on it has
        if not all(each._done for each in self.together):
            return
        # other batches that the script still holds: draws may be for them
        kept = any(one.lives for one in lead._handed) if lead._over else lead._left_waiting()
        if not (lead._ahead or kept):  # else the next one is there, and draws may be for it
            self.suspend()

    def _first_that_fits(self, call: Any, *, trains: bool) -> Handed | None:
        """Returns the first unused batch with as many samples as the forward `call`, else the first unused, or None."""
        # batches that are over are not waited for; in training those of a batch that is still being used up
        waiting = self._waiting(*(self._left_waiting() if trains else ()))
        fits = [batch.fits(call) for batch in waiting]
        if trains and len({batch.dealt for batch in waiting}) > 1:  # the number may match on this rank alone
            by_rank = gather_json(fits, self.mesh.data, self.mesh.device)
            fits = [all(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
        return next((batch for batch, fit in zip(waiting, fits, strict=True) if fit), waiting[0] if waiting else None)

    def _waiting(self, *left: Handed) -> list[Handed]:
        """Returns the unused batches among the current, the waiting and `left`; those the script made itself first."""
        waiting = [batch for batch in (self._now, *self._ahead, *left) if batch is not None and batch.awaits]
        return sorted(waiting, key=lambda batch: not batch.own)

    def _left_waiting(self) -> list[Handed]:
        """Returns unused batches that the script skipped for a later one: `for a, b in zip(...)`, b's step first."""
        return [one for one in self._handed if one is not self._now and one.awaits and one.lives]

    def drawn_for(self, part: Share, fits: Callable[[int], bool], given: Any) -> Share | None:
        """Returns the samples that a random operation is for; None: for none, the numbers are the script's own.

        part   this rank's samples of the current batch
        fits   number of samples -> whether the numbers' shape has that many
        given  the operation's arguments; numbers shaped after a batch's tensor are for that batch
        """
        storages = {_storage(tensor) for tensor in tensors_of(given)}
        batches = (self._now, *self._ahead, *self._handed)
        like = next((batch for batch in batches if batch is not None and storages and batch.is_in(storages)), None)
        if like is not None:
            # a forward of these numbers, which lie in no batch, is then of that batch
            self._drawn_like = None if like is self._now else like
            return like.dealt.local
        if self._over and not (self._ahead or (self._now is not None and self._now.awaits)):
            return None
        waiting = self._waiting()
        if len({batch.dealt for batch in waiting}) > 1:  # of other sizes: only one that has as many samples
            waiting = [batch for batch in waiting if fits(batch.dealt.local.count)]
        return waiting[0].dealt.local if waiting else part


def _storage(tensor: torch.Tensor) -> int:
    """Returns an id of a tensor's storage, for tensors without one (sparse, meta) of the tensor itself."""
    plain = tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage()._cdata if plain else id(tensor)
