"""`load` makes one checked `Effective` configuration from files, `--set`, and options of a command or of `train`.

A later source overrides an earlier one: defaults, the file that is extended, the file, options (`--plan`, `--steps`),
`--set`. All mistakes are raised in one `InputError`, each with its source, key, value and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwise.config import plans
from shardwise.config.schema import BUILTIN_DEFAULTS, BUILTINS, Config, ModelSizes, is_folder, without_effect
from shardwise.config.sources import Given, from_file, from_overrides, from_table, located, problem
from shardwise.errors import InputError, did_you_mean, nearest
from shardwise.layout.other_words import as_ours, key_of
from shardwise.layout.plan import Plan
from shardwise.task_files import which_task

DEFAULT = "default"
TOP = ("extends", "plan")  # keys that stand above the first section
FEW = 20  # at most so many keys are listed in a message
EXPECTED = {
    "optimizer.betas": "expected two numbers, each at least 0 and below 1",
    "train.profile_steps": "expected first:last, such as 10:12",
    "train.device": "expected auto, cpu or a type such as cuda; each rank takes the device of its local rank",
    "train.name": "expected letters, digits, '.', '_' or '-', at most 100, for it becomes part of a folder's name",
}
WORDS = {
    "a valid integer": "a whole number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid number": "a number",
    "expected greater": "expected a number greater",
    "expected less": "expected a number less",
}


NO_TASK = (
    "no task is given, so the built-in text example is trained; one of your own: shardwise train my_tasks.py:NAME, "
    "or [task] in the configuration"
)


SCALING = {"optimizer.scale_lr", "optimizer.base_batch"}  # keys of [optimizer] that do not replace a task's optimizer


@dataclass(frozen=True)
class Effective:
    """The configuration in force."""

    config: Config
    plan: Plan
    sources: dict[str, str]  # dotted key that was set -> a file, an option, such as "--set"
    notes: tuple[str, ...] = ()  # notices for the user, such as on keys that a later source left without effect

    @property
    def builtin(self) -> bool:
        """Whether the task is a built-in one."""
        return self.config.task.name in BUILTINS

    @property
    def own_optimizer(self) -> bool:
        """Whether the task's own optimizer is used: the task is the user's, and no key but `SCALING` is set."""
        keys = {key for key in self.sources if key.startswith("optimizer.")}
        return not self.builtin and keys <= SCALING

    def source(self, key: str) -> str:
        """Returns where the key's value came from: a file, an option, or "default"."""
        return self.sources.get(key, DEFAULT)

    def is_set(self, key: str) -> bool:
        """Whether any source set the dotted key."""
        return key in self.sources


def load(path: str | Path | None = None, overrides: Sequence[str] = (), values: Sequence[Given] = ()) -> Effective:
    """Returns the checked configuration; `InputError` that lists every mistake.

    path       a TOML file; None: defaults
    overrides  "key=value" of each `--set`
    values     values of a command's other options, or of `train`'s arguments
    """
    problems: list[str] = []
    items = from_file(Path(path), problems) if path is not None else []
    # after a broken file only its mistakes are raised, since its missing values would be reported too
    broken_file = bool(problems)
    items += values
    # a key that is set by --set and by an option is a mistake
    items += _not_twice(values, from_overrides(overrides, problems), problems)
    if broken_file:
        _raise(problems)
    plan, plan_sources = plans.merge([g for g in items if _in_plan(g)], problems)
    items = [located(g) for g in items if not _in_plan(g)]
    config, notes, items = _validate(items, problems)
    _raise(problems)
    assert config is not None
    # without a task the built-in text task is trained, which the user may not expect
    if not any(key.startswith("task.") for key in _sources(items)):
        notes.append(NO_TASK)
    return Effective(config, plan, _sources(items) | plan_sources, tuple(notes))


def _in_plan(item: Given) -> bool:
    return item.key == "plan" or item.key.startswith("plan.")


def _not_twice(values: Sequence[Given], overrides: list[Given], problems: list[str]) -> list[Given]:
    """Returns `overrides`; adds a problem for each key that is in `values` too."""
    sources = {value.key: value.source for value in values}
    for item in overrides:
        if item.key in sources:
            problems.append(problem("--set", item.key, item.value, f"is given by {sources[item.key]} too"))
    return overrides


def _raise(problems: list[str]) -> None:
    if problems:
        unique = list(dict.fromkeys(problems))
        title = "1 mistake" if len(unique) == 1 else f"{len(unique)} mistakes"
        raise InputError(f"{title} in the configuration:\n  " + "\n  ".join(unique))


