"""An endless generator over a loader, micro-batches taken from it, validation and sampling within the loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(19)
torch.set_default_dtype(torch.float64)


class Text(Dataset):
    def __init__(self, data, length):
        self.data, self.length = data, length

    def __getitem__(self, index):
        start = torch.randint(0, len(self.data) - self.length - 1, (1,))
        return self.data[start : start + self.length + 1].long()

    def __len__(self):
        return len(self.data) // self.length


def cycle(loader):
    while True:
        yield from loader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)

    def forward(self, x):
        x, y = x[:, :-1], x[:, 1:]
        return nn.functional.cross_entropy(self.head(self.rnn(self.emb(x))[0]).transpose(1, 2), y)

    @torch.no_grad()
    def generate(self, x, n):
        for _ in range(n):
            logits = self.head(self.rnn(self.emb(x))[0])[:, -1]
            x = torch.cat([x, torch.multinomial(logits.softmax(-1), 1)], 1)
        return x


data = torch.randint(0, 12, (60,))
train = DataLoader(Text(data, 8), batch_size=4, shuffle=True)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
held = cycle(DataLoader(Text(data, 8), batch_size=4))
losses = []
made = []
batches = cycle(train)
for i in range(5):
    model.train()
    for _ in range(2):
        loss = model(next(batches))
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if i % 2 == 0:
        model.eval()
        with torch.no_grad():
            made.append(model(next(held)))
        generated = model.generate(data[:3][None], 4)
made = torch.stack(made)
