"""The sections and keys of a configuration, as pydantic models, and which keys a configuration does not use.

`without_effect` finds the keys that a given configuration would not use, with the reason. A key that is set and
has no effect is an error, so that nothing is ignored silently.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

# name of a built-in task -> "module:function", which makes it from the [task] section
BUILTINS = {"text": "shardwise.training.builtin:text_task", "digits": "shardwise.training.builtin:digits_task"}
FOLDER = "shardwise.hf.folder_task:folder_task"  # makes the task of a checkpoint folder that is given as the task
PATHS = ("task.files", "task.tokenizer")  # keys whose values are paths, which are made absolute
NAME = r"^[\w][\w.-]{0,99}$"  # pattern of a run's name, which is part of its folder's name
UNITS = {"k": 1024, "M": 1024**2}

# name of an optimizer -> keys of [optimizer] that it reads besides lr
_ADAM = ("weight_decay", "betas", "eps")
OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "nadam": _ADAM,
    "radam": _ADAM,
    "adamax": _ADAM,
    "adagrad": ("weight_decay", "eps"),
    "rmsprop": ("weight_decay", "eps", "momentum"),
    "sgd": ("weight_decay", "momentum"),
}

# name of a built-in task -> section -> defaults in place of the schema's
BUILTIN_DEFAULTS: dict[str, dict[str, Any]] = {
    "text": {
        "task": {"seq_len": 256, "model": {"layers": 4, "hidden": 128, "heads": 4}},
        "train": {"batch_samples": 16, "generate": 200},
    },
    "digits": {
        "task": {"model": {"layers": 2, "hidden": 64, "heads": 4, "patch": 2}},
        "train": {"batch_samples": 64},
    },
}


def count(value: Any) -> Any:
    """Returns a text such as "64k" (64 * 1024) or "2M" (2 * 1024 * 1024) as an int; any other type unchanged.

    Raises `ValueError` for other texts.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+) ?([kM])", value.strip())
    if not match:
        raise ValueError('Input should be a whole number, or text such as "64k" (1024) or "2M" (1024 * 1024)')
    return int(match[1]) * UNITS[match[2]]


Count = Annotated[int, BeforeValidator(count)]


def _one_or_more(value: Any) -> Any:
    """Splits a str at commas into a list of words; returns any other value unchanged."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


def _renaming(value: str) -> str:
    """Returns "pattern=replacement" unchanged; `ValueError` if the pattern is no regular expression."""
    try:
        re.compile(value.partition("=")[0])
    except re.error as error:
        raise ValueError(rf"expected a regular expression before = ({error}): any text is .*, a dot is \.") from None
    return value


def _listed(value: Any) -> Any:
    """Wraps a single path (a str, not split at commas) in a list; returns any other value unchanged."""
    return [value] if isinstance(value, str) else value


class Section(BaseModel):
    """The base class of all sections, in which an unknown key or a value of a wrong type is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSizes(Section):
    """[task.model]: the sizes of a builtin task's model."""

    layers: int | None = Field(default=None, ge=1, description="blocks of the model")
    hidden: int | None = Field(default=None, ge=1, description="width of each token; a multiple of heads")
    heads: int | None = Field(default=None, ge=1, description="attention heads")
    kv_heads: int | None = Field(
        default=None, ge=1, description="key-value heads, a divisor of heads (text); not set: as heads"
    )
    intermediate: int | None = Field(
        default=None, ge=1, description="width of the feed-forward network; not set: 4 * hidden"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="chance that a feature is dropped")
    patch: int | None = Field(default=None, ge=1, description="pixels on a patch's side (digits; divides 8)")


class TaskSection(Section):
    """The section [task]: which task is trained."""

    name: str = Field(
        default="text",
        description='"text" | "digits" | "module:callable", your own function that returns a Task, or a folder '
        "with a model of transformers",
    )
    seq_len: int | None = Field(default=None, ge=2, description="tokens of one sample (text, a folder)")
    files: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed)] = Field(
        default=[],
        description='text, or JSON and parquet with a text each: files, patterns, "texts/*.txt", and folders (text); '
        "empty: Python's standard library; the same, or examples (a folder)",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="folder with a tokenizer.json, for the files; not set: bytes, or the folder's",
    )
    model: ModelSizes = Field(default=ModelSizes(), description="sizes of a builtin task's model")


