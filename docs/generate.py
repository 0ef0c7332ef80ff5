"""Write the generated pages of the documentation: `python docs/generate.py`, or `--check` that they are up to date.

compatibility.md   the rules by which plans are refused (src/shardwise/layout/rules.py)
config.md          every key of a configuration (src/shardwise/config/schema.py) and of a plan
tables/schedules.md  what pipeline schedules wait and hold (src/shardwise/layout/schedules.py)
techniques/table.md  what each technique splits, sends and needs (src/shardwise/layout/techniques.py)
tables/shared.md   what one process of a proof shares with the engine (src/shardwise/proof/, by docs/shared_code.py)
cli.md             `--help` of every command (src/shardwise/cli/main.py)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from shared_code import shared_code

from shardwise.cli.completion import INSTALL
from shardwise.cli.main import main as cli
from shardwise.config.schema import BUILTIN_DEFAULTS, OPTIMIZER_OPTIONS, Config, Section
from shardwise.config.sources import to_toml
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.layout import Plan, rules
from shardwise.layout.plan import SCHEDULES, TOLD
from shardwise.layout.schedules import schedule_of
from shardwise.layout.techniques import TECHNIQUES
from shardwise.planner import simulate

HERE = Path(__file__).parent
WIDTH = 100


def compatibility() -> str:
    """docs/compatibility.md, from the rules that the engine refuses by."""
    return (
        "# What cannot combine\n\n"
        "Generated from `src/shardwise/layout/rules.py` by `docs/generate.py`; change it there.\n"
        "A plan that meets a line below is refused before anything runs, with the reason given here.\n"
        "*Not built*: the technique does not exist yet. *Illegal*: the combination cannot be right.\n\n"
        + rules.as_markdown()
    )


# --- techniques

CLUSTER, SHAPE = "1x8 h100-sxm-80gb", "llama3-8b"
STATES = ("weights", "gradients", "master", "optimizer")


def techniques() -> str:
    """docs/techniques/table.md: one row each, what a rank holds and waits for being forecast on one model."""
    rows = []
    for row in TECHNIQUES:
        held, waits = _forecast_of(row.plan)
        rows.append(
            f"| [{row.name}]({row.page}.md) | `{row.plan}` | {row.split} | {row.sent} | {held} | {waits} | {row.needs} "
            f"| {row.when} |"
        )
    return (
        "# All techniques in one table\n\n"
        "Generated from `src/shardwise/layout/techniques.py` by `docs/generate.py`. P: the bytes of all parameters. "
        "The two columns of figures are forecasts (`shardwise simulate`), for llama-3-8b in bf16 on eight H100 of a "
        "node, 64 samples of 2,048 tokens in a step: what the fullest rank holds of weights, gradients, master "
        "weights and optimizer state, and of activations and the rest at the peak; and the share of the step that is "
        "communication that nothing hides, and bubble. Where they do not fit 80 GB they are what would be needed; – is "
        "no axis of that model.\n\n"
        "| technique | plan | what is split | what is sent, and when | a rank holds, GB: state + rest | waits "
        "| needs | when |\n|---|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def _forecast_of(plan: str) -> tuple[str, str]:
    """`18.1 + 7.4` GB and `12%` of a step."""
    if Plan.parse(plan).ep > 1:
        return "–", "–"
    try:
        forecast = simulate(SHAPE, f"{plan},precision=bf16", cluster=CLUSTER, global_batch="64", seq="2k").as_dict()
    except ShardwiseError:
        return "–", "–"
    fullest = max(forecast["memory"], key=lambda rank: rank["allocated"])
    state = sum(fullest["terms"].get(name, 0.0) for name in STATES)
    waits = sum(s for name, s in forecast["parts_s"].items() if "communication" in name or "bubble" in name)
    return f"{state / 1e9:.1f} + {(fullest['allocated'] - state) / 1e9:.1f}", f"{waits / forecast['step_s']:.0%}"


# --- the command line


def command_line() -> str:
    """docs/cli.md, from the commands themselves."""
    pages = [
        "# The command line\n\n"
        "Generated from `--help` by `docs/generate.py`.\n\n"
        "What is asked for goes to stdout, progress and messages go to stderr. With `--json`, stdout holds exactly one "
        "JSON object, whatever happened.\n\n"
        "| exit code | meaning |\n|---|---|\n"
        "| 0 | done; for `verify`, equal to one process |\n"
        "| 1 | the run failed, or no parity |\n"
        "| 2 | bad input: a misspelt key, a missing file, a task that fails in one process too |\n"
        "| 3 | the plan, or the plan on this task, is refused |\n"
        "| 75 | stopped by a signal, with its state saved: the same command goes on |\n"
        "| 130, 143 | interrupted, ended by SIGTERM |\n",
        "## Completion\n\nNames of commands and options, keys of plans and their values, names of the catalogue, "
        "files, and the tasks of a file (read from its text, without importing it):\n\n```sh\n"
        + "\n".join(INSTALL.values())
        + "\n```\n",
    ]
    pages += [f"## `{name}`\n\n```text\n{text}\n```\n" for name, text in _help_texts()]
    return "\n".join(pages)


def _help_texts() -> Iterator[tuple[str, str]]:
    yield "shardwise", _help_of(cli, "shardwise")
    for name in sorted(cli.commands):
        command = cli.commands[name]
        yield f"shardwise {name}", _help_of(command, f"shardwise {name}")
        for inner in sorted(command.commands) if isinstance(command, click.Group) else ():
            yield f"shardwise {name} {inner}", _help_of(command.commands[inner], f"shardwise {name} {inner}")


def _help_of(command: click.Command, name: str) -> str:
    # the terminal's width would otherwise change the page
    with click.Context(command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH) as context:
        context.help_option_names = ["-h", "--help"]
        return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


# --- the configuration


def configuration() -> str:
    """docs/config.md, from the pydantic models and the plan's fields."""
    sections = "\n".join(_sections(Config, ""))
    plan = "\n".join(_plan_rows())
    options = "\n".join(f"| `{name}` | {_codes(keys)} |" for name, keys in OPTIMIZER_OPTIONS.items())
    return (
        "# Configuration\n\n"
        "Generated from `src/shardwise/config/schema.py` by `docs/generate.py`; change it there.\n\n"
        "A configuration is a TOML file. `shardwise config --starter` writes one with every key commented out, "
        "`shardwise config my.toml` shows what is in force and where each value came from, and "
        "`shardwise train my.toml` runs it.\n\n"
        "Weakest first: the defaults, the file named by `extends`, the file, `--plan` and `--steps`, `--set`. "
        "An unknown key, a value of the wrong type, and a key that would have no effect are errors; all mistakes are "
        "told at once.\n\n"
        f"{sections}\n"
        "## [plan]\n\n"
        'A table, or one text at the top of the file: `plan = "dp_shard=2,zero=3"`. '
        "The world size is dp_replicate · dp_shard · tp · pp · cp · cp_ulysses · the tiles of domain. "
        "[What cannot combine](compatibility.md) lists what is refused.\n\n"
        f"| key | default | meaning |\n|---|---|---|\n{plan}\n\n"
        "## Which optimizer reads what\n\n"
        "`lr` is read by all.\n\n"
        f"| name | further keys |\n|---|---|\n{options}\n\n"
        "## Defaults of the built-in tasks\n\n"
        "In place of the defaults above.\n\n"
        f"| key | {' | '.join(BUILTIN_DEFAULTS)} |\n|---|{'---|' * len(BUILTIN_DEFAULTS)}\n"
        + "\n".join(_builtin_rows())
        + "\n"
    )


