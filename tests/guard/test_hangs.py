"""Hangs are named: the rank, the collective, the line, and why; what is only slow is left alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import all_reduce, everybody
from shardwise.errors import InputError, RunError
from shardwise.guard.diagnose import Deadlines, RankWatch
from shardwise.guard.points import reach
from shardwise.guard.records import RING, RankRecord, Reader, key_of
from shardwise.guard.stacks import collect, complete, process_state
from shardwise.ranks import RankEvent, RankPool, launch
from shardwise.testing import faults
from shardwise.testing.faults import Fault

# --- what ranks do


def steps(count: int = 3) -> None:
    for _ in range(count):
        dist.all_reduce(torch.ones(4))


def extra() -> None:
    steps()
    if dist.get_rank() == 0:
        dist.barrier()  # extra
    steps()


def extra_step() -> None:
    steps()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))  # alone
    for _ in range(3):
        dist.all_reduce(torch.ones(4))  # again


def skipped() -> None:
    steps()
    if dist.get_rank() != 1:
        dist.broadcast(torch.ones(4), 0)  # skipped by 1
    steps()


def mis_typed() -> None:
    steps()
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() == 1 else torch.float32))  # typed
    dist.barrier()
    time.sleep(600)


def mis_shaped() -> None:
    steps()
    dist.all_reduce(torch.ones(4 + (dist.get_rank() == 1)))  # shaped
    dist.barrier()


def swapped() -> None:
    axis = everybody()
    for tag in ("weights", "norms") if dist.get_rank() != 1 else ("norms", "weights"):
        all_reduce(torch.ones(4), axis, tag)  # swapped
    time.sleep(600)


def swapped_without_a_tag() -> None:
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(4))  # here
    else:
        dist.all_reduce(torch.ones(4))  # there
    dist.barrier()


def circle() -> None:
    pair = [dist.new_group([0, 1]) for _ in range(2)]
    dist.all_reduce(torch.ones(2), group=pair[dist.get_rank()])  # circle


def late_message() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), 1)  # receives
    else:
        dist.recv(torch.ones(2), 0)  # receives


def slow() -> int:
    """One rank at a time works, and the others wait for it: longer than a deadline together, nobody alone."""
    for turn in range(2):
        for _ in range(4):
            if dist.get_rank() == turn:
                time.sleep(0.5)
                reach("forward", 0)
        dist.barrier()
    return dist.get_rank()


def uneven() -> None:
    """Ranks may differ in what may differ."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [rank + 1] * world
    dist.all_to_all_single(
        torch.empty(sum(range(1, world + 1))), torch.ones(sum(sizes)), list(range(1, world + 1)), sizes
    )
    if rank == 0:
        dist.gather(torch.ones(2), [torch.empty(2) for _ in range(world)], 0)
    else:
        dist.gather(torch.ones(2), None, 0)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    if rank == 0:
        dist.send(torch.ones(5), 1)
    elif rank == 1:
        dist.recv(torch.empty(5), 0)
    work.wait()
    everything = [None] * world
    dist.all_gather_object(everything, "x" * rank)
    time.sleep(1.2)


def hang_at_a_point(step_count: int) -> None:
    for step in range(step_count):
        reach("input", step)
        dist.all_reduce(torch.ones(4))
        reach("update", step)
    dist.barrier()


def line_of(function: Callable[..., object], comment: str) -> str:
    """`test_hangs.py:N` of the line of this function that ends with the comment."""
    code = function.__code__
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i in range(code.co_firstlineno, len(lines)) if lines[i - 1].endswith(f"# {comment}"))
    return f"test_hangs.py:{number} in"


# --- collectives that only some ranks enter, or other ones


CASES = {
    "extra": (extra, 2, 1, "the operation differs", ["extra"]),
    "skipped": (skipped, 3, 1, "the operation differs", ["skipped by 1"]),
    "mis_typed": (mis_typed, 3, 1, "the dtype differs", ["typed"]),
    "mis_shaped": (mis_shaped, 3, 1, "the shape differs", ["shaped"]),
    "swapped": (swapped, 3, 1, "its purpose differs", ["swapped"]),
    "circle": (circle, 2, 0, "ranks 0, 1 wait for each other", ["circle"]),
    "message": (late_message, 2, 0, "wait for each other", []),
}
QUICK = ("extra", "mis_typed", "circle")


