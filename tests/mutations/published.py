"""Planted bugs that others had: a public thread that describes the same mistake, by the planted bug's name."""

from __future__ import annotations

PUBLISHED: dict[str, str] = {
    "gradients of norms are sums that nobody takes (sp)": "NVIDIA/Megatron-LM 1446",
    "gradients of keys from other ranks are dropped": "huggingface/diffusers 14265",
    "the norm is the last stage's": "pytorch/torchtitan 596",
    "each rank divides by its own weight": "meta-pytorch/torchtune 1875",
    "each rank's count of values stands for all": "pytorch/pytorch 22192",
    "statistics are not differentiated": "pytorch/pytorch 36382",
    "masks start from the first sample on every rank": "huggingface/transformers 31412",
    "the schedule is stepped twice": "huggingface/accelerate 2926",
    "zero=2 keeps the last micro-batch's gradient alone": "allenai/open-instruct 1498",
    "replicas sum gradients with the first micro-batch": "deepspeedai/DeepSpeed 7985",
    "a tied weight's gradient lacks the other stage's share": "uw-syfi/piper 13",
    "the late part of a backward leaves out shared weights": "pytorch/pytorch 180952",
    "an extra term is not differentiated": "NVIDIA-NeMo/Automodel 1412",
    "the sum over ranks has no adjoint": "NVIDIA-NeMo/Automodel 2995",
    "a sum over tp is left out": "pytorch/torchtitan 4054",
    "a key head that several ranks read keeps its own gradient": "bigcode-project/Megatron-LM 37",
    "a bias is added once on each rank of tp": "PaddlePaddle/Paddle 35186",
    "sections of a fused weight lie rank by rank": "ndif-team/nnsight 719",
    "every rank of tp holds the first share": "vllm-project/vllm-gguf-plugin 103",
    "every epoch has the first one's order": "huggingface/transformers 4398",
    "recompute advances running statistics twice": "pytorch/pytorch 96136",
    "the norm leaves out other ranks' pieces": "sgl-project/SpecForge 663",
    "the norm counts replicas": "ByteDance-Seed/VeOmni 184",
    "FSDP2 never sums over replicas": "verl-project/verl 7493",
    "experts are not summed over those that hold the same": "facebookresearch/fairseq 4220",
    "experts are summed over ranks that hold others": "NVIDIA/Megatron-LM 5916",
    "the average stays in the weights": "PKU-YuanGroup/Open-Sora-Plan 186",
    "norms and biases decay too": "ServiceNow/Fast-LLM 545",
    "the loss scale is not divided out": "milesial/Pytorch-UNet 468",
    "evaluations leave the module in evaluation mode": "wkentaro/pytorch-fcn 56",
    "evaluations run in training mode": "wolny/pytorch-3dunet 53",
}


def link(name: str) -> str:
    """Returns the thread as Markdown; empty for a bug of our own making."""
    repository, _, number = PUBLISHED.get(name, "").partition(" ")
    return f"[{repository} {number}](https://github.com/{repository}/issues/{number})" if number else ""
