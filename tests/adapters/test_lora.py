"""`[lora]`: which layers get adapters, and a task with them trains like one process under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Task, parallelize, verify
from shardwise.adapters import with_lora
from shardwise.adapters.peft_files import refuse_other_adapters
from shardwise.adapters.targets import target_paths, whole_paths
from shardwise.config import load
from shardwise.config.schema import LoraSection
from shardwise.errors import InputError
from shardwise.hf import task as hf_task
from shardwise.models.decoder import Decoder
from shardwise.ranks import RankPool
from shardwise.task_names import AdaptedTask
from shardwise.trace.deferred import build

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
peft = pytest.importorskip("peft", reason="needs peft, which is not installed here")


def tokens(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 160, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as transformers writes it."""
    config = transformers.LlamaConfig(vocab_size=160, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=2, intermediate_size=48)  # fmt: skip
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(str(path))
    return path


def llama(path: Path) -> Task:
    return hf_task(path, batch=tokens)


class Named:
    """A task by its folder, as a rank makes it."""

    def __init__(self, path: Path, **section: Any) -> None:
        self.path, self.section = path, LoraSection(**section)

    def __call__(self) -> Task:
        return with_lora(llama(self.path), self.section)


def built(path: Path, **section: Any) -> nn.Module:
    return build(Named(path, **section)().model, 0).module


def test_every_linear_layer_but_the_output_gets_adapters(folder: Path) -> None:
    module = built(folder, rank=4)
    adapted = [path for path, child in module.named_modules() if hasattr(child, "base_layer")]
    assert len(adapted) == 2 * 7 and not any("lm_head" in path for path in adapted)
    assert all(".lora_" in name for name, param in module.named_parameters() if param.requires_grad)


