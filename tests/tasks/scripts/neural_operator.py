"""A one-dimensional Fourier neural operator with its relative L2 loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
torch.set_default_dtype(torch.float64)
grid = torch.linspace(0, 1, 16)
a = torch.stack([torch.sin(6.28 * (k % 4 + 1) * grid + k) for k in range(14)])
loader = DataLoader(TensorDataset(a[..., None], a.cumsum(1)[..., None] / 16), batch_size=5, shuffle=True)


class SpectralConv1d(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        self.weights = nn.Parameter(torch.rand(width, width, modes, dtype=torch.cdouble) / width**2)

    def forward(self, x):
        x_ft = torch.fft.rfft(x)
        out = torch.zeros_like(x_ft)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", x_ft[:, :, : self.modes], self.weights)
        return torch.fft.irfft(out, n=x.size(-1))


class FNO1d(nn.Module):
    def __init__(self, width=6, modes=4):
        super().__init__()
        self.lift, self.out = nn.Linear(2, width), nn.Linear(width, 1)
        self.spectral = nn.ModuleList([SpectralConv1d(width, modes) for _ in range(2)])
        self.local = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(2)])

    def forward(self, x):
        at = torch.linspace(0, 1, x.shape[1], dtype=x.dtype).view(1, -1, 1).expand(len(x), -1, -1)
        x = self.lift(torch.cat([x, at], -1)).permute(0, 2, 1)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = torch.nn.functional.gelu(spectral(x) + local(x))
        return self.out(x.permute(0, 2, 1))


def lp_loss(x, y):
    n = x.size(0)
    return torch.mean(torch.norm((x - y).reshape(n, -1), 2, 1) / torch.norm(y.reshape(n, -1), 2, 1))


model = FNO1d()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4, eps=1e-4)
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = lp_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
