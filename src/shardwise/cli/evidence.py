"""The command `evidence`: what this machine shows of shardwise, as a page and a JSON (testing/machine_evidence)."""

from __future__ import annotations

from pathlib import Path

import click

from shardwise.cli.answer import Answer
from shardwise.cli.options import WholeNumber, common
from shardwise.cli.waiting import waiting


@click.command()
@click.option("-o", "--output", default="docs/evidence", show_default=True, type=click.Path(file_okay=False),
              help="The folder of the page and the JSON.")  # fmt: skip
@click.option("--ranks", type=WholeNumber(min=2), help="By default one for each accelerator, or two.")
@click.option("--device", default=None, help="cpu, or the accelerator's type; by default what is there.")
@click.option("--backend", help="The accelerator's own, for ranks that share it; by default gloo.")
@click.option("--minutes", type=WholeNumber(min=1), default=15, show_default=True, help="Nothing is begun after them.")
@common
@click.pass_obj
def evidence(
    answer: Answer, output: str, ranks: int | None, device: str | None, backend: str | None, minutes: int
) -> None:
    """Prove every kind of plan here, and measure against forecasts and loops by hand; one page for docs/evidence.

    \b
    shardwise evidence                                  on all accelerators of this machine, or two CPU ranks
    shardwise evidence --ranks 2 --backend NAME --minutes 9     two ranks on one, over its own backend

    Exit code 0 when everything that was tried held, 1 when something did not.
    """
    with waiting(answer, "evidence: loading PyTorch") as say:
        from shardwise.device import accelerator, check_device, check_own_backend, device_count, group_backend
        from shardwise.testing.evidence_page import about, page, write
        from shardwise.testing.machine_evidence import collect

        kind = accelerator()
        chosen = device or ("cpu" if kind is None else kind.type)
        check_device(chosen, "--device")
        # two at least, since one rank shards nothing
        count = ranks or max(2, device_count())
        if backend is not None:
            check_own_backend(backend, "--backend")
        # `group_backend` gives a text such as "cpu:gloo,cuda:nccl": the page shows the last name
        own = backend or ("gloo" if chosen == "cpu" else group_backend(count).rpartition(":")[2])
        rows = collect(device=chosen, backend=backend, ranks=count, limit_s=60.0 * minutes, say=say)
    facts = about(own, count)
    paths = write(Path(output), facts, rows)
    answer.fields.update(about=facts, rows=rows, page=str(paths[0]), json=str(paths[1]))
    answer.text = f"{page(facts, rows)}\nwritten: {paths[0]}, {paths[1]}"
    # a claim that was not tried (None) is no failure
    answer.code = 0 if all(row["held"] is not False for row in rows) else 1
