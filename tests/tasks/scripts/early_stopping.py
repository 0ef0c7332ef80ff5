"""Regression with held-out loss, a schedule that waits for a plateau, and a return to the best weights."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(20)
torch.set_default_dtype(torch.float64)
x = torch.randn(30, 4)
train_set, val_set = random_split(TensorDataset(x, x.sin().sum(1, keepdim=True)), [20, 10])
train_loader, val_loader = DataLoader(train_set, batch_size=7, shuffle=True), DataLoader(val_set, batch_size=5)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
best, best_loss = None, float("inf")
losses = []
for epoch in range(3):
    model.train()
    for xb, yb in train_loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        val = sum(nn.functional.mse_loss(model(xb), yb).item() * len(xb) for xb, yb in val_loader) / len(val_set)
    scheduler.step(val)
    losses.append(val)
    if val < best_loss:
        best_loss, best = val, copy.deepcopy(model.state_dict())
model.load_state_dict(best)
