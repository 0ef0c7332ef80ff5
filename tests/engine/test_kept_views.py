"""Views of weights that a constructor keeps: refused where they would go stale, filled where they are constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.engine.refused_modules import refuse
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.trace.constructor_recorder import LARGE
from shardwise.trace.deferred import build

KEPT: dict[str, Tensor] = {}


class Pair:
    def __init__(self, *halves: Tensor) -> None:
        self.halves = halves


class Halves(nn.Module):
    """A weight whose halves are kept where `keep` puts them, and multiplied one after the other."""

    def __init__(self, keep: Callable[[Any, Tensor, Tensor], None], trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4), requires_grad=trained)
        self.bias = nn.Parameter(torch.zeros(4))
        keep(self, self.weight[:4], self.weight[4:])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias + sum(half.sum() for half in KEPT.values())


def in_a_list(module: Any, first: Tensor, second: Tensor) -> None:
    module.parts = [first, second]


def in_a_dict(module: Any, first: Tensor, second: Tensor) -> None:
    module.parts = {"a": (first,), "b": [second.detach()]}


def in_an_object(module: Any, first: Tensor, second: Tensor) -> None:
    module.parts = Pair(first, second)


def in_an_attribute(module: Any, first: Tensor, second: Tensor) -> None:
    module.parts = first


def in_its_data(module: Any, first: Tensor, second: Tensor) -> None:
    module.parts = module.weight.data


def in_a_closure(module: Any, first: Tensor, second: Tensor) -> None:
    module.product = lambda x: x @ first


def in_a_closures_list(module: Any, first: Tensor, second: Tensor) -> None:
    halves = [first, second]
    module.product = lambda x: x @ halves[0]


def in_a_global(module: Any, first: Tensor, second: Tensor) -> None:
    KEPT["parts"] = first


WAYS = [in_a_list, in_a_dict, in_an_object, in_an_attribute, in_its_data, in_a_closure, in_a_closures_list, in_a_global]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_view_of_a_weight_that_is_kept_is_refused(way: Callable) -> None:
    KEPT.clear()
    with pytest.raises(RefusedPlan, match=r"keeps a view of the parameter 'weight', .* make the view in the forward"):
        refuse(build(partial(Halves, way), 0).module, Plan())
    KEPT.clear()


class Anew(Halves):
    """Halves that each forward takes again."""

    def __init__(self) -> None:
        super().__init__(in_a_list)

    def forward(self, x: Tensor) -> Tensor:
        self.take()
        return x @ self.parts[0]

    def take(self) -> None:
        self.parts = [self.weight[:4], self.weight[4:]]


def with_a_hook() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(4, 4))  # keeps its weight's data until a forward, which replaces it


def weights_themselves(module: Any, first: Tensor, second: Tensor) -> None:
    module.mine, module.copies = [module.weight, {"bias": module.bias}], [first.clone()]


def frozen() -> nn.Module:
    return Halves(in_an_attribute, trained=False)


@pytest.mark.parametrize(
    "model",
    [Anew, with_a_hook, partial(Halves, weights_themselves), frozen, partial(nn.LSTM, 4, 4)],
    ids=["anew", "with_a_hook", "weights_themselves", "frozen", "lstm"],
)
def test_what_is_made_again_or_is_the_weight_itself_is_not(model: Callable[[], nn.Module]) -> None:
    refuse(build(model, 0).module, Plan())


class Tables(nn.Module):
    """Large tables, of which parts are kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(2.0 * LARGE).view(2, LARGE))
        self.parts = [self.table[0], self.table[1]]
        self.linear = nn.Linear(2, 2)


def test_views_of_a_large_table_have_its_values() -> None:
    built = build(Tables, 0)
    assert not built.notice
    assert torch.equal(torch.stack(built.module.parts), built.value("table"))
    refuse(built.module, Plan())
