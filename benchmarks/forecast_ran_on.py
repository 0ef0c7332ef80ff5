"""What a row of a published run ran on: the device by the catalogue's name, the cluster, and the software."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from forecast_cells import Skip
from forecast_recipes import as_told, bridge_2026

from shardwise.cluster import Cluster, Figure, device_names, gemm_table
from shardwise.cluster import device as devices
from shardwise.costs.fp8 import FP8
from shardwise.costs.layout import Layout
from shardwise.costs.software import Software, software

# Runs with DeepSpeed's pipeline under Megatron's layers
DEEPSPEED_PIPELINES = (
    "megatron-deepspeed", "deepspeed+megatron", "gpt-neox", "pythia", "bloom (", "bigscience", "mt-nlg", "glm-130b",
)  # fmt: skip
# Which software a row was run with: the first word found in the file's name, the source or the notes.
SOFTWARE = (
    ("korthikanti", "megatron-2021"),
    ("megatron-lm sc21", "megatron-2021"),
    ("zero bubble", "zero-bubble"),
    ("llm-foundry", "llm-foundry"),
    *((word, "torchtitan-2025") for word in ("torchtitan 2025", "tinyllama", "olmo-core", "olmo 2", "nanochat")),
    *((word, "torchtitan") for word in ("torchtitan", "nanogpt", "torchtune")),
    *((word, "fsdp") for word in ("litgpt", "lit-gpt", "fms-fsdp", "colossal")),
    *((word, "megatron-deepspeed") for word in DEEPSPEED_PIPELINES),
    *((word, "megatron-flash") for word in ("starcoder", "falcon", "megascale", "--use-flash-attn")),
    ("herd of models", "megatron-core"),
    ("automodel", "automodel"),
    *((word, "maxtext") for word in ("maxtext", "paxml")),
    ("nemo", "nemo"),
    ("megatron-bridge", "nemo"),
    ("fused cross-entropy", "megatron-core"),
    ("megatron-lm ci", "megatron-core-unfused-loss"),
    ("deepseek-v2", "deepseek-v2"),
    ("deepseek-v3", "deepseek"),
    ("megatron", "megatron-core-unfused-loss"),
    ("fsdp", "fsdp"),
    ("deepspeed", "deepspeed-2021"),
)
# The usual port of one device, Gb/s, by generation; Selene (Megatron's papers) had 8 x 200 Gb/s for 8 A100
PORTS = {"v100": 100, "a100": 200}
OTHERS = 400
MAKERS = {"", "nvidia", "amd", "instinct", "tesla", "gpu", "nvl72"}  # words of a device's name that tell nothing apart


def device_name(gpu: str) -> str:
    """The catalogue's name; `H100` alone is the SXM one."""
    words = _words(gpu)
    near = [known for known in device_names() if words and words <= _words(known)]
    if not near:
        raise Skip(f"{gpu or 'a device without a name'} is not in the catalogue")
    return min(near, key=lambda known: (_words(known) != words, "sxm-80gb" not in known, "sxm" not in known))


def _words(name: str) -> set[str]:
    """Returns the words of a device's name that tell it apart: "NVIDIA A100-SXM4 40G" as a100, sxm and 40gb."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=\d) ?gi?b?\b", "gb", name.lower()))
    return {re.sub(r"^sxm\d$", "sxm", word) for word in words} - MAKERS


# MooreThreads/SimuMax configs/system/b200_bf16_ceperm.json: nine large forward products of 4096 tokens hold 0.474 to
# 0.512 of 2250 TFLOP/s, 0.724 of those of gemm.csv in the mean; other B200 hold what that file has
SIMUMAX_B200 = 0.724


def cluster_of(gpu: str, n: int, text: str = "") -> Cluster:
    """The GPUs of a row, whose source and notes are `text`: those that SimuMax measured hold their own products."""
    found = _usual(gpu, n, text)
    if found.device.name != "b200-sxm" or "simumax" not in text:
        return found
    best = Figure(SIMUMAX_B200 * gemm_table(found.device.table).best, "measured", "SimuMax b200_bf16_ceperm.json")
    return replace(found, device=replace(found.device, sustained_bf16_tflops=best))


def _usual(gpu: str, n: int, notes: str) -> Cluster:
    """So many GPUs of a kind as nodes of eight, or of a link domain's size, with their generation's usual ports."""
    name = device_name(gpu)
    if (domain := devices(name)[1].count) > 8:
        domain = 2 ** int(math.log2(domain)) if n > domain else domain  # jobs of several racks take 64 devices of 72
        return Cluster.parse(f"{n} {name}" if n <= domain else f"{-(-n // domain)}x{domain} {name}, ib-{OTHERS}")
    if n <= 8:
        return Cluster.parse(f"{n} {name}")
    link = "roce" if "roce" in notes else "ib"
    return Cluster.parse(f"{-(-n // 8)}x8 {name}, {link}-{PORTS.get(name.split('-')[0], OTHERS)}")


def as_run(gpu: str, text: str) -> str:
    """The device that a row ran on where its source says more: torchtitan's docs/performance.md of 2024 names H100 with
    HBM2e and less power, in tables that say H100."""
    return "H100-SXM-96GB" if "torchtitan" in text.lower() and gpu.lower().startswith("h100") else gpu


def software_name(file: str, row: Mapping[str, str]) -> str:
    """By what the file's name, the source and the notes say; by the layout where they say nothing."""
    text = " ".join((file, row["source"], row["notes"])).lower().replace("_", " ")
    for word, name in SOFTWARE:
        if word in text:
            return dated(name, f"{text} {row.get('url_or_arxiv', '')} {row.get('table', '')}".lower())
    return "fsdp" if row["dp_shard"].startswith("3") else "megatron-core-unfused-loss"


