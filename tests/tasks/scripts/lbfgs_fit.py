"""A curve fitted by LBFGS, whose closure computes the loss of all points anew."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(21)
torch.set_default_dtype(torch.float64)
x = torch.linspace(-2, 2, 18).unsqueeze(1)
loader = DataLoader(TensorDataset(x, x.sin()), batch_size=18)
model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
losses = []
batch = None


def closure():
    xb, yb = batch
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(xb), yb)
    loss.backward()
    return loss


for epoch in range(2):
    for batch in loader:
        losses.append(optimizer.step(closure).item())
