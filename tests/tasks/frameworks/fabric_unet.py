"""Circles cut out of noise by a U-Net with Lightning Fabric: a sampler of its own, Dice and cross-entropy."""

import argparse
import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Circles(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(100 + i)
        x, y, radius = torch.rand(3, generator=g)
        at = torch.linspace(0, 1, 8)
        mask = ((at[None] - x) ** 2 + (at[:, None] - y) ** 2 < (0.2 + 0.2 * radius) ** 2)[None]
        image = torch.where(mask, 1.0, 0.0) + 0.4 * torch.randn(mask.shape, generator=g)
        return image, torch.where(mask, 1.0, 0.0)


def convolved(inputs, outputs):
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU(0.1))


def double(inputs, outputs):
    return nn.Sequential(convolved(inputs, outputs), convolved(outputs, outputs))


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fine, self.coarse = double(1, width), double(width, 2 * width)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="nearest")
        self.join, self.leave = double(3 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, image):
        skip = self.fine(image)
        return self.leave(self.join(torch.cat([skip, self.grow(self.coarse(self.pool(skip)))], 1)))


def dice(logits, mask):
    p = logits.sigmoid()
    both, either = (p * mask).sum((1, 2, 3)), (p + mask).sum((1, 2, 3))
    return (1 - (2 * both + 1) / (either + 1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="images per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    devices = int(os.environ.get("WORLD_SIZE", 1))
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(5)

    model = UNet()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    data = Circles()  # the last batch of an epoch is a short one
    sampler = torch.utils.data.DistributedSampler(data, fabric.world_size, fabric.global_rank, shuffle=True)
    loader = fabric.setup_dataloaders(DataLoader(data, args.batch_size, sampler=sampler), use_distributed_sampler=False)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            logits = model(image)
            loss = dice(logits, mask) + nn.functional.binary_cross_entropy_with_logits(logits, mask)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=2.0)
            optimizer.step()
    fabric.print(f"last loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
