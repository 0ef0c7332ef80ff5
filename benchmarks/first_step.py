"""The first step of a prepared GPT-2 of 124M parameters beside the same script under DistributedDataParallel.

    python benchmarks/first_step.py [--pairs N] [--steps N]

Two ranks with one thread each train transformers' GPT-2 (vocabulary 50,257) on 4 samples of 128 tokens. Each run has
processes of its own, and either comes first in turn. The first step goes from the loop's begin, after `prepare` or the
wrapper, to the optimizer's update; the peak is the larger resident set of the two ranks.
"""

from __future__ import annotations

import argparse
import resource
import time
from statistics import median

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

import shardwise
from shardwise.ranks import launch

RANKS, SAMPLES, LENGTH = 2, 4, 128


def _rank(prepared: bool, steps: int) -> tuple[float, float, float]:
    """(seconds of the first step, of a later one, peak resident GiB) of one rank's run."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT2LMHeadModel(GPT2Config())
    data = TensorDataset(torch.randint(model.config.vocab_size, (SAMPLES * steps, LENGTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if prepared:
        script = shardwise.prepare(model, optimizer, DataLoader(data, batch_size=SAMPLES), plan=f"dp_replicate={RANKS}")
        model, optimizer, loader = script
        backward = script.backward
    else:
        sampler = DistributedSampler(data, shuffle=False)
        loader = DataLoader(data, batch_size=SAMPLES // RANKS, sampler=sampler)
        model, backward = DistributedDataParallel(model), torch.Tensor.backward
    times = []
    begun = time.perf_counter()
    for (tokens,) in loader:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        loss.item()
        now = time.perf_counter()
        times.append(now - begun)
        begun = now
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return times[0], median(times[1:]), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    words = parser.parse_args()
    runs: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for turn in range(words.pairs):
        for prepared in (bool(turn % 2), not turn % 2):
            runs[prepared].append(tuple(map(max, zip(*launch(_rank, RANKS, (prepared, words.steps)), strict=True))))
    print("| what | DistributedDataParallel | prepared | ratio |")
    print("|---|---:|---:|---:|")
    for place, what in enumerate(("first step, s", "a later step, s", "peak memory of a rank, GiB")):
        by_hand, ours = (median(run[place] for run in runs[prepared]) for prepared in (False, True))
        print(f"| {what} | {by_hand:.2f} | {ours:.2f} | {ours / by_hand:.2f} |")
    print(f"{words.pairs} pairs, torch {torch.__version__}")


if __name__ == "__main__":
    main()
