"""The ranks: order, reuse, errors, deadlines, deaths, and that no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.ranks import RankEvent, RankPool, join, launch
from shardwise.ranks.supervise import describe_exit
from shardwise.testing import faults

# --- what the ranks do


def tell_rank(label: str) -> tuple[str, int, int, str]:
    return label, dist.get_rank(), dist.get_world_size(), os.environ["RANK"]


def tell_pid() -> int:
    return os.getpid()


def tell_policies() -> set[int]:
    """Of this rank's threads, after a collective has started all that gloo needs."""
    dist.all_reduce(torch.zeros(1))
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def faults_of_freed_memory() -> float:
    """Page faults for each MiB that is asked for and freed again and again."""
    import resource

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    for _ in range(200):  # until there is a place that fits
        torch.ones(2**20)
    before = faults()
    for _ in range(50):
        torch.ones(2**20)
    return (faults() - before) / 200


def keeps_memory_where_somebody_chose() -> bool:
    from shardwise.ranks.allocation import keep_freed_memory

    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    try:
        return keep_freed_memory()
    finally:
        del os.environ["MALLOC_TRIM_THRESHOLD_"]


def tell_policy_of_ones_own() -> set[int]:
    """The same, where somebody chose a policy for the main thread before it joined."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    join()
    return {os.sched_getscheduler(0)}


def add_ranks() -> torch.Tensor:
    total = torch.full((2, 3), float(dist.get_rank()))
    dist.all_reduce(total)
    return total


def give_view() -> torch.Tensor:
    return torch.arange(1_000_000.0)[7:9]


def disturb() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.distributions.Distribution.set_default_validate_args(False)
    torch.manual_seed(dist.get_rank() + 99)
    os.environ["LEFT_BEHIND"] = "yes"


def disturb_and_fail() -> None:
    """What a script leaves that fails between an `__enter__` and its `__exit__`, and in contexts of its own."""
    Doubled().__enter__()
    Negated().__enter__()
    torch.set_default_device("meta")
    torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * 2).__enter__()
    torch.autograd.set_detect_anomaly(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    register_module_forward_hook(lambda module, args, output: output + 1)
    warnings.simplefilter("error")
    raise ValueError("on purpose")


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2 if isinstance(made, torch.Tensor) else made


class Negated(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return -made if isinstance(made, torch.Tensor) and made.is_floating_point() else made


def tell_modes() -> tuple[object, ...]:
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    with torch.no_grad():
        given = torch.nn.Identity()(torch.ones(2) + 1).tolist()
    flags = torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    return x.grad.tolist(), given, *flags, precision, [one[0] for one in warnings.filters]


def tell_state() -> tuple[object, ...]:
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), "LEFT_BEHIND" in os.environ
    flags += (torch.distributions.Distribution._validate_args,)
    return torch.ones(1).dtype, torch.rand(1).item(), *flags


def refuse() -> None:
    raise RefusedPlan("rank says no")


def fail_on(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ValueError(f"made to fail on {culprit}")
    dist.barrier()


def fail_late_elsewhere() -> None:
    time.sleep(0.4 * (2 - dist.get_rank()))  # rank 2 first, then 1, then 0
    raise ValueError(f"failed on {dist.get_rank()}")


def sleep_on(*sleepers: int) -> int:
    if dist.get_rank() in sleepers:
        time.sleep(600)
    return dist.get_rank()


def wait_for(sleeper: int) -> None:
    if dist.get_rank() == sleeper:
        time.sleep(600)
    dist.barrier()


CRASHES = ("segfault", "abort")


def die_on(culprit: int, how: str) -> None:
    if dist.get_rank() == culprit:
        if how == "exit":
            os._exit(7)
        if how in CRASHES:
            faults.KINDS[how](faults.Fault(how), None)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def say_and_tell() -> int:
    os.write(1, f"hello from {dist.get_rank()}\n".encode())
    return dist.get_rank()


def mesh_of_result(extra_groups: int) -> bool:
    """Whether a DTensor operation answers on the mesh it was given, and not on one of an earlier run."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    for _ in range(extra_groups):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    product = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) @ torch_eye(mesh)
    whole = product.redistribute(mesh, [Replicate()])
    return product.device_mesh is mesh and whole.device_mesh is mesh and bool((whole.to_local() == 1).all())


def torch_eye(mesh: object) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(torch.eye(4), mesh, [Replicate()])


def join_twice() -> tuple[int, int]:
    return join()


# --- whether processes are there


