"""Write every collective that Python issues into the rank's record, for guard/. By method names: also observe.

    dist.all_reduce(...) -> ProcessGroup.allreduce   the number in its group, op, dtype, shape, tag, the user's line
    work.wait()          -> Work.wait                what the rank waits for, while it waits

Methods of torch's two classes are replaced once in a process; without a record they only call the original.

In strict mode (`SHARDWISE_STRICT=1`) a collective is compared, before it is issued, with what other ranks of the host
issued under its number, the place in the code included: the later of two that differ raises.

`listing` keeps all of them in an `IssueLog`, in their order, for whoever plays them.

`refusing_others` raises where code that is neither ours nor PyTorch's engines' issues one: a module's own forward.

What this does not do: see collectives inside a compiled program and DTensor's own, which are issued below Python. All
ranks of a group leave out the same ones.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwise.comm import observe
from shardwise.comm.issued import IssueLog
from shardwise.errors import RunError
from shardwise.guard.diagnose import differ
from shardwise.guard.records import RankRecord, Reader, key_of

STRICT = "SHARDWISE_STRICT"
# method of a process group -> (what it is called, place of the tensor that tells of its size; None: there is none)
_COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", None),
    "barrier": ("barrier", None),
}
_MOST_FRAMES = 80
# as frames name their files: through whatever links Python found them (a linked home, or environment)
_OWN = str(Path(__file__).parents[1]) + os.sep
_COMM = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_ENGINES = tuple(f"{_TORCH}distributed{os.sep}{name}" for name in ("fsdp", "_composable", "tensor", "_tensor"))
_LIBRARY = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_PACKAGES = tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})
_USERS, _PACKAGE, _OURS, _SKIP = range(4)


class _State:
    """This process's groups and works, as the record that it has now numbers them."""

    def __init__(self) -> None:
        self.record: RankRecord | None = None
        self.groups: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # process group -> number; -1: left out
        self.keys: dict[int, str] = {}  # number of a group -> its key, the same on all ranks
        self.made: dict[str, int] = {}  # torch's name of a group -> groups made so far under it
        self.works: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # -> (group, number in it)
        self.pairs: dict[tuple[Any, ...], int] = {}  # (id of a group, peer, tag, whether it sends) -> number
        self.axes: dict[str, str] = {}  # torch's name of a group -> its mesh axis
        self.texts: dict[Any, int] = {}  # value -> number of its text
        # by the id of a code object, which is kept here and so stays its own: hashing one takes longer than all else
        self.kinds: dict[int, tuple[int, Any]] = {}
        self.places: dict[tuple[int, int], int] = {}  # (id of a code object, line) -> number of its text
        self.others: dict[int, Reader] = {}  # rank -> its record; -1: this rank's own
        self.strict = False
        self.log: IssueLog | None = None


_state = _State()
_inside = threading.local()


def begin(mine: RankRecord | None, others: dict[int, str] | None = None) -> None:
    """Write collectives to this record from now on (None: to none). `others`: paths of other ranks' records."""
    global _state
    _state = _State()
    _state.record = mine
    _state.strict = mine is not None and os.environ.get(STRICT, "") not in ("", "0")
    if _state.strict:
        _state.others = {rank: Reader(path) for rank, path in (others or {}).items()}
    if mine is not None:
        _replace_methods()


def name_axes(axes: dict[str, str]) -> None:
    """Add names of axes by process group name, for reports; groups that come later have them too."""
    _state.axes.update(axes)


@contextmanager
def listing(log: IssueLog) -> Iterator[None]:
    """Context: what this process issues, and waits for, is added to the log."""
    _replace_methods()
    before, _state.log = _state.log, log
    try:
        yield
    finally:
        _state.log = before


@contextmanager
def batched() -> Iterator[None]:
    """Context: messages issued inside begin together, and so they stand in the log."""
    with _state.log.batch() if _state.log is not None else nullcontext():
        yield


@contextmanager
def refusing_others(error: Callable[[str, str], Exception]) -> Iterator[None]:
    """Context: a collective that a module's own code issues on this thread raises `error(what it is, file:line)`."""
    _replace_methods()
    before = getattr(_inside, "refused", None)
    _inside.refused = error
    try:
        yield
    finally:
        _inside.refused = before


# --- torch's methods


def _replace_methods() -> None:
    """Replace torch's methods by ones that write to the record, once in a process."""
    if hasattr(dist.Work.wait, "shardwise"):
        return
    for method, (op, place) in _COLLECTIVES.items():
        own = getattr(dist.ProcessGroup, method, None)
        # torch has renamed some, and each version has its own
        if own is not None:
            setattr(dist.ProcessGroup, method, _collective(own, op, place))
    for method, sends in (("send", True), ("recv", False)):
        setattr(dist.ProcessGroup, method, _message(getattr(dist.ProcessGroup, method), sends))
    dist.Work.wait = _wait(dist.Work.wait)


