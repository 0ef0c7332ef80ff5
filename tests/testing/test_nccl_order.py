"""What ranks issue ends on a device that runs it in order, without buffers; wrong orders are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.issued import Issued, Waited
from shardwise.errors import RefusedPlan, RunError
from shardwise.layout import Plan
from shardwise.layout.communicators import communicators
from shardwise.layout.schedule_kinds import KINDS
from shardwise.layout.schedules import Schedule, make_schedule, plain_schedule
from shardwise.parallel.pipeline.stage_messages import Mail
from shardwise.parallel.sequence import passing
from shardwise.ranks import RankPool
from shardwise.testing import mock_device, nccl_order
from shardwise.testing.nccl_order import side_by_side, strictest
from shardwise.testing.order_check import check_order, record_rank, report

Entry = Issued | Waited


@pytest.fixture(scope="module")
def mocks() -> Iterator[RankPool]:
    """Ranks of their own: a device is registered for a process's life."""
    with RankPool(quiet=True) as ranks:
        yield ranks


def op(kind: str, group: str = "a", ranks: tuple[int, ...] = (0, 1), peer: int = -1, size: int = 4,
       batch: int | None = None, dtype: str = "float32", device: str = "") -> Issued:  # fmt: skip
    return Issued(kind, group, ranks, peer, dtype, (size,), "", "here", batch, device)


def send(peer: int, **rest: Any) -> Issued:
    return op("send", peer=peer, **rest)


def recv(peer: int, **rest: Any) -> Issued:
    return op("recv", peer=peer, **rest)


