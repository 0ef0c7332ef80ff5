"""Writes a commented starter file, and the effective configuration with sources, as TOML.

`load` can read both; keys without effect are commented out, since `load` refuses them if they are set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from shardwise.config.effective import SCALING, Effective
from shardwise.config.schema import BUILTIN_DEFAULTS, Config, Section, without_effect
from shardwise.config.sources import to_toml
from shardwise.layout.plan import TOLD, Plan

STARTER_HEAD = """\
# A shardwise configuration. A line `# key = value` shows a default: remove its first `#` to change it.
# Run it:            shardwise train this-file.toml
# Change one value:  shardwise train this-file.toml --set optimizer.lr=3e-4
# Build on another:  put  extends = "base.toml"  at the top; a key here wins over the same key there.
"""


def starter() -> str:
    """Returns the text of a starter file, with every section and, in comments, every key, default and meaning."""
    lines = [STARTER_HEAD]
    config = _with_defaults("text")
    for name, section in config:
        lines += _starter_section(name, section)
        if name == "task":
            lines += _starter_plan()
    return "\n".join(lines)


def _with_defaults(builtin: str) -> Config:
    return Config.model_validate(BUILTIN_DEFAULTS[builtin])


def _starter_section(name: str, section: BaseModel) -> list[str]:
    """Returns the lines of a section and its tables, each key commented out with its default and meaning."""
    lines = [f"[{name}]"]
    tables = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section):
            tables.append((f"{name}.{key}", value))
            continue
        text = f"{key} =" + (f" {to_toml(value)}" if value is not None else "")
        lines.append(_line(text if f"{name}.{key}" == "task.name" else f"# {text}", field.description or ""))
    lines.append("")
    for table, value in tables:
        lines += _starter_section(table, value)
    return lines


def _starter_plan() -> list[str]:
    """Returns the lines of the section [plan], each key commented out with its default and meaning."""
    lines = [_line("[plan]", "how it is spread; the world size is the product of its degrees, without ep")]
    values = Plan().as_dict(defaults=True)
    lines += [_line(f"# {key} = {to_toml(values[key])}", text) for key, text in TOLD.items()]
    return [*lines, ""]


def show(effective: Effective) -> str:
    """Returns the effective configuration as TOML, each line ending with its source."""
    idle = without_effect(effective.config, set(effective.sources))
    unused = {key: why.reason for key, why in idle.items()}
    # the task's own optimizer is used, so keys of [optimizer] have no effect unless they are set
    if effective.own_optimizer:
        own = "the task's own optimizer runs; set any key of [optimizer] but scale_lr to replace it"
        keys = {f"optimizer.{key}" for key in type(effective.config.optimizer).model_fields}
        # scale_lr also scales a task's own optimizer
        unused |= {key: own for key in keys if key not in SCALING or not effective.is_set("optimizer.scale_lr")}
    lines = []
    for name, section in effective.config:
        lines += [*_section(name, section, effective, unused), ""]
        if name == "task":
            lines += [*_plan(effective), ""]
    return "\n".join(lines)


def _section(name: str, section: BaseModel, effective: Effective, unused: dict[str, str]) -> Iterator[str]:
    """Yields the lines of a section, each value with its source.

    unused   dotted key -> why it has no effect; these keys are commented out
    """
    tables = []
    yield f"[{name}]"
    for key in type(section).model_fields:
        dotted, value = f"{name}.{key}", getattr(section, key)
        # in TOML a subtable must come after the keys of its table
        if isinstance(value, Section):
            tables.append((dotted, value))
        elif dotted in unused:
            yield _line(f"# {key} =", f"no effect: {unused[dotted]}")
        elif value is None:
            yield _line(f"# {key} =", "not set")
        else:
            yield _line(f"{key} = {to_toml(value)}", effective.source(dotted))
    for table, value in tables:
        yield ""
        yield from _section(table, value, effective, unused)


def _plan(effective: Effective) -> Iterator[str]:
    yield _line("[plan]", f"{effective.plan.world_size} rank(s)")
    values: dict[str, Any] = effective.plan.as_dict(defaults=True)
    for field in fields(effective.plan):
        yield _line(f"{field.name} = {to_toml(values[field.name])}", effective.source(f"plan.{field.name}"))


def _line(text: str, comment: str) -> str:
    return f"{text:<32} # {comment}"