def named(pool: RankPool, case: str) -> str:
    """The message of a case, after everything that must be in it was found."""
    function, world, odd, why, comments = CASES[case]
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        pool.run(function, world, timeout_s=300)
    assert time.monotonic() - began < 120  # long before the 300 s of the run
    text = str(caught.value)
    assert why in text and (world == 2 or caught.value.rank == odd), text
    assert caught.value.retry is False and "starting again would come to the same place" in text
    for comment in comments:
        assert line_of(function, comment) in text, text
    return text


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in CASES])
def test_ranks_that_differ_are_named(pool: RankPool, case: str) -> None:
    text = named(pool, case)
    if case == "extra":
        assert "rank 0: barrier, from" in text and "rank 1: all_reduce of float32 (4,), from" in text
        assert "rank 0 was here:" in text and "comm/recording.py" not in text


@pytest.mark.long
@pytest.mark.parametrize("case", list(CASES))
def test_every_one_is_named_every_time(pool: RankPool, case: str) -> None:
    for _ in range(5):
        named(pool, case)


def test_an_extra_step_is_named_where_ranks_parted(pool: RankPool) -> None:
    with pytest.raises(RunError, match="rank 1 has returned and will not come to a collective of rank 0") as caught:
        pool.run(extra_step, 2, timeout_s=300)
    text = str(caught.value)
    assert "rank 0 waits for rank 1 in all_reduce of float32 (4,) (number 7 of axis world)" in text
    places = re.search(r"number 4 of that axis from different places already: rank 0 from (.*); rank 1 from (.*)", text)
    assert places and line_of(extra_step, "alone") in places[1] and line_of(extra_step, "again") in places[2], text


