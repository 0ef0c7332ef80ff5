"""Translates a configuration of DeepSpeed or Accelerate into a plan and settings, with a sentence on each key.

    ds_config.json, accelerate's .yaml --> dotted keys --> the function in `ROWS` of each --> plan, settings, sentences

A key without such a function has no counterpart in the plan and gets a sentence too, so nothing is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import InputError
from shardwise.layout import Plan

NONE = "no counterpart: left out"
OURS = "chosen by shardwise itself"
JOB = "of the job, not of the plan: `shardwise launch` asks for it"
AUTO = "auto: another library fills it in; give its value here"
LINEAR = "the warm-up is linear, from 0"
WARMUP = {"warmup_max_lr": 1e-3, "warmup_num_steps": 1000}
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {  # section -> type -> DeepSpeed's defaults that differ from ours
    "optimizer": {"adam": {"weight_decay": 0.0}, "adamw": {"weight_decay": 0.0}},
    "scheduler": {"warmuplr": WARMUP, "warmupdecaylr": WARMUP, "warmupcosinelr": {"warmup_num_steps": 1000}},
}
# section of Accelerate's file -> the distributed_type for which Accelerate reads it
SECTIONS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}


@dataclass
class Translation:
    """The translation of a file, filled in key by key; `finished` makes the plan of it.

    ranks        ranks of the run; None: not known
    machines     hosts of the run
    sharding     ZeRO stage over data ranks, 0 to 3
    plan         field of a plan -> value; settings: key of the configuration -> value (`--set`)
    micro_batch  samples of a micro-batch on a device; None: not given
    told         (key of the file, sentence on how it was translated)
    """

    ranks: int | None = None
    machines: int = 1
    sharding: int = 0
    hybrid: int = 0  # ranks of a shard group; 0: all data ranks
    plan: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    peak_lr: float | None = None  # learning rate that a schedule sets itself, overriding the optimizer's; None: none
    type_is_adam: bool = False  # whether the optimizer's type in the file is Adam
    told: list[tuple[str, str]] = field(default_factory=list)

    def finished(self) -> Plan:
        """Returns the plan, and completes `settings`; `InputError` if ranks are unknown or not divided by degrees."""
        if self.ranks is None:
            raise InputError("the file does not say how many ranks there are: give --ranks")
        others = 1
        for name in ("tp", "pp", "cp", "cp_ulysses"):
            others *= self.plan.get(name, 1)
        data, rest = divmod(self.ranks, others)
        if rest:
            raise InputError(f"{self.ranks} ranks are not a multiple of {others}, of tp, pp and cp together")
        values = dict(self.plan)
        # the file may give the data degrees itself
        if "dp_shard" not in values and "dp_replicate" not in values:
            values |= self._data_ranks(data)
        plan = Plan.from_dict(values)
        # DeepSpeed's schedule overrides the optimizer's learning rate
        if self.peak_lr is not None:
            self.settings["optimizer.lr"] = self.peak_lr
        # without a micro-batch size `accumulate` cannot be derived
        if self.micro_batch is None:
            return plan
        at_once = self.micro_batch * plan.data_ranks
        whole = self.settings.setdefault("train.batch_samples", at_once * plan.accumulate)
        return Plan.from_dict(values | {"accumulate": self.plan.get("accumulate", max(1, whole // at_once))})

    def _data_ranks(self, data: int) -> dict[str, Any]:
        """Returns {field of the plan: value} for `data` data ranks; `InputError` if shard groups do not divide them."""
        if self.sharding == 0 or data == 1:
            return {"dp_replicate": data}
        shard = self.hybrid or data
        if data % shard:
            raise InputError(f"{data} data ranks are not a multiple of {shard}, over which state is sharded")
        return {"dp_replicate": data // shard, "dp_shard": shard, "zero": self.sharding}


Row = Callable[[Translation, Any], str]  # (translation to fill in, value of a key) -> sentence on the key


def _field(name: str) -> Row:
    """Returns a function for `ROWS` that sets the plan's field `name` to the value as an int."""

    def row(made: Translation, value: Any) -> str:
        made.plan[name] = int(value)
        return f"{name}={int(value)}"

    return row


def _setting(name: str, kind: Callable[[Any], Any] = float) -> Row:
    """Returns a function for `ROWS` that sets the configuration key `name` to `kind(value)`."""

    def row(made: Translation, value: Any) -> str:
        made.settings[name] = kind(value)
        return f"--set {name}={json.dumps(kind(value))}"

    return row


def _sentence(text: str) -> Row:
    return lambda made, value: text


def _clip(made: Translation, value: Any) -> str:
    if float(value) == 0:
        return "no clipping, the default"
    return _setting("train.clip_norm")(made, value)


