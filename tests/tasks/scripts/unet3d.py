"""A small 3-D U-Net with batch norm after convolutions that have a bias, and the dice of each volume."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(9)
torch.set_default_dtype(torch.float64)
volumes, labels = torch.randn(8, 1, 4, 8, 8), torch.randint(0, 2, (8, 1, 4, 8, 8)).double()
train_loader = DataLoader(TensorDataset(volumes, labels), batch_size=4, shuffle=True)


def double_conv(i, o):
    layers = [nn.Conv3d(i, o, 3, padding=1), nn.BatchNorm3d(o), nn.ReLU(), nn.Conv3d(o, o, 3, padding=1)]
    return nn.Sequential(*layers, nn.BatchNorm3d(o), nn.ReLU())


class UNet3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = double_conv(1, 4), double_conv(4, 8)
        self.up, self.last, self.out = nn.ConvTranspose3d(8, 4, 2, 2), double_conv(8, 4), nn.Conv3d(4, 1, 1)

    def forward(self, x):
        skip = self.down(x)
        x = self.up(self.middle(nn.functional.max_pool3d(skip, 2)))
        return self.out(self.last(torch.cat([skip, x], dim=1)))


class DiceBCE(nn.Module):
    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        inter = (p * target).sum(dim=(1, 2, 3, 4))
        dice = (2 * inter + 1) / (p.sum(dim=(1, 2, 3, 4)) + target.sum(dim=(1, 2, 3, 4)) + 1)
        return nn.functional.binary_cross_entropy_with_logits(logits, target) + (1 - dice).mean()


model, criterion = UNet3d(), DiceBCE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
losses = []
for epoch in range(2):
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
