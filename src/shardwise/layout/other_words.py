"""What other tools call a technique or a setting, and how a plan says it here. The glossary has the same table."""

from __future__ import annotations

_RANKS = "the product of the plan's degrees; ranks are started by torchrun, srun, or --nproc"
_LAUNCHERS = "no key: shardwise launch --on slurm, pbs, k8s, ray, sky, torchrun or hosts (docs/launch.md)"

OURS_OF = {
    ("dp", "data_parallel"): "dp_replicate=N (replicas) or dp_shard=N",
    ("ddp", "distributed_data_parallel", "no_shard", "multi_gpu"): "dp_replicate=N",
    ("fsdp", "fsdp2", "fully_shard", "full_shard", "zero_3"): "dp_shard=N,zero=3",
    ("shard_grad_op", "zero_2"): "dp_shard=N,zero=2",
    ("distributed_optimizer", "use_distributed_optimizer", "zero_redundancy_optimizer", "zero_1"): "dp_shard=N,zero=1",
    ("hsdp", "hybrid_shard"): "dp_replicate=M,dp_shard=N,zero=3",
    ("sharding_strategy", "zero_stage", "zero_optimization", "stage", "deepspeed"): "dp_shard=N,zero=1, 2 or 3",
    ("mp", "model_parallel", "tensor_parallel", "tensor_model_parallel_size", "tp_size", "autotp_size", "tp_plan"):
        "tp=N",
    ("pipeline", "pipeline_parallel", "pipeline_model_parallel_size", "pp_size"): "pp=N",
    ("virtual_pipeline_model_parallel_size", "virtual_stages"): "stages_per_rank=N, beside pp",
    ("sequence_parallel",): "sp=true, beside tp=N",
    ("context_parallel", "context_parallel_size", "ring_attention", "cp_size"): "cp=N",
    ("ulysses", "sequence_parallel_size", "sp_size"): "cp_ulysses=N",
    ("expert_parallel", "expert_model_parallel_size", "ep_size", "moe"): "ep=N",
    ("gradient_checkpointing", "activation_checkpointing", "checkpointing", "recompute", "recompute_granularity"):
        "remat=full or remat=selective",
    ("gradient_accumulation", "gradient_accumulation_steps", "grad_accum"): "accumulate=N",
    ("mixed_precision", "amp", "autocast", "dtype"): "precision=bf16 or fp16",
    ("torch_compile",): "compile=true",
    ("cpu_offload", "zero_offload", "zero_infinity", "offload_optimizer"):
        "offload=optimizer, or offload=optimizer:disk",
    ("offload_param", "offload_params", "param_offload", "cpuoffloadpolicy"):
        "offload=parameters:disk under zero=3, or offload=optimizer",
    ("activation_offloading", "offload_activations", "activation_offload", "cpu_checkpointing"):
        "offload=activations, or offload=activations:disk",
    ("world_size", "nnodes", "nproc_per_node", "num_gpus", "gpus"): _RANKS,
    ("batch_size", "micro_batch_size", "global_batch"):
        "no key: the batch is the task's, or train.batch_samples; accumulate=N divides it",
    ("sbatch", "slurm", "srun", "qsub", "kubernetes", "kubeflow", "ray", "skypilot", "rdzv_endpoint", "hostfile"):
        _LAUNCHERS,
    ("ds_config", "deepspeed_config", "accelerate_config"): "no key: shardwise plan --from FILE",
    ("wandb", "tensorboard", "mlflow"): "no key: train.sinks in a configuration; in a script its own lines on rank 0",
    ("lora", "peft", "adapters"): "no key of a plan: [lora] of a configuration, --set lora.rank=16",
    ("qlora",): "[lora] over a base in precision=bf16; a base of 4 bits is not built",
}  # fmt: skip


def ours_of(word: str, value: str = "") -> str | None:
    """Returns how a plan says another tool's `word`, or `word=value`; None for a word that is not known."""
    ours = _ours(word)
    if ours is None or not value:
        return ours
    if word.lower().endswith("stage") and value.isdecimal():
        value = f"zero_{value}"
    elif value.isdecimal() and ours.count("N") == 1 and "M" not in ours:
        return ours.replace("=N", f"={value}")
    return _ours(value) or ours


def _ours(word: str) -> str | None:
    plain = word.strip().lower().removeprefix("--").replace("-", "_").replace(" ", "_")
    return next((ours for words, ours in OURS_OF.items() if plain in words), None)
