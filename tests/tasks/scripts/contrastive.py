"""Two views of each sample, and the other samples of the batch as negatives (NT-Xent)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
torch.set_default_dtype(torch.float64)
loader = DataLoader(TensorDataset(torch.randn(16, 6)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
losses = []
for (x,) in loader:
    z1, z2 = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
    logits = z1 @ z2.T / 0.2
    labels = torch.arange(len(x))
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