def dated(name: str, text: str) -> str:
    """Returns the software as it was at a row's date, where its source, table or notes tell one."""
    if name == "nemo" and {"23", "24"} >= set(re.findall(r"\b(2\d)\.(?:0[1-9]|1[0-2])\b", text)) > set():
        return "nemo-2024"
    if name == "nemo" and re.search(r"\b(?:20)?26[.-](?:0[6-9]|1[0-2])\b", text):
        return "nemo-2026"
    if name == "torchtitan":
        if re.search(r"\b2025[-/ ]?(0[4-9]|1[0-2])|\b202[6-9]", text):
            return "torchtitan-2025"
        return "torchtitan-eager" if re.search(r"\beager\b|without torch\.?compile|no compile", text) else name
    return name


def software_of(file: str, row: Mapping[str, str], layout: Layout) -> Software:
    """The software's facts, with what the row says of its own run."""
    found = software(software_name(file, row) + fp8_suffix(row))
    if found.name == "megatron-2021" and "ZeRO" in row["table"]:
        found = software("deepspeed-2021")
    if layout.schedule.startswith("zb"):
        found = replace(found, overlap_p2p=True)  # their runtime posts messages ahead; Megatron's schedules wait
    if found.name.startswith("llm-foundry") and "PURE" in row["notes"]:
        found = replace(found, states="bf16-full")
    device = device_name(row["gpu"])
    if found.name.startswith("nemo-2026"):
        plain = replace(found, dispatch="each", graphs="") if layout.ep == 1 else found
        found = bridge_2026(plain, row, layout, device, devices(device)[1].count > 8)
        found = replace(found, selective=bridge_recomputes(row) or found.selective)
    elif found.name.startswith("nemo"):
        found = bridge_recipe(found, row, layout)
    return as_told(found, row, device) if found.megatron else found


def unsaid_chunks(row: Mapping[str, str], layers: int, pp: int) -> int:
    """Stages of one rank where a row does not say it: Llama 3's pipeline is interleaved, one layer to a stage.

    Source: The Llama 3 Herd of Models (2024), section 3.3.2; the first and the last stage hold one layer less.
    """
    return math.ceil(layers / pp) if pp > 1 and "herd of models" in (row["source"] + row["notes"]).lower() else 1


def bridge_recipe(nemo: Software, row: Mapping[str, str], layout: Layout) -> Software:
    """What the recipes of NVIDIA-NeMo/Megatron-Bridge (scripts/performance) switch on for mixtures of experts.

    Dropped tokens: a step is one CUDA graph. On NVL72 HybridEP, and a CUDA graph of what stands before the experts.
    Elsewhere Megatron's own exchange (DeepSeek's: DeepEP), beside computing where a pipeline is interleaved, which
    Megatron asks for, by 20 of 132 processors (DeepEP's default).
    """
    if layout.ep == 1:
        return nemo
    nemo = replace(nemo, selective=bridge_recomputes(row) or nemo.selective)
    # the recipe of DeepSeek for H100 says overlap_grad_reduce = False
    waits = "deepseek" in row["model"].lower() and device_name(row["gpu"]).startswith("h100")
    nemo = replace(nemo, overlap_dp=not waits)
    if "tokendrop" in row["model"]:
        return replace(nemo, dispatch="each", drops=True, graphs="step")
    if devices(device_name(row["gpu"]))[1].count > 8:
        # Qwen's 30B has graphs of what routes alone there
        return replace(nemo, dispatch="hybridep", graphs="routing" if "30b" in row["model"].lower() else "attention")
    beside = 20 / 132 if layout.chunks > 1 else 0.0
    return replace(nemo, dispatch="deepep" if "deepseek" in row["model"].lower() else "each", overlap_ep=beside)


def bridge_recomputes(row: Mapping[str, str]) -> str:
    """What those recipes compute again, as `Software.selective` has it; "" where nothing is.

    But for GB300 what DeepSeek makes of its latents (mla_up_proj), norms and activations of GPT-OSS (layernorm,
    moe_act).
    """
    if software_name("", row) not in ("nemo", "nemo-2026") or device_name(row["gpu"]).startswith("gb300"):
        return ""
    name = re.sub(r"[_ ]", "-", row["model"].lower())
    return "latents" if "deepseek" in name else "activations" if "gpt-oss" in name else ""


def fp8_suffix(row: Mapping[str, str]) -> str:
    """The recipe of FP8 that a row's precision names, as what follows a software's name; "" where it has none.

    Where two are given, "FP8-CS (FP8-MX)", the row's figures are "first (second)", and the first is scored; by the
    footnote of the 25.09 tables of NVIDIA-NeMo/Megatron-Bridge the second ones are FP8 of another granularity too.
    """
    text = row["precision"].lower()
    if "nvfp4" in text:
        return FP8["blocks of 16"].suffix
    if "fp8" not in text:
        return ""
    if text.startswith(("fp8-mx", "mxfp8")):
        return FP8["blocks"].suffix
    return FP8["delayed" if software_name("", row) in ("llm-foundry", "nemo-2024") else "current"].suffix
