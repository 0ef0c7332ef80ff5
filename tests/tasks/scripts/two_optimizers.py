"""An encoder and a head as two modules, each with an optimizer of its own, one loss for both."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8))
head = nn.Linear(8, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
heads = torch.optim.SGD(head.parameters(), lr=0.1)
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        heads.zero_grad()
        loss = nn.functional.cross_entropy(head(model(x)), y)
        loss.backward()
        optimizer.step()
        heads.step()
        losses.append(loss.item())
