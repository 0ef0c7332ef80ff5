"""Write every collective that Python issues into the rank's record in shared memory, for guard/.

    dist.all_reduce(...) -> ProcessGroup.allreduce   sequence number in its group, op, dtype, shape, tag, line of code
    work.wait()          -> Work.wait                what the rank waits for, while it waits

Methods of torch's two classes are replaced once in a process; without a record they only call the original.

In strict mode (`SHARDWISE_STRICT=1`) a collective, with its line of code, is compared before it is issued with those
that other ranks of the host issued under the same sequence number; the later of two that differ raises.

`listing` keeps all operations in an `IssueLog`, in order, for simulations.

`refusing_others` raises if code other than ours and PyTorch's engines', such as a module's forward, issues one.

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
# method of a process group -> (name of the op, index in its arguments of the tensor whose size is recorded, or None)
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
# path prefixes as frames have them, symbolic links not resolved
_OWN = str(Path(__file__).parents[1]) + os.sep
_COMM = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_ENGINES = tuple(f"{_TORCH}distributed{os.sep}{name}" for name in ("fsdp", "_composable", "tensor", "_tensor"))
_LIBRARY = tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_PACKAGES = tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})
_USERS, _PACKAGE, _OURS, _SKIP = range(4)  # whose code a frame is, the most informative first


class _State:
    """This process's record, and the ids that groups, works and texts have in it; one for each call of `begin`."""

    def __init__(self) -> None:
        self.record: RankRecord | None = None
        self.groups: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # process group -> id; -1: not recorded
        self.keys: dict[int, str] = {}  # id of a group -> its key, the same on all ranks
        self.made: dict[str, int] = {}  # torch's name of a group -> groups made so far under it
        self.works: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # -> (id of group, sequence number)
        self.pairs: dict[tuple[Any, ...], int] = {}  # (id() of a group, peer, tag, whether it sends) -> id; -1: none
        self.axes: dict[str, str] = {}  # torch's name of a group -> its mesh axis
        self.texts: dict[Any, int] = {}  # value -> id of its text
        # id() of a code object -> (whose code, the object, kept so that its id stays valid); hashing one would be slow
        self.kinds: dict[int, tuple[int, Any]] = {}
        self.places: dict[tuple[int, int], int] = {}  # (id() of a code object, line) -> id of its text
        self.others: dict[int, Reader] = {}  # rank -> its record; -1: this rank's own
        self.strict = False
        self.log: IssueLog | None = None


_state = _State()
_inside = threading.local()


def begin(mine: RankRecord | None, others: dict[int, str] | None = None) -> None:
    """Writes collectives to the record `mine` from now on (None: to none).

    others  rank -> path of its record, of the ranks of this host; used in strict mode
    """
    global _state
    _state = _State()
    _state.record = mine
    _state.strict = mine is not None and os.environ.get(STRICT, "") not in ("", "0")
    if _state.strict:
        _state.others = {rank: Reader(path) for rank, path in (others or {}).items()}
    if mine is not None:
        _replace_methods()


def name_axes(axes: dict[str, str]) -> None:
    """Adds mesh axis names for reports. `axes`: torch's name of a process group, which may not exist yet -> axis."""
    _state.axes.update(axes)


@contextmanager
def listing(log: IssueLog) -> Iterator[None]:
    """Context: operations that this process issues, and its waits, are added to `log`."""
    _replace_methods()
    before, _state.log = _state.log, log
    try:
        yield
    finally:
        _state.log = before


@contextmanager
def batched() -> Iterator[None]:
    """Context: messages issued inside begin together, and get one batch id in the log if there is one."""
    with _state.log.batch() if _state.log is not None else nullcontext():
        yield


@contextmanager
def refusing_others(error: Callable[[str, str], Exception]) -> Iterator[None]:
    """Context: a collective that other code than ours or PyTorch's issues on this thread raises `error(op, place)`."""
    _replace_methods()
    before = getattr(_inside, "refused", None)
    _inside.refused = error
    try:
        yield
    finally:
        _inside.refused = before


# --- torch's methods