def _sources(items: list[Given]) -> dict[str, str]:
    return {item.key: item.source for item in items}


def _validate(items: list[Given], problems: list[str]) -> tuple[Config | None, list[str], list[Given]]:
    """Returns (checked configuration, notes, the values that have an effect); mistakes go into `problems`.

    The configuration is None if a value has a wrong type. Values that a later source left without effect are dropped,
    with a note.
    """
    config = _parse(items, problems)
    notes: list[str] = []
    while config is not None and (idle := _overruled(config, items)):  # dropping some may leave others without effect
        notes += idle.values()
        items = [item for item in items if item.key not in idle]
        config = _parse(items, problems)
    if config is None:
        return None, notes, items
    sources = _sources(items)
    named_in = sources.get("task.name", DEFAULT)
    inconsistent = _inconsistent(config, Path(named_in) if named_in.endswith(".toml") else None)
    nameless = "task.name" in dict(inconsistent)  # then it is not known which keys the task reads
    unused = without_effect(config, set(sources))
    unused = {key: why for key, why in unused.items() if not (nameless and why.decided_by == "task.name")}
    for key, item in {item.key: item for item in items}.items():
        if key in unused:
            text = f"would have no effect: {unused[key].reason}"
            problems.append(problem(item.source, key, item.value, text))
    for key, text in inconsistent:
        value, source = _at(config, key), sources.get(key, DEFAULT)
        problems.append(f"{key} {text}" if value is None else problem(source, key, value, text))
    return config, notes, items


def _parse(items: list[Given], problems: list[str]) -> Config | None:
    """Returns the checked configuration; None if a value is wrong, with each mistake in `problems`."""
    sources = _sources(items)
    name = {item.key: item.value for item in items}.get("task.name", next(iter(BUILTINS)))
    try:
        return Config.model_validate(_tree([*_builtin_defaults(name, sources), *items], problems))
    except ValidationError as error:
        for mistake in error.errors():
            key = ".".join(part for part in mistake["loc"] if isinstance(part, str))
            source = _source_below(key, sources)
            problems.append(problem(source, key, mistake["input"], _expected(key, dict(mistake))))
        return None


def _overruled(config: Config, items: list[Given]) -> dict[str, str]:
    """Returns {key: note} for keys that a later source leaves without effect (by `--set schedule.name=constant`)."""
    sources = _sources(items)
    strength = {source: place for place, source in enumerate(dict.fromkeys(item.source for item in items))}
    notes = {}
    for key, (reason, decided_by) in without_effect(config, set(sources)).items():
        mine, other = sources.get(key), sources.get(decided_by)
        one_line = (mine or "").startswith("--") and (other or "").startswith("--")  # on one command line: a mistake
        if mine and other and strength[other] > strength[mine] and not one_line:
            notes[key] = f"{mine}: {key} has no effect: {reason} ({decided_by} from {other})"
    return notes


def _builtin_defaults(name: Any, sources: dict[str, str]) -> list[Given]:
    defaults = BUILTIN_DEFAULTS.get(name, {}) if isinstance(name, str) else {}
    found = from_table(defaults, DEFAULT)
    return [d for d in found if d.key != "train.batch_samples" or "train.batch_tokens" not in sources]


def _tree(items: list[Given], problems: list[str]) -> dict[str, Any]:
    """Returns the values as nested dicts, from their dotted keys; mistakes go into `problems`."""
    tree: dict[str, Any] = {}
    for item in items:
        *tables, leaf = item.key.split(".")
        at = tree
        for table in tables:
            below = at.setdefault(table, {})
            if not isinstance(below, dict):
                text = f"{table} is a value, not a table"
                problems.append(problem(item.source, item.key, item.value, text))
                break
            at = below
        else:
            at[leaf] = item.value
    return tree


def _source_below(key: str, sources: dict[str, str]) -> str:
    """Returns the source of a key, or of the last key in the table of that name; "default" if neither was set."""
    below = [source for name, source in sources.items() if name == key or name.startswith(key + ".")]
    return below[-1] if below else DEFAULT


