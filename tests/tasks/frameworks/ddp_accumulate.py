"""Sentences of unequal length, filled up with a pad: micro-batches accumulated under no_sync, a mean over tokens."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, WORDS, LONGEST, ACCUMULATE = 0, 24, 11, 3


class Sentences(Dataset):
    """Words that count upward from a random start; a label says whether the next word is even, the pad has none."""

    def __init__(self, count):
        g = torch.Generator().manual_seed(8)
        lengths = torch.randint(3, LONGEST, (count,), generator=g)
        starts = torch.randint(1, WORDS - LONGEST, (count,), generator=g)
        self.items = [torch.arange(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    words = nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=PAD)
    return words, ((words + 1) % 2).masked_fill(words == PAD, -100)


class Tagger(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.place = nn.Parameter(0.1 * torch.randn(LONGEST, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, words):
        h = self.embed(words) + self.place[: words.shape[1]]
        return self.head(self.layer(h, src_key_padding_mask=words == PAD))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="sentences of a micro-batch, per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    data = Sentences(62)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=2)
    loader = DataLoader(data, args.batch_size, sampler=sampler, collate_fn=collate)
    model = Tagger()
    if world > 1:
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, eps=1e-6)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for start in range(0, len(batches), ACCUMULATE):
            micro = batches[start : start + ACCUMULATE]  # the last step of an epoch has fewer
            tokens = sum((labels != -100).sum() for _, labels in micro)
            if world > 1:
                dist.all_reduce(tokens)
            total = 0.0
            for i, (words, labels) in enumerate(micro):
                last = i == len(micro) - 1
                with model.no_sync() if world > 1 and not last else contextlib.nullcontext():
                    nll = F.cross_entropy(model(words).flatten(0, 1), labels.flatten(), reduction="sum")
                    loss = nll * world / tokens
                    loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"last loss {total:.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