THREE = {"ranks": (0, 1, 2)}
# what each rank issues; whether it ends one after another, and with communicators side by side
PLANTED: dict[str, tuple[list[list[Entry]], bool]] = {
    "both send first": ([[send(1), recv(1)], [send(0), recv(0)]], False),
    "both receive first": ([[recv(1), send(1)], [recv(0), send(0)]], False),
    # by themselves, messages of each pair have a communicator of their own
    "a ring of three sends first": (
        [[send((r + 1) % 3, **THREE), recv((r - 1) % 3, **THREE)] for r in range(3)], True),
    "collectives of two groups crossed": (
        [[op("all_reduce"), op("all_reduce", "b")], [op("all_reduce", "b"), op("all_reduce")]], True),
    "a message before the collective, and after it": (
        [[send(1, group="b"), op("all_reduce")], [op("all_reduce"), recv(0, group="b")]], True),
    "a wait between two groups": (
        [[op("all_reduce"), Waited(0), op("all_reduce", "b")], [op("all_reduce", "b"), Waited(0), op("all_reduce")]],
        False),
    "one rank ends early": ([[op("all_reduce"), op("all_reduce")], [op("all_reduce")]], False),
    "nobody receives": ([[send(1)], []], False),
    "a batch of sends alone on both": (
        [[send(1, batch=1), recv(1, batch=2)], [send(0, batch=1), recv(0, batch=2)]], False),
    "another collective under one number": ([[op("all_reduce")], [op("all_gather")]], False),
    "a tensor that lies on the host of one rank": (
        [[op("broadcast", device="cpu")], [op("broadcast", device="mock")]], False),
    "sizes of the ends differ": ([[send(1, size=4)], [recv(0, size=5)]], False),
    "dtypes of the ends differ": ([[send(1)], [recv(0, dtype="bfloat16")]], False),
    "two of one pair's messages in another order": (
        [[send(1, size=1), send(1, size=2)], [recv(0, size=2), recv(0, size=1)]], False),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_order_is_found(name: str) -> None:
    ranks, beside = PLANTED[name]
    order = strictest(ranks)
    assert not order.runs and order.text()
    assert side_by_side(ranks).runs == beside


def test_a_deadlock_is_named_with_what_each_rank_waits_in() -> None:
    text = strictest(PLANTED["both send first"][0]).text()
    assert text.splitlines() == [
        "rank 0 waits in send of float32 [4] to rank 1 over a, from here, for rank 1",
        "rank 1 waits in send of float32 [4] to rank 0 over a, from here, for rank 0",
    ]


def test_what_is_right_runs() -> None:
    both = [[send(1, batch=1), recv(1, batch=1)], [recv(0, batch=1), send(0, batch=1)]]
    turns = [[send(1), recv(1)], [recv(0), send(0)]]
    for ranks in (both, turns, [[op("all_reduce"), send(1)], [op("all_reduce"), recv(0)]]):
        assert strictest(ranks).runs and side_by_side(ranks).runs


def test_communicators_are_counted() -> None:
    alone = [op("all_reduce"), send(1), recv(1), send(1, group="b", batch=3)]
    assert len(nccl_order.communicators(alone)) == 3
    assert len(nccl_order.communicators([op("all_reduce", ranks=(0,))])) == 0


# --- pipelines: every schedule by its table


def of_rounds(schedule: Schedule) -> list[list[Entry]]:
    """What the ranks of a pipeline issue, by the rounds of its schedule."""
    everyone = tuple(range(schedule.ranks))
    return [
        [
            (send if schedule.owner[source] == rank else recv)(
                schedule.owner[goal if schedule.owner[source] == rank else source],
                ranks=everyone, size=1 + number, batch=place,
            )
            for place, messages in enumerate(schedule.rounds[rank])
            for _, source, goal, number in messages
        ]
        for rank in everyone
    ]  # fmt: skip


def schedules(microbatches: tuple[int, ...]) -> Iterator[Schedule]:
    for name in KINDS:
        for ranks in range(2, 9):
            for per_rank in (1, 2, 3):
                for count in microbatches:
                    try:
                        yield make_schedule(name, ranks, count, per_rank)
                    except RefusedPlan:
                        continue


def all_run(microbatches: tuple[int, ...]) -> int:
    count = 0
    for schedule in schedules(microbatches):
        order = strictest(of_rounds(schedule))
        assert order.runs, f"{schedule.name} on {schedule.ranks} ranks: {order.text()}"
        sends_are_made(schedule)
        count += 1
    return count


def sends_are_made(schedule: Schedule) -> None:
    """A rank that comes to a round has made what it sends there, and has not yet needed what it asks for there."""
    for rank, row in enumerate(schedule.rows):
        rounds, due, made = list(schedule.rounds[rank]), set(), set()
        for messages in rounds:
            due |= set(messages)

        def go_on_to(message: tuple[str, int, int, int], rounds=rounds, due=due, made=made, rank=rank) -> None:
            while message in due:
                for each in rounds.pop(0):
                    due.remove(each)
                    assert schedule.owner[each[1]] != rank or each in made, f"{schedule.name}: {each} is not made yet"

        for each in row:
            kind, step = ("F", -1) if each.kind == "F" else ("B", 1)
            if each.kind != "W":
                go_on_to((kind, each.stage + step, each.stage, each.microbatch))
                made.add((kind, each.stage, each.stage - step, each.microbatch))
                go_on_to((kind, each.stage, each.stage - step, each.microbatch))
        assert not due


def test_no_schedule_waits_in_a_circle() -> None:
    assert all_run((1, 3, 4)) > 60
    assert strictest(of_rounds(plain_schedule((0, 1, 2, 1, 0), 3))).runs


@pytest.mark.long
def test_no_schedule_waits_in_a_circle_in_full() -> None:
    assert all_run((1, 2, 3, 4, 6, 8, 12, 16, 24)) > 400


def test_without_rounds_a_pipeline_waits_in_a_circle() -> None:
    """Each message by itself, a send as soon as it is made, a receive where it is needed: what needs two groups."""
    schedule = make_schedule("1f1b", 2, 4, 1)
    apart: list[list[Entry]] = [
        [send(1), send(1), recv(1), send(1), recv(1), send(1), recv(1), recv(1)],
        [each for _ in range(4) for each in (recv(0), send(0))],
    ]
    assert not strictest(apart).runs and strictest(of_rounds(schedule)).runs


# --- plans, recorded on a mock accelerator: forward, backward, evaluation, whole weights and state

QUICK = [
    ("shardwise.models.tasks:decoder_tied", "pp=2,dp_replicate=2,microbatches=2"),
    ("shardwise.models.tasks:decoder_tied", "dp_shard=2,zero=3,tp=2"),
    ("sequence_tasks:decoder", "cp=3"),
    ("domain_tasks:unet_group", "domain=2"),
    ("shardwise.models.tasks:moe", "dp_shard=2,ep=2"),
]
MORE = [
    (task if ":" in task else f"shardwise.models.tasks:{task}", plan)
    for task, plan in [
        ("mlp_frozen_unused", "dp_replicate=2,accumulate=2"), ("mlp_frozen_unused", "dp_shard=3,zero=1"),
        ("mlp", "dp_replicate=2,dp_shard=2,zero=2,accumulate=2"), ("vit", "dp_replicate=2,dp_shard=2,zero=3"),
        ("decoder", "dp_shard=2,zero=3,remat=full"), ("gpt2", "tp=4,sp=true"),
        ("decoder", "tp=2,tp_overlap=true"), ("decoder", "dp_shard=2,tp=2,pp=2,zero=1,microbatches=4"),
        ("decoder", "pp=2,schedule=interleaved1f1b,stages_per_rank=2,microbatches=4"),
        ("decoder", "pp=2,schedule=zbv,microbatches=4"),
        ("decoder", "pp=2,schedule=zbh1,microbatches=4,dp_shard=2,zero=1"),
        ("moe", "dp_shard=2,ep=2,tp=2"), ("moe", "dp_shard=4,ep=2,zero=2"), ("unet_batchnorm", "dp_replicate=4"),
        ("sequence_tasks:windowed", "cp=4"), ("sequence_tasks:encoder", "cp=2,tp=2"),
        ("sequence_tasks:routed", "cp=4,ep=2,zero=1"),
        ("sequence_tasks:grouped", "cp_ulysses=2,dp_shard=2"), ("sequence_tasks:decoder", "cp=2,cp_ulysses=2"),
        ("sequence_tasks:decoder", "cp=2,pp=2,microbatches=2"), ("sequence_tasks:decoder", "dp_shard=2,cp=2,tp=2"),
        ("moe", "dp_replicate=2,dp_shard=2,ep=2"), ("domain_tasks:unet_batch", "domain=4"),
        ("listed_tasks:skipping", "dp_shard=4,ep=2,zero=1"),
        ("domain_tasks:vit", "domain=2,dp_replicate=2"), ("unet_group", "tp=2"), ("hf_llama", "tp=2"),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("task", "plan"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)])
def test_a_plan_runs_one_after_another(task: str, plan: str, mocks: RankPool) -> None:
    found = check_order(task, plan, pool=mocks, timeout_s=250)
    assert found.strictest.runs, found.text()
    assert found.side_by_side.runs and found.issued > 10
    assert found.communicators == len(communicators(Plan.parse(plan)))


def test_gradients_within_a_forward_need_two_communicators_at_once(mocks: RankPool) -> None:
    """A stage asks the one before it while that one's next hidden states wait for it (`Talk`)."""
    found = check_order("taken_tasks:residual", "pp=2", pool=mocks, timeout_s=250)
    assert found.side_by_side.runs and not found.strictest.runs
    assert "inner gradients" in found.strictest.text()


def one_connection() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        try:
            record_rank("taken_tasks:residual", Plan.parse("pp=2"))
        except RefusedPlan as refusal:
            return str(refusal)
    return ""


def test_and_are_refused_where_a_device_has_one_queue(mocks: RankPool) -> None:

    assert all("CUDA_DEVICE_MAX_CONNECTIONS=1" in told for told in mocks.run(one_connection, 2, timeout_s=100))


# --- bugs planted in what plans issue


def with_bug(plant: Callable[[pytest.MonkeyPatch], None], task: str, plan: str) -> list[Entry]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)

        return record_rank(task, Plan.parse(plan))