def _replace_methods() -> None:
    """Replaces torch's methods by wrappers that write to the record; once in a process."""
    if hasattr(dist.Work.wait, "shardwise"):
        return
    for method, (op, place) in _COLLECTIVES.items():
        own = getattr(dist.ProcessGroup, method, None)
        # names differ between versions of torch
        if own is not None:
            setattr(dist.ProcessGroup, method, _collective(own, op, place))
    for method, sends in (("send", True), ("recv", False)):
        setattr(dist.ProcessGroup, method, _message(getattr(dist.ProcessGroup, method), sends))
    dist.Work.wait = _wait(dist.Work.wait)


def _collective(own: Callable[..., Any], op: str, place: int | None) -> Callable[..., Any]:
    """Returns a wrapper of a process group's method `own` that writes each call to the record and the log.

    op  its name there;  place  index of the tensor in the arguments after `self`, or None
    """

    def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
        # inside `refusing_others`
        if getattr(_inside, "refused", None) is not None:
            _refuse(op)
        state = _state
        # nothing is recorded, or a recorded method calls this one
        if (state.record is None and state.log is None) or getattr(_inside, "under", False):
            return own(self, *args, **kwargs)
        tensor = args[place] if place is not None and place < len(args) else None
        # some take a list of tensors, or a list of lists; the first tensor is recorded
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
    """Returns a wrapper of a process group's `send` or `recv` (`own`) that writes each call to record and log."""

    def pass_on(self: Any, tensors: Any, peer: int, *rest: Any, **kwargs: Any) -> Any:
        # inside `refusing_others`
        if getattr(_inside, "refused", None) is not None:
            _refuse("send" if sends else "recv")
        state = _state
        if state.record is None and state.log is None:  # nothing is recorded
            return own(self, tensors, peer, *rest, **kwargs)
        tag = rest[0] if rest else kwargs.get("tag", 0)
        where = None if state.record is None else _pair(self, peer, tag, sends)
        number = None if state.log is None else _logged(state.log, self, "send" if sends else "recv", tensors[0], peer)
        work = own(self, tensors, peer, *rest, **kwargs)
        _of_work(work, where, number)
        return work

    return pass_on


