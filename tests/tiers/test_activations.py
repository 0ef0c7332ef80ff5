"""What blocks keep for backward lies elsewhere until then, and not one bit of a run changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import parallelize
from shardwise.digest import digest
from shardwise.errors import RefusedPlan, RunError
from shardwise.memory.live import LiveBytes
from shardwise.memory.recompute import recompute_block
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.tiers import activations, places, scratch, stores

LAYOUTS = {
    "single": 1, "dp_replicate=2": 2, "dp_shard=2,zero=1": 2, "dp_shard=2,zero=2": 2, "dp_shard=2,zero=3": 2, "tp=2": 2,
    "tp=2,sp=true": 2, "cp=2": 2, "cp_ulysses=2": 2, "pp=2": 2, "pp=2,schedule=zbh1": 2,
    "pp=2,schedule=interleaved1f1b,stages_per_rank=2,microbatches=2": 2, "deterministic=true,dp_shard=2": 2,
    "tp=2,dp_shard=2,zero=3": 4, "cp=2,tp=2": 4, "pp=2,dp_shard=2,zero=3": 4,
}  # fmt: skip
TIERS = ["activations:disk", "activations", "activations:host:0.5|activations:disk:0.5", "activations:disk:0.5"]
SETTINGS = ["", "remat=full", "accumulate=2", "precision=bf16", "offload=optimizer:disk"]


def ran(name: str, plan: str, steps: int = 3) -> dict[str, Any]:
    """Take steps with every tensor large enough to move, the host's tier forced; returns losses and digests."""
    forced, size = places.has_own_memory, activations.SMALL_BYTES
    places.has_own_memory, activations.SMALL_BYTES = lambda device: True, 1
    try:
        task = getattr(tasks, name)()
        engine = parallelize(task, plan)
        assert task.batch is not None
        out: dict[str, Any] = {"losses": [engine.step(task.batch(step)).loss for step in range(steps)]}
        out["weights"] = {key: digest(value) for key, value in engine.full_parameters()}
        moved = engine.state.activations
        out["put"] = sum(store.bytes_put for store in moved.stores) if moved is not None else 0
        engine.close()
    finally:
        places.has_own_memory, activations.SMALL_BYTES = forced, size
    return out


def assert_same(name: str, layout: str, setting: str, tier: str, pool: RankPool, ranks: int) -> None:
    plain = ",".join(filter(None, [layout.replace("single", ""), setting])) or "single"
    offload = f"{setting}|{tier}" if "offload" in setting else f"offload={tier}"
    moved = ",".join(filter(None, [layout.replace("single", ""), "" if "offload" in setting else setting, offload]))
    for without, within in zip(pool.run(ran, ranks, name, plain), pool.run(ran, ranks, name, moved), strict=True):
        assert within["put"] > 0
        assert within["losses"] == without["losses"] and within["weights"] == without["weights"]


QUICK = [
    ("dp_shard=2,zero=3", "remat=full", TIERS[0]), ("tp=2", "", TIERS[1]), ("pp=2", "accumulate=2", TIERS[3]),
]  # fmt: skip
CASES = [
    case for case in product(LAYOUTS, SETTINGS, TIERS)
    if case not in QUICK and not ("zbh1" in case[0] and "remat" in case[1])
]  # fmt: skip


@pytest.mark.parametrize(("layout", "setting", "tier"), QUICK)
def test_same_bits(layout: str, setting: str, tier: str, pool: RankPool) -> None:
    assert_same("decoder", layout, setting, tier, pool, LAYOUTS[layout])


