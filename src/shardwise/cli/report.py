"""The command `report`: write runs as one HTML page (report/)."""

from __future__ import annotations

from pathlib import Path

import click

from shardwise.cli.answer import Answer
from shardwise.cli.options import common, output_file, write


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    callback=output_file,
    help="The page; by default report.html in the first run's folder.",
)
@common
@click.pass_obj
def report(answer: Answer, runs: tuple[str, ...], output: str | None) -> None:
    """Runs side by side as one HTML page that needs nothing outside itself.

    \b
    shardwise report runs/NAME runs/OTHER -o compared.html

    RUN is a run's folder, of a run under way too. The page shows loss and held-out loss, speed, where a step went,
    memory by class and rank, the forecast beside what was measured (of runs with --cluster), bytes on the wire, and
    every setting with its origin. It prints, and follows the dark or light look of the browser.
    """
    from shardwise.report import page, read_run

    read = [read_run(Path(run)) for run in runs]
    target = Path(output) if output else Path(runs[0]) / "report.html"
    write(target, page(read))
    answer.fields.update(file=str(target), runs=[run.name for run in read])
    answer.text = f"wrote {target}: {len(read)} run(s), {target.stat().st_size / 1024:.0f} KiB"
