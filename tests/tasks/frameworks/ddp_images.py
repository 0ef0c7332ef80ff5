"""Small pictures under DistributedDataParallel: batch norm over the batch of all ranks, flips, SGD with momentum."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Stripes(Dataset):
    """Stripes in one of four directions; whether a picture is flipped depends on the epoch and the picture alone."""

    def __init__(self, count, train):
        g = torch.Generator().manual_seed(5 + train)
        self.labels = torch.randint(4, (count,), generator=g)
        wave = torch.arange(8) * 1.5
        down, right = wave.sin()[:, None].expand(8, 8), wave.sin()[None].expand(8, 8)
        kinds = torch.stack([down, right, (wave[:, None] + wave).sin(), (wave[:, None] - wave).sin()])
        self.images = kinds[self.labels][:, None] + 0.5 * torch.randn(count, 1, 8, 8, generator=g)
        self.train, self.epoch = train, 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        g = torch.Generator().manual_seed(1000 * self.epoch + i)
        if self.train and torch.rand((), generator=g) < 0.5:
            image = image.roll(4, -1)
        return image, self.labels[i]


class JoinedBatchNorm2d(nn.BatchNorm2d):
    """SyncBatchNorm wants a GPU; this one joins the ranks' sums over any backend."""

    def forward(self, x):
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        count = x.new_full((1,), x.numel() // x.shape[1])
        sums = all_reduce(torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), count]))
        n = sums[-1]
        mean, square = (sums[:-1] / n).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * n / (n - 1), self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


def convnet(norm, width=6):
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), norm(width), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), norm(2 * width), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 4)),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="images per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(0)

    train, held_out = Stripes(38, train=True), Stripes(20, train=False)  # the last batch of an epoch is a short one
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=1)
    loader = DataLoader(train, args.batch_size, sampler=sampler)
    model = convnet(JoinedBatchNorm2d)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        model.train()
        for images, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        if rank == 0:
            plain = model.module if world > 1 else model
            with torch.no_grad():
                right = plain(held_out.images).argmax(1) == held_out.labels
            print(f"epoch {epoch}: {right.sum().item()} of {len(right)} right")
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
