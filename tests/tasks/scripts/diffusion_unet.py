"""A diffusion U-Net with time embeddings and dropout; noise and times are drawn in the loop."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(34)
torch.set_default_dtype(torch.float64)
loader = DataLoader(TensorDataset(torch.randn(10, 1, 12, 8)), batch_size=4, shuffle=True)
STEPS = 50
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.05, STEPS), 0)


def embed(t, dim=8):
    angle = t[:, None].double() * torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(1, i), nn.Conv2d(i, o, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, o), nn.Conv2d(o, o, 3, padding=1)
        self.time, self.skip, self.drop = nn.Linear(8, o), nn.Conv2d(i, o, 1), nn.Dropout(0.1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(self.drop(F.silu(self.norm2(h))))


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.into, self.first = nn.Conv2d(1, width, 3, padding=1), ResBlock(width, width)
        self.down, self.middle = nn.Conv2d(width, width, 3, stride=2, padding=1), ResBlock(width, 2 * width)
        self.last, self.out = ResBlock(3 * width, width), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        t = embed(t)
        skip = self.first(self.into(x), t)
        h = self.middle(self.down(skip), t)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.out(self.last(torch.cat([h, skip], dim=1), t))


model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
losses = []
for epoch in range(2):
    for (x,) in loader:
        t = torch.randint(0, STEPS, (x.shape[0],))
        noise = torch.randn_like(x)
        a = alphas[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())

model.eval()
made = torch.randn(2, 1, 12, 8)
with torch.no_grad():
    for step in reversed(range(0, STEPS, 25)):
        made = made - 0.1 * model(made, torch.full((2,), step))
