"""Rare classes drawn more often by a sampler, weighed in the loss, and accuracy measured in the middle of an epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(27)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(26, 6), (torch.rand(26) > 0.75).long()
counts = torch.bincount(y, minlength=2)
sampler = WeightedRandomSampler((1.0 / counts)[y], num_samples=26, replacement=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler, drop_last=True)
held_out = DataLoader(TensorDataset(torch.randn(10, 6), torch.randint(0, 2, (10,))), batch_size=4)
model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 2))
criterion = nn.CrossEntropyLoss(weight=counts.sum() / (2.0 * counts))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
losses = []
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        model.train()
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i == 1:
            model.eval()
            with torch.no_grad():
                correct = sum((model(a).argmax(1) == b).sum().item() for a, b in held_out)
            losses.append(1.0 + correct)