class LoraSection(Section):
    """[lora]: low-rank adapters beside frozen layers (extra lora); in force once rank is set."""

    rank: int | None = Field(default=None, ge=1, description="width of the adapters; not set: none")
    alpha: float | None = Field(
        default=None, gt=0, description="an adapter's output is multiplied by alpha / rank; not set: as rank"
    )
    targets: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_one_or_more)] = Field(
        default=["all-linear"],
        min_length=1,
        description='layers with adapters: ends of their names with * and ?, "q_proj"; "all-linear": all, '
        "of transformers' models but the output's",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="chance that a feature is dropped before an adapter")
    rslora: bool = Field(default=False, description="multiplied by alpha / sqrt(rank) instead")
    dora: bool = Field(default=False, description="with a trained length of each row beside the adapter")
    whole: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_one_or_more)] = Field(
        default=[], description="modules that are trained whole, named as in targets"
    )


class OptimizerSection(Section):
    """[optimizer]: replaces that of a task of your own once a key is set; `scale_lr` alone scales the task's own."""

    name: Literal["adamw", "adam", "nadam", "radam", "adamax", "adagrad", "rmsprop", "sgd"] = Field(
        default="adamw", description="adamw | adam | nadam | radam | adamax | adagrad | rmsprop | sgd"
    )
    lr: float = Field(default=1e-3, gt=0, description="learning rate before the schedule's factor")
    weight_decay: float | None = Field(
        default=None, ge=0, description="of matrices (norms and biases have none); not set: torch's default"
    )
    betas: list[Annotated[float, Field(ge=0, lt=1)]] | None = Field(
        default=None, min_length=2, max_length=2, description="two decay rates (the adam family)"
    )
    eps: float | None = Field(default=None, ge=0, description="added to the denominator (all but sgd)")
    momentum: float | None = Field(default=None, ge=0, description="of sgd and rmsprop")
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="none | linear | sqrt: lr is multiplied by (batch / base_batch), or by its root"
    )
    base_batch: Count | None = Field(
        default=None, ge=1, description="batch for which lr was chosen: samples, or tokens where batch_tokens is set"
    )


class ScheduleSection(Section):
    """[schedule]: the factor on the learning rate at each optimizer step."""

    name: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="constant",
        description="constant | cosine | linear | wsd (warm-up, stable, decay), all after the warm-up",
    )
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps in which the factor rises linearly to 1")
    decay_fraction: float = Field(default=0.2, gt=0, le=1, description="part of all steps that decays at the end (wsd)")
    decay_steps: int | None = Field(default=None, ge=1, description="the same, as a number of steps (wsd)")
    final_factor: float = Field(
        default=0.0, ge=0, le=1, description="what it decays to, reached after the last step (cosine, linear, wsd)"
    )


