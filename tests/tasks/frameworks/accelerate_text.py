"""A GRU continues sequences of unequal length with Accelerate: micro-batches accumulated, a mean over all tokens."""

import argparse
import contextlib
import itertools

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

MODULUS, LABEL_PAD = 13, -100


def sequences(count):
    """Each number is the sum of the two before it, modulo 13."""
    g = torch.Generator().manual_seed(31)
    lines = []
    for _ in range(count):
        line = torch.randint(MODULUS, (2,), generator=g).tolist()
        for _ in range(int(torch.randint(2, 9, (), generator=g))):
            line.append((line[-1] + line[-2]) % MODULUS)
        lines.append(torch.tensor(line))
    return lines


def collate(lines):
    inputs = pad_sequence([line[:-1] for line in lines], batch_first=True)
    return inputs, pad_sequence([line[1:] for line in lines], batch_first=True, padding_value=LABEL_PAD)


class Continues(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(MODULUS, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, MODULUS)

    def forward(self, inputs):
        return self.head(self.norm(self.gru(self.embed(inputs))[0]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a micro-batch, per process")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate, dataloader_config=config)
    set_seed(23)
    loader = DataLoader(sequences(59), args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    model = Continues()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=LABEL_PAD)

    for _ in range(args.epochs):
        batches = iter(loader)
        while group := list(itertools.islice(batches, args.accumulate)):
            tokens = sum((labels != LABEL_PAD).sum() for _, labels in group)
            tokens = accelerator.gather(tokens).sum()
            for i, (inputs, labels) in enumerate(group):
                last = i == len(group) - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(model):
                    loss = criterion(model(inputs).flatten(0, 1), labels.flatten())
                    # backward divides by the micro-batches, DDP by the processes; the mean is over all tokens
                    loss = loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / tokens
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    accelerator.print(f"last loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