def _expected(key: str, mistake: dict[str, Any]) -> str:
    """Returns a text on what was expected for `key`; `mistake`: an entry of pydantic's `ValidationError.errors()`."""
    if mistake["type"] == "extra_forbidden":
        return "unknown key" + _nearest(key, mistake["input"])
    if mistake["type"] == "model_type":
        return "expected a table of keys and values"
    if key in EXPECTED:
        return EXPECTED[key]
    text = str(mistake["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    if mistake["type"] == "literal_error":
        text += did_you_mean(str(mistake["input"]), re.findall(r"'([^']+)'", text))
    return text


def _nearest(key: str, value: Any) -> str:
    """Returns a text on the key that was probably meant by an unknown one; "" without any idea.

    value   of the unknown key; a table of one key if a dot was typed in place of "_" (`checkpoint.every`)
    """
    table, _, leaf = key.rpartition(".")
    by_leaf: dict[str, str] = {}
    for name in keys():
        its_table, _, its_leaf = name.rpartition(".")
        # several tables may have a key of this name: prefer the table in which the user wrote it
        if its_leaf not in by_leaf or its_table == table:
            by_leaf[its_leaf] = name
    inner = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else ""
    # in order: a dot for an underscore, another library's name, a misplaced key, a misspelling
    if (joined := f"{key}_{inner}".replace(".", "_")) in by_leaf:
        return f"; did you mean '{by_leaf[joined]}'?"
    if (other := key_of(leaf)) is not None:
        return as_ours(other)
    if table and leaf in TOP:
        return f"; it stands below [{table}]: put it above the first section"
    siblings = [name for name, full in by_leaf.items() if full.rpartition(".")[0] == table]
    candidates = siblings if not by_leaf.get(leaf) else [leaf]
    near = nearest(leaf, candidates) or nearest(leaf, by_leaf)
    if near:
        return f"; did you mean '{by_leaf[near]}'?"
    if len(siblings) > FEW:
        return "; shardwise config --starter shows all keys"
    return f" (known: {', '.join(siblings)})" if siblings else ""


def keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Returns every dotted key of the configuration and of the plan, with tables.

    model, prefix   for recursion: the section and its dotted name with a final dot
    """
    names = [] if prefix else [*TOP, *(f"plan.{name}" for name in plans.KNOWN)]
    for name, field in model.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += keys(field.annotation, f"{prefix}{name}.")
    return names


def _at(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _inconsistent(config: Config, from_toml: Path | None) -> list[tuple[str, str]]:
    """Returns (key, problem) for values that contradict each other.

    from_toml   the configuration file that names the task; None: it is named elsewhere
    """
    task, optimizer, train = config.task, config.optimizer, config.train
    problems = _inconsistent_model(task.name, task.model)
    # a task is a built-in one, a folder, or "file:name"
    named = task.name in BUILTINS or is_folder(task.name) or all(task.name.rpartition(":"))
    if not named or "::" in task.name:
        problems.append(("task.name", which_task(task.name)))
    file, _, _ = task.name.rpartition(":")
    # a configuration that was moved may name a file at its old place
    if file.endswith(".py") and not Path(file).is_file() and from_toml is not None:
        near = did_you_mean(Path(file).name, sorted(path.name for path in from_toml.parent.glob("*.py")))
        moved = f"; where it was moved or renamed: --set task.name=FILE.py:{task.name.rpartition(':')[2]}"
        problems.append(("task.name", f"there is no file {file}, here or beside {from_toml}{near}{moved}"))
    if train.batch_tokens and task.seq_len and train.batch_tokens % task.seq_len:
        problems.append(("train.batch_tokens", f"expected a multiple of task.seq_len = {task.seq_len}"))
    # scale_lr computes batch / base_batch
    if optimizer.scale_lr != "none" and optimizer.base_batch is None:
        text = f"is not set: optimizer.scale_lr = {optimizer.scale_lr} needs the batch that lr was chosen for"
        problems.append(("optimizer.base_batch", text))
    return problems


def _inconsistent_model(task: str, model: ModelSizes) -> list[tuple[str, str]]:
    """Returns (key, problem) for sizes of [task.model] that do not divide each other; `task`: name of the task."""
    problems = []
    if model.hidden and model.heads and model.hidden % model.heads:
        problems.append(("task.model.hidden", f"expected a multiple of task.model.heads = {model.heads}"))
    # rotary positions rotate pairs of each head's elements
    elif task == "text" and model.hidden and model.heads and model.hidden // model.heads % 2:
        problems.append(("task.model.hidden", f"expected an even width for each of {model.heads} heads"))
    if model.kv_heads and model.heads and model.heads % model.kv_heads:
        problems.append(("task.model.kv_heads", f"expected a divisor of task.model.heads = {model.heads}"))
    # the digits are images of 8 x 8 pixels
    if model.patch and 8 % model.patch:
        problems.append(("task.model.patch", "expected a divisor of 8, the width of the digits"))
    return problems
