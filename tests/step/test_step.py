"""One rank's step: what the host reads in it, and who may look on."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwise
from shardwise import Plan, Task, parallelize
from shardwise.comm import Axis, gather_json
from shardwise.comm.buckets import GradientBuckets
from shardwise.host import HostReads, answered, read, require, row_of
from shardwise.models import tasks
from shardwise.ranks import RankPool


def momentum(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def reads_of(name: str, plan: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    """(named reads, others) of two steps: shapes of messages and the scale of losses are known in the second."""
    task: Task = globals()[name]() if name in globals() else getattr(tasks, name)()
    engine = parallelize(task.with_(optimizer=momentum), plan, device="cpu", clip_norm=1.0)
    found = []
    for step in range(2):
        assert task.batch is not None
        with HostReads() as reads:
            engine.step(task.batch(step))
        found.append((dict(reads.named), dict(reads.others)))
    return found


def _two_terms(output: Tensor, batch: Any) -> tuple[Tensor, int, dict]:
    total, weight = tasks.feature_loss(output, batch)
    return total, weight, {"of its own weight": (output.square().sum(), (batch[1] > 1).sum())}


def extras() -> Task:
    return tasks.mlp().with_(loss=_two_terms)


def looks() -> Task:
    """Its loss reads a value, which is not the engine's."""

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        total, weight = tasks.feature_loss(output, batch)
        assert total.item() >= 0
        return total, weight

    return tasks.mlp().with_(loss=loss)


ONE = {"control row": 1}
STAGES = {"control row": 1, "texts": 1}
CASES = [
    ("mlp", "single", ONE), ("mlp", "dp_replicate=2,accumulate=2", ONE), ("decoder", "dp_replicate=2", ONE),
    ("decoder", "dp_shard=2,zero=1", ONE), ("decoder", "dp_shard=2,zero=2", ONE), ("decoder", "dp_shard=2,zero=3", ONE),
    ("decoder", "tp=2", ONE), ("decoder", "tp=2,sp=true", ONE), ("unet_batchnorm", "dp_replicate=2", ONE),
    ("extras", "dp_replicate=2", ONE), ("decoder", "dp_replicate=2,precision=fp16", ONE),
    ("decoder", "pp=2,microbatches=2", STAGES),
    ("decoder_tied", "pp=2,microbatches=2", {"tied parameters": 1, **STAGES}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "expected"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_reads_of_a_step(name: str, plan: str, expected: dict[str, int], pool: RankPool) -> None:
    for found in pool.run(reads_of, Plan.parse(plan).world_size, name, plan):
        assert found[1] == (expected, {})


def test_reads_for_experts_are_one_for_each_layer(pool: RankPool) -> None:
    named, others = pool.run(reads_of, 2, "moe", "dp_shard=2,ep=2")[0][1]
    layers = len(tasks.moe().model().blocks)
    assert named == {"rows for experts": layers, "control row": 1}
    own = pool.run(reads_of, 2, "moe", "dp_replicate=2")[0][1][1]  # how many tokens each expert got
    assert own and others == own


def test_reads_of_the_tasks_own_code_are_seen(pool: RankPool) -> None:
    assert pool.run(reads_of, 2, "looks", "dp_replicate=2")[0][1] == (ONE, {"_local_scalar_dense": 1})


def test_the_step_reads_through_one_function() -> None:
    """No method of a tensor that hands its values to Python stands in the room."""
    for path in sorted((Path(shardwise.__file__).parent / "step").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in ("item", "tolist", "cpu", "numpy"), f"{path.name}:{node.lineno}"


# --- the function


def test_what_counts_as_a_read() -> None:
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    with HostReads() as reads:
        assert read(x, "four") == [0, 1, 2, 3] and read(x.sum(), "one") == 6
        require(x.sum() > 1, AssertionError)
        x.sum().item(), x[mask], x.nonzero(), torch.equal(x, x)
        row_of([x.sum(), 2], x.device)
        x[torch.tensor([1])].repeat_interleave(torch.tensor([3]), output_size=3)
        x[mask] = 0.0
    assert reads.named == {"four": 1, "one": 1}
    assert reads.others == Counter(
        {"_local_scalar_dense": 1, "index.Tensor": 1, "nonzero": 1, "equal": 1, "index_put_": 1}
    )


def test_copies_between_devices_are_reads_where_the_host_waits() -> None:
    there = torch.empty(4, device="meta")
    with HostReads() as reads:
        torch.empty(4).to("meta")
        torch.empty(4).to("meta", non_blocking=True)
        there.copy_(torch.empty(4))
        there.copy_(torch.empty(4), non_blocking=True)
        torch.empty(4).to(torch.float64)
        with pytest.raises(NotImplementedError):
            there.cpu()
    assert reads.others == {"_to_copy": 2, "copy_": 1}


def test_a_rehearsal_answers_reads() -> None:
    with FakeTensorMode():
        without_values = torch.empty(2, 3)
    with answered(lambda tensor, what: (what, list(tensor.shape))), HostReads() as reads:
        assert read(without_values, "rows") == ("rows", [2, 3])
    assert reads.named == {"rows": 1} and not reads.others
    with pytest.raises(KeyError):
        require(torch.tensor(False), KeyError)


def texts(longest: int) -> list[str]:
    rank = torch.distributed.get_rank()
    axis = Axis("world", 2, rank, torch.distributed.group.WORLD, (0, 1))
    return gather_json("é" * longest * rank, axis, torch.device("cpu"))


@pytest.mark.parametrize("longest", [0, 83, 84, 2000])  # six bytes each in JSON, and two quotes: 504 fit a short row
def test_texts_of_any_length(longest: int, pool: RankPool) -> None:
    assert pool.run(texts, 2, longest) == [["", "é" * longest]] * 2


# --- looking on


def parts_met(plan: str) -> list[str]:
    """Parts of a step in the order in which they began and ended."""
    task = tasks.decoder()
    engine = parallelize(task, plan, device="cpu")
    met: list[str] = []

    def around(part: str) -> Any:
        @contextmanager
        def noting() -> Iterator[None]:
            met.append(f"({part}")
            yield
            met.append(")")

        return engine.around(part, noting)  # type: ignore[arg-type]

    assert task.batch is not None
    with around("micro_batch"), around("reduce"), around("update"):
        engine.step(task.batch(0))
    engine.step(task.batch(1))  # nobody looks on
    return met


@pytest.mark.parametrize(("plan", "ops"), [("dp_replicate=2,accumulate=2", 2), ("pp=2,microbatches=2", 4)])
def test_contexts_around_parts_of_a_step(plan: str, ops: int, pool: RankPool) -> None:
    assert pool.run(parts_met, 2, plan)[1] == ["(micro_batch", ")"] * ops + ["(reduce", ")", "(update", ")"]


@pytest.mark.parametrize(
    ("keep", "summing", "wanted"), [(True, 8, [1, 2]), (True, 4, [1, 1, 1]), (False, 8, [1, 1, 1])]
)
def test_more_ranks_are_sent_larger_buckets_where_whole_gradients_stay(keep: bool, summing: int, wanted: list) -> None:
    """Of three weights the first to be sent goes alone, so that something is on its way early."""
    named = [(str(i), torch.nn.Parameter(torch.empty(4_000_000, device="meta"))) for i in range(3)]
    made = GradientBuckets(named, dtype=torch.float32, ranks=1, summing=summing, keep=keep, launch=lambda bucket: None)
    assert [len(bucket.params) for bucket in made.buckets] == wanted