def _wait(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of `Work.wait` (`own`) that names in the record, while it runs, the operation waited for."""

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
    """Adds a wait for `work` to the log, if there is one; for subclasses of `Work` that override `wait`."""
    if _state.log is not None:
        _state.log.waited(work)


# --- what is written


def _logged(log: IssueLog, group: Any, op: str, tensor: Any, peer: int | None = None) -> int:
    """Adds an operation to the log; returns its id there. `peer`: index within the group, None for a collective."""
    ranks = dist.get_process_group_ranks(group)
    axis = _state.axes.get(group.group_name, "world" if group is dist.group.WORLD else f"group {group.group_name}")
    place = _frame(_OURS)
    text = "" if place is None else _text_of(*place)
    tag = getattr(observe._local, "tag", None) or ""
    return log.add(op, group, ranks, axis, tensor, tag, text, -1 if peer is None else ranks[peer])


def _of_work(work: Any, where: tuple[int, int] | None, number: int | None) -> None:
    """Notes which operation `work` belongs to.

    where   (id of the group, sequence number) in the record, or None;  number  id in the log, or None
    """
    if work is None:
        return
    if where is not None:
        _state.works[work] = where
    if number is not None and _state.log is not None:
        _state.log.work(work, number)


def _noted(group: Any, op: str, tensor: Any) -> tuple[int, int] | None:
    """Writes one collective to the record; returns (id of the group, sequence number), None if it is not recorded.

    tensor  whose size, shape and dtype are recorded; None: there is none
    """
    state = _state
    mine = state.record
    assert mine is not None
    number = state.groups.get(group)
    if number is None:
        number = _registered(group)
    # a group that `_registered` leaves out
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
    """Returns the id of a value's text in the record, which is written once for each value."""
    at = _state.texts.get(value)
    if at is None:
        assert _state.record is not None
        text = str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
        at = _state.texts[value] = _state.record.text(text)
    return at


def _registered(group: Any) -> int:
    """Adds a process group to the record; returns its id, -1 if it is not recorded."""
    state = _state
    assert state.record is not None
    ranks = dist.get_process_group_ranks(group)
    number = -1
    # not recorded while only some of the ranks form the default process group
    if dist.get_world_size() == state.record.world:
        name = group.group_name
        axis = state.axes.get(name, "world" if group is dist.group.WORLD else f"group {name}")
        # torch reuses the name of a destroyed group; the count tells the two apart
        times = state.made[name] = state.made.get(name, 0) + 1
        key = key_of(axis, f"{name}#{times}", ranks)
        number = state.record.group(key)
        state.keys[number] = key
    state.groups[group] = number
    return number


def _pair(group: Any, peer: int, tag: int, sends: bool) -> tuple[int, int] | None:
    """Writes a message to the record; returns (id of the pair of ranks, sequence number), None if not recorded.

    peer  index of the other end within the group;  tag  torch's;  sends  whether this rank sends
    """
    state = _state
    mine = state.record
    assert mine is not None
    at = (id(group), peer, tag, sends)
    number = state.pairs.get(at)
    if number is None:
        number = -1
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        # not recorded while only some of the ranks form the default process group, and for a peer that does not exist,
        # for which torch will raise
        if dist.get_world_size() == mine.world and 0 <= peer < len(ranks):
            ends = (ranks[me], ranks[peer]) if sends else (ranks[peer], ranks[me])
            number = mine.group(key_of("message", f"{group.group_name}/{tag}", ends), between_two=True)
        state.pairs[at] = number
    if number < 0:
        return None
    return number, mine.issue(number, 0, 0, 0, 0, 0, 0)


def _frame(least: int = _USERS) -> tuple[Any, int] | None:
    """Returns (code, line) of the frame that says most about a call: the user's, else a package's, else ours; or None.

    least   kind (`_USERS`, `_PACKAGE`, `_OURS`) at which the search from the innermost frame stops
    """
    frame: Any = sys._getframe(3)
    kinds, nearest, left = _state.kinds, None, _MOST_FRAMES
    best = _SKIP
    while frame is not None and left:
        # the entry keeps the code object alive, since another one could get its id
        code = frame.f_code
        entry = kinds.get(id(code))
        if entry is None:
            entry = kinds[id(code)] = (_kind_of(code.co_filename), code)
        kind = entry[0]
        if kind < best:
            nearest, best = frame, kind
            if kind <= least:
                break
        frame, left = frame.f_back, left - 1
    return None if nearest is None else (nearest.f_code, nearest.f_lineno)


def _place() -> int:
    """Returns the id of the record's text for the line of code that issues a collective; 0 without one."""
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
    """Returns "file:line in function"."""
    return f"{code.co_filename}:{line} in {code.co_name}"


def _refuse(op: str) -> None:
    """Raises the error of `refusing_others`, unless this package or an engine of PyTorch issues the collective."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _OURS if file.startswith((_COMM, *_ENGINES)) else _kind_of(file)
        between = frame.f_code.co_name == "__torch_function__"  # a mode that the call passed through
        if kind == _OURS and not between:
            return
        if kind not in (_SKIP, _OURS):
            raise _inside.refused(op, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back


def _kind_of(file: str) -> int:
    """Returns whose code a file is: `_USERS` (our models too), `_PACKAGE`, `_OURS`, or `_SKIP` (torch, comm/, ...)."""
    # this package's own frames, and code without a file
    if file.startswith((_COMM, "<")):
        return _SKIP
    if file.startswith(_OWN):
        # our example models take the place of a user's, so messages show their lines
        return _USERS if f"{os.sep}models{os.sep}" in file[len(_OWN) - 1 :] else _OURS
    if file.startswith(_TORCH):
        return _SKIP
    if file.startswith(_PACKAGES):
        return _PACKAGE
    return _SKIP if file.startswith(_LIBRARY) else _USERS


# --- strict


def _compare(mine: RankRecord, number: int, issued: int) -> None:
    """Raises `RunError` if another rank of the host issued another operation under the same sequence number.

    number  id of the group in the record `mine`;  issued  the sequence number
    """
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
        # nothing to compare with: the rank is on another host, or has not issued it yet
        if reader is None or other is None or key not in other.groups or entry is None:
            continue
        theirs = reader.entry(other.groups[key], issued)
        what = differ(entry, theirs, places=True) if theirs is not None else ""
        if theirs is not None and what:
            raise RunError(
                f"ranks came to different collectives ({what}): number {issued} of axis {key.split('|')[0]} is {entry} "
                f"on rank {mine.rank}, from {entry.place}, and {theirs} on rank {rank}, from {theirs.place}"
            )
