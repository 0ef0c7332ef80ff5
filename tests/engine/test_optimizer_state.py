"""`Engine.full_optimizer_state`: whole tensors under one process's names, whatever holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import unlike_tasks
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize
from shardwise.checkpoint.holdings import weights
from shardwise.digest import digest
from shardwise.errors import ShardwiseError
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task

STEPS = 2


class Uneven(nn.Module):
    """Shapes that no number of ranks divides, one weight without dims and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(7, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


class OneHead(nn.Module):
    """Attention of one head: under tp one rank has it, and the other one rows of no index."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.last = nn.Linear(4, 3 * 8), nn.Linear(8, 4), nn.Linear(12, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(len(x), 3, 1, 8).transpose(1, 2) for one in self.qkv(x.view(len(x), 3, 4)).chunk(3, -1))
        read = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), 3, 8)
        return self.last(self.out(read).flatten(1))


def one_head() -> Task:
    return momentum().with_(model=OneHead)


def adam() -> Task:
    return tasks.mlp().with_(model=Uneven, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01))


def adagrad() -> Task:
    return tasks.mlp().with_(model=Uneven, optimizer=lambda groups: torch.optim.Adagrad(groups, lr=0.01))


def momentum() -> Task:
    return tasks.mlp().with_(model=Uneven, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))


def adafactor() -> Task:
    return tasks.mlp().with_(model=Uneven, optimizer=lambda groups: torch.optim.Adafactor(groups, lr=0.01))


def lbfgs() -> Task:
    return tasks.mlp().with_(
        optimizer=lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]], lr=0.1, max_iter=3)
    )


def flattened(name: str, value: Any) -> dict[str, Any]:
    """Every tensor and number of a nested state by its path, tensors on the CPU as copies."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flattened(f"{name}/{key}", item).items()}
    if isinstance(value, list | tuple):
        return {k: v for place, item in enumerate(value) for k, v in flattened(f"{name}/{place}", item).items()}
    return {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value}


def state_after_steps(name: str, plan: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What every rank is told, and its digests."""
    task = resolve_task(name)
    engine = parallelize(task, f"{plan},precision=fp64", device="cpu", check_loss=False)
    assert task.batch is not None
    for step in range(STEPS):
        engine.step(task.batch(step))
    found = {k: v for param, state in engine.full_optimizer_state() for k, v in flattened(param, state).items()}
    return found, {key: digest(value) for key, value in found.items() if isinstance(value, Tensor)}


CASES = [
    ("adam", "dp_shard=3,zero=1"), ("adam", "dp_shard=2,zero=3"), ("adagrad", "dp_shard=3,zero=3"),
    ("adagrad", "dp_replicate=2"), ("momentum", "dp_replicate=2,dp_shard=2,zero=2"), ("momentum", "tp=2"),
    ("adam", "dp_shard=2,zero=1,tp=2"), ("adafactor", "dp_shard=2,zero=3"), ("adafactor", "dp_shard=3,zero=1"),
    ("adafactor", "tp=2"), ("adafactor", "dp_shard=2,zero=2,tp=2"),
    ("lbfgs", "dp_replicate=2"), ("one_head", "tp=2"),
]  # fmt: skip
OTHERS = [
    ("shardwise.models.tasks:decoder_tied", "pp=2,microbatches=2"),
    ("shardwise.models.tasks:moe", "dp_shard=4,ep=2,zero=3"),
    # products of what stands above
    pytest.param("shardwise.models.tasks:decoder", "pp=2,dp_shard=2,zero=2,microbatches=2", marks=pytest.mark.long),
    pytest.param("shardwise.models.tasks:moe", "dp_shard=2,ep=2,zero=1,tp=2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "plan"), [(f"test_optimizer_state:{name}", plan) for name, plan in CASES] + OTHERS)
def test_state_is_whole_and_the_same_on_every_rank(name: str, plan: str, pool: RankPool) -> None:
    chosen = Plan.parse(plan)
    alone, _ = pool.run(state_after_steps, 1, name, f"accumulate={chosen.step_microbatches}")[0]
    ranks = pool.run(state_after_steps, chosen.world_size, name, plan)
    assert alone, "one process has state"
    for found, digests in ranks:
        assert found.keys() == alone.keys()
        assert digests == ranks[0][1]
        for key, value in alone.items():
            if isinstance(value, Tensor):
                assert found[key].shape == value.shape and found[key].dtype == value.dtype, key
                assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-12), key
            else:
                assert found[key] == pytest.approx(value), key


def without_state_on_rank_1() -> list[str]:
    task = adam()
    told = []
    for plan in ("dp_shard=2,zero=1", "dp_replicate=2"):
        engine = parallelize(task, plan, device="cpu")
        engine.step(tasks.mlp().batch(0))
        if engine.rank == 1:
            engine.optimizer.state.clear()
        try:
            told.append(str(sum(len(state) for _, state in engine.full_optimizer_state())))
        except ShardwiseError as error:
            told.append(str(error))
    return told


def test_a_rank_that_lost_its_state_is_named(pool: RankPool) -> None:
    (pieces, whole), (pieces_1, whole_1) = pool.run(without_state_on_rank_1, 2)
    assert pieces == pieces_1 and "rank 1 has no optimizer state for its piece of 'first.weight'" in pieces
    assert int(whole) > 0 and whole_1 == "0", "each replica tells its own"


def test_a_digest_tells_dtype_shape_and_bits_apart() -> None:
    a = torch.arange(6, dtype=torch.float64)
    assert digest(a) == digest(torch.arange(12, dtype=torch.float64)[:6])
    others = [a.float(), a.view(2, 3), a + torch.finfo(a.dtype).eps, a.long(), a[:0], torch.complex(a, a), -a.neg() * 2]
    assert len({digest(a), *map(digest, others)}) == 1 + len(others)
    assert digest(torch.view_as_complex(torch.ones(3, 2)).conj()) != digest(torch.view_as_complex(torch.ones(3, 2)))
    assert digest(torch.tensor(True)) != digest(torch.tensor(False))


def _checkpointed(plan: str) -> str:
    engine = parallelize(unlike_tasks.complex_weights(), plan)
    engine.step(unlike_tasks.sequences(0))
    kinds = {str(tensor.dtype) for _, tensor in engine.full_parameters()}
    assert kinds >= {str(held.tensor.dtype) for held in weights(engine)}
    assert kinds == {str(kept["exp_avg"].dtype) for _, kept in engine.full_optimizer_state()}
    return "".join(sorted(kinds))


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2"])
def test_complex_parameters_are_complex_outside(pool: RankPool, plan: str) -> None:
    assert pool.run(_checkpointed, 2, plan) == ["torch.complex64torch.float32"] * 2
