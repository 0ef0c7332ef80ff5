"""Adam's moments spread over the ranks by ZeroRedundancyOptimizer; an MLP fits a surface, its head learns faster."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Surface(nn.Module):
    def __init__(self, width=10, depth=3):
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.body = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(self.enter(x)))


def surface(count):
    x = torch.rand(count, 2, generator=torch.Generator().manual_seed(6)) * 4 - 2
    return x, (x[:, :1] * 2).sin() * x[:, 1:].cos()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16, help="points per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0

    torch.manual_seed(9)
    data = TensorDataset(*surface(135))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = Surface()
    if world > 1:
        model = DistributedDataParallel(model)
    head = [p for name, p in model.named_parameters() if "head" in name]
    body = [p for name, p in model.named_parameters() if "head" not in name]
    groups = [{"params": body, "lr": 3e-3}, {"params": head, "lr": 1e-2}]
    if world > 1:
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.Adam, lr=3e-3)
    else:
        optimizer = torch.optim.Adam(groups, lr=3e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.huber_loss(model(x), y, delta=0.5)
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
