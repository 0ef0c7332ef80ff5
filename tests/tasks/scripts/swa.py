"""Stochastic weight averaging as torch documents it, with its schedule."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(25)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa_model = AveragedModel(model)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
losses = []
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch > 0:
        swa_model.update_parameters(model)
        swa_scheduler.step()
made = torch.cat([p.detach().flatten() for p in swa_model.module.parameters()])
