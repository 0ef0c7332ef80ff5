"""What a forward leaves in a module is known by name and put back: attributes, containers, hooks, generators."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from threading import Thread
from typing import Any

import module_tasks
import numpy as np
import remembering_tasks
import torch

from shardwise import parallelize
from shardwise.look.unowned import not_trained
from shardwise.memory.recompute import recompute_block
from shardwise.ranks import RankPool
from shardwise.trace.module_state import ModuleState, PassedState
from shardwise.trace.outside_state import entries
from shardwise.trace.remembered import contents


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


class MakesAnew(OrderedDict):
    """Makes something new of what it holds at each access, as transformers' table of activations does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


def test_a_container_that_makes_something_new_at_each_access_is_not_changed_by_it() -> None:
    module: Any = module_tasks.Counting()
    module.table = MakesAnew(gelu=torch.nn.GELU)
    state = ModuleState(module)
    assert not state.changed()
    state.restore()
    assert isinstance(module.table["gelu"], torch.nn.GELU)


class Counts(tuple):
    """Has no length of its own, as a list of representations that add up has none."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_container_that_refuses_its_length_is_gone_through() -> None:
    module: Any = module_tasks.Counting()
    module.kinds = Counts([torch.ones(2), [torch.ones(3, requires_grad=True)]])
    module.kinds[1][0].grad = torch.ones(3)
    assert entries(module.kinds) == 2 and len(contents(module.kinds)) == 2
    assert "'kinds[1][0]' got a gradient" in not_trained(module)[0]
    state = ModuleState(module)
    assert not state.changed()
    state.restore()


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


def test_generators_are_put_back() -> None:
    module = remembering_tasks.OwnGenerators()
    module.third = torch.Generator().manual_seed(3)  # type: ignore[assignment]
    module.fourth = np.random.RandomState(3)  # type: ignore[assignment]
    state = ModuleState(module)

    def drawn() -> list[float]:
        own = module.numbers.random(), module.others.random(), module.fourth.random()
        return [*own, float(torch.rand((), generator=module.third))]

    assert not state.changed()
    first = drawn()
    assert len(state.changed()) == 4
    with state.standing_in():
        assert drawn() == first
    second = drawn()
    state.restore()
    assert [drawn(), drawn()] == [first, second]


def test_what_objects_and_containers_hold_is_put_back() -> None:
    module = remembering_tasks.Stored()
    module.pair = (torch.zeros(2), [1])  # type: ignore[assignment]
    held = module.store.states["by layer"]
    state = ModuleState(module)
    assert not state.changed()
    held[0] = torch.ones(1)
    module.store.seen += 1
    module.pair[0].add_(1)
    module.pair[1].append(2)
    assert {key for _, key in state.changed()} == {"store", "pair"}
    with state.standing_in():
        assert module.store.seen == 0
        assert held[0] is None
    assert module.store.seen == 1
    state.restore()
    assert module.store.states["by layer"] is held
    assert (held, module.store.seen, module.pair[1]) == ([None] * 4, 0, [1])
    assert not module.pair[0].any()


class Ticks(Thread):
    """As progress bars have one, that notes when it last woke."""

    woken = 0.0


def test_what_a_thread_notes_of_itself_was_left_by_no_forward() -> None:
    module = remembering_tasks.Stored()
    module.monitor = Ticks()  # type: ignore[assignment]
    state = ModuleState(module)
    module.monitor.woken = 1.0
    assert not state.changed()
    module.store.seen += 1
    assert {key for _, key in state.changed()} == {"store"}


class Told(torch.nn.Module):
    """Its arguments are named as torch's `checkpoint` names its own."""

    def forward(self, x: torch.Tensor, debug: bool = False, fn: float = 1.0) -> torch.Tensor:
        return x.exp() * (100 if debug else 1) * fn


def test_recompute_hands_on_arguments_that_are_named_like_those_of_checkpoint() -> None:
    recompute_block(block := Told(), "full")
    x = torch.ones(2, requires_grad=True)
    made = block(x, debug=True, fn=2.0)
    assert torch.equal(made, x.exp() * 200)
    (found,) = torch.autograd.grad(made.sum(), x)
    assert torch.equal(found, x.exp() * 200)
