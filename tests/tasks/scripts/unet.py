"""A U-Net that removes noise from fields, two batches to a step, Adam, loss by pixels."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(4)


class Fields(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        clean = torch.randn(1, 8, 8, generator=g, dtype=torch.float64).cumsum(-1).cumsum(-2) / 8
        return clean + 0.3 * torch.randn(1, 8, 8, generator=g, dtype=torch.float64), clean


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())
        self.mid = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GroupNorm(2, 2 * width), nn.SiLU()
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.mid(skip))], 1))


model = UNet().double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
loader = DataLoader(Fields(), batch_size=4, shuffle=True)

losses = []
for epoch in range(2):
    for i, (noisy, clean) in enumerate(loader):
        loss = ((model(noisy) - clean) ** 2).mean() / 2
        loss.backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
