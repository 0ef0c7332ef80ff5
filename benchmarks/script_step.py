"""What `prepare` costs a script's step, beside the same script with torch's own wrapper in its place.

    python benchmarks/script_step.py [--pairs N] [--steps N] [--zero 3 | --tp]

Replicas are compared with DistributedDataParallel, `--zero 3` with `fully_shard` on each block and on the model, `--tp`
with `parallelize_module`: attention, feed-forward network, embedding and head, each cut by hand.

Two ranks with one thread each. A pair is two runs of their own, one after the other, of which either comes first in
turn: what follows a prepared script would follow the other too in one process. The ratio is that of the runs' median
steps, t_torch / t_prepared; above 1 the prepared script is faster. Both read their loss in every step.

    decoder   3.2 M parameters, 8 samples of 64 tokens: kernels
    small     a decoder of hidden 32 on 8 samples of 16 tokens: what Python adds
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.ranks import launch

CASES = {
    "decoder": (DecoderConfig(512, 256, 4, 4, 2, 704, 128), 64),
    "small": (DecoderConfig(64, 32, 4, 4, 2, 88, 16), 16),
}
RANKS, SAMPLES, WARM_UP = 2, 8, 10
PLANS = {"replicas": f"dp_replicate={RANKS}", "zero": f"dp_shard={RANKS},zero=3", "tp": f"tp={RANKS}"}


def _cut_by_hand(model: Decoder) -> torch.optim.Optimizer:
    """Returns AdamW over the model, which is cut over two ranks as Megatron-LM cuts it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        columns = ("attention.query", "attention.key", "attention.value", "gate", "up")
        cut = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, cut | {"attention.out": RowwiseParallel(), "down": RowwiseParallel()})
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": head})
    params = list(model.parameters())
    # torch's foreach kernels take no plain tensor beside one that is cut
    groups = [[p for p in params if isinstance(p, DTensor) is is_cut] for is_cut in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)


def _rank(case: str, prepared: bool, steps: int, way: str) -> float:
    """Seconds of a median step of one rank's run."""
    torch.manual_seed(0)
    config, length = CASES[case]
    model: torch.nn.Module = Decoder(config)
    data = TensorDataset(torch.randint(config.vocab, (SAMPLES * (steps + WARM_UP), length)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if prepared:
        loader = DataLoader(data, batch_size=SAMPLES)
        script = shardwise.prepare(model, optimizer, loader, plan=PLANS[way])
        model, optimizer, loader = script
        backward = script.backward
    else:
        parts = 1 if way == "tp" else RANKS
        mine = torch.utils.data.distributed.DistributedSampler(data, parts, dist.get_rank() % parts, shuffle=False)
        loader = DataLoader(data, batch_size=SAMPLES // parts, sampler=mine)
        backward = torch.Tensor.backward
        if way == "tp":
            optimizer = _cut_by_hand(model)
        elif way == "zero":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        else:
            model = DistributedDataParallel(model)
    times = []
    begun = time.perf_counter()
    for (tokens,) in loader:
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        backward(loss)
        optimizer.step()
        loss.item()
        now = time.perf_counter()
        times.append(now - begun)
        begun = now
    return median(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--zero", type=int, choices=(0, 3), default=0)
    parser.add_argument("--tp", action="store_true")
    words = parser.parse_args()
    way = "tp" if words.tp else "zero" if words.zero else "replicas"
    print("| case | torch, ms | prepared, ms | added, ms | t_torch / t_prepared | pairs |")
    print("|---|---:|---:|---:|---|---:|")
    for case in words.cases:
        pairs = []
        for turn in range(words.pairs):
            first = bool(turn % 2)
            found = {ours: max(launch(_rank, RANKS, (case, ours, words.steps, way))) for ours in (first, not first)}
            pairs.append((found[False], found[True]))
        ratios = sorted(by_hand / ours for by_hand, ours in pairs)
        by_hand, ours = (1e3 * median(each) for each in zip(*pairs, strict=True))
        row = f"{by_hand:.2f} | {ours:.2f} | {ours - by_hand:.2f} | {median(ratios):.3f}"
        print(f"| {case} | {row} ({ratios[0]:.3f} to {ratios[-1]:.3f}) | {len(pairs)} |", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
