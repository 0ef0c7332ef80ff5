"""Segmentation of images into classes by a U-Net: cross entropy and soft dice of each sample."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(33)
torch.set_default_dtype(torch.float64)
CLASSES = 3
images, masks = torch.randn(11, 1, 13, 10), torch.randint(0, CLASSES, (11, 13, 10))
loader = DataLoader(TensorDataset(images, masks), batch_size=4, shuffle=True)


def conv_block(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
        nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.down, self.middle = conv_block(1, width), conv_block(width, 2 * width)
        self.up, self.last = nn.ConvTranspose2d(2 * width, width, 2, 2), conv_block(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        skip = self.down(x)
        up = self.up(self.middle(F.max_pool2d(skip, 2)))
        dy, dx = skip.size(2) - up.size(2), skip.size(3) - up.size(3)
        up = F.pad(up, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.head(self.last(torch.cat([skip, up], dim=1)))


def dice_loss(logits, target, eps=1.0):
    probs = logits.softmax(1)
    hot = F.one_hot(target, CLASSES).permute(0, 3, 1, 2).to(probs.dtype)
    inter = (probs * hot).sum(dim=(2, 3))
    union = probs.sum(dim=(2, 3)) + hot.sum(dim=(2, 3))
    return (1 - (2 * inter + eps) / (union + eps)).mean()


model = UNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
losses = []
correct = 0
for epoch in range(2):
    model.train()
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y) + dice_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(TensorDataset(images, masks), batch_size=4):
            correct += (model(x).argmax(1) == y).sum().item()
