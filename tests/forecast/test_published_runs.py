"""Runs that others published: their seconds and bytes beside the forecast of the words of the row."""

from __future__ import annotations

import pytest

from shardwise import plan, simulate
from shardwise.cluster import Cluster
from shardwise.planner.door import subject_of

H100 = "h100-sxm-80gb"
LATER = "schedule=interleaved1f1b"
# NVIDIA/NeMo, docs/source/performance: performance_summary.md (24.07) and performance_long_sequence.md (24.03, whose
# TFLOP/s count all of attention), both FP8 on DGX H100: model, plan, cluster, batch, positions, tokens/s of a device
NEMO_2024 = (
    ("llama2-7b", "dp_shard=8,zero=1,accumulate=16", f"8 {H100}", 128, 4096, 16847),
    ("llama2-13b", f"dp_shard=4,zero=1,pp=4,{LATER},stages_per_rank=10,microbatches=32", f"2x8 {H100}, ib-400", 128,
     4096, 8646),
    ("llama2-70b", f"dp_shard=4,zero=1,tp=4,sp=true,pp=4,{LATER},stages_per_rank=20,microbatches=32",
     f"8x8 {H100}, ib-400", 128, 4096, 1707),
    ("llama3-8b", "dp_shard=4,zero=1,cp=2,accumulate=32", f"8 {H100}", 128, 8192, 12036),
    ("llama2-7b", "dp_shard=8,zero=1,tp=2,sp=true,accumulate=32", f"2x8 {H100}, ib-400", 256, 16384, 10090),
    ("llama2-7b", "dp_shard=8,zero=1,tp=4,sp=true,cp=4,accumulate=4", f"16x8 {H100}, ib-400", 32, 131072, 2258),
    ("llama2-7b", "dp_shard=4,zero=1,tp=8,sp=true,cp=32", f"128x8 {H100}, ib-400", 4, 1048576, 317.4),
)  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "cluster", "batch", "seq", "rate"), NEMO_2024)
def test_nemo_of_2024_had_flash_attention_2(
    model: str, plan: str, cluster: str, batch: int, seq: int, rate: float
) -> None:
    old, new = (
        simulate(model, plan, cluster, global_batch=batch, seq=seq, software=name)
        for name in ("nemo-2024-fp8-delayed", "nemo-fp8-delayed")
    )
    assert old.tokens_per_s is not None
    assert abs(rate * old.world_size / old.tokens_per_s - 1) < 0.09
    assert old.step_s > new.step_s


# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, and of June 2025 on H200 (a compiled loss): GiB reserved
TITAN = (
    ("llama3-8b", "dp_shard=128,zero=3,remat=selective", "16x8 h100-sxm-96gb, ib-400", 256, "torchtitan", 62.0),
    ("llama3-8b", "dp_shard=128,zero=3,remat=selective", "16x8 h100-sxm-96gb, ib-400", 256, "torchtitan-fp8", 61.8),
    ("llama3-70b", "dp_shard=32,zero=3,tp=8,sp=true,remat=full,tp_overlap=true", "32x8 h100-sxm-96gb, ib-400", 512,
     "torchtitan-fp8", 67.6),
    ("llama3-8b", "dp_shard=32,zero=3,remat=selective", "4x8 h200-sxm-141gb, ib-400", 64, "torchtitan-2025-fp8", 48.0),
)  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "cluster", "batch", "software", "gib"), TITAN)
def test_torchtitan_keeps_its_logits_in_float32_until_the_loss_is_compiled(
    model: str, plan: str, cluster: str, batch: int, software: str, gib: float
) -> None:
    forecast = simulate(model, plan, cluster, global_batch=batch, seq=8192, software=software)
    assert -0.13 < forecast.worst.reserved / 2**30 / gib - 1 < 0.02
    matrix = 2 * {"llama3-8b": 4096, "llama3-70b": 8192 / 8}[model] * 128256
    assert forecast.worst.terms["ends, gathered"] == matrix * (1 if "2025" in software else 2)


def test_fp8_on_a_b200_is_not_held_back_by_its_runs_in_bf16() -> None:
    """NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11: 8B on 8 B200 in FP8, 30,624 tokens/s of each."""
    plan = "dp_shard=8,zero=1,accumulate=8"
    forecast = simulate("llama3-8b", plan, "8 b200-sxm", global_batch=128, seq=8192, software="nemo-fp8")
    assert forecast.tokens_per_s is not None
    assert forecast.tokens_per_s / 8 == pytest.approx(30624, rel=0.05)


def test_what_products_in_fp8_read_is_gathered_in_fp8() -> None:
    """torchtitan's 405B on 128 H100 (docs/performance.md of October 2024): 109 tokens/s as it is, and 177 in FP8."""
    plan, cluster = "dp_shard=16,zero=3,tp=8,sp=true,remat=full", "16x8 h100-sxm-96gb, ib-400"
    rates = []
    for software in ("torchtitan-eager", "torchtitan-fp8"):
        forecast = simulate("llama3-405b", plan, cluster, global_batch=32, seq=8192, software=software)
        assert forecast.tokens_per_s is not None
        rates.append(forecast.tokens_per_s / 128)
    assert rates == pytest.approx([109, 177], rel=0.09)


def test_fp4_is_faster_than_fp8_where_a_device_has_it() -> None:
    """NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 26.02: 70B on 64 GB300, 4,596 and 6,798 tokens/s."""
    plan = f"dp_shard=16,zero=1,pp=4,{LATER},stages_per_rank=5,microbatches=16"
    eight, four = (
        simulate("llama3-70b", plan, "64 gb300", global_batch=256, seq=8192, software=f"nemo-{recipe}")
        for recipe in ("mxfp8", "nvfp4")
    )
    assert eight.tokens_per_s is not None and four.tokens_per_s is not None
    assert [eight.tokens_per_s / 64, four.tokens_per_s / 64] == pytest.approx([4596, 6798], rel=0.09)
    assert four.worst.terms["weights in FP4"] == pytest.approx(eight.worst.terms["weights in FP8"] / 2)