def gone(pid: int) -> bool:
    """No such process, or one that has ended and waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def all_gone_within(pids: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not all(map(gone, pids)):
        time.sleep(0.05)
    return all(map(gone, pids))


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")


# --- the pool


def test_results_come_in_rank_order(pool: RankPool) -> None:
    assert pool.run(tell_rank, 3, "x") == [("x", 0, 3, "0"), ("x", 1, 3, "1"), ("x", 2, 3, "2")]
    assert pool.run(tell_rank, 1, "alone") == [("alone", 0, 1, "0")]


def test_processes_are_reused(pool: RankPool) -> None:
    first = pool.run(tell_pid, 3)
    assert len(set(first)) == 3
    assert pool.run(tell_pid, 3) == first
    assert pool.run(tell_pid, 2) == first[:2]


def test_all_reduce_and_tensors_by_value(pool: RankPool) -> None:
    for total in pool.run(add_ranks, 3):
        assert torch.equal(total, torch.full((2, 3), 3.0))
    (view,) = pool.run(give_view, 1)
    assert view.tolist() == [7.0, 8.0]
    assert view.untyped_storage().nbytes() == 8  # the million elements stayed behind


def test_nothing_of_a_run_reaches_the_next(pool: RankPool) -> None:
    before = pool.run(tell_state, 2)
    pool.run(disturb, 2)
    assert pool.run(tell_state, 2) == before
    assert before[0] == before[1]
    assert before[0][0] == torch.float32


def test_a_run_that_failed_leaves_no_mode_to_the_next(pool: RankPool) -> None:
    before = pool.run(tell_modes, 2)
    with pytest.raises(RunError, match="on purpose"):
        pool.run(disturb_and_fail, 2)
    assert pool.run(tell_modes, 2) == before
    assert before[0][:2] == ([2.0, 2.0], [2.0, 2.0])


def test_dtensor_caches_do_not_outlive_a_run(pool: RankPool) -> None:
    for extra_groups in (0, 2, 1):
        assert pool.run(mesh_of_result, 2, extra_groups) == [True, True]


def test_environment_and_directory_are_the_callers(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_TEST_WORD", "seen")
    monkeypatch.chdir(tmp_path)
    assert pool.run(os.getenv, 1, "SHARDWISE_TEST_WORD") == ["seen"]
    assert pool.run(os.getcwd, 1) == [os.getcwd()]


# --- errors


def test_own_errors_keep_their_class(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan) as caught:
        pool.run(refuse, 2)
    assert str(caught.value) == "rank says no"
    assert caught.value.rank in (0, 1)
    assert "in refuse" in caught.value.remote_traceback


def test_failing_rank_is_named_and_not_its_echo(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.ranks.pool.GRACE_S", 40.0)  # others end by themselves, however slow the machine is
    pids = pool.run(tell_pid, 3)
    with pytest.raises(RunError, match="rank 1: ValueError: made to fail on 1") as caught:
        pool.run(fail_on, 3, 1)
    assert caught.value.rank == 1
    assert "in fail_on" in caught.value.remote_traceback
    assert pool.run(tell_pid, 3) == pids  # an error costs no process


def test_first_failure_is_shown(pool: RankPool) -> None:
    with pytest.raises(RunError, match="rank 2: ValueError: failed on 2"):
        pool.run(fail_late_elsewhere, 3)


def test_deadline_shows_where_each_rank_was(pool: RankPool) -> None:
    pool.run(tell_pid, 3)
    with pytest.raises(RunError, match="passed its deadline of 1 s; ranks 0, 2 had not finished") as caught:
        pool.run(sleep_on, 3, 0, 2, timeout_s=1)
    assert str(caught.value).count("in sleep_on") == 2
    assert "_end_with_caller" not in str(caught.value)
    assert pool.run(sleep_on, 3) == [0, 1, 2]


def test_rank_that_others_wait_for_is_named(pool: RankPool) -> None:
    with pytest.raises(RunError, match="rank 1 had not finished") as caught:
        pool.run(wait_for, 2, 1, timeout_s=1.5)
    assert caught.value.rank == 1
    text = str(caught.value)  # rank 0's own time is over, or it is still in there
    assert "in wait_for" in text and ("rank 0: " in text or "rank 0 waits for rank 1 in barrier" in text)


@pytest.mark.parametrize(
    ("how", "text"), [("kill", "died of SIGKILL"), ("exit", "left with exit code 7"),
                      ("segfault", "died of SIGSEGV"), ("abort", "died of SIGABRT")],
)  # fmt: skip
def test_dead_rank_is_named_and_replaced(pool: RankPool, how: str, text: str) -> None:
    with pytest.raises(RunError, match=f"rank 1: {text}") as caught:
        pool.run(die_on, 2, 1, how)
    said = str(caught.value)
    assert ("in die_on" in said and "most recent call first" in said) == (how in CRASHES), said
    assert "worker.py" not in said and "Extension modules" not in said
    assert caught.value.rank == 1 and caught.value.reason == "died"
    (followed,) = caught.value.__notes__
    assert followed.startswith("what followed: rank 0: RuntimeError")
    assert [rank for _, rank, *_ in pool.run(tell_rank, 2, "after")] == [0, 1]


@needs_proc
def test_an_end_by_a_signal_without_a_name_is_told() -> None:
    assert describe_exit(-(signal.SIGRTMIN + 7)) == f"died of signal {signal.SIGRTMIN + 7}"
    assert describe_exit(-signal.SIGBUS) == "died of SIGBUS (shared memory may be full)"


def test_death_between_runs_is_mended(pool: RankPool) -> None:
    pids = pool.run(tell_pid, 2)
    os.kill(pids[1], signal.SIGKILL)
    until = time.monotonic() + 5
    while Path(f"/proc/{pids[1]}").exists() and time.monotonic() < until:
        time.sleep(0.01)  # until it is reaped: a zombie's threads may still hold its channel open
    assert pids[1] not in pool.run(tell_pid, 2)


def test_function_that_ranks_cannot_find_is_refused(pool: RankPool) -> None:
    with pytest.raises(InputError, match="top level of a module"):
        pool.run(lambda: 1, 1)
    with pytest.raises(InputError, match="at least one rank"):
        pool.run(tell_pid, 0)


# --- launch


def test_launch_returns_results_and_tells_events(tmp_path: Path) -> None:
    events: list[RankEvent] = []
    assert launch(say_and_tell, 3, log_dir=tmp_path, on_event=events.append, timeout_s=30) == [0, 1, 2]
    assert (tmp_path / "rank2.log").read_text() == "hello from 2\n"
    assert not (tmp_path / "rank0.log").exists()
    assert [event.kind for event in events[:3]] == ["started"] * 3
    assert sorted(event.rank for event in events[3:] if event.kind == "finished") == [0, 1, 2]
    assert all(gone(event.pid) for event in events)


def test_launch_failure_ends_the_others(tmp_path: Path) -> None:
    events: list[RankEvent] = []
    with pytest.raises(RunError, match="rank 1: ValueError") as caught:  # long before the others wake up
        launch(fail_while_others_sleep, 3, log_dir=tmp_path, on_event=events.append)
    assert any("rank1.log" in note for note in caught.value.__notes__)  # beside what followed on ranks that still met
    assert all(gone(event.pid) for event in events)


def fail_while_others_sleep() -> None:
    if dist.get_rank() == 1:
        raise ValueError("ends the run")
    time.sleep(600)


def test_launch_passes_own_errors() -> None:
    with pytest.raises(RefusedPlan, match="rank says no"):
        launch(refuse, 1)


def test_a_function_that_was_typed_is_told_so() -> None:
    """Of a script without a guard `tests/cli/test_mistakes.py`."""
    typed = "from shardwise.ranks import launch\ndef mine(): pass\nlaunch(mine, 1)\n"
    done = subprocess.run([sys.executable, "-c", typed], capture_output=True, text=True, timeout=60)
    assert "`mine` is defined in an interactive session" in done.stderr


def test_import_brings_no_torch() -> None:
    check = "import sys, shardwise.ranks, shardwise.testing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


# --- join


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_join_refuses_half_an_environment(bare_environment: pytest.MonkeyPatch) -> None:
    bare_environment.setenv("RANK", "0")
    bare_environment.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(InputError, match="not WORLD_SIZE, MASTER_PORT"):
        join()


def test_join_refuses_numbers_that_are_none(bare_environment: pytest.MonkeyPatch) -> None:
    values = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in values.items():
        bare_environment.setenv(name, value)
    with pytest.raises(InputError, match="RANK=2"):
        join()
    bare_environment.setenv("RANK", "one")
    with pytest.raises(InputError, match="RANK is 'one'"):
        join()


@needs_proc
def test_threads_of_ranks_that_share_cores_take_turns(pool: RankPool) -> None:
    assert pool.run(tell_policies, 2) == [{os.SCHED_BATCH}] * 2
    assert launch(tell_policy_of_ones_own, 2, timeout_s=60) == [{os.SCHED_IDLE}] * 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_ranks_keep_the_memory_that_they_free(pool: RankPool) -> None:
    """Handed back, each MiB would come again as 256 pages."""
    assert max(pool.run(faults_of_freed_memory, 2)) < 10
    assert pool.run(keeps_memory_where_somebody_chose, 2) == [False, False]


@pytest.mark.parametrize(
    ("call", "left_kb"), [("a._set_thresholds(a.LARGEST, 2**31 - 1)", 100_000), ("a.give_back_at_once()", 0)]
)
def test_freed_memory_is_kept_or_given_back(call: str, left_kb: int) -> None:
    """In a process of its own: what its heap has from before is used again, whatever is set."""
    lines = [
        "import ctypes, pathlib, shardwise.ranks.allocation as a",
        "lib = ctypes.CDLL(None)",
        "lib.malloc.restype, lib.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]",
        "rss = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1]) * 4",
        f"assert {call}",
        "before = rss()",
        "blocks = [lib.malloc(2**22) for _ in range(40)]",
        "[ctypes.memset(block, 1, 2**22) for block in blocks] and [lib.free(block) for block in blocks]",
        "print(rss() - before)",
    ]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert left_kb <= int(out.stdout) < left_kb + 100_000


def test_join_keeps_a_group_that_is_there(pool: RankPool) -> None:
    assert pool.run(join_twice, 2) == [(0, 2), (1, 2)]


ALONE = """
from shardwise.ranks import join
import torch, torch.distributed as dist
assert join() == (0, 1) == join()
dist.all_reduce(torch.ones(1)); dist.new_group([0]); dist.destroy_process_group()
"""


def test_join_alone(bare_environment: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=60)


# --- no process is left

OWNER = """
import os, signal, sys, time
from shardwise.ranks import RankPool, launch

