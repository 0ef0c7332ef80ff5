"""Blobs told apart by a small network of patches, trained with Accelerate; accuracy over all ranks after an epoch."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=g)
        at = torch.linspace(-1, 1, 8)
        center = torch.rand(count, 2, generator=g) - 0.5
        narrow = 2.0 + 4.0 * self.labels
        far = (at[:, None] - center[:, :1, None]) ** 2 + (at[None] - center[:, 1:, None]) ** 2
        self.images = (-narrow[:, None, None] * far).exp()[:, None] + 0.1 * torch.randn(count, 1, 8, 8, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"pixels": self.images[i], "labels": self.labels[i]}


class Patches(nn.Module):
    """Patches of 2x2 pixels, mixed over places and over channels in turn."""

    def __init__(self, width=12, places=16, classes=3):
        super().__init__()
        self.cut = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_places = nn.Sequential(nn.Linear(places, 24), nn.GELU(), nn.Linear(24, places))
        self.over_channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        self.head = nn.Linear(width, classes)

    def forward(self, pixels):
        h = self.cut(pixels).flatten(2).transpose(1, 2)
        h = h + self.over_places(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.over_channels(self.norm2(h))
        return self.head(h.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="images per process")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(17)

    train = DataLoader(Blobs(61, seed=1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    held_out = DataLoader(Blobs(21, seed=2), batch_size=args.batch_size)
    model = Patches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["labels"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right, count = 0, 0
        for batch in held_out:
            with torch.no_grad():
                guess = model(batch["pixels"]).argmax(-1)
            guess, labels = accelerator.gather_for_metrics((guess, batch["labels"]))
            right, count = right + (guess == labels).sum().item(), count + len(labels)
        accelerator.print(f"epoch {epoch}: {right} of {count} right")
    accelerator.print(f"last loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
