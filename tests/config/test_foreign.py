"""Configurations of DeepSpeed and Accelerate: the plan that they mean, and a sentence for each of their keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import call
from shardwise.config.other_configs import _flat, read
from shardwise.errors import InputError

ZERO3 = {
    "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
    "my_own_key": 1,
}  # fmt: skip
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_transformer_layer_cls_to_wrap: Block,Head
  fsdp_activation_checkpointing: true
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 2
num_processes: 8
"""
FSDP2 = "{distributed_type: FSDP, num_processes: 4, fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}}"


@pytest.mark.parametrize(
    ("text", "name", "ranks", "plan"),
    [
        (json.dumps(ZERO3), "ds.json", 8, "dp_shard=8,zero=3,accumulate=4,precision=bf16,offload=optimizer"),
        ('{"zero_optimization": {"stage": 0}}', "ds.json", 4, "dp_replicate=4"),
        ('{"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}', "ds.json", 4,
         "dp_shard=2,zero=2,tp=2"),
        ('{"zero_optimization": {"stage": 3, "mics_shard_size": 2}}', "ds.json", 8, "dp_replicate=4,dp_shard=2,zero=3"),
        (FSDP, "a.yaml", None, "dp_replicate=2,dp_shard=4,zero=3,precision=bf16,remat=full,wrap=Block|Head"),
        (FSDP2, "a.yaml", None, "dp_shard=4,zero=2"),
        ("{distributed_type: MULTI_GPU, num_processes: 2, mixed_precision: fp16}", "a.yaml", None,
         "dp_replicate=2,precision=fp16"),
        ("{distributed_type: 'NO'}", "a.yaml", None, "single"),
        ("{distributed_type: DEEPSPEED, num_processes: 4, deepspeed_config: {zero_stage: 1, "
         "gradient_accumulation_steps: auto}}", "a.yaml", None, "dp_shard=4,zero=1"),
    ],
)  # fmt: skip
def test_the_plan_that_a_file_means(text: str, name: str, ranks: int | None, plan: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    made = read(path, ranks)
    assert set(str(made.finished()).split(",")) == set(plan.split(","))
    if name.endswith(".json"):
        assert {key for key, _ in made.told} == {key for key, _ in _flat(json.loads(text))}
        assert all(sentence for _, sentence in made.told)


def test_settings_go_to_the_run_and_unknown_keys_are_told(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO3))
    made = read(path, 8)
    made.finished()
    assert made.settings == {
        "train.clip_norm": 1.0, "optimizer.name": "adamw", "optimizer.lr": 3e-4, "optimizer.betas": [0.9, 0.95],
        "optimizer.weight_decay": 0.1, "schedule.name": "cosine", "schedule.warmup_steps": 100, "train.steps": 1000,
        "train.batch_samples": 64,
    }  # fmt: skip
    told = dict(made.told)
    assert told["my_own_key"] == "no counterpart: left out"
    assert told["zero_optimization.offload_optimizer.device"] == "offload=optimizer"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        # DeepSpeed's schedules set the rate themselves, whatever the optimizer's is; its Adam does not decay
        ('{"optimizer": {"type": "Adam", "params": {"lr": 5e-5}}, "scheduler": {"type": "WarmupLR"}}',
         {"optimizer.name": "adamw", "optimizer.lr": 1e-3, "optimizer.weight_decay": 0.0, "schedule.name": "constant",
          "schedule.warmup_steps": 1000}),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "weight_decay": "auto", "adam_w_mode": false}}, '
         '"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}',
         {"optimizer.name": "adamw", "optimizer.lr": 5e-5, "schedule.name": "linear"}),
        ('{"gradient_clipping": 0.0, "train_batch_size": 8}', {"train.batch_samples": 8}),  # DeepSpeed's word for none
        # AdamW is AdamW whatever this says (runtime/engine.py, effective_adam_w_mode); keys may stand in any order
        ('{"optimizer": {"params": {"adam_w_mode": false, "weight_decay": 0.1}, "type": "Adam"}}',
         {"optimizer.name": "adam", "optimizer.weight_decay": 0.1}),
        ('{"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1}}, "optimizer": {"type": "SGD", '
         '"params": {"lr": 0.1}}}',
         {"optimizer.name": "sgd", "optimizer.lr": 0.1, "schedule.name": "cosine", "schedule.warmup_steps": 1000,
          "schedule.final_factor": 0.1}),
        ('{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 0}}, "optimizer": '
         '{"type": "Adagrad", "params": {"lr": 0.1}}}',
         {"optimizer.name": "adagrad", "optimizer.lr": 3e-5, "schedule.name": "constant", "schedule.warmup_steps": 0}),
    ],
)  # fmt: skip
def test_what_a_file_leaves_out_is_as_deepspeed_has_it(text: str, settings: dict, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    made = read(path, 2)
    made.finished()
    assert made.settings == settings


def test_micro_batches_follow_from_the_batch_and_their_size(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}')
    made = read(path, 4)
    assert str(made.finished()) == "dp_shard=4,zero=1,accumulate=4" and made.settings["train.batch_samples"] == 64


def test_sections_of_another_kind_of_run_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "{distributed_type: MEGATRON_LM, num_processes: 8, fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}, "
        "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_use_distributed_optimizer: true}}"
    )
    made = read(path)
    assert str(made.finished()) == "dp_shard=4,zero=1,tp=2"
    assert "distributed_type is FSDP: left out" in dict(made.told)["fsdp_config.fsdp_sharding_strategy"]


def test_a_file_of_deepspeed_that_accelerate_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    path = tmp_path / "a.yaml"
    path.write_text("{distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: "
                    "{deepspeed_config_file: ds.json}}")  # fmt: skip
    assert str(read(path).finished()) == "dp_shard=2,zero=2,precision=bf16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON or YAML"),
        ("[1]", "expected keys and values"),
        ('{"a": 1}', "no key of it"),
        ('{"zero_optimization": {"stage": "three"}}', "'three' is not a value that stage takes"),
        ('{"zero_optimization": {"stage": 2}}', "give --ranks"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read(path).finished()
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "none.json")
    path.write_text('{"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "none.json"}}')
    with pytest.raises(InputError, match="which is not beside it"):
        read(path, 2)


def test_the_command_line(tmp_path: Path, capfd) -> None:
    path, out = tmp_path / "ds.json", tmp_path / "plan.toml"
    path.write_text(json.dumps(ZERO3))
    assert call(["plan", "--from", str(path), "--ranks", "8", "-o", str(out)]) == 0
    said = capfd.readouterr().out
    assert "plan: dp_shard=8,zero=3,accumulate=4,precision=bf16" in said and "--set optimizer.lr=0.0003" in said
    assert "dp_shard = 8" in out.read_text()
    assert call(["plan"]) == 2 and "Missing argument 'TASK'" in capfd.readouterr().err
    assert call(["plan", "digits"]) == 2 and "Missing option '--cluster'" in capfd.readouterr().err