def _stage(made: Translation, value: Any) -> str:
    made.sharding = int(value)
    return (
        "dp_replicate: every rank has all state" if made.sharding == 0 else f"zero={made.sharding} over the data ranks"
    )


def _precision(name: str) -> Row:
    """Returns a function for `ROWS` that sets the plan's precision to `name` if the value is true."""

    def row(made: Translation, value: Any) -> str:
        if value is True:
            made.plan["precision"] = name
        return f"precision={name}" if value is True else "precision stays as it is"

    return row


def _mixed(made: Translation, value: Any) -> str:
    """Sets the plan's precision from Accelerate's `mixed_precision`; returns the sentence on the key."""
    if str(value) in ("no", "None", "False"):
        return "precision=fp32, the default"
    if str(value) == "fp8":
        return "no plan of this version runs FP8: left out"
    made.plan["precision"] = str(value)
    return f"precision={value}"


def _offload(made: Translation, value: Any) -> str:
    if str(value) in ("none", "None", "False"):
        return "nothing is offloaded"
    return _moved(made, "optimizer:disk" if str(value) == "nvme" else "optimizer")


def _offload_weights(made: Translation, value: Any) -> str:
    """Sets the plan's offload of parameters from DeepSpeed's `offload_param`; returns the sentence on the key."""
    if str(value) in ("none", "None", "False"):
        return "nothing is offloaded"
    told = _moved(made, "parameters")
    return (
        f"{told}, in the host's memory (a disk is for ranks whose device is the CPU)" if str(value) == "nvme" else told
    )


def _moved(made: Translation, part: str) -> str:
    made.plan["offload"] = "|".join([*filter(None, [made.plan.get("offload")]), part])
    return f"offload={part}"


def _micro(made: Translation, value: Any) -> str:
    made.micro_batch = int(value)
    return "train.batch_samples: this, times accumulate and the data ranks"


def _hybrid(made: Translation, value: Any) -> str:
    if int(value) > 0:
        made.hybrid = int(value)
    return f"dp_shard={value}, and dp_replicate for the rest of the data ranks"


def _optimizer(made: Translation, value: Any) -> str:
    """Sets optimizer.name from DeepSpeed's type; returns the sentence on the key."""
    name = str(value).lower().removeprefix("onebit").removeprefix("fused").removeprefix("cpu")
    if name not in ("adam", "adamw", "sgd", "adagrad", "rmsprop"):
        return f"{value} is none of shardwise's by name: give it as the task's optimizer"
    # DeepSpeed's Adam decays weights as AdamW does, unless adam_w_mode is false
    made.type_is_adam = name == "adam"
    made.settings["optimizer.name"] = "adamw" if name == "adam" else name
    return f"--set optimizer.name={made.settings['optimizer.name']}"


def _schedule(made: Translation, value: Any) -> str:
    """Sets schedule.name from DeepSpeed's type; returns the sentence on the key."""
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if value not in kinds:
        return f"{value} is none of constant, linear, cosine and wsd: give the nearest as schedule.name"
    made.settings["schedule.name"] = kinds[value]
    return f"--set schedule.name={kinds[value]}"


def _peak(made: Translation, value: Any) -> str:
    made.peak_lr = float(value)
    return f"--set optimizer.lr={made.peak_lr:g}: this schedule sets the rate, whatever the optimizer's is"


def _decoupled(made: Translation, value: Any) -> str:
    """Sets optimizer adam if adam_w_mode is false, which DeepSpeed reads for Adam alone; returns the sentence."""
    if value is False and made.type_is_adam:
        made.settings["optimizer.name"] = "adam"
    return f"--set optimizer.name={made.settings.get('optimizer.name', 'adamw')}"


def _distributed_optimizer(made: Translation, value: Any) -> str:
    made.sharding = int(str(value).lower() in ("true", "1"))
    return f"zero={made.sharding}"


def _distributed(made: Translation, value: Any) -> str:
    """Sets ranks and sharding from Accelerate's `distributed_type`; returns the sentence on the key."""
    if value == "NO":
        made.ranks = made.ranks or 1
        return "one process"
    if value in ("FSDP", "DEEPSPEED") and not made.sharding:
        made.sharding = 3
    known = {
        "FSDP": "state is sharded, by fsdp_config", "DEEPSPEED": "by deepspeed_config",
        "MULTI_GPU": "dp_replicate", "MULTI_CPU": "dp_replicate", "MEGATRON_LM": "by megatron_lm_config",
    }  # fmt: skip
    return known.get(str(value), f"{value}: {NONE}")


