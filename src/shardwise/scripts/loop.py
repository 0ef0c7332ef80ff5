"""Follow a script's loop over its loader: which batch is at hand, and when draws are for its samples. For calls.

    for x in loader                 a batch is at hand from when it is handed out
    x, ahead = ahead, next(it)      read ahead: a batch waits, and is at hand from the first forward that is given it
    x = next(iter(loader))          taken out of the loop, or kept in a list: it is at hand in each such forward
    for x in cycle(loader)          kept from a loop that is over: likewise, the one after the last being expected next

What is made of a batch's tensors is known (`kept`), and so is which batch a forward, or a draw like them, is of. What
is drawn by a size alone is drawn for the samples of the batch at hand, or of the first that waits; between the backward
of a batch and the next one it is the script's own, and refused where it meets samples of a batch all the same. Of kept
batches, a line that has drawn for samples before draws for those of the batch that is expected next.

What this does not do: tell batches apart that hold no tensors; they are at hand when they are handed out.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan
from shardwise.guard.points import reach
from shardwise.layout.dealing import Share
from shardwise.mesh import Mesh
from shardwise.scripts.additive import LossLook
from shardwise.scripts.agreement import same_samples
from shardwise.scripts.arrivals import Heard
from shardwise.scripts.batches import Handed
from shardwise.scripts.dealt import Dealt, deal
from shardwise.scripts.draws import SampleDraws
from shardwise.scripts.kept import Kept
from shardwise.scripts.loader import Events
from shardwise.scripts.meeting import Meeting
from shardwise.scripts.pushed import UNFED
from shardwise.scripts.reading import share_generators, standing
from shardwise.scripts.saying import names_line
from shardwise.scripts.tape import tensors_in
from shardwise.scripts.whole_batch import WholeBatch
from shardwise.step.batching import samples_in

_ELSEWHERE = (
    "the loader is gone through in a thread of the script's own (a background generator), in which ranks cannot meet "
    "and what is drawn is drawn in no order: go through it in the thread that trains, and let it read ahead by itself "
    "(num_workers, prefetch_factor); a prefetcher without a thread is followed"
)
_UNFOLLOWED = (
    "the model is trained on a batch of a loop over the loader that has ended, and random numbers were drawn since, in "
    "which it was not followed which of them are for the batch's samples: train on it within the loop, or begin "
    "another one (x, y = next(iter(loader)))"
)


class Loop(Heard, Events):
    """The loader's `Events`, for one model or several that one loop trains; the first of them, `leader`, has the
    batches."""

    model: nn.Module
    mesh: Mesh
    randomness: str
    engine: Engine | None
    whole: WholeBatch | None
    leader: Any
    compares: Callable[[], None]
    together: list[Any]
    loss_look: LossLook | None
    kept: Kept | None
    dealt: Dealt | None  # the batch at hand
    used: Dealt | None  # by the model's last forward in training
    checksum: int  # of all samples so far
    _meeting: Meeting | None
    _watched: SampleDraws | None
    _spent: bool  # the backward of its last forward is over
    _done: bool  # its backward of this batch is over
    _dim: int | None  # of a batch's tensors that counts samples
    _ends: list[Any]

    def _no_batch(self) -> None:
        """Nothing was handed out yet."""
        self._now: Handed | None = None
        self._ahead: deque[Handed] = deque()  # that wait to be at hand
        self._last = 0  # batches that were handed out
        self._epoch = 0  # of them, when this epoch began
        self._over = False  # it has ended
        self._took = False  # and the script took batches out of it, of which it trained on none
        self._handed: list[Handed] = []  # in this epoch, that something of is there
        self._round = False  # it is over, and the script has kept batches of it
        self._elsewhere = False  # a thread of the script's own goes through the loader
        self._reads_ahead = False  # batches were trained on after later ones were handed out
        self._draws_on = False
        self.in_loop = False  # between a batch and the next
        self._thread = threading.get_ident()
        self._stood: int | None = None  # the generators, when the loop ended
        self.unfed = False  # there is no loader, and nothing was dealt
        self.unfollowed = False  # a forward is of a batch of a loop that has ended, and something was drawn since

    def before_epoch(self) -> None:
        """Set every rank's generators to rank 0's, so that samplers and datasets draw alike."""
        if self.is_elsewhere():
            return
        self.unfed = False
        self._passes("an epoch over the loader")
        if self.mesh.world.size > 1:
            share_generators(self.mesh.world, self.mesh.device)
        if self._took:  # batches that were looked at, and are not waited for
            self._now = None
            self._ahead.clear()
        self._epoch, self._over, self._took, self._reads_ahead = self._last, False, False, False
        self._round, self._handed = False, []
        self._comes_to("input")

    def begin_unfed(self) -> None:
        """Begin without a loader: what the script makes its batches of is drawn alike on every rank. Collective."""
        self.unfed = True
        if self.mesh.world.size > 1:
            share_generators(self.mesh.world, self.mesh.device)

    def _comes_unfed(self, call: Any) -> None:
        """A forward in training begins, and what it is given is the batch."""
        if self.whole is None:
            raise InputError(UNFED)
        try:
            total = samples_in(call, name="the model's arguments")
        except InputError as error:
            if self.whole.spreads:
                raise InputError(f'{error}. loss_scope="model" runs the model on all of them on every rank') from None
            total = 1  # which every rank has, whatever counts them
        self._last += 1
        self._begin(Handed(self._last, call, self._of_whole(total), 0, 0), fresh=True)

    def _of_whole(self, total: int) -> Dealt:
        """Which of a whole batch's samples this rank's forward takes."""
        spreads = self.whole is not None and self.whole.spreads
        return deal(total, *((self.mesh.data.size, self.mesh.data.index) if spreads else (1, 0)))

    def is_elsewhere(self) -> bool:
        """Whether it is not the thread in which the script was prepared that asks for batches."""
        return threading.get_ident() != self._thread

    def _passes(self, what: str) -> None:
        if self._meeting is not None:
            self._meeting.passes(what)

    def _comes_to(self, point: str) -> None:
        """A point of the script's step, for the rank's record and for faults on purpose."""
        engine = self.engine
        reach(point, 0 if engine is None else engine.steps_done, None if engine is None else engine.state)

    def wants_look(self) -> bool:
        """Returns whether the model or the loss is to be checked against one process on the next batch."""
        return self.loss_look is not None and self.loss_look.wanted

    def wants_uneven(self) -> bool:
        """Whether draws of the script's, or numbers in its losses, may hang on the number of a rank's samples."""
        look = self.loss_look
        if look is not None and (look.unsure or (look.assumed and not self.goes_beside())):
            return True
        return self._watched is not None and self.whole is None and self._watched.unsure

    def goes_beside(self) -> bool:
        """Whether losses are of another loader's samples too."""
        return self.kept is not None and self.kept.goes_beside()

    def before_first(self, look: list[float], checksum: int) -> None:
        """Raise an error where ranks read other samples than each other, unless each draws for itself. Collective."""
        if self.is_elsewhere():
            return
        if self.mesh.world.size > 1 and self.randomness == "global":
            same_samples(look, checksum, self.mesh.world, self.mesh.device)

    def before_batch(self, batch: Any, dealt: Dealt, checksum: int, dim: int | None) -> None:
        """Begin to follow a batch that is handed to the script: its samples, its draws, its loss."""
        dealt = dealt if self.whole is None else self._of_whole(dealt.part.total)
        self._last += 1
        handed = Handed(self._last, batch, dealt, checksum, dim)
        if self.is_elsewhere():
            self._elsewhere = True
            return
        self._let_go()
        self._handed = [*(one for one in self._handed if one.lives), handed]
        waits = self.kept is not None and handed.traced and (self._ahead or _awaits(self._now))
        if self.kept is not None:
            self.kept.hand_out(handed)
        if waits:
            self._ahead.append(handed)
            self._follow()
        else:
            self._begin(handed, fresh=True)
        self._comes_to("forward")

    def _begin(self, handed: Handed, *, fresh: bool = False) -> None:
        """This batch is at hand from here on; `fresh`: it is just handed out."""
        self._now, handed.spent = handed, False
        while self._ahead and self._ahead[0].number <= handed.number:
            self._ahead.popleft()
        dealt, dim = handed.dealt, handed.dim
        for each in self.together:
            each.used = None if each._spent else each.used
            each.dealt, each._done, each._dim = dealt, False, dim
            each._ends.clear()
            each.checksum = zlib.crc32(str(handed.checksum).encode(), each.checksum)
            if each.engine is not None:
                each.engine.state.phase.stand_in = dealt.part.count == 0
        if self._watched is not None:
            self._watched.dim, self._watched.even = dim or 0, dealt.even
            if not dealt.even:
                self._watched.tried()
        followed = fresh or self.kept is None or self.kept.on
        if self._draws_on and self._watched is not None:
            self._watched.part = dealt.held
        if self.kept is not None:
            self.kept.begin(handed, models=[each.model for each in self.together], fresh=fresh)
        if self.loss_look is not None:
            self.loss_look.begin(handed, every=dealt.several and followed, fresh=fresh)
        self._follow()

    def _follow(self, *, own: bool = False) -> None:
        """Follow operations, and draws for samples unless they are the script's `own`."""
        if self.kept is not None:
            self.kept.go_in(after=own)
        if self.loss_look is not None:
            self.loss_look.go_on()
        if not own:
            self.resume()
        self.in_loop = True

    def _let_go(self) -> None:
        """Forget the first batches that wait, as long as nothing of them is there."""
        while self._ahead and not self._ahead[0].lives:
            self._ahead.popleft()

    def refuse_unfollowed(self) -> None:
        """Raise `RefusedPlan` for a loss of a batch of a loop that has ended, since when something was drawn."""
        if self.leader.unfollowed:
            raise RefusedPlan(_UNFOLLOWED)

    def comes_with(self, call: Any, *, trains: bool) -> None:
        """A forward begins: the batch that its arguments are made of is at hand, if it waited or was handed out
        before."""
        now, known = self._now, self.kept is not None
        if self._elsewhere:
            raise RefusedPlan(_ELSEWHERE)
        handed = self.kept.batch_of(call) if self.kept is not None else None
        if handed is None and self._ahead and not (known and _awaits(now)) and (now is None or now.spent or known):
            handed = self._ahead[0]  # what it was made into is not known
        if handed is None and trains and now is not None and now.spent and self.kept is not None and not self.kept.on:
            rows = any(one.dim() and len(one) == now.dealt.held.count for one in tensors_in(call))
            self.unfollowed |= rows and self._stood not in (None, standing())
        if handed is now and now is not None and now.spent and trains:
            if self.loss_look is not None:
                self.loss_look.begin_again(now)
            if self.kept is not None and self._took:
                self.kept.begin_again()
        if handed is None or handed is now or (handed.spent and not trains):
            return
        if _awaits(now) and (handed.spent or not trains):
            return  # something kept of an earlier one, or made of a later one, beside this one
        self._reads_ahead |= trains and handed.number < self._last
        followed = self.kept is None or self.kept.on or self._stood in (None, standing())
        self.unfollowed |= trains and not followed
        self._begin(handed)

    def after_batch(self) -> None:
        """Stop following draws and losses, since the script asks for its next batch."""
        if not self.is_elsewhere():
            self.in_loop = False
            self._pause()
            self._comes_to("input")

    def _pause(self) -> None:
        if self.loss_look is not None:
            self.loss_look.pause()
        if self.kept is not None:
            self.kept.go_out()
        self.suspend()

    @names_line
    def after_all(self) -> None:
        """Compare what ranks hold alike, since an epoch has had its last batch on every rank. Collective."""
        if not self.is_elsewhere():
            for each in self.together:
                each.compares()

    def after_epoch(self) -> None:
        """Stop following draws and losses, since the loop has ended; not those of batches that are still to come."""
        if self.is_elsewhere():
            return
        self._over = True
        self._pause()
        self._let_go()
        now, waits = self._now, bool(self._ahead) or _awaits(self._now)
        trained = now is not None and now.spent and now.number > self._epoch
        self._took = waits and not self._reads_ahead and not trained and self._last > self._epoch
        self._round = sum(one.traced and one.lives for one in self._handed) > 1
        if self.kept is not None and (self._round or (waits and (self._reads_ahead or self._took))):
            self._follow(own=self._took or not waits)
            self.kept.expected = self._expected()
        else:
            self._end()

    def _expected(self) -> Handed | None:
        """Returns the batch that a script which goes through kept ones goes on with: the one after the last."""
        if not (self._round or self._took):
            return None
        kept, last = [one for one in self._handed if one.traced and one.lives], self._now.number if self._now else 0
        return next((one for one in kept if one.number > last), kept[0] if kept else None)

    def _end(self) -> None:
        """The loop is over: what is computed from here on is the script's own."""
        self.in_loop = False
        if self.kept is not None:
            self.kept.pause()
        if self.loss_look is not None:
            self.loss_look.rest()
            self.loss_look.after_epoch()
        self.suspend()
        self._stood = standing()

    def resume(self) -> None:
        """Begin dealing draws over the samples of the batch at hand."""
        lead = self.leader
        if lead._watched is not None and lead.dealt is not None and not lead._draws_on:
            lead._watched.begin(lead.dealt.held, whole=lead.whole is not None)
            lead._draws_on = True

    def suspend(self) -> None:
        """Stop dealing draws over samples: the script's own draws are alike on every rank."""
        lead = self.leader
        if lead._watched is not None and lead._draws_on:
            lead._watched.end()
            lead._draws_on = False

    @contextmanager
    def dealing(self, handed: Handed) -> Iterator[None]:
        """Context of one operation on samples of a batch, while the script's own draws are not dealt."""
        watched = self._watched
        if watched is None or self._draws_on:
            yield
            return
        watched.part, watched.whole = handed.dealt.held, self.whole is not None
        try:
            with watched:
                yield
        finally:
            watched.part = None

    def after_backward(self) -> None:
        """Stop dealing draws over samples once every model in the loop has had its backward."""
        self._done = self._spent = True
        self._ends.clear()
        lead = self.leader
        if lead._now is not None:
            lead._now.spent = True
        if self.kept is not None:
            self.kept.end_step()
        if not all(each._done for each in self.together):
            return
        lead._let_go()
        if self.kept is not None:
            self.kept.after = True
            self.kept.following = lead._ahead[0] if lead._ahead else None
            self.kept.expected = lead._expected()
        if lead._ahead:
            return  # the next one is there, and draws may be for it
        self.suspend()
        if lead._over and not (lead._took or lead._round):
            lead._end()

    def drawn_for(self, part: Share, fits: Callable[[int], bool]) -> Share:
        """Returns the samples that numbers are drawn for: those of what they are drawn like; by their count alone,
        those of the first batch that is to be trained on."""
        if self.kept is None:
            return part
        if self.kept.draws_of is not None:
            return self.kept.draws_of.dealt.held
        waiting = [one for one in (self._now, *self._ahead) if one is not None and _awaits(one)]
        if len({one.dealt for one in waiting}) > 1:
            waiting = [one for one in waiting if fits(one.dealt.held.count)]
            self.kept.drawn_for = waiting[0] if waiting else None
        return waiting[0].dealt.held if waiting else part


def _awaits(handed: Handed | None) -> bool:
    """Whether a batch is still to be trained on."""
    return handed is not None and handed.traced and not handed.spent and handed.lives
