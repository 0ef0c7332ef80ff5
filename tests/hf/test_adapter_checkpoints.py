"""Checkpoints of a model on a folder's frozen weights hold what trains, and go on under any plan on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_adapters_out import Adapted, loaded, saved, tokens

from shardwise import parallelize
from shardwise.checkpoint.inspect import convert, summary
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.digest import digest
from shardwise.engine.load_weights import load_state_dict
from shardwise.errors import InputError
from shardwise.hf import save_adapters
from shardwise.layout import Plan
from shardwise.ranks import RankPool

pytest.importorskip("peft", reason="needs peft, which is not installed here")


def steps(given: Adapted, plan: str, out: str, source: str | None, change: bool = False) -> dict[str, Any]:
    """On a rank: two steps from the start or from a checkpoint, then one of one's own in `out`, and peft's files."""
    engine = parallelize(given(), plan)
    saver = Saver(engine, f"{out}/checkpoints", background=False)
    if source is not None:
        restore(engine, source)
    start = {name: digest(value.cpu()) for name, value in engine.full_parameters()}
    for step in range(engine.steps_done, engine.steps_done + 2):
        engine.step(tokens(step))
    if change:
        load_state_dict(engine.state, {CHANGED.removeprefix("model/"): torch.full((32, 32), 0.5)}, strict=False)
    saver.save({})
    saver.close()
    end = {name: value.cpu().clone() for name, value in engine.full_parameters()}
    save_adapters(engine, f"{out}/adapter")
    engine.close()
    return {"start": start, "end": end}


CHANGED = "model/model.layers.0.self_attn.o_proj.base_layer.weight"


def run(pool: RankPool, given: Adapted, plan: str, *args: Any) -> dict[str, Any]:
    return pool.run(steps, Plan.parse(plan).world_size, given, plan, *args, timeout_s=200)[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dp_shard=2,zero=3", "tp=2"),
        *(
            pytest.param(first, second, marks=pytest.mark.long)
            for first, second in (("pp=2,microbatches=2", "dp_shard=2,zero=3"), ("tp=2", "pp=2,microbatches=2"),
                                  ("cp=2", "dp_shard=2,zero=2"), ("dp_shard=2,tp=2,zero=3", "single"))
        ),
    ],
)  # fmt: skip
def test_what_trains_is_saved_and_another_plan_goes_on(first: str, second: str, pool: RankPool, tmp_path: Path) -> None:
    given = Adapted(saved(tmp_path / "model"), "lora")
    before = run(pool, given, first, str(tmp_path / "a"), None)
    content = summary(tmp_path / "a" / "checkpoints")
    trained = {name: value for name, value in before["end"].items() if ".lora_" in name}
    assert {name.removeprefix("model/") for name in content["weights"] if name.startswith("model/")} == trained.keys()
    assert content["kinds"]["model"]["bytes"] == sum(value.nbytes for value in trained.values())
    after = run(pool, given, second, str(tmp_path / "b"), str(tmp_path / "a" / "checkpoints"))
    assert after["start"] == {name: digest(value) for name, value in before["end"].items()}
    whole = run(pool, given, second, str(tmp_path / "c"), None)  # the first steps again, under the second plan
    assert all(torch.allclose(whole["end"][name], before["end"][name], atol=1e-5) for name in trained)
    module = given().model().eval()
    for place, weights in (("a", before["end"]), ("b", after["end"])):
        module.load_state_dict(weights, strict=False)
        with torch.no_grad():
            logits = module(tokens(99)["input_ids"]).logits
        assert torch.equal(loaded(given.folder, tmp_path / place / "adapter"), logits)
    with pytest.raises(InputError, match=r"holds what was trained; \d+ frozen weights are in the files that its task"):
        convert(tmp_path / "a", tmp_path / "whole.safetensors")


def test_another_base_is_refused(pool: RankPool, tmp_path: Path) -> None:
    given = Adapted(saved(tmp_path / "model"), "lora")
    run(pool, given, "single", str(tmp_path / "a"), None)
    path = given.folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name] + 1e-6}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"trained beside other weights than this task's files hold: model.layers.1"):
        run(pool, given, "dp_shard=2,zero=3", str(tmp_path / "b"), str(tmp_path / "a" / "checkpoints"))


def test_a_frozen_weight_that_changed_is_saved(pool: RankPool, tmp_path: Path) -> None:
    given = Adapted(saved(tmp_path / "model"), "lora")
    before = run(pool, given, "dp_shard=2,zero=3", str(tmp_path / "a"), None, True)
    names = summary(tmp_path / "a" / "checkpoints")["weights"]
    assert [name for name in names if ".lora_" not in name and name.startswith("model/")] == [CHANGED]
    after = run(pool, given, "tp=2", str(tmp_path / "b"), str(tmp_path / "a" / "checkpoints"))
    assert after["start"] == {name: digest(value) for name, value in before["end"].items()}
    assert CHANGED in summary(tmp_path / "b" / "checkpoints")["weights"]