def test_strict_mode_compares_the_place_before_a_collective_is_issued(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(swapped_without_a_tag, 2)  # the same operation on the same shape: allowed
    monkeypatch.setenv("SHARDWISE_STRICT", "1")
    with pytest.raises(RunError, match="the place in the code") as caught:
        pool.run(swapped_without_a_tag, 2)
    text = str(caught.value)
    assert line_of(swapped_without_a_tag, "here") in text and line_of(swapped_without_a_tag, "there") in text


def test_what_may_differ_is_left_alone(pool: RankPool) -> None:
    pool.run(uneven, 3)


# --- deadlines


SOON = Deadlines(start_s=60, step_s=1.5, save_s=60)


def test_a_rank_that_is_slow_is_not_ended_and_whoever_waits_for_it_neither() -> None:
    assert launch(slow, 2, deadlines=SOON) == [0, 1]


HANGS = {
    "stop": "its process is stopped (SIGSTOP)",
    "lock": "its interpreter is locked: no Python thread has run",
    "sleep": "it works or sleeps outside of collectives",
}


def hang(kind: str, rank: int, step: int) -> None:
    events: list[RankEvent] = []
    deadlines = Deadlines(60, 8.0 if kind == "lock" else 3.0, 60)  # a beat is missed after five seconds
    with (
        faults.injected(Fault(kind, rank=rank, step=step, at="update")),
        pytest.raises(RunError, match=re.escape(HANGS[kind])) as caught,
    ):
        launch(hang_at_a_point, 3, (6,), deadlines=deadlines, on_event=events.append, stop_wait_s=0.2)
    text = str(caught.value)
    assert caught.value.rank == rank and f"rank {rank} has done nothing for" in text
    assert caught.value.reason == "late" and caught.value.retry
    assert f"in step {step}, step" in text and "its last collective was all_reduce of float32 (4,)" in text
    assert "in hang_at_a_point" in text and f"rank {rank} was here:" in text
    where = {"stop": "_stop", "lock": "_lock", "sleep": "_sleep"}[kind]
    assert f"in {where}" in text  # its own stack, though it is stopped or locked
    waiting = [f"rank {other} waits for rank {rank}" in text for other in range(3) if other != rank]
    assert all(waiting), text
    assert not [event.pid for event in events if alive(event.pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


STOPPED = """
import os, signal, sys, threading
from shardwise.guard.stacks import answer_with_stacks
answer_with_stacks(open(sys.argv[1], "w"))
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def stands():
    os.kill(os.getpid(), signal.SIGSTOP)
stands()
threading.Event().wait()
"""


def test_a_process_that_is_woken_tells_where_it_stood(tmp_path: Path) -> None:
    """Its main thread answers before it goes on: another thread could be first, and the place would be lost."""
    files = {rank: tmp_path / str(rank) for rank in range(3)}
    words = [sys.executable, "-c", STOPPED]
    ranks = {rank: subprocess.Popen([*words, str(file)]) for rank, file in files.items()}
    try:
        until = time.monotonic() + 60
        while any(process_state(each.pid) != "T" for each in ranks.values()) and time.monotonic() < until:
            time.sleep(0.01)
        collect({rank: each.pid for rank, each in ranks.items()}, lambda rank: files[rank].read_text())
    finally:
        for each in ranks.values():
            each.kill()
            each.wait()
    for file in files.values():
        answered = file.read_text().rpartition("Current thread ")[2]
        assert "in stands" in answered and complete(answered := f"Current thread {answered}"), file.read_text()
        assert not complete(answered[: answered.rindex("File")]), "half a dump is not one"


@pytest.mark.parametrize("kind", ["stop", pytest.param("lock", marks=pytest.mark.long), "sleep"])
def test_a_rank_that_hangs_is_named_with_its_stack(kind: str) -> None:
    hang(kind, 1, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", list(HANGS))
def test_every_rank_and_step_that_hangs(kind: str) -> None:
    for rank in range(3):
        for step in (0, 4):
            hang(kind, rank, step)


# --- records, without processes


def written(path: Path, rank: int, key: str, ops: list[tuple[str, int]]) -> RankRecord:
    record = RankRecord(path, rank, 3)
    group = record.group(key)
    for op, elements in ops:
        record.issue(
            group, record.text(op), elements, 0, record.text("float32"), 0, record.text(f"a.py:{elements} in f")
        )
    return record


def test_a_record_is_read_as_it_was_written_and_forgets_the_oldest(tmp_path: Path) -> None:
    key = key_of("data", "1#1", [0, 2])
    record = written(tmp_path / "0", 0, key, [("all_reduce", i) for i in range(RING + 5)])
    record.phase("update", 7)
    record.waits(0, RING + 5)
    reader = Reader(tmp_path / "0")
    seen = reader.see()
    assert seen is not None and (seen.phase, seen.step, seen.pid) == ("update", 7, os.getpid())
    group = seen.groups[key]
    assert (group.axis, group.ranks, group.issued, seen.waits_key) == ("data", (0, 2), RING + 5, key)
    assert reader.entry(group, 5) is None and reader.entry(group, RING + 6) is None
    entry = reader.entry(group, RING)
    assert entry is not None and (entry.op, entry.elements, entry.place) == (
        "all_reduce",
        RING - 1,
        f"a.py:{RING - 1} in f",
    )
    record.goes_on()
    assert not reader.see().waits_key
    for number in range(20_000):  # texts beyond what has place are left out
        record.text(f"a text of some length, number {number}")
    assert record.text("one more that is new") == 0


def test_the_odd_one_of_three_is_named_and_nobody_before_a_second_look(tmp_path: Path) -> None:
    key = key_of("data", "1#1", [0, 1, 2])
    same = [("all_reduce", 4)] * 3
    records = [written(tmp_path / str(rank), rank, key, same) for rank in range(3)]
    watch = RankWatch({rank: Reader(tmp_path / str(rank)) for rank in range(3)}, Deadlines(100, 10, 100))
    now = time.monotonic()
    assert watch.look(now) is None
    records[2].issue(0, records[2].text("all_gather"), 4, 0, 0, 0, 0)
    records[2].waits(0, 4)
    assert watch.look(now) is None  # the others may come
    records[0].issue(0, records[0].text("all_reduce"), 4, 0, 0, 0, 0)
    records[1].issue(0, records[1].text("all_reduce"), 4, 0, 0, 0, 0)
    found = watch.look(now)
    assert found is not None and (found.reason, found.rank) == ("differ", 2)


def test_waits_for_one_that_waits_elsewhere_are_not_a_circle(tmp_path: Path) -> None:
    """0 waits for 1, who waits in a collective to which all of its ranks have come: it may go on."""
    first, second = key_of("data", "1#1", [0, 1]), key_of("tp", "2#1", [1, 2])
    records = [RankRecord(tmp_path / str(rank), rank, 3) for rank in range(3)]
    for rank, key in ((0, first), (1, second), (2, second)):
        group = records[rank].group(key)
        records[rank].waits(group, records[rank].issue(group, 0, 0, 0, 0, 0, 0))
    for record in records:
        record.phase("forward", 0)
    watch = RankWatch({rank: Reader(tmp_path / str(rank)) for rank in range(3)}, Deadlines(100, 10, 100))
    now = time.monotonic()
    assert watch.look(now) is None and watch.look(now) is None
    found = watch.look(now + 11)  # nobody else to blame: the collective itself
    assert found is not None and found.reason == "wire" and found.rank in (1, 2)
    assert watch.look(now + 1, gone=[1]) is None  # seen once
    found = watch.look(now + 1, gone=[1])
    assert found is not None and (found.reason, found.rank) == ("never", 1)


# --- faults


def test_faults_are_checked_when_they_are_made() -> None:
    with pytest.raises(InputError, match="did you mean 'kill'"):
        Fault("kil")
    with pytest.raises(InputError, match="no point is called 'updat'; did you mean 'update'"):
        Fault("kill", at="updat")
    with pytest.raises(InputError, match="are for 'disk'"):
        Fault("enospc")
    with pytest.raises(InputError, match="needs the rank's state"):
        Fault("nan", at="start")


# --- ranks of a launcher


def test_ranks_of_torchrun_are_watched_by_a_process_of_their_host(tmp_path: Path) -> None:
    script = tmp_path / "extra.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from shardwise.ranks import join\n"
        "rank, _ = join()\n"
        "dist.all_reduce(torch.ones(4))\n"
        "if rank == 0:\n"
        "    dist.barrier()\n"  # line 6
        "dist.all_reduce(torch.ones(4))\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "this run hangs: ranks came to different collectives (the operation differs)" in done.stderr, done.stderr
    assert "extra.py:6 in <module>" in done.stderr and "extra.py:7 in <module>" in done.stderr
    assert "rank 1 was here:" in done.stderr


@pytest.mark.long
def test_a_rank_of_a_launcher_that_raised_is_not_said_to_have_returned(tmp_path: Path) -> None:
    """Its launcher has a while to end the others; this one does not, and the watcher does."""
    script = tmp_path / "raising.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from shardwise.ranks import join\n"
        "rank, _ = join()\n"
        "if rank == 1:\n"
        "    raise ValueError('its own')\n"
        "dist.all_reduce(torch.ones(4))\n"
    )
    told = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513", "WORLD_SIZE": "2"}
    ranks = [subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True,
                              env={**told, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]  # fmt: skip
    said = "".join(rank.communicate(timeout=120)[1] for rank in ranks)
    assert "ValueError: its own" in said and "has returned" not in said, said
    assert all(rank.returncode for rank in ranks)


# --- a link that is gone


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them: 10.231.7.1 and 10.231.7.2, on devices of the names."""
    names = [f"sw{os.getpid()}{side}" for side in "ab"]
    words = [f"netns add {names[0]}", f"netns add {names[1]}",
             f"link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}"]  # fmt: skip
    for side, name in enumerate(names):
        words += [f"-n {name} addr add 10.231.7.{side + 1}/24 dev {name}", f"-n {name} link set {name} up",
                  f"-n {name} link set lo up"]  # fmt: skip
    try:
        for line in words if shutil.which("ip") else ():
            done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"needs network namespaces, and `ip {line}` says: {done.stderr.strip()}")
        if not shutil.which("ip"):
            pytest.skip("needs network namespaces, and there is no `ip` on this machine")
        yield names[0], names[1]
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_a_link_that_is_gone_is_told_with_the_collective(two_hosts: tuple[str, str], tmp_path: Path) -> None:
    script = tmp_path / "linked.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from shardwise.guard.diagnose import Deadlines\n"
        "from shardwise.guard.points import reach\n"
        "from shardwise.ranks import join\n"
        "join(deadlines=Deadlines(60, 2, 60))\n"
        "for step in range(4):\n"
        "    reach('update', step)\n"
        "    dist.all_reduce(torch.ones(4))\n"  # line 8
    )
    shared = {**os.environ, **faults.environment([Fault("drop", rank=1, step=2, at="update")], tmp_path),
              "MASTER_ADDR": "10.231.7.1", "MASTER_PORT": "29511", "WORLD_SIZE": "2"}  # fmt: skip
    began, ranks = time.monotonic(), []
    for rank, name in enumerate(two_hosts):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": name}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", name, sys.executable, str(script)], env=own,
                                      stderr=subprocess.PIPE, text=True))  # fmt: skip
    said = "".join(rank.communicate(timeout=120)[1] for rank in ranks)
    assert [rank.returncode < 0 for rank in ranks] == [True, True], said
    assert "a collective whose ranks have all come to it has not ended for" in said, said
    assert "all_reduce of float32 (4,) (number 3 of axis world)" in said and "linked.py:8" in said, said
    assert faults.struck(tmp_path) == 1 and time.monotonic() - began < 100
