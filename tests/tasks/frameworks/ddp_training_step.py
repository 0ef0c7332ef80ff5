"""A module with a training step: one process calls its networks one by one, ranks call a wrapper of the whole."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Points(nn.Module):
    """Whether a point lies within a circle: an encoder and a head, called by the step, and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 2)
        self.encoder = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, points, labels):
        return nn.functional.cross_entropy(self.scale * self.head(self.encoder(points)), labels)

    def forward(self, *batch):
        return self.training_step(*batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=6, help="points per rank")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(0)

    points = torch.randn(48, 2)
    data = TensorDataset(points, (points.square().sum(-1) < 1).long())
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=1)
    model = Points()
    step = DistributedDataParallel(model) if world > 1 else model.training_step
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, args.batch_size, sampler=sampler):
            optimizer.zero_grad()
            loss = step(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
