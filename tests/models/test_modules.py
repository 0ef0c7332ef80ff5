"""Modules that nobody prepared: each equals one process under a plan, or is refused with the mechanism's name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import module_tasks
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from shardwise import parallelize, verify
from shardwise.memory.recompute import recompute_block
from shardwise.random import BatchDims
from shardwise.random.modes import Drawn
from shardwise.ranks import RankPool
from shardwise.trace.state import ModuleState, PassedState

REPLICAS = "dp_replicate=2"
FLAT = "dp_shard=3,zero=2,accumulate=2"
FULL = "dp_shard=2,zero=3,accumulate=2"
HYBRID = "dp_replicate=2,dp_shard=2,zero=3"
REMAT = "dp_replicate=2,remat=full"

EQUAL = [
    ("two_draws", REPLICAS), ("two_draws", FULL),
    ("layer_drop", FLAT), ("layer_drop", FULL),
    ("layer_drop_python", FLAT), ("layer_drop_python", FULL),
    ("categorical", REPLICAS), ("categorical", FLAT),
    ("time_first", REPLICAS), ("time_first", FLAT), ("time_before_samples", REPLICAS),
    ("random_loss", REPLICAS), ("random_loss", FULL),
    ("norm_without_statistics", REPLICAS), ("norm_without_statistics", FULL),
    ("norm_cumulative", FLAT), ("norm_cumulative", REMAT),
    ("norm_in_checkpoint", REPLICAS), ("norm_in_checkpoint", FULL),
    ("norm_functional", FLAT), ("norm_functional", REMAT),
    ("counting", REPLICAS), ("counting", FULL), ("counting", REMAT),
    ("spectral", FULL), ("spectral", REMAT), ("spectral_by_hooks", FLAT), ("spectral_by_hooks", REMAT),
    ("weight_normed", FULL), ("weight_normed", REMAT),
    ("teacher", REPLICAS), ("teacher", FLAT), ("teacher", FULL),
    ("odd_parameters", REPLICAS), ("odd_parameters", FLAT), ("odd_parameters", FULL), ("odd_parameters", HYBRID),
    ("sparse_gradients", REPLICAS), ("sparse_gradients", FULL),
    ("weight_used_outside", FLAT), ("weight_used_outside", FULL), ("weight_used_outside", HYBRID),
    ("weight_used_outside", "pp=2,dp_shard=2,zero=3,microbatches=2"), ("weight_used_outside", f"{FULL},remat=full"),
    ("table_for_eval", "dp_shard=2,zero=3"), ("teacher", "tp=2"), ("teacher", "tp=2,pp=2"),
    ("weight_of_a_block_in_the_output", FULL), ("two_names", FULL),
    ("reentrant_twice", REPLICAS), ("reentrant_twice", FLAT), ("tied_reentrant", REPLICAS), ("tied_reentrant", FLAT),
    ("routed_experts", REPLICAS), ("routed_experts", FLAT), ("routed_experts", FULL), ("routed_experts", HYBRID),
    ("penalised", REPLICAS), ("penalised", "tp=2"), ("penalised", FULL),
    ("hooked", REPLICAS), ("hooked", FULL), ("hooked", "tp=2,pp=2"), ("reversible", FULL),
    ("sparse_graph", "pp=2"), ("scripted", "tp=2,pp=2"),
    ("distributions", FULL), ("distributions", "pp=2,tp=2"),
    ("writes_into_products", "dp_replicate=2,remat=selective"), ("writes_into_products", "tp=2"),
    ("assigns_data", "tp=2"), ("shared_module", FULL),
    ("adds_to_views", FULL), ("adds_to_views", "dp_shard=2,zero=3,remat=full"),
    ("complex_parameter", FULL), ("pairs", REPLICAS), ("pairs", FULL), ("pairs", HYBRID),
    ("drops_a_single_sample", REPLICAS),
    ("pairs_with_as_many_scales", REPLICAS), ("pairs_with_as_many_scales", FLAT), ("pairs_with_as_many_scales", FULL),
]  # fmt: skip

REFUSED = [
    ("masked_rows", REPLICAS, "random op aten.bernoulli_"),
    ("last_sample_first", REPLICAS, "masks dealt by global index"),
    ("instance_norm_statistics", FLAT, "by other means than batch norm"),
    ("gradient_hook", REPLICAS, "puts a hook on the gradient of parameter 'weight'"),
    ("shared_memory", REPLICAS, "'part' shares memory with 'whole'"),
    ("sparse_adam", REPLICAS, "as every plan makes them, dense and"),
    ("weight_used_outside_of_one_module", FULL, "which cannot be sharded anew"),
    ("tied_reentrant", "pp=2,schedule=zbh1", "use a schedule that does not split"),
    ("reentrant_twice", FULL, "more than once under a reentrant checkpoint"),
    ("pairs_of_logits", REPLICAS, "compute what compares samples"),
]


@pytest.mark.parametrize(("name", "plan"), EQUAL)
def test_module_equals_one_process(pool: RankPool, name: str, plan: str) -> None:
    result = verify(f"module_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert result.parity, result.text()


@pytest.mark.parametrize(("name", "plan", "reason"), REFUSED)
def test_module_is_refused_by_its_mechanism(pool: RankPool, name: str, plan: str, reason: str) -> None:
    result = verify(f"module_tasks:{name}", plan, pool=pool, timeout_s=60)
    assert result.refused, result.text()
    assert reason in result.refused


def _units_and_notices() -> tuple[list[str], list[str]]:
    engine = parallelize(module_tasks.weight_used_outside(), "dp_shard=2,zero=3")
    units = [path for path, child in engine.module.named_modules() if isinstance(child, FSDPModule)]
    return units, [notice for notice in engine.notices if "outside its forward" in notice]


def test_unit_whose_weight_is_read_outside_is_gathered_with_the_root(pool: RankPool) -> None:
    units, told = pool.run(_units_and_notices, 2)[0]
    assert "" in units
    assert "blocks.0" not in units
    assert "blocks.1" in units
    assert "'blocks.0'" in told[0]


def _state_after_look() -> tuple[int, float]:
    engine = parallelize(module_tasks.counting(), "single")
    first = engine.module.blocks[0]
    return first.number, float(first.calls)


def test_look_leaves_counters_alone(pool: RankPool) -> None:
    assert pool.run(_state_after_look, 1) == [(0, 0.0)]


def test_recompute_meets_the_state_that_forward_met() -> None:
    block = module_tasks.Counting()
    plain = block(x := torch.ones(2, module_tasks.WIDTH, requires_grad=True)).sum()
    (expected,) = torch.autograd.grad(plain, x)
    again = module_tasks.Counting()
    again.load_state_dict({**block.state_dict(), "calls": torch.zeros(())})
    recompute_block(again, "full")
    for place in range(2):  # the second time, only what is known to change is kept
        loss = again(x).sum()
        (found,) = torch.autograd.grad(loss, x)
        assert again.number == len(again.history) == int(again.calls) == place + 1
        if place == 0:
            assert torch.equal(found, expected)


def test_state_names_what_changed_and_restores_it() -> None:
    module = module_tasks.Counting()
    state = ModuleState(module)
    module(torch.ones(1, module_tasks.WIDTH))
    module.made_late = 3
    assert sorted(key for _, key in state.changed()) == ["calls", "history", "made_late", "number"]
    state.restore()
    assert (module.number, module.history, float(module.calls), hasattr(module, "made_late")) == (0, [], 0.0, False)


def test_children_that_a_forward_makes_go_with_it() -> None:
    module: Any = torch.nn.Sequential()
    module.register_module("declared", None)
    state = ModuleState(module)
    module.declared, module.added = torch.nn.Identity(), torch.nn.Identity()
    state.restore()
    assert dict(module._modules) == {"declared": None} and module.declared is None


def test_a_buffer_that_was_written_past_autograd_is_restored() -> None:
    """By `.data` torch counts no version, as moving averages are often written."""
    module = torch.nn.BatchNorm1d(2)
    state = ModuleState(module)
    module.running_mean.data.mul_(0.9).add_(1.0)
    state.restore()
    assert module.running_mean.tolist() == [0.0, 0.0]


class Frozen(OrderedDict):
    """A configuration that refuses to be changed once it is made, as libraries have them."""

    def __init__(self, **values: int) -> None:
        super().__init__(values)
        self.__dict__["frozen"] = True

    def update(self, *args, **values) -> None:
        raise AttributeError("frozen")

    clear = update

    def __setitem__(self, key, value) -> None:
        if "frozen" in self.__dict__:
            raise AttributeError("frozen")
        super().__setitem__(key, value)

    def __setattr__(self, key, value) -> None:
        raise AttributeError("frozen")


def test_state_of_a_container_that_refuses_changes_is_kept() -> None:
    module: Any = module_tasks.Counting()
    module.config, module.found = Frozen(width=3), defaultdict(list, {1: [2]})
    state = ModuleState(module)
    module.found[4].append(5)
    with state.standing_in():
        assert module.config == {"width": 3} and 4 not in module.found
    assert module.found[4] == [5]
    with PassedState(module.config).standing_in():
        assert type(module.config) is Frozen and dict(module.config) == {"width": 3}
    state.restore()
    assert dict(module.found) == {1: [2]} and module.found.default_factory is list


def test_batch_dims_tell_draws_of_one_op_apart() -> None:
    dims = BatchDims()
    whole = [("randn", (5, 1)), ("randn", (1, 6)), ("drop", (7, 6)), ("turned", (8, 5))]
    part = [("randn", (4, 1)), ("randn", (1, 6)), ("drop", (5, 6)), ("turned", (8, 4))]
    dims.learn([Drawn("m", *draw) for draw in whole], [Drawn("m", *draw) for draw in part], 5, 4)
    assert dims.find("m", "randn", (3, 1), 3) == 0
    assert dims.find("m", "randn", (1, 6), 3) == -1
    assert dims.find("m", "turned", (8, 3), 3) == 1
    assert dims.find("other", "turned", (8, 3), 3) == 1
    assert dims.find("m", "drop", (3, 6), 3) == -2  # its size follows the samples, but not in proportion
    assert dims.unclear() == ["drop in module 'm'"]


class _Hooked(torch.nn.Module):
    """Adds a hook in its first forward, and notes that it has."""

    def __init__(self):
        super().__init__()
        self.layer, self.hooked, self.seen = torch.nn.Linear(2, 2), False, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.layer.register_forward_hook(lambda layer, args, output: self.seen.append(output))
            self.hooked = True
        return self.layer(x)


def test_hooks_that_a_forward_adds_go_with_what_says_so() -> None:
    module = _Hooked()
    module.layer.register_forward_hook(lambda layer, args, output: None)
    for _ in range(2):
        state = ModuleState(module)
        module(torch.ones(1, 2))
        assert len(module.seen) == 1 and len(module.layer._forward_hooks) == 2
        state.restore()
        assert not module.seen and not module.hooked and len(module.layer._forward_hooks) == 1