def sends_first(patch: pytest.MonkeyPatch) -> None:
    """A ring without batches: what goes, then what comes."""
    own = passing.exchange

    def apart(sends: Any, receives: Any, axis: Any) -> Any:
        return own(sends, [], axis)[0], own([], receives, axis)[1]

    patch.setattr(passing, "exchange", apart)


def by_need(patch: pytest.MonkeyPatch) -> None:
    """A pipeline whose messages go when they are made, and are asked for when they are needed."""
    patch.setattr(Mail, "_go_on_to", lambda self, key: None)
    own = Mail.expect

    def expect(self: Mail, *args: Any) -> None:
        own(self, *args)
        self._due.clear()

    patch.setattr(Mail, "expect", expect)


@pytest.mark.parametrize(("plant", "task", "plan"), [
    (sends_first, "sequence_tasks:decoder", "cp=2"),
    (by_need, "shardwise.models.tasks:decoder", "pp=2,microbatches=4"),
], ids=["a ring sends first", "a pipeline by need"])  # fmt: skip
def test_a_bug_in_the_order_is_found(plant: Any, task: str, plan: str, mocks: RankPool) -> None:
    found = report(plan, mocks.run(with_bug, 2, plant, task, plan, timeout_s=250))
    assert not found.strictest.runs and "rank 1 waits in send" in found.text()


# --- what NCCL does not take


def refused(what: str) -> str:
    """What the mock accelerator's group says of tensors that NCCL does not take."""
    device = mock_device.install()
    mock_device.join_group()
    one = torch.ones(4, 2, device=device)
    calls = {
        "type": lambda: dist.all_reduce(one.to(torch.int16)),
        "strides": lambda: dist.all_reduce(one.t()),
        "sizes": lambda: dist.all_gather_into_tensor(torch.ones(9, device=device), torch.ones(4, device=device)),
        "message": lambda: dist.isend(one[:, 0], 1 - dist.get_rank()),
    }
    try:
        calls[what]()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("what", "told"), [
    ("type", "no type for torch.int16"), ("strides", "contiguous"), ("sizes", "makes as many"), ("message", "contig"),
])  # fmt: skip
def test_what_nccl_does_not_take_is_refused(what: str, told: str, mocks: RankPool) -> None:
    assert all(told in said for said in mocks.run(refused, 2, what))


def test_an_error_of_a_rank_is_the_checks(mocks: RankPool) -> None:
    with pytest.raises((RunError, RefusedPlan)):
        check_order("shardwise.models.tasks:mlp", "tp=2,cp=2", pool=mocks)
