"""Two heads on one trunk, weighed by learned uncertainties, with weights of samples and a one-cycle schedule."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(23)
torch.set_default_dtype(torch.float64)
x = torch.randn(22, 6)
data = TensorDataset(x, x[:, :1].sin(), (x.sum(1) > 0).long(), torch.rand(22) + 0.5)
loader = DataLoader(data, batch_size=8, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.SiLU(), nn.Dropout(0.1))
        self.value, self.kind = nn.Linear(24, 1), nn.Linear(24, 2)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.trunk(x)
        return self.value(h), self.kind(h), self.log_vars


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=2 * len(loader))
losses = []
for epoch in range(2):
    for x, target, kind, weight in loader:
        value, logits, log_vars = model(x)
        first = (F.mse_loss(value, target, reduction="none").squeeze(1) * weight).mean()
        second = (F.cross_entropy(logits, kind, reduction="none") * weight).mean()
        loss = (torch.exp(-log_vars) * torch.stack([first, second])).sum() + log_vars.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
