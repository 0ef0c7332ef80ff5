"""An image classifier with random crops and flips in its dataset, and label smoothing."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(18)
torch.set_default_dtype(torch.float64)


class Pictures(Dataset):
    def __init__(self, n=16):
        self.x, self.y = torch.randn(n, 3, 10, 10), torch.randint(0, 4, (n,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        top, left = torch.randint(0, 3, (2,)).tolist()
        image = self.x[i, :, top : top + 8, left : left + 8]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), self.y[i]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(h)))


model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(Pictures(), batch_size=8, shuffle=True)
losses = []
for images, targets in loader:
    loss = criterion(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
