"""Adapters out of a run: peft reads them, and merged folders are read by `from_pretrained`, with equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise import Task, parallelize
from shardwise.adapters import with_lora
from shardwise.adapters.peft_files import of_adapters, write_adapters
from shardwise.config.schema import LoraSection
from shardwise.errors import InputError
from shardwise.hf import export, save_adapters, task
from shardwise.layout import Plan
from shardwise.ranks import RankPool

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
peft = pytest.importorskip("peft", reason="needs peft, which is not installed here")


def tokens(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 160, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def adam(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.02, eps=1e-5)  # beside which a gradient that is rounding moves nothing


def saved(folder: Path, **changes: Any) -> Path:
    sizes = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})).save_pretrained(str(folder))
    return folder


SECTIONS: dict[str, dict[str, Any]] = {
    "lora": {"alpha": 8.0},
    "dora": {"dora": True, "targets": ["q_proj", "down_proj"]},
    "whole": {"targets": ["q_proj"], "whole": ["lm_head"], "rslora": True},
}


class Adapted:
    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind

    def __call__(self) -> Task:
        section = LoraSection(rank=4, **SECTIONS[self.kind])
        return with_lora(task(self.folder, batch=tokens, optimizer=adam), section)


def trained(given: Adapted, plan: str, out: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Steps under the plan, both exports; logits of the trained weights in a plain module, on every rank."""
    engine = parallelize(given(), plan)
    for step in range(3):
        engine.step(tokens(step))
    save_adapters(engine, f"{out}/adapter")
    state = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    export(engine, f"{out}/merged", given.folder, merge=True)
    module = given().model()
    module.load_state_dict(state, strict=False)
    with torch.no_grad():
        return module.eval()(tokens(99)["input_ids"]).logits, state


def loaded(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """Logits as anybody would load the folder, and adapters for it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(tokens(99)["input_ids"]).logits


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("lora", "dp_shard=2,zero=3"),
        ("dora", "tp=2"),
        ("whole", "pp=2,microbatches=2"),
        *(
            pytest.param(kind, plan, marks=pytest.mark.long)
            for kind in SECTIONS
            for plan in ("dp_replicate=2", "cp=2", "dp_shard=2,zero=2", "dp_shard=2,tp=2,zero=3")
        ),
    ],
)  # fmt: skip
def test_adapters_of_any_plan_are_read_by_peft_alone(kind: str, plan: str, pool: RankPool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    results = pool.run(trained, Plan.parse(plan).world_size, Adapted(folder, kind), plan, str(tmp_path), timeout_s=120)
    logits, state = results[0]
    assert (logits - loaded(folder)).abs().max() > 1e-3  # it has learned
    assert torch.equal(loaded(folder, tmp_path / "adapter"), logits)
    torch.testing.assert_close(loaded(tmp_path / "merged"), logits, rtol=1e-5, atol=1e-6)
    names = [name for name in state if ".lora_" in name or "modules_to_save" in name]
    size = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    assert size <= 1.01 * sum(state[name].nbytes for name in names) + 300 * len(names)  # the header has a row for each
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == len(names)


def test_adapters_of_each_name_are_written_with_what_layers_share(tmp_path: Path) -> None:
    base = transformers.LlamaForCausalLM.from_pretrained
    folder, ids = saved(tmp_path / "base"), tokens(0)["input_ids"]
    model = peft.get_peft_model(base(str(folder)), peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    model.add_adapter("second", peft.VeraConfig(r=4, target_modules=["o_proj"]))
    model.add_adapter("third", peft.VeraConfig(r=4, target_modules=["o_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_(0, 1)
    params = dict(model.named_parameters())
    own = {name: params[name] for name in of_adapters(model, params)}
    assert len(own) == 2 * 2 * 2 + 2 * 2 * 2 and all("vera_lambda" in name for name in own)
    out = write_adapters(model, {**own, **dict(model.named_buffers())}, tmp_path / "out")
    for name, path in (("default", out), ("second", out / "second"), ("third", out / "third")):
        model.base_model.set_adapter([name])
        read = peft.PeftModel.from_pretrained(base(str(folder)), str(path)).eval()
        with torch.no_grad():
            assert torch.equal(read(ids).logits, model.eval()(ids).logits), name


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    engine = parallelize(Adapted(folder, "lora")(), "single")
    adapter = save_adapters(engine, tmp_path / "adapter")
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
    others = {
        "wider": saved(tmp_path / "wider", hidden_size=64),
        "flatter": saved(tmp_path / "flatter", num_hidden_layers=1),
    }
    for other in others.values():
        with pytest.raises(InputError, match="are adapters of another model than"):
            export(adapter, tmp_path / "out", other, merge=True)
    with pytest.raises(InputError, match="holds no adapters"):
        export(folder, tmp_path / "out", folder, merge=True)
    assert not (tmp_path / "out").exists()
    plain = parallelize(task(folder, batch=tokens), "single")
    with pytest.raises(InputError, match="no adapters into this model"):
        save_adapters(plain, tmp_path / "none")
