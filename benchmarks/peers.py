"""The loops that shardwise is timed against: by hand, Accelerate, Lightning Fabric; and the task of both sides.

Accelerate and Lightning come with the extra `bench`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.task import Task

CONFIG = DecoderConfig(vocab=512, hidden=256, layers=4, heads=4, kv_heads=2, intermediate=704, context=128)
SAMPLES, LENGTH, RANKS = 8, 64, 2
CLIP_NORM, LR = 1.0, 1e-3

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]  # -> the same, still tensors


# --- the task, the same on both sides ---


def make_batch(step: int) -> Batch:
    """A global batch of random tokens; every token counts but each sample's first."""
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(CONFIG.vocab, (SAMPLES, LENGTH), generator=generator)}


def token_loss(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    """Cross entropy of each next token, summed, and how many there are."""
    targets = batch["tokens"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"), targets.numel()


def adamw(groups: list[dict] | Any) -> torch.optim.Optimizer:
    """AdamW at torch's defaults, all parameters alike."""
    return torch.optim.AdamW(groups, lr=LR, weight_decay=0.01)


def tokens_only(batch: Batch) -> tuple[tuple, dict]:
    """What the model is called with."""
    return (batch["tokens"],), {}


TASK = Task(
    model=partial(Decoder, CONFIG), loss=token_loss, inputs=tokens_only, optimizer=adamw, batch=make_batch,
    name="overhead",
)  # fmt: skip


def decay_groups(model: nn.Module) -> list[dict]:
    """shardwise's two groups: no decay for norms."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


# --- the peers: each takes the initial model and returns a step on this rank's samples ---


class Unavailable(Exception):
    """The peer does not offer this strategy here; the text says why."""


def hand_ddp(model: nn.Module) -> Step:
    """DistributedDataParallel at its defaults."""
    model = nn.parallel.DistributedDataParallel(model)
    return _hand_loop(model, adamw(decay_groups(model)))


def hand_sharded_optimizer(model: nn.Module) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(model)
    groups = decay_groups(model)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=LR, weight_decay=0.01)
    return _hand_loop(model, optimizer)


def hand_fsdp2(model: nn.Module) -> Step:
    """fully_shard on each block and on the root."""
    from torch.distributed.device_mesh import init_device_mesh

    _shard_blocks(model, init_device_mesh("cpu", (RANKS,)))
    return _hand_loop(model, adamw(decay_groups(model)))


def _shard_blocks(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _hand_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    params = list(model.parameters())

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        total, weight = token_loss(model(batch["tokens"]), batch)
        loss = total / weight
        loss.backward()
        norm = nn.utils.clip_grad_norm_(params, CLIP_NORM)
        optimizer.step()
        return loss.detach(), norm

    return step


def accelerate_ddp(model: nn.Module) -> Step:
    """`Accelerator.prepare`, `backward` and `clip_grad_norm_`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != RANKS:
        raise Unavailable("Accelerate did not join the process group")
    model, optimizer = accelerator.prepare(model, adamw(decay_groups(model)))
    params = list(model.parameters())

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        total, weight = token_loss(model(batch["tokens"]), batch)
        loss = total / weight
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(params, CLIP_NORM)
        optimizer.step()
        return loss.detach(), norm

    return step


def accelerate_fsdp2(model: nn.Module) -> Step:
    """Not there: `AcceleratorState` takes up an FSDP plugin only for accelerators."""
    raise Unavailable("Accelerate's FSDP2 needs an accelerator; on CPU it falls back to DDP")


def fabric_ddp(model: nn.Module) -> Step:
    """`Fabric.setup`, `backward` and `clip_gradients`, strategy "ddp"."""
    return _fabric_loop(model, "ddp")


def fabric_fsdp2(model: nn.Module) -> Step:
    """The same with `ModelParallelStrategy`, which calls fully_shard."""
    try:
        from lightning.fabric.strategies import ModelParallelStrategy
    except ImportError:
        from lightning_fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        lambda module, mesh: _shard_blocks(module, mesh["data_parallel"]),
        data_parallel_size=RANKS, tensor_parallel_size=1,
    )  # fmt: skip
    return _fabric_loop(model, strategy)


def _fabric_loop(model: nn.Module, strategy: Any) -> Step:
    try:
        from lightning.fabric import Fabric
    except ImportError:
        from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=RANKS)
    fabric.launch()
    if fabric.world_size != RANKS:
        raise Unavailable("Fabric did not join the process group")
    if isinstance(strategy, str):
        model, optimizer = fabric.setup(model, adamw(decay_groups(model)))
    else:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(adamw(decay_groups(model)))

    def step(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        total, weight = token_loss(model(batch["tokens"]), batch)
        loss = total / weight
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        return loss.detach(), norm

    return step


BUILDERS: dict[tuple[str, str], Callable[[nn.Module], Step]] = {
    ("ddp", "hand"): hand_ddp,
    ("ddp", "accelerate"): accelerate_ddp,
    ("ddp", "fabric"): fabric_ddp,
    ("zero1", "hand"): hand_sharded_optimizer,
    ("zero2", "hand"): hand_sharded_optimizer,
    ("zero3", "hand"): hand_fsdp2,
    ("zero3", "accelerate"): accelerate_fsdp2,
    ("zero3", "fabric"): fabric_fsdp2,
}
