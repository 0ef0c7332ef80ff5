"""Find which dim of a view's result is cut, from the unsharded shapes that one process has.

A view is answered for one axis after the other. For an inner axis, dims are already cut by the outer ones, and may be
ones or zeros on some ranks. By such local shapes ranks would decide differently, and wait for each other for ever.

    (B, 5, 5, C), rows cut over d0, all columns on one rank of d1
    joined      (B, 25, C)          owners of the 25 indices do not tell which of the two dims d1 cut
    split       (B, 1, 5, 1, 5, C)  `Part.factors` of the joined dim says which one
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shardwise.layout.view_dims import groups
from shardwise.part.cuts import regrouped
from shardwise.part.tensor import Part


@dataclass(frozen=True)
class WholeView:
    """The unsharded shapes of a view, before and after.

    outer  (cut dim before, cut dim after) of each axis further out that cuts the viewed tensor
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    outer: tuple[tuple[int, int], ...] = ()

    def seen_as(self, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """Whether the local shapes `before` and `after` may be this view's: only dims that `outer` cuts may differ."""
        # another number of dims is another view
        if len(before) != len(self.before) or len(after) != len(self.after):
            return False
        cut = [set(dims) for dims in zip(*self.outer, strict=True)] or [set(), set()]
        sides = zip((self.before, self.after), (before, after), cut, strict=True)
        return all(d in taken or m == n for whole, seen, taken in sides
                   for d, (m, n) in enumerate(zip(whole, seen, strict=True)))  # fmt: skip

    def run(self, dim: int) -> tuple[range, range]:
        """Returns (dims before, dims after) of the smallest run of dims that the view rearranges, with `dim` in it."""
        return next(pair for pair in groups(self.before, self.after) if dim in pair[0])

    def inside(self, to: range, place: int) -> int:
        """Returns the stride of dim `to[place]` of the view within its run `to` of dims."""
        return math.prod(self.after[d] for d in to[place + 1 :])


class _Whole(threading.local):
    """The view that rules are computing in this thread, with its unsharded shapes; None: none."""

    view: WholeView | None = None

    @contextmanager
    def of(self, part: Part, shape: tuple[int, ...]) -> Iterator[WholeView]:
        """Context that yields the `WholeView` of a view of this part to `shape`.

        If the rule of an outer axis is answering the same view, it is that one's; else it has the part's own shapes.
        """
        before = self.view
        if before is None or not before.seen_as(tuple(part.shape), shape):
            self.view = WholeView(tuple(part.shape), shape)
        assert self.view is not None
        try:
            yield self.view
        finally:
            self.view = before

    @contextmanager
    def cut_along(self, before: int, after: int) -> Iterator[None]:
        """Context in which rules of inner axes see that this axis cuts dim `before`, and dim `after` of the result."""
        view = self.view
        assert view is not None
        self.view = replace(view, outer=(*view.outer, (before, after)))
        try:
            yield
        finally:
            self.view = view


WHOLE = _Whole()


def goal_of(part: Part, whole: WholeView) -> int | None:
    """Returns the dim along which a view's result is cut, from unsharded shapes; None: `regrouped` chooses.

    The same on all ranks. Raises `Uncut` if the ranks' elements are no shares of one dim.
    """
    goal = _taken_apart(part, whole)
    # told by the factor that was cut; or no axis further out, and `regrouped` may choose
    if goal is not None or not whole.outer:
        return goal
    # an axis further out cuts something else: this one is told by its own owners
    if part.dim_cut not in (before for before, _ in whole.outer):
        return regrouped(whole.before, part.dim_cut, part.owners, whole.after)[0]
    # several ranks own indices, or there are none: nothing here tells which dim is the cut one
    if len(part.owners.who) > 1 or 0 in whole.before:
        return None
    # joined, and all indices on one rank: any dim would do, so one that no axis further out cuts where there is one
    taken = {after for _, after in whole.outer}
    wide = [d for d in whole.run(part.dim_cut)[1] if whole.after[d] > 1]
    return min(wide, key=lambda d: (d in taken, d), default=None)


Factors = tuple[int, int, int]


def _cut_factor(part: Part, whole: WholeView) -> Factors | None:
    """Returns the unsharded sizes (outer, cut, inner) of the dims that the view rearranges together with the cut one.

    cut  size of the dim that was cut; if earlier views joined it with others, from `Part.factors`, since owners do not
         tell it any more if one rank has all indices;  outer, inner  product of the sizes in front of it and behind
    None if the remembered factors do not fill the dim any more, or a dim is empty.
    """
    size = whole.before[part.dim_cut]
    outer, cut, inner = part.factors or (1, size, 1)
    # the parts no longer fill the dim: another view has rearranged it
    if outer * cut * inner != size or 0 in whole.before:
        return None
    run, _ = whole.run(part.dim_cut)
    before, behind = ([whole.before[d] for d in run if (d > part.dim_cut) == late and d != part.dim_cut]
                      for late in (False, True))  # fmt: skip
    return outer * math.prod(before), cut, inner * math.prod(behind)


def factors_of(part: Part, dim: int, whole: WholeView) -> Factors | None:
    """Returns the sizes (outer, cut, inner) joined in the cut dim `dim` of a view's result; None if none are."""
    factors = _cut_factor(part, whole)
    if factors is None:
        return None
    _, to = whole.run(part.dim_cut)
    # the cut went to a dim that has none of these
    if dim not in to:
        return None
    _, cut, inner = factors
    behind, size = whole.inside(to, to.index(dim)), whole.after[dim]
    # the dim holds no whole runs of the cut factor, or is that factor itself: nothing to remember
    if inner % behind or (behind * size) % (cut * inner) or size == cut:
        return None
    return behind * size // (cut * inner), cut, inner // behind


def _taken_apart(part: Part, whole: WholeView) -> int | None:
    """Returns the dim of a view's result with the cut indices, if the view splits a joined dim; else None."""
    # only of a dim that was joined is it unclear which of its factors was cut
    factors = _cut_factor(part, whole) if part.factors is not None else None
    if factors is None:
        return None
    _, cut, inner = factors
    _, to = whole.run(part.dim_cut)
    taken = {after for _, after in whole.outer}
    fitting = []
    for place, d in enumerate(to):
        behind, size = whole.inside(to, place), whole.after[d]
        # the dim must hold whole runs of the cut factor, and lie on top of what is inside it
        if inner % behind == 0 and (behind * size) % (cut * inner) == 0:
            fitting.append((size, d in taken, place, d))
    # the smallest such dim, first of those that no outer axis cuts, is the factor itself
    return min(fitting)[-1] if fitting else None
