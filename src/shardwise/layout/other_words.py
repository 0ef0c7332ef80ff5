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
        "offload=parameters under zero=3, the host's memory, or parameters:disk",
    ("optim_bits", "adam8bit", "adamw8bit", "adamw_8bit", "use_8bit_adam", "quantized_optimizer"):
        "optimizer_state=8bit",
    ("exp_avg_dtype", "exp_avg_sq_dtype", "moments", "bf16_optimizer_states", "use_precision_aware_optimizer"):
        "optimizer_state=bf16 or 8bit",
    ("store_param_remainders", "main_params_dtype", "bf16_master_weights"): "masters=split, beside precision=bf16",
    ("optimizer_in_bwd", "optimizer_in_backward"): "gradients=as_made",
    ("activation_offloading", "offload_activations", "activation_offload", "cpu_checkpointing"):
        "offload=activations, or offload=activations:disk",
    ("world_size", "nnodes", "nproc_per_node", "num_gpus", "gpus", "num_processes", "num_machines", "local_rank"):
        _RANKS,
    ("batch_size", "micro_batch_size", "global_batch"):
        "no key: the batch is the task's, or train.batch_samples; accumulate=N divides it",
    ("sbatch", "slurm", "srun", "qsub", "kubernetes", "kubeflow", "ray", "skypilot", "rdzv_endpoint", "hostfile"):
        _LAUNCHERS,
    ("docker", "container", "podman", "singularity", "apptainer"):
        "no key: start torchrun in each container, as docker run --shm-size=1g (docs/questions.md)",
    ("ds_config", "deepspeed_config", "accelerate_config"): "no key: shardwise plan --from FILE",
    ("wandb", "tensorboard", "mlflow"): "no key: train.sinks in a configuration; in a script its own lines on rank 0",
    ("lora", "peft", "adapters"): "no key: [lora] of a configuration, --set lora.rank=16",
    ("qlora",): "no key: [lora] over a base in precision=bf16; a base of 4 bits is not built",
}  # fmt: skip


KEY_OF = {  # arguments of trainers and of peft -> the key of a configuration, maybe with a remark
    ("num_train_epochs", "num_epochs", "max_epochs", "n_epochs"): "train.epochs",
    ("max_steps", "num_steps", "max_iters", "iterations", "train_iters", "total_steps"): "train.steps",
    ("per_device_train_batch_size", "train_batch_size", "batch_size", "global_batch_size", "global_batch"):
        "train.batch_samples, over all ranks",
    ("learning_rate", "max_lr", "base_lr"): "optimizer.lr",
    ("optim", "optimizer_type"): "optimizer.name",
    ("adam_epsilon", "epsilon"): "optimizer.eps",
    ("adam_beta1", "adam_beta2", "beta1", "beta2"): "optimizer.betas = [beta1, beta2]",
    ("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style"): "schedule.name",
    ("warmup_ratio", "warmup", "num_warmup_steps", "lr_warmup_steps"): "schedule.warmup_steps",
    ("min_lr", "min_lr_ratio"): "schedule.final_factor, a part of optimizer.lr",
    ("max_grad_norm", "gradient_clipping", "gradient_clip_val", "grad_clip", "clip_grad"): "train.clip_norm",
    ("output_dir", "default_root_dir", "save_dir", "log_dir"): "train.out",
    ("run_name", "experiment_name"): "train.name",
    ("logging_steps", "log_every_n_steps", "log_interval"): "train.log_every",
    ("save_steps", "save_interval", "save_strategy"): "train.checkpoint_every",
    ("save_total_limit", "save_top_k"): "train.checkpoint_keep",
    ("eval_steps", "val_check_interval", "eval_interval", "eval_strategy", "evaluation_strategy"): "train.eval_every",
    ("load_best_model_at_end",): "train.keep_best",
    ("dataloader_num_workers", "num_workers"): "train.workers",
    ("report_to", "logger"): "train.sinks",
    ("random_seed", "manual_seed"): "train.seed",
    ("max_seq_length", "max_seq_len", "max_length", "block_size", "context_length", "seq_length"): "task.seq_len",
    ("model_name_or_path", "model_name", "pretrained_model_name_or_path"): "task.name, a folder on this machine",
    ("train_file", "data_path", "train_files", "dataset"): "task.files",
    ("r", "lora_r", "lora_rank", "rank_dimension"): "lora.rank",
    ("lora_alpha",): "lora.alpha",
    ("lora_dropout",): "lora.dropout",
    ("target_modules", "lora_target_modules"): "lora.targets",
    ("modules_to_save",): "lora.whole",
    ("use_rslora",): "lora.rslora",
    ("use_dora",): "lora.dora",
    ("resume_from_checkpoint",): "no key: --resume RUN",
    ("accelerator",): "train.device",
    ("devices", "num_nodes"): "no key: the product of the plan's degrees",
    ("bf16", "fp16"): "plan.precision",
}  # fmt: skip


def key_of(word: str) -> str | None:
    """Returns the configuration key for another tool's `word`, maybe with a remark, or why there is none; else None."""
    ours = _of(KEY_OF, word)
    plan = None if ours else _of(OURS_OF, word)
    return ours or (f"plan.{plan}" if plan and is_key(plan) else plan)


def is_key(ours: str) -> bool:
    """Whether a result of `ours_of` or `key_of` names keys, and is no explanation why there is no key."""
    return not ours.startswith("no key") and ours != _RANKS


def as_ours(ours: str) -> str:
    """Returns the end of a message on another tool's word; `ours`: the result of `ours_of` or `key_of` for it."""
    return f"; that is {ours} here" if is_key(ours) else f"; here {ours.removeprefix('no key: ')}"


def ours_of(word: str, value: str = "") -> str | None:
    """Returns how a plan says another tool's `word` or `word=value`, or why it has no key; None if not known."""
    ours = _of(OURS_OF, word)
    if ours is None or not value:
        return ours
    # "zero_stage=2" has a row of its own for each value
    if word.lower().endswith("stage") and value.isdecimal():
        value = f"zero_{value}"
    # "tensor_parallel_size=8" fills the one N of "tp=N"; of two letters it is not clear which is meant
    elif value.isdecimal() and ours.count("N") == 1 and "M" not in ours:
        return ours.replace("=N", f"={value}")
    return _of(OURS_OF, value) or ours


def _of(table: dict[tuple[str, ...], str], word: str) -> str | None:
    plain = word.strip().lower().removeprefix("--").replace("-", "_").replace(" ", "_")
    return next((ours for words, ours in table.items() if plain in words), None)
