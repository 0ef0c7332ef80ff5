"""What a row's notes say of its own run of Megatron-Core, and what Megatron-Bridge's recipes switched on in 2026."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from shardwise.costs.layout import Layout
from shardwise.costs.software import MEGATRON_BUCKET, Software

# Processors that send rows beside computing, of a device's: DeepEP's default; HybridEP's `moe_hybridep_num_sms`, which
# is 32 in the recipes for H100 and 16 in those for GB200
DEEPEP, HYBRIDEP = 20 / 132, {"h100": 32 / 132, "h200": 32 / 132}
HYBRIDEP_ELSE = 16 / 148
DISPATCHERS = {"hybridep": "hybridep", "deepep": "deepep", "alltoall": "each"}
# Megatron's recompute modules beside layernorm, by the word for each, as `Software.selective` has them
RECOMPUTED = {"moe": "experts", "moe_act": "activations", "act": "activations", "up_proj": "latents"}
BESIDE = r"\b(?:ep|expert|a2a|moe) overlap|overlap of ep\b|1f1b overlap"


def sends_beside(dispatch: str, device: str) -> float:
    """The share of a device's processors that send rows where that is beside computing."""
    return HYBRIDEP.get(device[:4], HYBRIDEP_ELSE) if dispatch == "hybridep" else DEEPEP


def bridge_2026(nemo: Software, row: Mapping[str, str], layout: Layout, device: str, rack: bool) -> Software:
    """What Megatron-Bridge's recipes (src/megatron/bridge/perf_recipes, 26.06 to 26.08) switch on for mixtures.

    In MXFP8 on NVL72 a step is one CUDA graph, rows travel beside computing, and Transformer Engine's grouped products
    join the activation; attention of Qwen is in MXFP8 (fp8_dot_product_attention). In bf16 there, and for Qwen's 30B
    elsewhere, HybridEP and graphs of what routes. DeepSeek on H100 waits for its rows.
    """
    if layout.ep == 1:
        return nemo
    narrow = row["precision"].lower().startswith(("fp8-mx", "mxfp8"))
    name = row["model"].lower()
    if rack and narrow:
        attention = f"{nemo.attention}-mxfp8" if "qwen" in name else nemo.attention
        return replace(
            nemo, dispatch="hybridep", graphs="step", joins_experts=True, attention=attention,
            overlap_ep=sends_beside("hybridep", device),
        )  # fmt: skip
    if rack or "30b" in name:
        return replace(nemo, dispatch="hybridep", graphs="routing")
    if "deepseek" in name:
        return replace(nemo, dispatch="deepep", graphs="")
    return replace(nemo, dispatch="each", graphs="", overlap_ep=DEEPEP if layout.chunks > 1 else 0.0)


def as_told(found: Software, row: Mapping[str, str], device: str) -> Software:
    """The software with what the row's notes say of it: its dispatcher, its graphs, what runs beside computing."""
    notes = row["notes"].lower()
    dispatch = next((name for word, name in DISPATCHERS.items() if word in notes), None)
    if dispatch:
        found = replace(found, dispatch=dispatch, overlap_ep=0.0, graphs="")
    if re.search(BESIDE, notes):
        found = replace(found, overlap_ep=sends_beside(found.dispatch, device))
    if "graphs" in notes:
        found = replace(found, graphs=told_graphs(notes))
        if found.graphs != "step":  # the grouped products that join take the sizes of a graph's experts
            found = replace(found, joins_experts=False)
    told = re.search(r"recomputes ([\w ,]*)", notes)
    if told:
        words = set(re.findall(r"\w+", told[1]))
        found = replace(
            found, selective=next((kind for word, kind in RECOMPUTED.items() if word in words), "attention")
        )
    if "overlap_grad_reduce" in notes:
        found = replace(found, overlap_dp=True, overlap_gathers="overlap_param_gather" in notes, bucket=MEGATRON_BUCKET)
    if found.attention == "cudnn" and re.search(r"\b2026\b", f"{row['table']} {notes}"):
        found = replace(found, attention="cudnn-2026")
    return found


def told_graphs(notes: str) -> str:
    """What notes say is replayed as CUDA graphs, in the words of `Software.graphs`."""
    if re.search(r"\bno (?:cuda )?graphs", notes):
        return ""
    if re.search(r"full[- ]iteration|whole step", notes):
        return "step"
    parts = {"attention": "attn|attention", "routing": "router"}
    return "+".join(part for part, word in parts.items() if re.search(word, notes))