def _collective(own: Callable[..., Any], op: str, place: int | None) -> Callable[..., Any]:
    """Returns a process group's method `own` that writes each call to the record. `place`: of the tensor in args."""

    def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
        # inside `refusing_others`
        if getattr(_inside, "refused", None) is not None:
            _refuse(op)
        state = _state
        # nobody records, or this is a call that a recorded one makes: counted once
        if (state.record is None and state.log is None) or getattr(_inside, "under", False):
            return own(self, *args, **kwargs)
        tensor = args[place] if place is not None and place < len(args) else None
        # all_gather and its like take a list of tensors, or a list of these: the first tells the dtype
        while isinstance(tensor, list | tuple):
            tensor = tensor[0] if tensor else None
        where = None if state.record is None else _noted(self, op, tensor)
        number = None if state.log is None else _logged(state.log, self, op, tensor)
        _inside.under = True  # one method of torch may call another
        try:
            work = own(self, *args, **kwargs)
        finally:
            _inside.under = False
        _of_work(work, where, number)
        return work

    issue.__name__ = op
    return issue


def _message(own: Callable[..., Any], sends: bool) -> Callable[..., Any]:
    """Returns a process group's `own`, which sends or receives a message, that writes each call to the record."""

    def pass_on(self: Any, tensors: Any, peer: int, *rest: Any, **kwargs: Any) -> Any:
        # inside `refusing_others`
        if getattr(_inside, "refused", None) is not None:
            _refuse("send" if sends else "recv")
        state = _state
        if state.record is None and state.log is None:  # nobody watches this process
            return own(self, tensors, peer, *rest, **kwargs)
        tag = rest[0] if rest else kwargs.get("tag", 0)
        where = None if state.record is None else _pair(self, peer, tag, sends)
        number = None if state.log is None else _logged(state.log, self, "send" if sends else "recv", tensors[0], peer)
        work = own(self, tensors, peer, *rest, **kwargs)
        _of_work(work, where, number)
        return work

    return pass_on


