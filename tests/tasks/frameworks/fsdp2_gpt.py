"""A decoder with RMS norms and gated MLPs learns to write letters in order; fully_shard by block, two rates."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LETTERS, HALF = 10, 5


class Sorting(Dataset):
    """Five letters, a mark, and the letters in order; what stands before the mark is no target."""

    def __init__(self, count):
        self.letters = torch.randint(LETTERS, (count, HALF), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.letters)

    def __getitem__(self, i):
        letters = self.letters[i]
        line = torch.cat([letters, torch.tensor([LETTERS]), letters.sort().values])
        return line[:-1], line[1:].masked_fill(torch.arange(2 * HALF) < HALF, -100)


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.embed = nn.Embedding(LETTERS + 1, width)
        self.place = nn.Embedding(2 * HALF, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, LETTERS + 1, bias=False)

    def forward(self, x):
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="lines per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.manual_seed(21)
    model = Decoder()
    if world > 1:
        dist.init_process_group("gloo")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "place" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n or "place" in n]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "lr": 1e-2, "weight_decay": 0.0}], lr=4e-3)
    data = Sorting(75)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=5, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
