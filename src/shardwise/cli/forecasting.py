"""Options of commands that forecast: cluster, batch, failures (`failures`); TASK as a subject; writing files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.options import Number, WholeNumber, with_adapters
from shardwise.progress import silent

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.layout import Plan
    from shardwise.planner.subject import Subject

TASK = "TASK"
TASK_HELP = """
    TASK is a catalogue name such as llama3-405b, the config.json of a transformers model (decoders by their numbers,
    any other is built without weights and traced), module:name or file.py:name of a task of your own (its model is
    traced without being run), or a built-in task.
"""


def where(function: Callable) -> Callable:
    """Decorator of a command: adds the options --cluster (required), --global-batch, --seq and others of a forecast."""
    return maybe_where(function, required=True)


def maybe_where(function: Callable, *, required: bool = False) -> Callable:
    """Decorator as `where`; --cluster is optional unless `required`."""
    options = (
        click.option(
            "--cluster", required=required,
            help='Devices and links: "16x8 h100-sxm-80gb, ib-400" (nodes x devices, device, links), or a .toml file.',
        ),
        click.option("--global-batch", help="Samples of a step: 512, or 16M-tokens (k and M are 1024 and 1024^2)."),
        click.option("--seq", help="Tokens of a sample, for names and configurations of models of text: 8192 or 8k."),
        click.option(
            "--software", default="shardwise", show_default=True,
            help="Whose kernels and overlap to assume: shardwise, megatron-core, nemo, llm-foundry ...",
        ),
        click.option(
            "--randomness", type=click.Choice(["global", "fast"]), default="global", show_default=True,
            help="Of dropout, as train.randomness: one process's, or each rank's own.",
        ),
        click.option("--channels-last/--no-channels-last", default=None, help="Of a configuration's images: on GPUs."),
        click.option("--lora", type=WholeNumber(min=1), metavar="RANK", help="With adapters, as --set lora.rank=RANK."),
        click.option("--set", "overrides", multiple=True, metavar="lora.KEY=VALUE", help="Set a key of [lora]."),
    )  # fmt: skip
    for option in options:
        function = option(function)
    return function


def adapted(task: str, words: dict[str, Any]) -> Any:
    """Returns the task that a command was given, with the adapters that its options ask for."""
    rank = () if words["lora"] is None else (f"lora.rank={words['lora']}",)
    return with_adapters(task, (*words["overrides"], *rank), "a forecast")


def failures(command: Any) -> Any:
    """Decorator of a command: adds the options on failures, their rate and what a restart and a checkpoint cost."""
    options = (
        click.option("--mtbf-hours", type=Number(min=1), help="Mean hours between failures of one device."),
        click.option("--restart-s", type=Number(min=0), default=300.0, show_default=True, help="Seconds to restart."),
        click.option(
            "--checkpoint-s",
            type=Number(min=0),
            help="Seconds that a checkpoint stops a step; by default the copy of what a rank writes.",
        ),
        click.option("--saves-of", metavar="RUN", help="The same as a run measured it, by its bytes."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def subject_and_batch(
    task: str, cluster: Cluster, words: dict[str, Any], precision: str, plan: Plan | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Subject, str]:  # fmt: skip
    """Returns (the planner's `Subject` of TASK, its batch in words); raises as `planner.door.subject_of`."""
    from shardwise.planner.door import is_shape, subject_of

    subject = subject_of(
        adapted(task, words), cluster,
        global_batch=words["global_batch"], seq=words["seq"], precision=precision, software_name=words["software"],
        plan=plan, say=say or silent, randomness=words["randomness"], channels_last=words["channels_last"],
    )  # fmt: skip
    of = f" of {subject.sample}" if subject.sample else f" of {subject.seq} tokens" if is_shape(task) else ""
    return subject, f"{subject.global_batch} samples{of}"
