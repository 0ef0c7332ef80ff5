"""An LSTM reads a long text in streams side by side, its state carried from piece to piece; each rank has streams."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEXT = "the rain that falls on the hill runs to the river, and the river runs to the sea. " * 21
PIECE = 12


class Reader(nn.Module):
    def __init__(self, vocabulary, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x, state=None):
        h, state = self.lstm(self.embed(x), state)
        return self.head(h), state


def streams_of(text, count):
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(c) for c in text])
    length = len(codes) // count
    return codes[: count * length].view(count, length), len(letters)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8, help="streams per rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rank, world = 0, 1
    if distributed:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(7)
    streams, vocabulary = streams_of(TEXT, args.batch_size * world)
    mine = streams[rank * args.batch_size : (rank + 1) * args.batch_size]
    model = Reader(vocabulary)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for _ in range(args.epochs):
        state = None
        for at in range(0, mine.shape[1] - 1, PIECE):
            y = mine[:, at + 1 : at + 1 + PIECE]  # the last piece of a stream is shorter
            x = mine[:, at : at + y.shape[1]]
            if state is not None:
                state = tuple(s.detach() for s in state)
            logits, state = model(x, state)
            loss = criterion(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    if rank == 0:
        print(f"last loss {loss.item():.6f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
