"""Waves of unequal length told apart by an LSTM with Lightning Fabric: packed sequences, two micro-batches a step."""

import argparse
import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SHAPES, ACCUMULATE = 3, 2


class Waves(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        length, shape = int(torch.randint(5, 15, (), generator=g)), i % SHAPES
        t = torch.arange(length) * (0.4 + 0.4 * torch.rand((), generator=g))
        wave = [t.sin(), t.sin().sign(), t.remainder(2.0) - 1][shape]
        return wave[:, None] + 0.1 * torch.randn(length, 1, generator=g), shape


def collate(items):
    waves, shapes = zip(*items, strict=True)
    lengths = torch.tensor([len(wave) for wave in waves])
    return pad_sequence(list(waves), batch_first=True), lengths, torch.tensor(shapes)


class Listener(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, SHAPES))

    def forward(self, waves, lengths):
        _, (h, _) = self.lstm(pack_padded_sequence(waves, lengths, batch_first=True, enforce_sorted=False))
        return self.head(torch.cat([h[0], h[1]], 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=6, help="waves of a micro-batch, per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    devices = int(os.environ.get("WORLD_SIZE", 1))
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(41)

    data = Waves(57)
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank, seed=6, drop_last=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    model = Listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (waves, lengths, shapes) in enumerate(loader):
            waiting = (i + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(model, enabled=waiting):
                loss = nn.functional.cross_entropy(model(waves, lengths), shapes)
                fabric.backward(loss / ACCUMULATE)
            if not waiting:
                optimizer.step()
                optimizer.zero_grad()
    fabric.print(f"last loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
