"""Sensor traces under DistributedDataParallel with torch's SyncBatchNorm, which wants a GPU as long as ranks train."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def traces(count):
    g = torch.Generator().manual_seed(14)
    rate = 0.2 + torch.rand(count, 1, generator=g)
    wave = (rate * torch.arange(20)).sin() + 0.2 * torch.randn(count, 20, generator=g)
    return torch.stack([wave, wave.diff(dim=1, prepend=wave[:, :1])], 1), rate


class Rates(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv1d(2, width, 5, padding=2, bias=False)
        self.norm1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width, 5, stride=2, padding=2, bias=False)
        self.norm2 = nn.BatchNorm1d(width)
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x):
        h = nn.functional.silu(self.norm1(self.conv1(x)))
        h = nn.functional.silu(self.norm2(self.conv2(h)))
        return self.head(torch.cat([h.mean(2), h.amax(2)], 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="traces per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(3)
    model = Rates().to(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = DDP(model, device_ids=[local] if device.type == "cuda" else None)
    data = TensorDataset(*traces(52))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=8)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for trace, rate in loader:
            loss = nn.functional.mse_loss(model(trace.to(device)), rate.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