@pytest.mark.long
@pytest.mark.parametrize(("layout", "setting", "tier"), CASES)
def test_same_bits_in_full(layout: str, setting: str, tier: str, pool: RankPool) -> None:
    assert_same("decoder", layout, setting, tier, pool, LAYOUTS[layout])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("moe", "dp_shard=2,zero=3,ep=2"), ("moe", "dp_shard=2,zero=1,ep=2"), ("unet_group", "domain=2"),
        ("decoder_dropout", "dp_shard=2,zero=3,remat=full"), ("decoder", "compile=true,tp=2"),
        ("decoder", "compile=true,dp_shard=2,zero=3"), ("decoder", "position_chunks=4,tp=2"), ("vit", "pp=2"),
    ],
)  # fmt: skip
def test_same_bits_of_other_modules(name: str, layout: str, pool: RankPool) -> None:
    assert_same(name, layout, "", TIERS[0], pool, 2)


class Block(nn.Module):
    """Writes into an activation in place, and reads a mask that its caller holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.second(torch.relu_(self.first(x)) * mask)


class Stack(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.mask = torch.rand(8, 32, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask * 2
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.fixture
def store() -> Iterator[stores.HostCopies]:
    yield stores.HostCopies(torch.device("cpu"))


def moved(module: Stack, store: stores.Store, fraction: float = 1.0) -> activations.Activations:
    return activations.Activations(module, activations.spread([*module.blocks], [(store, fraction)]))


def test_what_moves_and_what_stays(store: stores.HostCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of each block its input (8, 16), and once each of what relu and the product keep, (8, 32)."""
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    module = Stack()
    moved(module, store)
    x = torch.randn(8, 16)
    module(x).sum().backward()
    inputs, wide, mask = 8 * 16 * 4, 8 * 32 * 4, 8 * 32 * 4
    assert store.bytes_put == 4 * (inputs + 2 * wide) + mask, "weights stay; what all blocks keep moves once"
    assert store.held_bytes <= store.bytes_put, "room is used again"


