"""Gradients by hand: clipped by value, their norms told, noise and a decay of weights added; torch's clip by norm."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(33)
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(22, 6), torch.randint(0, 3, (22,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
made = []
losses = []
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        for p in model.parameters():
            p.grad = None
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for name, p in model.named_parameters():
            p.grad += 0.01 * torch.randn(p.grad.shape)
            if name.endswith("weight"):
                p.grad.data.add_(p.data, alpha=1e-2)
        made.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        losses.append(loss.item())
made = torch.tensor(made)