class TrainSection(Section):
    """[train]: how long, how much at once, and what is written."""

    steps: int | None = Field(default=None, ge=1, description="optimizer steps; 100 when epochs is not set either")
    epochs: float | None = Field(default=None, gt=0, description="passes over the data, instead of steps")
    batch_samples: Count | None = Field(default=None, ge=1, description="samples of one optimizer step, over all ranks")
    batch_tokens: Count | None = Field(
        default=None, ge=1, description='the same in tokens (text): a multiple of seq_len; "64k" is 64 * 1024'
    )
    seed: int = Field(default=0, ge=0, description="of the initial weights, dropout and the order of the data")
    randomness: Literal["global", "fast"] = Field(
        default="global",
        description="global | fast: random numbers (dropout) of one process under every plan, or each rank's own",
    )
    clip_norm: float | None = Field(default=None, gt=0, description="largest norm of the gradient over all ranks")
    on_nonfinite: Literal["raise", "skip"] = Field(
        default="raise", description="raise | skip: what a loss or gradient that is not finite does to the run"
    )
    workers: int = Field(
        default=0, ge=0, description="processes on each rank that read its samples; 0: a thread of the rank itself"
    )
    eval_every: int | None = Field(
        default=None,
        ge=0,
        description="steps between evaluations on held-out data; not set: at the end only; 0: never",
    )
    eval_samples: int = Field(default=256, ge=0, description="held-out samples of one evaluation; 0: all of them")
    keep_best: bool = Field(
        default=False, description="write the weights of the smallest held-out loss so far as best.safetensors"
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="of a moving average of the weights, evaluated beside them and written as ema.safetensors",
    )
    checkpoint_every: int | None = Field(
        default=None, ge=0, description="steps between checkpoints; not set: by time; 0: none, and no stop by signals"
    )
    checkpoint_minutes: float = Field(
        default=15.0, gt=0, description="minutes between checkpoints where checkpoint_every is not set"
    )
    checkpoint_folder: str | None = Field(
        default=None,
        description="where checkpoints lie, in a folder of the run's name: a folder, or an address of a store that "
        "fsspec reads (s3://...); not set: in the run's folder",
    )
    checkpoint_keep: int = Field(default=2, ge=1, description="checkpoints that stay; older ones are removed")
    checkpoint_background: bool = Field(
        default=True, description="a process of its own writes them while training goes on"
    )
    restarts: int = Field(
        default=0, ge=0, description="how often the run is started again, from its last checkpoint, when a rank fails"
    )
    min_ranks: int | None = Field(
        default=None,
        ge=1,
        description="an elastic run: with fewer ranks left, but at least these, the data degrees of the plan shrink",
    )
    start_deadline: float = Field(
        default=1800.0, ge=0, description="seconds in which a rank must do something before its first step; 0: none"
    )
    step_deadline: float = Field(
        default=1200.0, ge=0, description="the same in a step: a collective, a micro-batch; 0: none"
    )
    save_deadline: float = Field(
        default=1800.0, ge=0, description="the same while a checkpoint or the weights are written; 0: none"
    )
    check_replicas: int | None = Field(
        default=None,
        ge=1,
        description="steps between comparisons of what several ranks hold alike, bit for bit, and before each "
        "checkpoint; not set: none",
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="weights to begin with: a run, a checkpoint, or safetensors; names and shapes that agree are taken",
    )
    init_rename: list[Annotated[str, Field(pattern="^[^=]+=.*$"), AfterValidator(_renaming)]] = Field(
        default=[], description='"pattern=replacement" on the names in init_from, regular expressions, in turn'
    )
    sinks: Annotated[list[Literal["tensorboard", "mlflow", "wandb"]], BeforeValidator(_one_or_more)] = Field(
        default=[], description='other writers of the metrics: any of "tensorboard", "mlflow", "wandb"'
    )
    log_every: int = Field(default=10, ge=1, description="steps between printed lines where there is no live display")
    out: str = Field(default="runs", min_length=1, description="folder of the run folders")
    name: str | None = Field(
        default=None,
        pattern=NAME,
        description="the run's name in its folder's name; the task's when not set",
    )
    profile_steps: str | None = Field(
        default=None,
        pattern=r"^\d+:\d+$",
        description='steps to trace, "10:12" for 10 and 11: a file for each rank, and a table of where they went',
    )
    cluster: str | None = Field(
        default=None,
        min_length=1,
        description="cluster file of `shardwise probe`: the run writes its forecast beside what it measures",
    )
    generate: int = Field(default=0, ge=0, description="tokens that the model writes at the end (text)")
    device: str = Field(
        default="auto",
        pattern="^[a-z0-9_]+$",
        description="auto (the accelerator if there is one), cpu, or the type of the accelerator: cuda, xpu, npu, mps",
    )


# keys on which training does not depend, so a resumed run has no notice if they changed
NOT_TRAINED = re.compile(
    r"train\.(out|name|log_every|sinks|profile_steps|cluster|checkpoint_\w+|\w+_deadline|restarts|min_ranks|"
    r"check_replicas|device|workers)"
)


class Config(Section):
    """A configuration without `[plan]`, which is a `shardwise.Plan`."""

    task: TaskSection = Field(default=TaskSection())
    lora: LoraSection = Field(default=LoraSection())
    optimizer: OptimizerSection = Field(default=OptimizerSection())
    schedule: ScheduleSection = Field(default=ScheduleSection())
    train: TrainSection = Field(default=TrainSection())


