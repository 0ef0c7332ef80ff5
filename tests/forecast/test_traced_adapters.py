"""Memory of a model with adapters on frozen weights: of each class and at its peak within 2% of the forecast."""

from __future__ import annotations

import gc
from typing import Any

import architectures
import pytest
from rank_memory import every_rank
from test_traced import HERE

from shardwise import Plan, Task, parallelize
from shardwise.adapters import with_lora
from shardwise.config.schema import LoraSection
from shardwise.costs.layout import of_plan
from shardwise.costs.software import software
from shardwise.hf import task as hf_task
from shardwise.memory.live import LiveBytes
from shardwise.planner.traced_task import Traced

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
pytest.importorskip("peft", reason="needs peft, which is not installed here")


def adapted() -> Task:
    config = transformers.LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return with_lora(hf_task(config, batch=architectures.words), LoraSection(rank=8))


def held(plan: str) -> dict[str, Any]:
    """On a rank: bytes of each class after a step, the peak of the next, and what lies beside frozen weights."""
    task = adapted()
    with LiveBytes() as live:
        engine = parallelize(task, plan, check_loss=False)
        engine.step(task.batch(0))
        gc.collect()
        live.reset_peak()
        live.settle = True
        engine.step(task.batch(1))
        peak = live.peak
    frozen = [param for param in engine.module.parameters() if not param.requires_grad]
    states = [value for param in frozen for value in engine.optimizer.state.get(param, {}).values()]
    beside = [param.grad for param in frozen if param.grad is not None] + states
    memory = engine.memory()
    classes = {kind: memory[kind] for kind in ("parameters", "gradients", "optimizer")}
    return {"classes": classes, "peak": peak, "frozen": len(frozen), "beside": len(beside)}


@pytest.mark.parametrize(
    "plan",
    [
        "dp_shard=2,zero=3",
        *(pytest.param(text, marks=pytest.mark.long) for text in ("dp_replicate=2", "dp_shard=2,zero=2", "tp=2")),
    ],
)
def test_bytes_of_each_class_are_those_of_the_forecast(plan: str, pool: Any) -> None:
    plan = f"{plan},precision=bf16"
    layout = of_plan(Plan.parse(plan), global_batch=architectures.SAMPLES, seq=1, uneven=True)
    traced = Traced(adapted(), HERE, software("shardwise"), "bf16", (layout.micro_batch,) * 2, cuts=True)
    ranks = pool.run(held, 2, plan, timeout_s=200)
    for rank, ledger in zip(ranks, every_rank(traced, layout, architectures.SAMPLES), strict=True):
        terms = ledger.terms
        forecast = {
            "parameters": terms.get("weights", 0) + terms["master"],
            "gradients": terms["gradients"],
            "optimizer": terms["optimizer"],
        }
        assert rank["frozen"] > 0 and rank["beside"] == 0
        assert rank["classes"] == pytest.approx(forecast, rel=0.02)
        assert rank["peak"] == pytest.approx(ledger.allocated, rel=0.02)
