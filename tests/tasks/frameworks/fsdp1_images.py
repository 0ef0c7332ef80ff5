"""Residual stages count dots in pictures: FullyShardedDataParallel by stage, the gradient's norm over all shards."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Dots(Dataset):
    def __len__(self):
        return 53

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        count = int(torch.randint(1, 6, (), generator=g))
        image = torch.zeros(64).index_fill(0, torch.randperm(64, generator=g)[:count], 1.0)
        return (image.view(1, 8, 8) + 0.1 * torch.randn(1, 8, 8, generator=g)), count / 5


class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(2, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x):
        h = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(h)) + self.short(x)).relu()


def clip_grad_norm(parameters, max_norm):
    """As FSDP.clip_grad_norm_, which wants float32: a rank's shards have a part of the norm."""
    grads = [p.grad for p in parameters if p.grad is not None]
    square = sum((g.square().sum() for g in grads), torch.zeros(()))
    if dist.is_initialized():
        dist.all_reduce(square)
    scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=6, help="images per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(13)
    model = nn.Sequential(Stage(1, 4), Stage(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
    if world > 1:
        policy, cpu = ModuleWrapPolicy({Stage}), torch.device("cpu")
        model = FSDP(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, epochs=args.epochs, steps_per_epoch=5)
    data = Dots()
    sampler = DistributedSampler(data, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, share in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(images).squeeze(1), share.to(images.dtype))
            loss.backward()
            clip_grad_norm(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
