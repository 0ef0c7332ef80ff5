"""A configured model of many alike layers is forecast from few of them as from all: the same bytes and operations."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from shardwise import Plan
from shardwise.adapters import with_lora
from shardwise.cluster import Cluster
from shardwise.config.schema import LoraSection
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.software import software
from shardwise.planner.alike_layers import WORTH, AlikeLayers, alike_layers, with_layers
from shardwise.planner.configured_task import configured
from shardwise.planner.traced_task import BlockMemory, Traced
from shardwise.simulator.counted import Model, StepTrace
from shardwise.simulator.depths import NoLine, longer_trace
from shardwise.task import Task

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
pytest.importorskip("peft", reason="needs peft, which is not installed here")
LORA, LAYERS = LoraSection(rank=4), 9


def config(**changes: Any) -> Any:
    return transformers.Qwen3Config(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": WORTH, "head_dim": 8,
           "num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["Qwen3ForCausalLM"], **changes}
    )  # fmt: skip


def task(count: int) -> Task:
    return with_lora(configured(with_layers(config(), count), 8).tasks[0], LORA)


@cache
def traced(few: bool) -> Traced:
    layers = AlikeLayers(LAYERS, task) if few else None
    return Traced(task(LAYERS), Cluster.parse("4 h100-sxm-80gb"), software("shardwise"), "bf16", (2, 4), True,
                  layers=layers)  # fmt: skip


def model(few: bool, layout: Layout) -> Model:
    made = traced(few)
    if made._cuts(layout).differ or layout.sharded.state:
        return made.cut(layout, 16)[0]
    return made.model(BlockMemory.of(layout), layout.dp, layout.micro_batch)


def differing(one: Any, other: Any) -> list[str]:
    """Names of the fields in which two traces differ; operations in any order, since a layer's come together."""
    names = []
    for field in fields(one):
        few, whole = getattr(one, field.name), getattr(other, field.name)
        if field.name == "order":
            few, whole = Counter(few), Counter(whole)
        if field.name == "ops":
            names += [name for key in whole for name in differing(few[key], whole[key])]
        elif few != whole:
            names.append(field.name)
    return names


@pytest.mark.parametrize(
    "text",
    [
        "dp_replicate=4,remat=full",
        "dp_shard=4,zero=3,remat=full,accumulate=2",
    ],
)
def test_few_layers_tell_of_all(text: str) -> None:
    layout = of_plan(Plan.parse(f"{text},precision=bf16"), global_batch=16, seq=1, uneven=True)
    few, whole = model(True, layout), model(False, layout)
    assert differing(few.small, whole.small) == differing(few.large, whole.large) == []
    assert all(whole.small.tops), "each window was reached"
    assert traced(True).simulate(layout, 16).step_s == pytest.approx(traced(False).simulate(layout, 16).step_s)


def test_layers_that_differ_are_traced_one_by_one() -> None:
    def count(lora: LoraSection | None = None, **changes: Any) -> int:
        made = config(**changes)
        return alike_layers(made, configured(made, 8).tasks[0].model, lora)

    assert count() == count(LORA) == WORTH
    assert count(num_hidden_layers=WORTH - 1) == 0  # too few to gain by it
    assert count(LoraSection(rank=4, targets=["*.layers.1.*"])) == 0
    windows = ["sliding_attention", "full_attention"] * (WORTH // 2)
    assert count(layer_types=windows, use_sliding_window=True, sliding_window=4) == 0


def test_a_peak_that_may_be_elsewhere_is_not_told() -> None:
    few = StepTrace(1, tops=(9, 10, 5), peak=10)
    more = StepTrace(1, tops=(9, 12, 5), peak=12)
    assert longer_trace(few, more, 3).peak == 18
    with pytest.raises(NoLine):  # shards of gradients outgrow what waits for its backward
        longer_trace(few, replace(more, shard_gradient_bytes=3), 3)
    with pytest.raises(NoLine):
        longer_trace(few, replace(more, order=[("add", (1.0,), 1)], balanced=True), 3)
    few, more = (replace(trace, order=[("add", (float(size),), 1) for size in sizes])
                 for trace, sizes in ((few, (1, 2, 5)), (more, (1, 2, 2, 5, 2))))  # fmt: skip
    with pytest.raises(NoLine):  # no place and no two places in which something came in
        longer_trace(few, replace(more, order=more.order[::-1]), 3)
    assert [shape[0] for _, shape, _ in longer_trace(few, replace(more, order=more.order[:4]), 2).order] == [
        1.0, 2.0, 2.0, 2.0, 2.0, 5.0
    ]  # fmt: skip