# pytorch/torchtune, README.md of October 2024, 2 samples of 2048 for each device: GiB, without state that bitsandbytes
# pages in memory of its own. What its table calls an A6000 multiplied more than an RTX A6000 can (143 TFLOP/s of 123)
TUNE = (
    ("llama3-8b", "remat=full,optimizer_state=8bit,offload=optimizer", "1 rtx-4090", 2, "torchtune-in-backward", 18.9),
    ("llama3-8b", "optimizer_state=8bit,offload=optimizer", "1 rtx-6000-ada", 2, "torchtune-in-backward", 37.4),
    ("llama3-70b", "dp_shard=8,zero=3,remat=full,offload=parameters", "8 a100-sxm-80gb", 16, "torchtune", 13.9),
)  # fmt: skip


@pytest.mark.parametrize(("model", "plan", "cluster", "batch", "software", "gib"), TUNE)
def test_torchtune_fits_on_one_card_and_on_eight(
    model: str, plan: str, cluster: str, batch: int, software: str, gib: float
) -> None:
    forecast = simulate(model, plan, cluster, global_batch=batch, seq=2048, software=software)
    assert forecast.worst.allocated / 2**30 == pytest.approx(gib, rel=0.07)


def test_torchtune_updates_70b_on_the_host_as_it_did() -> None:
    """The same table: 1,568 tokens/s of eight A100."""
    forecast = simulate(*TUNE[2][:3], global_batch=16, seq=2048, software="torchtune")
    assert forecast.tokens_per_s == pytest.approx(1568, rel=0.05)


def test_gradients_are_held_one_at_a_time_where_each_is_used_at_once() -> None:
    whole, freed = (
        simulate("llama3-8b", plan, "1 h100-sxm-80gb", global_batch=2, seq=2048, software="torchtune-in-backward")
        for plan in ("accumulate=2", "")
    )
    assert whole.worst.terms["gradients"] == 2 * 8_030_261_248
    assert freed.worst.terms["gradients"] == 2 * 128256 * 4096


@pytest.mark.parametrize("software", ["shardwise", "megatron-core"])
def test_all_in_bf16_is_taken_at_its_word(software: str) -> None:
    """Weights, gradients and Adam's state of two bytes each, whatever else the software keeps."""
    forecast = simulate(
        "llama3-8b", "precision=bf16-full", "1 h100-sxm-80gb", global_batch=1, seq=128, software=software
    )
    held = sum(forecast.worst.terms.get(name, 0.0) for name in ("weights", "gradients", "master", "optimizer"))
    assert held == pytest.approx(8 * 8_030_261_248)


@pytest.mark.parametrize(("device", "rate"), [("v100-sxm2-32gb", "10.7"), ("t4", "2.4")])
def test_bf16_is_slow_where_no_tensor_core_takes_it(device: str, rate: str) -> None:
    """Products of 8192 in bf16 and fp16: zzc0721/torch-performance-test-data, issue 140 and database.md."""
    fast, slow = (
        simulate("gpt2", f"precision={name}", f"1 {device}", global_batch=4, seq=1024) for name in ("fp16", "bf16")
    )
    assert slow.step_s > 4 * fast.step_s
    assert f"{rate} TFLOP/s" in slow.basis["products"]
    assert f"{rate} TFLOP/s" not in fast.basis["products"]


def test_devices_whose_tensor_cores_take_no_bf16_are_planned_in_fp16() -> None:
    asked = {"global_batch": 8, "seq": 1024}
    assert plan("gpt2", "2 v100-sxm2-32gb", **asked).best.plan.precision == "fp16"
    assert plan("gpt2", "2 a10", **asked).best.plan.precision == "bf16"
    assert simulate("gpt2", "dp_replicate=2", "2 t4", **asked).step_s == pytest.approx(
        simulate("gpt2", "dp_replicate=2,precision=fp16", "2 t4", **asked).step_s
    )
    told = subject_of("gpt2", Cluster.parse("2 t4"), precision="bf16", **asked).remarks
    assert told and "precision=fp16" in told[0]


# mosaicml/llm-foundry, scripts/train/benchmarking/README.md: seconds of a step of MPT-13B on 8 A100 of 40 GB, which
# keeps what 48 samples of 2048 positions need, and which runs layers again for 240 of 4096
FOUNDRY = (("remat=none", 2048, 2, 3, 5.432), ("remat=full", 4096, 10, 3, 59.64))


@pytest.mark.parametrize(("remat", "seq", "micro_batch", "times", "seconds"), FOUNDRY)
def test_what_runs_again_ends_with_what_backward_reads(
    remat: str, seq: int, micro_batch: int, times: int, seconds: float
) -> None:
    plan = f"dp_shard=8,zero=3,accumulate={times},{remat}"
    batch = 8 * micro_batch * times
    forecast = simulate("mpt-13b", plan, "8 a100-sxm-40gb", global_batch=batch, seq=seq, software="llm-foundry")
    assert forecast.step_s == pytest.approx(seconds, rel=0.12)


def test_convolutions_take_what_a_gpu_took() -> None:
    """An H200 with torch 2.11: transformers' ResNet-50, 256 images in channels_last, bfloat16: 54.9 ms a step."""
    forecast = simulate("resnet-50", "precision=bf16", "1 h200-sxm-141gb", global_batch=256)
    assert forecast.step_s == pytest.approx(0.0549, rel=0.07)