def _strategy(made: Translation, value: Any) -> str:
    """Sets the sharding from FSDP's strategy, a name or its number (from 1); returns the sentence on the key."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    name = names[int(value) - 1] if str(value).isdigit() and 1 <= int(value) <= len(names) else str(value)
    kinds = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
    if name not in kinds:
        return f"{value}: {NONE}"
    made.sharding = kinds[name]
    # hybrid: state is sharded within a machine and replicated over machines
    if name.startswith("HYBRID") and made.ranks:
        made.hybrid = made.ranks // made.machines
    return f"zero={kinds[name]}" if kinds[name] else "dp_replicate"


def _reshard(made: Translation, value: Any) -> str:
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        return _strategy(made, value)
    made.sharding = 3 if str(value).lower() == "true" else 2
    return f"zero={made.sharding}"


def _wrap(made: Translation, value: Any) -> str:
    made.plan["wrap"] = str(value).replace(",", "|")
    return f"wrap={made.plan['wrap']}"


def _true(name: str, value_if: Any, otherwise: str) -> Row:
    """Returns a function for `ROWS` that sets the plan's field `name` to `value_if` if the value is true.

    otherwise   sentence on the key if it is false
    """

    def row(made: Translation, value: Any) -> str:
        if str(value).lower() in ("true", "1"):
            made.plan[name] = value_if
            return f"{name}={str(value_if).lower()}"
        return otherwise

    return row


def _compile(made: Translation, value: Any) -> str:
    if str(value).upper() == "NO":
        return "compile=false, the default"
    made.plan["compile"] = True
    return "compile=true"


def _ranks(made: Translation, value: Any) -> str:
    made.ranks = made.ranks or int(value)
    return "the product of the plan's degrees"


def _machines(made: Translation, value: Any) -> str:
    made.machines = int(value)
    return f"shardwise launch --nodes {value}"


ZERO, FSDP = "zero_optimization.", "fsdp_config.fsdp_"
ROWS: dict[str, Row] = {
    "num_processes": _ranks, "num_machines": _machines, "distributed_type": _distributed,
    "mixed_precision": _mixed, "gradient_accumulation_steps": _field("accumulate"),
    "gradient_clipping": _clip, "bf16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"), "bfloat16.enabled": _precision("bf16"),
    "train_micro_batch_size_per_gpu": _micro, "train_batch_size": _setting("train.batch_samples", int),
    "steps_per_print": _setting("train.log_every", int), f"{ZERO}stage": _stage, "zero_stage": _stage,
    f"{ZERO}mics_shard_size": _hybrid, f"{ZERO}offload_optimizer.device": _offload,
    f"{ZERO}offload_param.device": _offload_weights, "offload_optimizer_device": _offload,
    "offload_param_device": _offload_weights,
    f"{ZERO}cpu_offload": _offload, "optimizer.type": _optimizer, "optimizer.params.lr": _setting("optimizer.lr"),
    "optimizer.params.eps": _setting("optimizer.eps"), "optimizer.params.momentum": _setting("optimizer.momentum"),
    "optimizer.params.weight_decay": _setting("optimizer.weight_decay"),
    "optimizer.params.betas": _setting("optimizer.betas", list), "optimizer.params.adam_w_mode": _decoupled,
    "scheduler.type": _schedule, "scheduler.params.warmup_max_lr": _peak,
    "scheduler.params.warmup_min_lr": _sentence(LINEAR), "scheduler.params.warmup_type": _sentence(LINEAR),
    "scheduler.params.warmup_min_ratio": _sentence(LINEAR),
    "scheduler.params.cos_min_ratio": _setting("schedule.final_factor"),
    "scheduler.params.warmup_num_steps": _setting("schedule.warmup_steps", int),
    "scheduler.params.total_num_steps": _setting("train.steps", int), "tensor_parallel.autotp_size": _field("tp"),
    "sequence_parallel_size": _field("cp_ulysses"), "pipeline.stages": _field("pp"),
    f"{FSDP}sharding_strategy": _strategy, f"{FSDP}reshard_after_forward": _reshard,
    f"{FSDP}transformer_layer_cls_to_wrap": _wrap,
    f"{FSDP}activation_checkpointing": _true("remat", "full", "remat=none, the default"),
    f"{FSDP}offload_params": _offload_weights, "dynamo_config.dynamo_backend": _compile, "dynamo_backend": _compile,
    "megatron_lm_config.megatron_lm_tp_degree": _field("tp"), "megatron_lm_config.megatron_lm_pp_degree": _field("pp"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": _true("sp", True, "sp=false, the default"),
    "megatron_lm_config.megatron_lm_num_micro_batches": _field("microbatches"),
    "megatron_lm_config.megatron_lm_gradient_clipping": _clip,
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": _distributed_optimizer,
    "megatron_lm_config.megatron_lm_recompute_activations": _true("remat", "selective", "remat=none, the default"),
    "parallelism_config.parallelism_config_tp_size": _field("tp"),
    "parallelism_config.parallelism_config_cp_size": _field("cp"),
    "parallelism_config.parallelism_config_dp_shard_size": _field("dp_shard"),
    "parallelism_config.parallelism_config_dp_replicate_size": _field("dp_replicate"),
    "machine_rank": _sentence(JOB), "main_process_ip": _sentence(JOB), "main_process_port": _sentence(JOB),
    "rdzv_backend": _sentence(JOB), "same_network": _sentence(JOB), "gpu_ids": _sentence(JOB),
    "use_cpu": _setting("train.device", lambda cpu: "cpu" if cpu in (True, "true") else "auto"),
    "wall_clock_breakdown": _sentence("--profile-steps 10:12 tells where a step goes"),
    "flops_profiler.enabled": _sentence("FLOPs are counted in every run"),
}  # fmt: skip
GROUPS = {  # beginning of keys that are not in `ROWS` -> sentence on them
    ZERO: OURS, FSDP: OURS, "fp16.": "the loss scale is dynamic, and grows and shrinks as torch's does",
    "bf16.": OURS, "optimizer.params.": NONE, "scheduler.params.": NONE, "activation_checkpointing.":
    "remat=full or remat=selective computes activations again", "communication_data_type": "reduce_dtype",
    "debug": NONE, "downcast_bf16": NONE,
}  # fmt: skip


def read(path: Path, ranks: int | None = None) -> Translation:
    """Returns the translation of a file; `InputError` if it is no configuration of DeepSpeed or Accelerate.

    ranks   number of ranks, in place of the file's; None: the file's
    """
    made = Translation(ranks)
    values = _parsed(path)
    if not any(key in ROWS or key.startswith(tuple(GROUPS)) for key, _ in _flat(values)):
        raise InputError(f"--from {path}: no key of it is one of DeepSpeed's or Accelerate's configurations")
    # DeepSpeed's defaults that differ from ours are translated as if the file gave them
    unsaid = dict(_unsaid(values))
    # ranks, machines and the optimizer's type come first, since other keys depend on them
    first = ("num_processes", "num_machines", "distributed_type", "optimizer.type", "deepspeed_config.optimizer.type")
    rows = sorted([*_flat(values), *unsaid.items()], key=lambda row: row[0] not in first)
    for key, value in rows:
        kind = SECTIONS.get(key.partition(".")[0])
        if kind is not None and values.get("distributed_type", kind) != kind:
            made.told.append((key, f"Accelerate reads it where distributed_type is {kind}: left out"))
            continue
        # Accelerate may refer to a file of DeepSpeed, whose values override those read so far
        if key.endswith("deepspeed_config_file"):
            if not (path.parent / str(value)).is_file():
                raise InputError(f"--from {path}: {key} names {value}, which is not beside it: put it there")
            inner = read(path.parent / str(value), made.ranks)
            made.peak_lr = inner.peak_lr
            made.plan |= inner.plan
            made.settings |= inner.settings
            made.sharding, made.hybrid, made.micro_batch = inner.sharding, inner.hybrid, inner.micro_batch
            made.told += [(f"{value}: {name}", text) for name, text in inner.told]
            continue
        text = _translated(made, key.removeprefix("deepspeed_config."), value)
        made.told.append((key, f"{text} (DeepSpeed's default)" if key in unsaid else text))
    return made


def _unsaid(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of DeepSpeed's defaults for keys that the file lacks, if ours differ."""
    for section, kinds in DEFAULTS.items():
        said = values.get(section)
        if isinstance(said, dict):
            params = said.get("params") or {}
            defaults = kinds.get(str(said.get("type")).lower(), {})
            yield from ((f"{section}.params.{key}", value) for key, value in defaults.items() if key not in params)