def _wait(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's `Work.wait` (`own`) that names in the record, while it runs, the operation that is waited for."""

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        mine, where = _state.record, _state.works.get(self)
        waits_for(self)
        if mine is None or where is None:
            return own(self, *args, **kwargs)
        mine.waits(*where)
        try:
            return own(self, *args, **kwargs)
        finally:
            mine.goes_on()

    wait.shardwise = True  # type: ignore[attr-defined]
    return wait


def waits_for(work: Any) -> None:
    """Notes in the log that `work` is waited for; called by classes of works with a `wait` of their own."""
    if _state.log is not None:
        _state.log.waited(work)


# --- what is written


def _logged(log: IssueLog, group: Any, op: str, tensor: Any, peer: int | None = None) -> int:
    """Add an operation to the log; returns its number there. `peer` counts within the group."""
    ranks = dist.get_process_group_ranks(group)
    axis = _state.axes.get(group.group_name, "world" if group is dist.group.WORLD else f"group {group.group_name}")
    place = _frame(_OURS)
    text = "" if place is None else _text_of(*place)
    tag = getattr(observe._local, "tag", None) or ""
    return log.add(op, group, ranks, axis, tensor, tag, text, -1 if peer is None else ranks[peer])


def _of_work(work: Any, where: tuple[int, int] | None, number: int | None) -> None:
    """Note which operation a work is of, in the record and in the log."""
    if work is None:
        return
    if where is not None:
        _state.works[work] = where
    if number is not None and _state.log is not None:
        _state.log.work(work, number)


def _noted(group: Any, op: str, tensor: Any) -> tuple[int, int] | None:
    """Write one collective to the record; returns (group, its number there), None for a group that is left out."""
    state = _state
    mine = state.record
    assert mine is not None
    number = state.groups.get(group)
    if number is None:
        number = _registered(group)
    # left out, as in `_registered`: a world of its own for a while
    if number < 0:
        return None
    if tensor is None:
        elements, shape, dtype = 0, 0, 0
    else:
        elements, shape, dtype = tensor.numel(), _text(tensor.shape), _text(tensor.dtype)
    tag = getattr(observe._local, "tag", None)
    issued = mine.issue(number, _text(op), elements, shape, dtype, _text(tag) if tag else 0, _place())
    if state.strict:
        _compare(mine, number, issued)
    return number, issued


def _text(value: Any) -> int:
    """Returns the number of a value's text in the record, made once for each value."""
    at = _state.texts.get(value)
    if at is None:
        assert _state.record is not None
        text = str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
        at = _state.texts[value] = _state.record.text(text)
    return at


def _registered(group: Any) -> int:
    """Returns the number of a process group in the record, -1 for one that is left out."""
    state = _state
    assert state.record is not None
    ranks = dist.get_process_group_ranks(group)
    number = -1
    if dist.get_world_size() == state.record.world:  # else a part of the ranks is a world of its own for a while
        name = group.group_name
        axis = state.axes.get(name, "world" if group is dist.group.WORLD else f"group {name}")
        # torch gives a name again after its group has gone: the count keeps the two apart
        times = state.made[name] = state.made.get(name, 0) + 1
        key = key_of(axis, f"{name}#{times}", ranks)
        number = state.record.group(key)
        state.keys[number] = key
    state.groups[group] = number
    return number


def _pair(group: Any, peer: int, tag: int, sends: bool) -> tuple[int, int] | None:
    """Write a message between two ranks to the record; returns (pair, its number there), or None."""
    state = _state
    mine = state.record
    assert mine is not None
    at = (id(group), peer, tag, sends)
    number = state.pairs.get(at)
    if number is None:
        number = -1
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        # left out, as in `_registered`: messages of a part of the ranks that is a world of its own for a while; and to
        # a peer that is not there, for which torch raises
        if dist.get_world_size() == mine.world and 0 <= peer < len(ranks):
            ends = (ranks[me], ranks[peer]) if sends else (ranks[peer], ranks[me])
            number = mine.group(key_of("message", f"{group.group_name}/{tag}", ends), between_two=True)
        state.pairs[at] = number
    if number < 0:
        return None
    return number, mine.issue(number, 0, 0, 0, 0, 0, 0)


def _frame(least: int = _USERS) -> tuple[Any, int] | None:
    """Returns (code, line) of the innermost frame of the user's code, a package's, or ours; None where none is.

    least   the innermost frame of this kind, or one before it, is taken at once
    """
    frame: Any = sys._getframe(3)
    kinds, nearest, left = _state.kinds, None, _MOST_FRAMES
    best = _SKIP
    while frame is not None and left:
        # the entry keeps the code object, whose id would otherwise come again once it is gone
        code = frame.f_code
        entry = kinds.get(id(code))
        if entry is None:
            entry = kinds[id(code)] = (_kind_of(code.co_filename), code)
        kind = entry[0]
        # the user's own line tells more than a package's, and that more than ours
        if kind < best:
            nearest, best = frame, kind
            if kind <= least:
                break
        frame, left = frame.f_back, left - 1
    return None if nearest is None else (nearest.f_code, nearest.f_lineno)


def _place() -> int:
    """Returns the record's number for file:line of the frame that issues a collective; 0 for none."""
    found = _frame()
    if found is None:
        return 0
    code, line = found
    at = (id(code), line)
    place = _state.places.get(at)
    if place is None:
        assert _state.record is not None
        place = _state.places[at] = _state.record.text(_text_of(code, line))
    return place


def _text_of(code: Any, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_name}"


def _refuse(op: str) -> None:
    """Raises where neither this package nor an engine of PyTorch issues the collective."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _OURS if file.startswith((_COMM, *_ENGINES)) else _kind_of(file)
        between = frame.f_code.co_name == "__torch_function__"  # a mode that the call went through on its way
        if kind == _OURS and not between:
            return
        if kind not in (_SKIP, _OURS):
            raise _inside.refused(op, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back


def _kind_of(file: str) -> int:
    """Returns whose code a file is: the user's (our models too), a package's, ours, or one to skip."""
    # frames of this room, and code without a file, are passed by
    if file.startswith((_COMM, "<")):
        return _SKIP
    if file.startswith(_OWN):
        # our models stand in for a user's: their lines are what a message should show
        return _USERS if f"{os.sep}models{os.sep}" in file[len(_OWN) - 1 :] else _OURS
    if file.startswith(_TORCH):
        return _SKIP
    # a package's line is better than torch's own, and worse than the user's
    if file.startswith(_PACKAGES):
        return _PACKAGE
    return _SKIP if file.startswith(_LIBRARY) else _USERS


# --- strict


def _compare(mine: RankRecord, number: int, issued: int) -> None:
    """Raises `RunError` where another rank of the host issued something else under this number."""
    key = _state.keys[number]
    # -1: this rank's own record, opened at the first comparison
    own = Reader(mine.path) if -1 not in _state.others else _state.others[-1]
    _state.others[-1] = own
    seen = own.see()
    assert seen is not None
    entry = own.entry(seen.groups[key], issued)
    for rank in seen.groups[key].ranks:
        reader = _state.others.get(rank)
        other = reader.see() if reader is not None and rank != mine.rank else None
        # nothing to compare: the rank is on another host, or has not come so far
        if reader is None or other is None or key not in other.groups or entry is None:
            continue
        theirs = reader.entry(other.groups[key], issued)
        what = differ(entry, theirs, places=True) if theirs is not None else ""
        if theirs is not None and what:
            raise RunError(
                f"ranks came to different collectives ({what}): number {issued} of axis {key.split('|')[0]} is {entry} "
                f"on rank {mine.rank}, from {entry.place}, and {theirs} on rank {rank}, from {theirs.place}"
            )
