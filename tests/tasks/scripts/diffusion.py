"""A small diffusion model on points of a spiral: times and noise are drawn in the loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
torch.set_default_dtype(torch.float64)
angle = torch.rand(40) * 9
points = torch.stack([angle.cos() * angle, angle.sin() * angle], 1) / 5
loader = DataLoader(TensorDataset(points), batch_size=8, shuffle=True, drop_last=True)
STEPS = 50
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS), 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 16)
        self.layers = nn.ModuleList([nn.Linear(18, 32), nn.Linear(32, 32), nn.Linear(32, 2)])

    def forward(self, x, t):
        h = torch.cat([x, self.time(t)], 1)
        for layer in self.layers[:-1]:
            h = F.dropout(F.silu(layer(h)), 0.1, self.training)
        return self.layers[-1](h)


model = Denoiser()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

losses = []
for epoch in range(2):
    for (x,) in loader:
        t = torch.randint(0, STEPS, (len(x),))
        noise = torch.randn_like(x)
        a = alphas[t].unsqueeze(1)
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

model.eval()
made = torch.randn(3, 2)
with torch.no_grad():
    for step in reversed(range(0, STEPS, 10)):
        made = made - 0.1 * model(made, torch.full((3,), step))
