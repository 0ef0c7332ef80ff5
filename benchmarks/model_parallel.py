"""What tensor and pipeline parallelism cost beside the same written by hand with PyTorch's own tools.

Two ranks with one thread each train two copies of the same decoder on the same batches, from the same weights: one by
`engine.step`, the other by a loop over `parallelize_module` with a vocabulary-parallel loss (tp=2), or over
`torch.distributed.pipelining`'s 1F1B (pp=2). Steps alternate, and which copy goes first alternates too. A pair's ratio
is t_peer / t_shardwise, each the slower rank's; the median stands with its 95% bootstrap interval, as in overhead.py.

    python benchmarks/model_parallel.py --pairs 60 --write      # docs/tables/model_parallel.md
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from overhead import RESAMPLES, SEED, SHORT, WARM_UP, Numbers, Times, _be_quiet, _timed, bootstrap
from peers import (
    CLIP_NORM,
    CONFIG,
    LENGTH,
    RANKS,
    SAMPLES,
    TASK,
    Batch,
    Step,
    adamw,
    decay_groups,
    make_batch,
    token_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.models.decoder import Decoder, turns
from shardwise.ranks import launch

MICRO_BATCHES = 4
PLANS = {
    "tp": "tp=2",
    "tp, overlap": "tp=2,tp_overlap=true",
    "tp, sp": "tp=2,sp=true",
    "pp": f"pp=2,schedule=1f1b,microbatches={MICRO_BATCHES}",
}
TABLE = Path(__file__).resolve().parent.parent / "docs" / "tables" / "model_parallel.md"


# --- by hand ---


def hand_tensor(model: Decoder, *, sequence: bool = False) -> Step:
    """`parallelize_module`, each pair of linear layers named; logits stay cut, the loss is `loss_parallel`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,))
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        layers: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        layers |= {"gate": ColwiseParallel(), "up": ColwiseParallel()}
        layers |= {name: RowwiseParallel(output_layouts=between) for name in ("attention.out", "down")}
        if sequence:
            whole = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
            layers |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
            layers["attention"] = PrepareModuleInput(**whole)  # type: ignore[arg-type]
            for name in ("gate", "up"):
                layers[name] = ColwiseParallel(input_layouts=Shard(1))
        parallelize_module(block, mesh, layers)
    optimizer = adamw(decay_groups(model))
    params = list(model.parameters())

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        with loss_parallel():
            total, weight = token_loss(model(batch["tokens"]), batch)
            loss = total / weight
            loss.backward()
        norm = _clip(params)
        optimizer.step()
        return _local(loss.detach()), norm

    return step


