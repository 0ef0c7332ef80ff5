"""The commands `show schedule | ring | tp | ranks`: what a plan does, as text and pictures. Nothing is run."""

from __future__ import annotations

import click

from shardwise.cli.answer import Answer
from shardwise.cli.options import WholeNumber, common, given_plan, output_file, write
from shardwise.cli.waiting import waiting

MOST_CELLS = 100_000  # largest table that is printed
PLAN_HELP = "How to spread it: dp_shard=2,zero=3, or a .toml file with the same keys."


@click.group()
def show() -> None:
    """Show what a plan does, without running anything."""


@show.command()
@click.argument("plan", metavar="PLAN", callback=given_plan)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), callback=output_file, help="Draw it into this .svg file instead."
)
@common
@click.pass_obj
def schedule(answer: Answer, plan: str, output: str | None) -> None:
    """The order in which a pipeline's ranks run forwards and backwards, counted and drawn.

    \b
    shardwise show schedule pp=4,schedule=zbv,microbatches=8

    PLAN is, for example, "pp=4,schedule=zbv,microbatches=8". F is a forward, B a backward; zero-bubble schedules
    split a backward into I (gradient of the input) and W (gradients of the weights).
    """
    from shardwise.layout import Plan
    from shardwise.layout.drawing import as_svg, as_text, summary
    from shardwise.layout.schedules import schedule_of

    parsed = Plan.parse(plan)
    answer.fields.update(plan=str(parsed), world_size=parsed.world_size)
    _can_be_shown("schedule", parsed.pp * parsed.microbatches, "give fewer stages or micro-batches: it repeats itself")
    table = schedule_of(parsed)
    answer.fields.update(
        schedule=table.name,
        microbatches=table.microbatches,
        stages=table.stages,
        bubble=table.bubble(),
        live=table.live(),
        rows=[[str(op) for op in row] for row in table.rows],
    )
    if output is None:
        answer.text = as_text(table)
        return
    write(output, as_svg(table))
    answer.text = "\n".join([*summary(table), f"drawn in {output}"])


def _can_be_shown(what: str, cells: int, remedy: str) -> None:
    if cells > MOST_CELLS:
        from shardwise.errors import InputError

        raise InputError(f"show {what}: a table of {cells:,} cells is more than anybody reads: {remedy}")


@show.command()
@click.argument("task", metavar="MODULE:TASK | text | digits")
@click.option("--plan", required=True, callback=given_plan, help=PLAN_HELP)
@common
@click.pass_obj
def tp(answer: Answer, task: str, plan: str) -> None:
    """Which weights tensor parallelism cuts, who holds how much of each, and what goes over the wire.

    \b
    shardwise show tp text --plan tp=2

    The cuts are derived from one forward on tensors without values; `tp_whole=...` in the plan keeps weights whole.
    """
    from shardwise.cli.shown_tables import cuts_table
    from shardwise.layout import Plan, check

    parsed = Plan.parse(plan)
    answer.fields.update(plan=str(parsed), world_size=parsed.world_size)
    check(parsed)
    with waiting(answer, "show tp: loading PyTorch"):
        from shardwise.engine.tensor_cuts import describe
        from shardwise.task_names import resolve_task

        rows, totals = describe(resolve_task(task), parsed)
    answer.fields.update(rows=rows, totals=totals)
    answer.text = cuts_table(parsed.tp, rows, totals)


@show.command()
@click.argument("plan", metavar="PLAN", callback=given_plan)
@click.option("--devices", type=WholeNumber(min=1), default=8, show_default=True, help="Devices in each node.")
@common
@click.pass_obj
def ranks(answer: Answer, plan: str, devices: int) -> None:
    """Where each rank of a plan lies: its node and device, and its coordinate on each axis.

    \b
    shardwise show ranks tp=2,dp_shard=4 --devices 4

    Axes that talk most are innermost: tp, cp_ulysses, cp, domain, dp_shard, pp, dp_replicate.
    """
    from shardwise.cli.shown_tables import ranks_table
    from shardwise.layout import Plan
    from shardwise.layout.grid import placement

    parsed = Plan.parse(plan)
    _can_be_shown("ranks", parsed.world_size, "give smaller degrees of the outer axes")
    rows, leaving = placement(parsed, devices)
    answer.fields.update(plan=str(parsed), world_size=parsed.world_size, rows=rows, leaving=leaving)
    answer.text = ranks_table(rows, leaving)


@show.command()
@click.argument("collective", metavar="COLLECTIVE")
@click.option("--ranks", type=WholeNumber(min=2, max=32), default=4, show_default=True, help="Ranks of the ring.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), callback=output_file, help="Draw it into this .svg.")
@common
@click.pass_obj
def ring(answer: Answer, collective: str, ranks: int, output: str | None) -> None:
    """A collective step by step: who sends which piece to whom, and what each rank then holds.

    \b
    shardwise show ring all_reduce --ranks 4
    shardwise show ring all_reduce --ranks 4 -o ring.svg      a picture that goes through the steps

    COLLECTIVE is all_reduce, reduce_scatter, all_gather, broadcast or all_to_all.
    """
    from shardwise.layout.ring_steps import as_svg, as_text
    from shardwise.layout.ring_steps import ring as drawn_ring

    drawn = drawn_ring(collective, ranks)
    rows = [[[send.source, send.target, send.piece] for send in step.sends] for step in drawn.steps]
    answer.fields.update(world_size=ranks, rows=rows, received=drawn.received())
    if output is None:
        answer.text = as_text(drawn)
        return
    write(output, as_svg(drawn))
    answer.text = f"drawn in {output}: {len(drawn.steps)} steps"