def _translated(made: Translation, key: str, value: Any) -> str:
    """Translates one key of the file into `made`; returns the sentence on it; `InputError` for a wrong value."""
    if value == "auto":
        return AUTO
    if value is None:
        return "not set"
    row = ROWS.get(key)
    if row is None:
        return next((text for start, text in GROUPS.items() if key.startswith(start)), NONE)
    try:
        return row(made, value)
    except (TypeError, ValueError):
        raise InputError(f"{key}: {value!r} is not a value that {key.rpartition('.')[2]} takes") from None


def _parsed(path: Path) -> dict[str, Any]:
    """Returns the mapping in a JSON or YAML file; `InputError` if it is neither or no mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"--from {path}: {error.strerror}") from None
    try:
        values = json.loads(text) if path.suffix == ".json" else _yaml(text)
    except ValueError as error:
        raise InputError(f"--from {path}: not JSON or YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"--from {path}: expected keys and values, as DeepSpeed's and Accelerate's files have")
    return values


def _yaml(text: str) -> Any:
    """Returns the value of a YAML text; `ValueError` if it is no YAML, `InputError` if PyYAML is not installed."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise InputError("--from: a YAML file is read by PyYAML: pip install pyyaml, or give it as JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each leaf of nested mappings; `prefix`: put before each key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