@pytest.mark.parametrize("size", [8 * 16 * 4 + 1, 8 * 32 * 4 + 1])
def test_small_storages_stay(size: int, store: stores.HostCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", size)
    module = Stack()
    moved(module, store)
    module(torch.randn(8, 16)).sum().backward()
    assert store.bytes_put == (4 * 2 + 1) * 8 * 32 * 4 * (size < 8 * 32 * 4)


def test_the_first_blocks_move(store: stores.HostCopies) -> None:
    blocks = [nn.Linear(1, 1) for _ in range(4)]
    other = stores.HostCopies(torch.device("cpu"))
    for parts, expected in (
        ([(store, 0.5)], [store, store, None, None]), ([(store, 0.25), (other, 0.75)], [store, other, other, other]),
        ([(store, 0.1)], [None] * 4),
    ):  # fmt: skip
        assert [where for _, where in activations.spread(blocks, parts)] == expected


def test_two_blocks_lie_in_memory(store: stores.HostCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; what lies on the host is left out."""
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    peaks = []
    for blocks, used in product((6, 12), (False, True)):
        module = Stack(blocks)
        nowhere = stores.HostCopies(torch.device("cpu"))
        if used:
            moved(module, nowhere)
        for param in module.parameters():
            param.grad = torch.zeros_like(param)
        live = LiveBytes()
        live.count([*module.parameters(), *(param.grad for param in module.parameters())])
        base = live.now
        with live:
            module(torch.randn(8, 16)).sum().backward()
        peaks.append(live.peak - base - nowhere.held_bytes)
    (few, few_moved), (many, many_moved) = peaks[:2], peaks[2:]
    assert many - few == 6 * (8 * 16 + 2 * 8 * 32) * 4
    assert abs(many_moved - few_moved) < 0.1 * (many - few)


def test_a_tensor_that_was_written_to_is_refused_as_without(store: stores.HostCopies) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            z = y * y
            y.add_(1)
            return z

    block = Writes()
    activations.Activations(block, [(block, store)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        block(torch.randn(4, requires_grad=True)).sum().backward()


def test_backward_twice_and_gradients_of_gradients(store: stores.HostCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    gradients = []
    for used in (False, True):
        torch.manual_seed(0)
        module = Stack()
        if used:
            moved(module, store)
        x = torch.randn(8, 16, requires_grad=True)
        total = module(x).square().sum()
        total.backward(retain_graph=True)
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        first.square().sum().backward()
        gradients.append([x.grad, *(param.grad for param in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("offload=activations", r"the device of this rank is its processor.*offload=activations:disk"),
        ("remat=selective,offload=activations:disk", "selective recompute keeps"),
    ],
)
def test_what_is_refused(plan: str, message: str) -> None:
    with pytest.raises(RefusedPlan, match=message):
        parallelize(tasks.decoder(), plan)


def test_a_fraction_of_no_block_is_told() -> None:
    engine = parallelize(tasks.decoder(), "offload=activations:disk:0.1")
    told = "nothing moves for activations:disk:0.1: that is none of this rank's 4 blocks, to the nearest one"
    assert sum(told in notice for notice in engine.notices) == 1
    engine.close()


def test_a_module_without_blocks_is_refused() -> None:
    task = tasks.mlp().with_(model=lambda: nn.Linear(12, 5))
    with pytest.raises(RefusedPlan, match="no repeated blocks were found in the module: name them by wrap="):
        parallelize(task, "offload=activations:disk")


def test_a_folder_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "file_system", lambda folder: "tmpfs")
    with pytest.raises(RefusedPlan, match="is tmpfs, which lies in the host's memory: let TMPDIR name"):
        parallelize(tasks.decoder(), "offload=activations:disk")


@pytest.mark.parametrize(
    ("call", "outcome", "message"),
    [
        ("pwritev", OSError(errno.ENOSPC, "No space left on device"), "cannot write .* No space left on device"),
        ("preadv", OSError(errno.EIO, "Input/output error"), "cannot read .* at offset"),
        ("posix_fallocate", OSError(errno.ENOSPC, "No space left on device"), "has no room for what this rank's"),
    ],
)
def test_a_disk_that_fails(call: str, outcome: OSError, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    task = tasks.decoder()
    engine = parallelize(task, "offload=activations:disk")
    assert task.batch is not None

    def failing(*args: Any) -> int:
        raise outcome

    if call == "posix_fallocate":
        monkeypatch.setattr(stores.ExtentFile, "_take_back", lambda self, start, size: None)
        engine.state.activations.stores[0]._free.clear()
    monkeypatch.setattr(os, call, failing)
    before = {name: digest(value) for name, value in engine.full_parameters()}
    with pytest.raises(RunError, match=message) as raised:
        engine.step(task.batch(0))
    monkeypatch.undo()
    assert ".activations" in str(raised.value) and "are those before this step" in str(raised.value)
    assert {name: digest(value) for name, value in engine.full_parameters()} == before


def test_extents_are_used_again() -> None:
    file = stores.ExtentFile(torch.device("cpu"), 0)
    starts = [file.room(4096 * pages) for pages in (1, 2, 3)]
    assert starts == [0, 4096, 3 * 4096]
    file.give_back(0, 4096)
    file.give_back(4096, 2 * 4096)
    assert file.room(3 * 4096) == 0, "neighbours are one extent again"
    assert file.held_bytes == stores.GROWTH_BYTES
    file.close()


class AsksWhoIsWho(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query.exp() if query is key else query.exp() * key.exp()


def test_arguments_that_are_one_tensor_are_one_in_the_second_forward(
    store: stores.HostCopies, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What hooks have kept of a tensor is another one each time."""
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    gradients = []
    for used, kwargs in product((False, True), repeat=2):
        block = AsksWhoIsWho()
        recompute_block(block, "full")
        if used:
            activations.Activations(block, [(block, store)])
        x = torch.linspace(0, 1, 8, requires_grad=True)
        (block(x, key=x) if kwargs else block(x, x)).sum().backward()
        gradients.append(x.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