def test_patterns_are_ends_of_paths(folder: Path) -> None:
    model = llama(folder).model()
    assert target_paths(model, ["q_proj"], 4) == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
    assert target_paths(model, ["layers.1.mlp.*_proj"], 4) == [
        f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    assert target_paths(model, ["lm_head"], 4) == ["lm_head"]
    assert whole_paths(model, ["norm"]) == ["model.norm"]
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert target_paths(small, ["all-linear"], 2) == ["0", "2"]  # any module
    with pytest.raises(InputError, match=r"lora.rank: 4 is above the width of '2' \(2\), .*: at most 2"):
        target_paths(small, ["all-linear"], 4)
    assert target_paths(small, ["0"], 4) == ["0"]


def test_patterns_that_match_nothing_are_told_with_the_nearest_name(folder: Path) -> None:
    model = llama(folder).model()
    with pytest.raises(InputError, match=r"'q_porj' matches none of the 15 linear layers.*did you mean 'q_proj'"):
        target_paths(model, ["q_porj"], 4)
    with pytest.raises(InputError, match=r"lora.whole: 'nrom' matches no module with parameters.*'norm'"):
        whole_paths(model, ["nrom"])
    with pytest.raises(InputError, match="no linear layer"):
        target_paths(nn.LayerNorm(4), ["all-linear"], 4)
    with pytest.raises(
        InputError, match=r"lora.whole: 'model.layers.0.mlp.down_proj' is trained whole, and lora.targets"
    ):
        built(folder, rank=4, whole=["down_proj"])


def test_alpha_and_its_root(folder: Path) -> None:
    scaling = [
        built(folder, rank=4, **options).model.layers[0].mlp.up_proj.scaling["default"]
        for options in ({}, {"alpha": 8.0}, {"alpha": 8.0, "rslora": True})
    ]
    assert scaling == [1.0, 2.0, 4.0]


def test_layers_are_trained_whole(folder: Path) -> None:
    module = built(folder, rank=4, targets=["q_proj"], whole=["lm_head"])
    trained = {name for name, param in module.named_parameters() if param.requires_grad}
    assert "lm_head.modules_to_save.default.weight" in trained
    assert len(trained) == 2 * 2 + 1


def names_of_any_letters() -> nn.Module:
    return nn.ModuleDict({"a+b": nn.Linear(4, 4), "body": nn.Linear(4, 4)})


def test_names_with_signs_of_patterns_get_adapters() -> None:
    task = Task(model=names_of_any_letters, loss=lambda output, batch: output, batch=tokens)
    module = with_lora(task, LoraSection(rank=2, targets=["a+b"])).model()
    assert {name.split(".")[0] for name, _ in module.named_parameters() if "lora_" in name} == {"a+b"}


def test_adapters_with_other_values_for_some_layers_are_told(tmp_path: Path) -> None:
    """Taken without their pattern they would be scaled otherwise than in peft."""
    options: dict[str, Any] = {"r": 2, "lora_alpha": 2, "target_modules": ["body"]}
    module, other = (
        peft.inject_adapter_in_model(peft.LoraConfig(**options, **pattern), names_of_any_letters())
        for pattern in ({}, {"alpha_pattern": {"body": 32}})
    )
    other.peft_config["default"].save_pretrained(str(tmp_path))
    with pytest.raises(InputError, match=r'was trained with alpha_pattern = \{"body": 32\}'):
        refuse_other_adapters(tmp_path / "adapter_model.safetensors", module)
    refuse_other_adapters(tmp_path / "adapter_model.safetensors", other)


def test_a_module_that_peft_would_train_whole_unasked_is_told() -> None:
    """peft compares the ends of names by their letters, not by their parts."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "head", "aux_head")})
    with pytest.raises(InputError, match=r"peft would train 'aux_head' whole too.* ends as 'head' does"):
        whole_paths(model, ["head"])
    assert whole_paths(model, ["head", "aux_head"]) == ["head", "aux_head"]
    assert whole_paths(model, ["aux_head"]) == ["aux_head"]


def test_keys_without_a_rank_have_no_effect() -> None:
    with pytest.raises(InputError, match=r"lora.alpha = 8.0: would have no effect: lora.rank is not set"):
        load(overrides=["lora.alpha=8.0"])
    assert load(overrides=["lora.rank=4", "lora.alpha=8.0"]).config.lora.alpha == 8.0


PLANS = ("dp_replicate=2", "dp_shard=2,zero=3", "tp=2", "pp=2,microbatches=2", "cp=2", "dp_shard=2,tp=2,zero=3")
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"dropout": 0.1},
    "rslora": {"rslora": True, "alpha": 8.0},
    "dora": {"dora": True, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
    "whole": {"targets": ["q_proj"], "whole": ["model.norm"]},
}  # fmt: skip
QUICK = (("rslora", PLANS[1]), ("dora", "tp=2"))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(kind, plan, marks=[] if (kind, plan) in QUICK else [pytest.mark.long])
        for kind in KINDS
        for plan in (*PLANS, "position_chunks=2,remat=full")
    ],
)
def test_adapters_train_like_one_process(kind: str, plan: str, folder: Path, pool: RankPool) -> None:
    parity = verify(Named(folder, rank=4, **KINDS[kind]), plan, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


REDUCES = ("all_reduce", "reduce_scatter")


def held(given: Any, plan: str) -> dict[str, Any]:
    """What a rank holds and sends in its second step."""
    engine = parallelize(given(), plan)
    engine.step(tokens(0))
    with engine.observe() as ledger:
        engine.step(tokens(1))
    shapes = {name: tensor.numel() for name, tensor in engine.full_parameters()}
    trained = sum(count for name, count in shapes.items() if ".lora_" in name)
    reduced = sum(
        entry.received_bytes for (tag, op, _), entry in ledger.entries.items() if op in REDUCES and tag != "control"
    )
    return {"memory": engine.memory(), "trained": trained, "all": sum(shapes.values()), "reduced": reduced}


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3"])
def test_what_is_frozen_has_no_gradient_no_state_and_is_not_reduced(plan: str, folder: Path, pool: RankPool) -> None:
    for rank in pool.run(held, 2, Named(folder, rank=2, targets=["q_proj"]), plan):
        share = 1 if plan.startswith("dp_replicate") else 2
        padding = 64 * 8  # of shards that do not divide
        assert rank["memory"]["optimizer"] <= 2 * 4 * rank["trained"] / share + padding
        assert rank["memory"]["gradients"] <= 4 * rank["trained"] + padding
        assert 0 < rank["reduced"] <= 2 * 4 * rank["trained"] + padding
        assert rank["all"] > 20 * rank["trained"]


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_frozen_weights_of_a_narrow_plan_have_no_wide_copy(plan: str, folder: Path, pool: RankPool) -> None:
    for rank in pool.run(held, 2, Named(folder, rank=2, targets=["q_proj"]), f"{plan},precision=bf16"):
        frozen = 2 * (rank["all"] - rank["trained"]) / (1 if plan.startswith("dp_replicate") else 2)
        assert frozen <= rank["memory"]["parameters"] <= 1.02 * frozen + 6 * rank["trained"] + 1024


def test_a_configuration_names_them_for_a_task(folder: Path) -> None:
    section = load(overrides=["lora.rank=2", 'lora.targets=["queries", "all-linear"]']).config.lora
    with pytest.raises(InputError, match=r"lora.targets: 'queries' matches none"):
        build(AdaptedTask("text", section)().model, 0)
    made = AdaptedTask("text", LoraSection(rank=2))
    assert isinstance(build(made().model, 0).module, Decoder)
