"""The command `probe`: measure this machine (measure/machine) and write a cluster file."""

from __future__ import annotations

from pathlib import Path

import click

from shardwise.cli.answer import Answer, speaks
from shardwise.cli.options import WholeNumber, common, output_file, write
from shardwise.cli.waiting import waiting
from shardwise.progress import telling


@click.command()
@click.option(
    "-o",
    "--output",
    default="cluster.toml",
    show_default=True,
    type=click.Path(dir_okay=False),
    callback=output_file,
    help="The file.",
)
@click.option(
    "--ranks", type=WholeNumber(min=1), help="Ranks that measure at once; by default one for each GPU, or two."
)
@click.option(
    "--quick", is_flag=True, help="Half a minute instead of two: one round of fewer steps, so a slow moment counts."
)
@click.option(
    "--refine", metavar="RUN", is_eager=True, help="Do not measure: correct the file by a run that was forecast on it."
)
@common
@click.pass_obj
def probe(answer: Answer, output: str, ranks: int | None, refine: str | None, quick: bool) -> None:
    """Measure this machine and write a cluster file: products, memory, collectives, disk.

    \b
    shardwise probe                      two minutes; then: shardwise train --cluster cluster.toml --plan dp_replicate=2
    shardwise probe --quick              half a minute, less sure
    shardwise probe --refine runs/NAME   and the next forecast is corrected by what that run measured

    Under torchrun, srun or mpirun the launcher's ranks measure, on several hosts the links between them too, and
    rank 0 writes the file:

    \b
    torchrun --nnodes 2 --node-rank $NODE_RANK --master-addr $FIRST_HOST --nproc-per-node 2 --no-python shardwise probe
    """
    from shardwise.cluster import Cluster

    with waiting(answer, "probe: loading PyTorch"):
        from shardwise.measure.machine import probe as measure
        from shardwise.measure.machine import text

    if refine is not None and not speaks():
        return  # only rank 0 of a launcher corrects the file
    if refine is not None:
        from shardwise.training.foresight import refine as refined

        cluster = refined(Cluster.parse(output if output.endswith(".toml") else output + ".toml"), Path(refine))
    else:
        with telling(not answer.as_json) as say:
            cluster = measure(ranks, say, quick=quick)
    if speaks():
        write(output, cluster.to_toml())
    answer.fields.update(cluster=cluster.as_dict(), file=output)
    correction = cluster.device.correction
    lines = [text(cluster), f"written to {output}"]
    if correction is not None:
        lines.insert(1, f"  forecasts are multiplied by {correction.value:.3g} ({correction.source})")
    answer.text = "\n".join(lines)
