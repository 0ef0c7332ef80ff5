"""A two-layer LSTM over characters, batch first, with dropout between layers and clipping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
torch.set_default_dtype(torch.float64)
text = torch.randint(0, 17, (14, 12))
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=4, shuffle=True, drop_last=True)


class CharLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(12, 17)

    def forward(self, x):
        h, _ = self.lstm(self.embed(x))
        return self.out(h)


model = CharLSTM()
optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, eps=1e-4)
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).reshape(-1, 17), y.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
