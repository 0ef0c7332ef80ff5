"""What the host reads in a step, counted: `python benchmarks/host_table.py` writes docs/tables/host.md.

Ranks on this machine take two optimizer steps of small tasks on a mock accelerator (`shardwise.testing.mock_device`);
the second is counted. Counts do not depend on the machine: what torch reads of tensors that stay on the CPU everywhere
is left out by an optimizer that keeps no count of steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise import Plan, Task, parallelize
from shardwise.host import HostReads
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.testing import mock_device

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tasks"))
import domain_tasks
import sequence_tasks


def _means(output: Tensor, batch: Any) -> dict[str, Any]:
    logits = tasks.logits_of(output)
    return {"largest": (logits.amax(-1).sum(), logits[..., 0].numel())}


def _with_term(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Any, dict]:
    total, weight = tasks.next_token_loss(output, batch)
    return total, weight, {"z": (output.logsumexp(-1).square().sum(), len(output))}


def _metrics() -> Task:
    return tasks.decoder().with_(metrics=_means)


def _term() -> Task:
    return tasks.decoder().with_(loss=_with_term)


def _global_loss() -> Task:
    return tasks.mlp().with_(loss_scope="global")


# what is trained, in words; its task; plans
ROWS = (
    ("a decoder", tasks.decoder, (
        "single", "dp_replicate=2", "dp_replicate=2,accumulate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2",
        "dp_shard=2,zero=3", "dp_replicate=2,dp_shard=2,zero=3", "tp=2", "tp=2,sp=true", "tp=2,tp_overlap=true",
        "dp_shard=2,zero=3,tp=2", "dp_replicate=2,precision=fp16", "dp_replicate=2,remat=full",
        "pp=2,microbatches=2", "pp=2,schedule=zbv,microbatches=2", "pp=2,dp_shard=2,zero=1,microbatches=2",
    )),
    ("a decoder of positions", sequence_tasks.decoder, ("cp=2", "cp_ulysses=2", "dp_shard=2,zero=3,cp=2")),
    ("a U-Net on fields", domain_tasks.unet_group, ("domain=2", "domain=2,dp_shard=2,zero=3")),
    ("tied embeddings", tasks.decoder_tied, ("pp=2,microbatches=2", "pp=2,dp_replicate=2,microbatches=2")),
    ("a network with batch norm", tasks.unet_batchnorm, ("dp_replicate=2",)),
    ("a loss with a term of its own weight", _term, ("dp_replicate=2,accumulate=2",)),
    ("Task.metrics", _metrics, ("dp_replicate=2,accumulate=2",)),
    ('loss_scope="global"', _global_loss, ("dp_replicate=2,accumulate=2",)),
    ("two layers of experts", tasks.moe, ("dp_replicate=2", "dp_shard=2,ep=2", "dp_shard=2,ep=2,accumulate=2")),
)  # fmt: skip


def reads_of(row: int, plan: str) -> tuple[dict[str, int], dict[str, int]]:
    """Reads of this rank's second step: the engine's by name, and those of the model's and the task's own code."""
    task = ROWS[row][1]().with_(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9))
    device = mock_device.install()
    if Plan.parse(plan).world_size > 1:
        mock_device.join_group()
    engine = parallelize(task, plan, device=device, clip_norm=1.0)
    assert task.batch is not None
    engine.step(task.batch(0))
    with HostReads() as reads:
        engine.step(task.batch(1))
    return dict(reads.named), dict(reads.others)


def _listed(reads: dict[str, int]) -> str:
    return ", ".join(f"{name} × {count}" if count > 1 else name for name, count in reads.items())


def page() -> str:
    """The whole page."""
    lines = []
    with RankPool() as pool:
        for row, (what, _, plans) in enumerate(ROWS):
            for plan in plans:
                found = pool.run(reads_of, Plan.parse(plan).world_size, row, plan, timeout_s=120)
                named, others = max(found, key=lambda reads: sum(reads[0].values()))
                cells = (what, f"`{plan}`", str(sum(named.values())), _listed(named), str(sum(others.values()) or "–"))
                lines.append(f"| {' | '.join(cells)} |")
    return (
        "# What the host reads in a step\n\n"
        "Written by `benchmarks/host_table.py`. A read is a value that Python needs from a tensor, for which the host "
        "waits until the device has come that far; until then it runs ahead. All of the engine's go through one "
        "function (`host.read`); counted are those of the rank that reads most, in its second step, and beside them "
        "all else that waits, which is the model's and the task's own code: values taken out, and copies between the "
        "host and the device that wait. Counted on a mock accelerator ([accelerators](../accelerators.md)).\n\n"
        "| | plan | reads | which | own code |\n|---|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        "- *control row*: loss, weight, norm and samples of all ranks, from which every rank decides alike whether "
        "values are finite and how to clip. Between data ranks; with pipeline stages then *texts*, once, between "
        "stages: which terms a loss has is known on the last one alone.\n"
        "- *tied parameters*: whether any stage reached a parameter that several hold, before their gradients are "
        "summed. With data ranks beside, their branches are compared first, so that both rows travel twice.\n"
        "- *metrics*: sums and weights of `Task.metrics`, once in a step.\n"
        "- *samples of each rank*: how many outputs each rank brings to a loss over all of them, in each micro-batch.\n"
        "- *rows for experts*: how many rows each rank sends and receives, which an all-to-all has to be told; for "
        "each layer in each micro-batch.\n\n"
        "The first step also reads shapes of messages between stages and, in fp16, the weight from which the scale of "
        "losses is chosen. An optimizer of torch's reads its count of steps, which it keeps on the CPU unless it is "
        "capturable. A step in which a rank took another branch, or had no sample "
        "in some micro-batch, reads which parameters were reached and then another control row.\n"
    )


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "tables" / "host.md"
    path.write_text(page(), encoding="utf-8")
    print(f"wrote {path.name}")