def _local(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _clip(params: list[nn.Parameter]) -> torch.Tensor:
    """Clipping by the global norm where some gradients are cut and some are whole: one all-reduce."""
    from torch.distributed.tensor import DTensor, Replicate

    cut, whole = [], []
    for param in params:
        grad = param.grad
        if isinstance(grad, DTensor) and not all(isinstance(p, Replicate) for p in grad.placements):
            cut.append(grad.to_local())
        elif grad is not None:
            whole.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    square = torch.stack(torch._foreach_norm(cut)).square().sum()
    dist.all_reduce(square)
    norm = (square + torch.stack(torch._foreach_norm(whole)).square().sum()).sqrt()
    torch._foreach_mul_([*cut, *whole], float((CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)))
    return norm


class _Stage(nn.Module):
    """One of equal parts of the decoder, as one would cut it by hand."""

    def __init__(self, model: Decoder, index: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        self.blocks = model.blocks[index * each : (index + 1) * each]
        self.embedding = model.embedding if index == 0 else None
        self.norm, self.head = (model.norm, model.head) if index == stages - 1 else (None, None)
        self.config = model.config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        cos, sin = turns(self.config, x.shape[1], x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def hand_pipeline(model: Decoder) -> Step:
    """`PipelineStage` and `Schedule1F1B` over equal parts, one for each rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = _Stage(model, rank, ranks)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))

    def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        total, _ = token_loss(logits, {"tokens": tokens})
        return total / (MICRO_BATCHES * tokens[:, 1:].numel())

    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    optimizer = adamw(decay_groups(part))
    params = list(part.parameters())

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["tokens"])
        elif rank == ranks - 1:
            schedule.step(target=batch["tokens"], losses=losses)
        else:
            schedule.step()
        own = torch.stack(torch._foreach_norm([p.grad for p in params])).square().sum()
        told = torch.stack([own, torch.stack(losses).sum() if losses else torch.zeros(())])
        dist.all_reduce(told)  # the norm over all parts, and the loss to everybody
        norm = told[0].sqrt()
        torch._foreach_mul_([p.grad for p in params], float((CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)))
        optimizer.step()
        return told[1], norm

    return step


BUILDERS = {
    "tp": hand_tensor,
    "tp, overlap": hand_tensor,
    "tp, sp": lambda model: hand_tensor(model, sequence=True),
    "pp": hand_pipeline,
}


# --- on each rank ---


def on_rank(strategy: str, pairs: int) -> Times:
    """Alternate the two copies' steps and time each."""
    _be_quiet()
    torch.set_num_threads(1)
    engine = shardwise.parallelize(TASK, PLANS[strategy], clip_norm=CLIP_NORM)
    model = Decoder(CONFIG)
    model.load_state_dict(engine.state_dict())
    times = Times(parameters=sum(p.numel() for p in model.parameters()))
    peer_step = BUILDERS[strategy](model)

    def ours(batch: Batch) -> Numbers:
        result = engine.step(batch)
        return result.loss, result.grad_norm

    def theirs(batch: Batch) -> Numbers:
        loss, norm = peer_step(batch)
        return float(loss), float(norm)

    gc.collect()
    gc.freeze()
    for pair in range(WARM_UP + pairs):
        batch = make_batch(pair)
        sides = [ours, theirs]
        timed = [_timed(side, batch) for side in (sides if pair % 2 == 0 else sides[::-1])]
        (t_ours, c_ours, of_ours), (t_peer, c_peer, of_theirs) = timed if pair % 2 == 0 else timed[::-1]
        if pair < WARM_UP:
            apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(of_ours, of_theirs, strict=True))
            times.difference = max(times.difference, apart)
            continue
        times.ours.append(t_ours)
        times.peer.append(t_peer)
        times.ours_cpu.append(c_ours)
        times.peer_cpu.append(c_peer)
    return times


def compare(strategy: str, pairs: int) -> dict[str, Any]:
    """One comparison on fresh ranks."""
    ranks: list[Times] = launch(on_rank, RANKS, (strategy, pairs))
    ours = np.max([times.ours for times in ranks], axis=0)
    theirs = np.max([times.peer for times in ranks], axis=0)
    cpu = np.sum([times.peer_cpu for times in ranks], axis=0) / np.sum([times.ours_cpu for times in ranks], axis=0)
    low, high = bootstrap(theirs / ours)
    return {
        "plan": PLANS[strategy],
        "peer_ms": float(np.median(theirs)) * 1e3,
        "shardwise_ms": float(np.median(ours)) * 1e3,
        "ratio": float(np.median(theirs / ours)),
        "low": low,
        "high": high,
        "cpu": float(np.median(cpu)),
        "pairs": pairs,
        "difference": max(times.difference for times in ranks),
        "parameters": ranks[0].parameters,
        "verdict": "short" if high < SHORT else "holds" if low <= 1 else "faster",
    }


def as_page(rows: list[dict[str, Any]]) -> str:
    """The table with what it was measured on."""
    lines = [
        "| plan | by hand ms | shardwise ms | t_hand / t_shardwise | 95% | of CPU time | pairs | verdict |",
        "|---|---:|---:|---:|---|---:|---:|---|",
    ]
    lines += [
        f"| `{r['plan']}` | {r['peer_ms']:.1f} | {r['shardwise_ms']:.1f} | {r['ratio']:.3f} | "
        f"{r['low']:.3f} to {r['high']:.3f} | {r['cpu']:.3f} | {r['pairs']} | {r['verdict']} |"
        for r in rows
    ]
    worst = max((r["difference"] for r in rows), default=math.nan)
    return "\n".join([
        "# Tensor and pipeline parallelism beside the same by hand",
        "",
        "Made by `benchmarks/model_parallel.py --write`; how it is measured stands there.",
        "",
        f"{rows[0]['parameters'] / 1e6:.1f} M parameters, {SAMPLES} samples of {LENGTH} tokens, {RANKS} ranks with one "
        f"thread each on {os.cpu_count()} {platform.machine()} cores, gloo, torch {torch.__version__}; "
        f"the machine is shared, its load average at the end {os.getloadavg()[0]:.0f}. Intervals: {RESAMPLES:,} "
        f"bootstrap resamples of the median, seed {SEED}. Above 1, shardwise is faster; \"short\" is an upper end "
        f"below {SHORT}. In the first {WARM_UP} steps, losses and gradient norms of the two sides differed by at most "
        f"{worst:.0e} relative.",
        "",
        *lines,
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--strategy", choices=(*PLANS, "all"), default="all")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} in docs/tables")
    options = parser.parse_args()
    rows = []
    for strategy in PLANS if options.strategy == "all" else [options.strategy]:
        rows.append(compare(strategy, options.pairs))
        print(f"{strategy}: {rows[-1]['ratio']:.3f}", file=sys.stderr)
    page = as_page(rows)
    print(page)
    if options.write:
        TABLE.write_text(page)


if __name__ == "__main__":
    main()