def _sections(model: type[Section], prefix: str) -> Iterator[str]:
    tables = []
    rows = []
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            tables.append((f"{prefix}{name}", kind))
            continue
        default = "not set" if field.default is None else f"`{to_toml(field.default)}`"
        rows.append(f"| `{name}` | {_type(schema['properties'][name])} | {default} | {_cell(field.description)} |")
    if rows:
        head = f"## [{prefix.removesuffix('.')}]\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        yield head + "\n".join(rows) + "\n"
    for name, kind in tables:
        yield from _sections(kind, f"{name}.")


NAMES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "array": "list"}
LIMITS = {"minimum": "≥ ", "exclusiveMinimum": "> ", "maximum": "≤ ", "exclusiveMaximum": "< "}


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return "one of " + _codes(schema["enum"])
    limits = ", ".join(f"{sign}{schema[key]:g}" for key, sign in LIMITS.items() if key in schema)
    text = NAMES[schema["type"]] + (f" {limits}" if limits else "")
    if schema["type"] == "array":
        items, count = schema["items"], f"{schema['minItems']} " if "minItems" in schema else ""
        of = _codes(items["enum"]) if "enum" in items else f"{NAMES[items['type']]}s"
        text = f"list of {count}{of}"
    return text


def _plan_rows() -> Iterator[str]:
    values = Plan().as_dict(defaults=True)
    for key, text in TOLD.items():
        told = {
            "zero": "3 where dp_shard > 1, else 0",
            "schedule": "`1f1b` where pp > 1",
            "microbatches": "the number of stages",
        }
        default = told.get(key, f"`{to_toml(values[key])}`")
        yield f"| `{key}` | {default} | {_cell(text)} |"


def _builtin_rows() -> Iterator[str]:
    flat = {name: dict(_leaves(defaults)) for name, defaults in BUILTIN_DEFAULTS.items()}
    for key in dict.fromkeys(key for values in flat.values() for key in values):
        cells = [to_toml(values[key]) if key in values else "" for values in flat.values()]
        yield f"| `{key}` | {' | '.join(cells)} |"


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _codes(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def schedules_table() -> str:
    """docs/tables/schedules.md, counted from the tables of layout/schedules.py."""
    ranks, counts = 4, (4, 8, 16, 32)
    lines = []
    for name in SCHEDULES:
        cells = []
        for count in counts:
            plan = Plan(pp=ranks, schedule=name, microbatches=count)
            try:
                schedule = schedule_of(plan)
            except RefusedPlan:
                cells.append("")
                continue
            held = max(schedule.live()) / plan.stages_per_rank
            cells.append(f"{schedule.bubble():.1%}, {held:g}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return (
        "# Pipeline schedules, counted\n\n"
        "Generated from `src/shardwise/layout/schedules.py` by `docs/generate.py`. For "
        f"{ranks} ranks with equal stages, F, I and W taking as long and messages no time: the share of the ranks' "
        "time in which they wait, and the most micro-batches whose activations a rank holds at once, in layers of a "
        "whole rank.\n\n"
        f"| schedule | {' | '.join(f'{count} micro-batches' for count in counts)} |\n"
        f"|---|{'---|' * len(counts)}\n" + "\n".join(lines) + "\n"
    )


PAGES = {
    "compatibility.md": compatibility,
    "config.md": configuration,
    "cli.md": command_line,
    "tables/schedules.md": schedules_table,
    "tables/shared.md": shared_code,
    "techniques/table.md": techniques,
}


def main() -> int:
    """Write the pages, or tell which are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is stale")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        path, text = HERE / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if check and stale:
        print(f"stale: {', '.join(stale)}; run python docs/generate.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