def hold(sleepers):
    if int(os.environ["RANK"]) in sleepers:
        time.sleep(600)
    return os.getpid()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    if sys.argv[1] == "launch":
        launch(hold, 2, [(0, 1)], on_event=lambda event: print(event.pid, flush=True))
    pool = RankPool()
    print(*pool.run(hold, 2, ()), sep=chr(10), flush=True)
    pool.run(hold, 2, (0,))
"""


@needs_proc
@pytest.mark.parametrize(
    ("door", "number"), [("pool", signal.SIGKILL), ("launch", signal.SIGTERM), ("launch", signal.SIGINT)]
)
def test_ranks_end_with_their_caller(tmp_path: Path, door: str, number: signal.Signals) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    command = [sys.executable, str(script), door]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        try:
            pids = [int(owner.stdout.readline()) for _ in range(2)]
            assert not any(map(gone, pids))
            time.sleep(0.3)
            owner.send_signal(number)
            assert all_gone_within(pids, 10)
            owner.wait(10)
        finally:
            owner.kill()
    if number == signal.SIGTERM:
        assert owner.returncode == -signal.SIGTERM


@needs_proc
def test_close_leaves_no_process() -> None:
    with RankPool(quiet=True) as own:
        pids = own.run(tell_pid, 2)
    assert all_gone_within(pids, 5)
    with pytest.raises(InputError, match="closed"):
        own.run(tell_pid, 1)
    own.close()


def _train_and_count_threads(plan: str, width: int) -> int:
    from shardwise import parallelize
    from shardwise.models import Decoder, tasks

    task = replace(tasks.decoder(), model=partial(Decoder, replace(tasks.TINY_DECODER, intermediate=width)))
    engine = parallelize(task, plan)
    engine.step(task.batch(0))
    engine.state_dict()
    del engine
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("Threads")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts threads in /proc, which is Linux's")
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2",
        "dp_shard=2,zero=1",
        "dp_shard=2,zero=3",
        "tp=2,sp=true",
        "pp=2",
        pytest.param("tp=2,compile=true", marks=pytest.mark.long),
    ],
)
def test_an_engine_that_is_let_go_leaves_no_process_groups(pool: RankPool, plan: str) -> None:
    # of other widths, since what torch keeps for each shape may hold groups too
    held = plan.endswith("zero=3") and torch.__version__ < (2, 13)  # by FSDP2, of up to four engines
    widths = (24, 40, 56, 72, 88, 104) if held else (24, 40, 56)
    counted = [pool.run(_train_and_count_threads, 2, plan, width)[0] for width in widths]
    piled = max(counted[4:]) > max(counted[:4]) if held else counted[1] != counted[2]
    assert not piled, f"threads of process groups pile up: {counted}"


LEFT = """
from multiprocessing import forkserver, resource_tracker
import shardwise.ranks.process as process
forkserver.ensure_running = lambda: None
process._start_fork_server()
resource_tracker.register("/left-by-a-rank", "semaphore")
"""


def test_what_ranks_that_are_ended_leave_is_removed_without_a_word():
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