class Unused(NamedTuple):
    """The reason why a key has no effect, and the key whose value is that reason."""

    reason: str
    decided_by: str


def without_effect(config: Config, set_keys: set[str]) -> dict[str, Unused]:
    """Returns {dotted key that this configuration does not use: why}; `set_keys`: the keys that were set."""
    by_task = _task_without_effect(config.task.name)
    if not config.task.files:
        by_task.setdefault("task.tokenizer", "task.files is not set")
    unused = {key: Unused(reason, "task.name") for key, reason in by_task.items()}
    if config.lora.rank is None:
        unused |= {f"lora.{key}": Unused("lora.rank is not set", "lora.rank") for key in _BESIDE_RANK}
    optimizer, schedule, train = config.optimizer, config.schedule, config.train
    for key in {option for options in OPTIMIZER_OPTIONS.values() for option in options}:
        if key not in OPTIMIZER_OPTIONS[optimizer.name]:
            unused[f"optimizer.{key}"] = Unused(f"{optimizer.name} does not read it", "optimizer.name")
    if optimizer.scale_lr == "none":
        unused["optimizer.base_batch"] = Unused("optimizer.scale_lr is none", "optimizer.scale_lr")
    for key in _DECAY if schedule.name == "constant" else ():
        unused[key] = Unused("the constant schedule does not decay", "schedule.name")
    for key in _DECAY[1:] if schedule.name in ("cosine", "linear") else ():
        unused[key] = Unused(f"{schedule.name} decays over all steps after the warm-up", "schedule.name")
    if train.checkpoint_every is not None:  # steps are used instead of minutes
        unused["train.checkpoint_minutes"] = Unused("train.checkpoint_every is set", "train.checkpoint_every")
    if train.checkpoint_every == 0:
        for key in ("train.checkpoint_keep", "train.checkpoint_background"):
            unused[key] = Unused("train.checkpoint_every is 0", "train.checkpoint_every")
    if train.init_from is None:
        unused["train.init_rename"] = Unused("train.init_from is not set", "train.init_from")
    if train.eval_every == 0:
        for key in ("train.eval_samples", "train.keep_best"):
            unused[key] = Unused("train.eval_every is 0", "train.eval_every")
    # of two alternative keys, the one that is set makes the other unused; setting both is a mistake
    for key, other in EXCLUSIVE:
        if {key, other} <= set_keys:
            unused[key] = Unused(f"{other} is set too: give one of them", other)
            unused[other] = Unused(f"{key} is set too: give one of them", key)
        elif other in set_keys:
            unused[key] = Unused(f"{other} is set", other)
    return unused


_BESIDE_RANK = [key for key in LoraSection.model_fields if key != "rank"]
EXCLUSIVE = (
    ("train.steps", "train.epochs"),
    ("train.batch_samples", "train.batch_tokens"),
    ("schedule.decay_fraction", "schedule.decay_steps"),
)
_DECAY = ("schedule.final_factor", "schedule.decay_fraction", "schedule.decay_steps")


def is_folder(name: str) -> bool:
    """Whether a task's name is the path of a checkpoint folder of transformers."""
    return (Path(name) / "config.json").is_file()


def _task_without_effect(name: str) -> dict[str, str]:
    """Returns {dotted key: why the task of this name does not read it}."""
    if name == "text":
        return {"task.model.patch": "the text model has no patches"}
    only_text = {
        "task.seq_len": "only the text task and a folder of transformers read it",
        "task.files": "only the text task and a folder of transformers read files",
        "task.tokenizer": "only the text task and a folder of transformers read files",
        "train.batch_tokens": "only the text task counts tokens: give train.batch_samples",
        "train.generate": "only the text task writes text",
    }
    if is_folder(name):
        kept = ("task.seq_len", "task.files", "task.tokenizer")
        sizes = {f"task.model.{key}": "the folder's model has its own sizes" for key in ModelSizes.model_fields}
        return {key: why for key, why in only_text.items() if key not in kept} | sizes
    if name == "digits":
        return only_text | {"task.model.kv_heads": "only the text model groups its heads"}
    own = "the model of your own task has its sizes in its code"
    return only_text | {f"task.model.{key}": own for key in ModelSizes.model_fields}
