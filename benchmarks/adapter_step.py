"""A step of adapters on a frozen base beside peft under DistributedDataParallel, or under `fully_shard` by hand.

    python benchmarks/adapter_step.py [--pairs N] [--steps N] [--zero 3]

Two ranks with one thread each train a Llama of transformers with LoRA of rank 8, 8 samples of 64 tokens a step, in
float32. A pair is two runs of their own, one after the other, of which either comes first in turn. The ratio is that of
the runs' median steps, t_torch / t_ours; above 1 ours is faster. Both read their loss in every step, and begin with the
same loss.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise import Task, parallelize
from shardwise.ranks import launch

RANKS, SAMPLES, LENGTH, WORDS, WARM_UP = 2, 8, 64, 512, 5
PLANS = {0: f"dp_replicate={RANKS}", 3: f"dp_shard={RANKS},zero=3"}


def _model() -> torch.nn.Module:
    """Returns a Llama of 3.3M frozen parameters with 120,000 of adapters, the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **sizes)
    return peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=8, target_modules="all-linear"))


def _batch(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


class _ByHand:
    """peft's model under torch's own wrapper."""

    def __init__(self, zero: int) -> None:
        model = _model()
        self.trained = [param for param in model.parameters() if param.requires_grad]
        if zero:
            for block in model.base_model.model.model.layers:
                fully_shard(block)
            self.model = fully_shard(model)
            self.trained = [param for param in self.model.parameters() if param.requires_grad]
        else:
            self.model = DistributedDataParallel(model)
        self.optimizer = _adamw(self.trained)

    def step(self, step: int) -> float:
        ids = _batch(step).chunk(RANKS)[dist.get_rank()]
        loss = _loss(self.model(input_ids=ids).logits, ids) / (len(ids) * (LENGTH - 1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        return loss.item() / RANKS


class _Ours:
    """The same as a task."""

    def __init__(self, zero: int) -> None:
        weights = {name: param.detach() for name, param in _model().named_parameters()}
        task = Task(
            model=_model, weights=weights.get, batch=_batch, optimizer=_adamw,
            inputs=lambda ids: ((), {"input_ids": ids}),
            loss=lambda out, ids: (_loss(out.logits, ids), len(ids) * (LENGTH - 1)),
        )  # fmt: skip
        self.engine = parallelize(task, PLANS[zero])

    def step(self, step: int) -> float:
        return float(self.engine.step(_batch(step)).loss)


def _rank(ours: bool, steps: int, zero: int) -> tuple[float, float]:
    """Returns seconds of a median step of a rank's run, and its first loss."""
    run = (_Ours if ours else _ByHand)(zero)
    first, times = run.step(0), []
    for step in range(1, steps + WARM_UP):
        start = time.perf_counter()
        run.step(step)
        times.append(time.perf_counter() - start)
    return median(times[WARM_UP - 1 :]), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--zero", type=int, choices=sorted(PLANS), default=0)
    args = parser.parse_args()
    ratios = []
    for pair in range(args.pairs):
        order = (True, False) if pair % 2 else (False, True)
        taken = {ours: max(launch(_rank, RANKS, (ours, args.steps, args.zero))) for ours in order}
        (mine, first), (theirs, other) = taken[True], taken[False]
        ratios.append(theirs / mine)
        print(f"{pair + 1}: torch {theirs * 1e3:.1f} ms, ours {mine * 1e3:.1f} ms, {ratios[-1]:.3f}; "
              f"first losses {other:.6f} and {first:.6f}", flush=True)  # fmt: skip
    print(f"median of {len(ratios)} pairs: {median(ratios):.3f}")


if __name__ == "__main__":
    main()
