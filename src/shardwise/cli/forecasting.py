"""Options that commands of forecasts share, and their TASK argument as the planner's `Subject`."""

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
    """Adds the options of a forecast to a command (a decorator): --cluster (required), --global-batch, --seq, ..."""
    return maybe_where(function, required=True)


def maybe_where(function: Callable, *, required: bool = False) -> Callable:
    """Adds the options of `where` to a command (a decorator); --cluster is optional unless `required`."""
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
    """Returns the task `task`, with adapters if the options --lora or --set ask for them; `words`: options by name."""
    rank = () if words["lora"] is None else (f"lora.rank={words['lora']}",)
    return with_adapters(task, (*words["overrides"], *rank), "a forecast")


def failures(command: Any) -> Any:
    """Adds the options on failures to a command (a decorator): --mtbf-hours, --restart-s, --checkpoint-s, ..."""
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
    """Returns (the planner's `Subject` of TASK, a text on its batch such as "512 samples of 8192 tokens").

    words       the command's options by name, those of `where`
    precision   of the plans, such as "bf16"
    plan        the plan to forecast; None: many plans are
    say         called with a text on what is done next; None: silent

    Raises as `planner.door.subject_of`.
    """
    from shardwise.planner.door import is_shape, subject_of

    subject = subject_of(
        adapted(task, words), cluster,
        global_batch=words["global_batch"], seq=words["seq"], precision=precision, software_name=words["software"],
        plan=plan, say=say or silent, randomness=words["randomness"], channels_last=words["channels_last"],
    )  # fmt: skip
    of = f" of {subject.sample}" if subject.sample else f" of {subject.seq} tokens" if is_shape(task) else ""
    return subject, f"{subject.global_batch} samples{of}"
