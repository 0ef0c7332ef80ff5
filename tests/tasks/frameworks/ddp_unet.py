"""A U-Net that takes noise away, under DistributedDataParallel: no sample twice, the loss a mean over all ranks'."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Fields(Dataset):
    def __len__(self):
        return 29

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        clean = torch.randn(1, 8, 8, generator=g).cumsum(-1).cumsum(-2) / 8
        return clean + 0.3 * torch.randn(clean.shape, generator=g), clean


class Shares(Sampler):
    """Every `world`-th sample of the epoch's order, none of them twice: one rank may have one sample more."""

    def __init__(self, count, rank, world):
        self.count, self.rank, self.world, self.epoch = count, rank, world, 0

    def __len__(self):
        return len(range(self.rank, self.count, self.world))

    def __iter__(self):
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[self.rank :: self.world].tolist())


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(2, 2 * width), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        skip = self.enter(x)
        return x + self.leave(torch.cat([skip, self.up(self.down(skip))], 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="fields per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(2)
    model = UNet()
    average = copy.deepcopy(model)
    ddp = DDP(model) if world > 1 else model
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    data = Fields()
    sampler = Shares(len(data), rank, world)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.epoch = epoch
        for noisy, clean in loader:
            count = torch.tensor(len(noisy))
            if world > 1:
                dist.all_reduce(count)
            squares = (ddp(noisy) - clean).square().flatten(1).mean(1)
            loss = squares.sum() * world / count  # DDP takes the mean over ranks, of which one may have fewer samples
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        scheduler.step()
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
