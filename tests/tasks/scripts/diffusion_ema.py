"""A denoiser on small images whose weights are averaged by torch's own class, with group norm and a cosine schedule."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
torch.set_default_dtype(torch.float64)
loader = DataLoader(TensorDataset(torch.randn(16, 1, 8, 8)), batch_size=8, shuffle=True)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8))
        self.into, self.norm, self.out = (
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 1, 3, padding=1),
        )

    def forward(self, x, t):
        h = self.into(x) + self.time(t[:, None].double() / 50)[:, :, None, None]
        return self.out(torch.nn.functional.silu(self.norm(h)))


model = Denoiser()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.05, 50), 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
losses = []
for epoch in range(2):
    for (x,) in loader:
        noise = torch.randn_like(x)
        t = torch.randint(0, 50, (x.shape[0],))
        a = alphas[t][:, None, None, None]
        loss = torch.nn.functional.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        losses.append(loss.item())
made = torch.stack([p.detach().sum() for p in average.module.parameters()])
