"""`VARIANTS`: the implementations of `costs/software` in other versions or with other switches, as data."""

from __future__ import annotations

from typing import Any

# fully_shard copies gathered weights out of its buffer (read and written in bf16, for forward and for backward) and
# casts gradients to float32 on their way into the buffer that is scattered (torch/distributed/fsdp/_fully_shard)
FSDP2_BYTES = 2 * (2 + 2) + (2 + 4)

# (name of the variant, name of the `Software` it is a variant of, {field: value} that differs)
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "megatron-deepspeed", "megatron-2021",
        {"accumulates": False, "widens": True, "states": "bf16-deepspeed", "grad_reduce_bytes": 4.0, "source":
         "Megatron-DeepSpeed of 2022, as BLOOM was trained: its pipeline, and a BF16 optimizer that copies each "
         "gradient into float32 and adds that to its sum (deepspeed/runtime/bf16_optimizer.py)"},
    ),
    (
        "deepspeed-2021", "megatron-2021",
        {"split_sends": False, "prefetch": "none", "gathers_per_unit": 12, "gathers_again": True, "copies_us": 8.0,
         "accumulates": False, "states": "fp16-apex", "source": "ZeRO-3 of DeepSpeed as run in Narayanan et al. 2021, "
         "section 5.2"},
    ),
    (
        "megatron-flash", "megatron-2021",
        {"attention": "flash2", "split_sends": False, "grad_reduce_bytes": 4.0, "logit_peak_bytes": 6.0, "source":
         "Megatron-LM of 2023 with --use-flash-attn, before Transformer Engine: nothing overlaps"},
    ),
    (
        "megatron-core-unfused-loss", "megatron-core",
        {"loss": "parallel", "source": "the same with the cross-entropy of its defaults: a float32 copy of the logits "
         "that becomes softmax and gradient in place"},
    ),
    (
        "nemo-2024", "nemo",
        {"attention": "flash2", "loss": "parallel", "dispatch": "each", "source": "NeMo until 24.12: FlashAttention-2, "
         "since its launcher switched cuDNN's attention off (NVTE_FUSED_ATTN: 0 in launcher_scripts/conf/config.yaml); "
         "a cross-entropy that is not fused"},
    ),
    (
        "nemo-2026", "nemo",
        {"attention": "cudnn-2026", "dispatch": "hybridep", "graphs": "routing", "source": "Megatron-Bridge of 2026 "
         "(perf_recipes, 26.06 to 26.08): cuDNN 9.18 and later, HybridEP, CUDA graphs of what routes rows to experts"},
    ),
    (
        "nemo-2026-graphs", "nemo-2026",
        {"attention": "cudnn-2026-mxfp8", "graphs": "step", "joins_experts": True, "overlap_ep": 16 / 148, "source":
         "the same on NVL72 in MXFP8: a step is one CUDA graph, rows of experts travel beside computing by 16 of 148 "
         "processors, grouped products join experts' activation (NVTE_CUTEDSL_FUSED_GROUPED_MLP), attention in MXFP8"},
    ),
    (
        "deepseek-v2", "deepseek",
        {"attention": "flash2", "overlap_ep": 0.0, "source": "DeepSeek-V2 (DeepSeek-AI 2024, section 3.1.3): a "
         "FlashAttention-2 of their own; rows of experts are waited for (not counted: what shared experts hide of it)"},
    ),
    (
        "automodel", "fsdp",
        {"attention": "cudnn", "fused": True, "dispatch": "deepep", "states": "bf16-full", "unit_bytes": FSDP2_BYTES,
         "grad_reduce_bytes": 4.0, "in_parts": True, "weighs_first": True, "source": "NeMo AutoModel: FSDP2, which "
         "sums gradients in float32; kernels of Transformer Engine, DeepEP, the rest in bf16 (its benchmark configs)"},
    ),
    (
        "maxtext", "automodel",
        {"unit_bytes": 0.0, "grad_reduce_bytes": 2.0, "in_parts": False, "source": "MaxText and Pax: blocks that XLA "
         "fuses, cuDNN's attention, gradients summed in bf16 (not counted: products that its remat policies keep)"},
    ),
    (
        "internevo", "fsdp",
        {"stops_early": False, "states": "bf16-grads", "loss": "fused", "kept_gathered": 0, "source": "InternEvo of "
         "2023 and 2024: eager, FlashAttention-2 and its cross-entropy; gradients are reduced beside backward"},
    ),
    (
        "torchtitan-eager", "torchtitan",
        {"fused": False, "waits": False, "source": "torchtitan without torch.compile"},
    ),
    (
        "torchtitan-2025", "torchtitan",
        {"loss": "fused", "logit_peak_bytes": 4.0, "cut_logit_bytes": 0.0, "kept_gathered": 1, "source": "torchtitan "
         "since April 2025: the loss is compiled too (pull request 1033): logits are read in bf16, their gradient is "
         "written; embedding and output matrix are units of their own"},
    ),
    (
        "torchtune", "torchtitan",
        {"states": "bf16-full", "grad_reduce_bytes": 2.0, "logit_peak_bytes": 2 + 2 + 8 / 8, "cut_logit_bytes": 0.0,
         "kept_gathered": 0, "source": "torchtune, compiled: all in bf16; logits in chunks (CEWithChunkedOutputLoss)"},
    ),
    *((f"{of}-no-sync", of, {"sums_once": True, "source": f"{of}, with no_sync"}) for of in ("torchtitan", "fsdp")),
    ("torchtune-in-backward", "torchtune", {"in_backward": True, "source": "torchtune with optimizer_in_bwd"}),
)  # fmt: skip
