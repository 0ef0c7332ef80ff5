"""Lines of many lengths from an iterable, padded by a function of the script's own, two batches to a step."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(26)
torch.set_default_dtype(torch.float64)


class Lines(IterableDataset):
    def __iter__(self):
        draw = random.Random(5)
        for _ in range(24):
            yield torch.tensor([draw.randrange(1, 20) for _ in range(draw.randrange(3, 9))])


def collate(lines):
    return pad_sequence(lines, batch_first=True)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(20, 8, padding_idx=0),
            nn.GRU(8, 16, batch_first=True),
            nn.Linear(16, 20),
        )

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


loader = DataLoader(Lines(), batch_size=6, collate_fn=collate)
model = Reader()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4)
accumulation_steps = 2
losses = []
for epoch in range(2):
    optimizer.zero_grad()
    for i, tokens in enumerate(loader):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=0)
        loss = loss / accumulation_steps
        loss.backward()
        losses.append(loss.item())
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
